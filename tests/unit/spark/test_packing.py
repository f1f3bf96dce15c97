"""What travels packed through Spark: nothing is lost, wherever the events are cut, and a message stays whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from heapline.spark.jobs.auditing import alone, packing
from heapline.spark.jobs.auditing.gathering import put_together
from heapline.spark.jobs.auditing.packing import MARKS, STEPS
from heapline.spark.jobs.auditing.ranks import Intervals
from heapline.spark.jobs.auditing.steps import Steps, from_arrow
from tests.unit.spark.lived import TOPICS
from tests.unit.spark.test_audit import a_life


@pytest.fixture(params=[1, 7, 100, 1 << 18], ids=lambda rows: f"windows of {rows}")
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(packing, "WINDOW", request.param)
    monkeypatch.setattr(packing, "BLOB_ROWS", 3)
    return int(request.param)


def lives() -> pa.Table:
    """Of two topics, which take turns."""
    tables = [a_life(name, 3)[0] for name in sorted(TOPICS)[:2]]
    names = [pa.array([name] * table.num_rows) for name, table in zip(("one", "two"), tables, strict=True)]
    found = [t.set_column(t.schema.get_field_index("topic"), "topic", n) for t, n in zip(tables, names, strict=True)]
    whole = pa.concat_tables(found)
    return whole.take(pc.sort_indices(whole, [("unit", "ascending"), ("offset", "ascending")]))


def packed(table: pa.Table, cut: int) -> pa.Table:
    return pa.Table.from_batches(packing.pack(table.to_batches(max_chunksize=cut)))


def of_kind(rows: pa.Table, what: int) -> list[Any]:
    return rows.filter(pc.equal(rows["what"], what)).combine_chunks().to_batches()


def in_order(steps: Steps) -> Steps:
    return steps.take(np.lexsort((steps.offset, steps.id, steps.topic)))


def test_steps_come_out_as_they_went_in_under_the_numbers_that_topics_have_then(cut: int) -> None:
    table, numbers = lives(), {"two": 0, "one": 1}
    found = in_order(packing.unpack_steps(of_kind(packed(table, cut), STEPS), numbers))
    for name, mine, theirs in zip(Steps._fields, found, in_order(from_arrow(table, numbers)), strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=name)


def test_message_is_in_one_bucket(cut: int) -> None:
    seen: dict[int, int] = {}
    for batch in of_kind(packed(lives(), cut), STEPS):
        for bucket, blob in zip(batch["bucket"].to_pylist(), batch["blob"], strict=True):
            values = packing.from_blob(blob.as_buffer())
            assert 0 < values.num_rows <= packing.BLOB_ROWS
            assert all(seen.setdefault(id, bucket) == bucket for id in values["id"].to_pylist())
    assert len(set(seen.values())) > 1


def test_marks_and_reaches_add_up_to_those_of_the_whole(cut: int) -> None:
    table = lives()
    blobs = [blob.as_buffer() for batch in of_kind(packed(table, cut), MARKS) for blob in batch["blob"]]
    marks, reaches = put_together([packing.from_blob(blob) for blob in blobs])
    rows = table.to_pylist()
    assert sorted(marks, key=repr) == sorted(alone._marks(rows), key=repr)
    assert sorted(reaches) == sorted(alone._reaches(rows))


def test_opening_steps_keep_their_topics_and_columns_of_ranks_their_values(cut: int) -> None:
    steps = from_arrow(lives(), {"one": 0, "two": 1})
    batch = pa.RecordBatch.from_arrays([pa.array(column) for column in steps], names=list(Steps._fields))
    found = packing.unpack_steps(packing.pack_steps(("one", "two"), [batch, batch.slice(0, 0)]), {"one": 5, "two": 6})
    expected = in_order(steps._replace(topic=steps.topic + 5))
    assert all((mine == theirs).all() for mine, theirs in zip(in_order(found), expected, strict=True))
    columns = Intervals(*(np.arange(10) * (-1) ** n for n in range(8)))
    blobs = list(packing.pack_columns(columns))
    for mine, theirs in zip(packing.unpack_columns(blobs, Intervals._fields), columns, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert [len(column) for column in packing.unpack_columns([], ("id",))] == [0]
