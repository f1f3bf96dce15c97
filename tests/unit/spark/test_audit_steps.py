"""Packing of steps for Spark: nothing is lost wherever events are cut, and a message's steps stay together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from heapline.spark.audit import steps as packing
from heapline.spark.audit.ranks import NEVER, Intervals
from heapline.spark.audit.steps import MARK_KINDS, MARK_ROWS, STEP_ROWS, Mark, Reach, Steps, from_arrow, merge_marks
from tests.unit.spark.random_histories import TOPICS
from tests.unit.spark.test_audit import a_life


@pytest.fixture(params=[1, 7, 100, 1 << 18], ids=lambda rows: f"windows of {rows}")
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(packing, "WINDOW", request.param)
    monkeypatch.setattr(packing, "BLOB_ROWS", 3)
    return int(request.param)


def lives() -> pa.Table:
    """Rows of two topics, which take turns."""
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


def test_packed_steps_round_trip_with_new_topic_numbers(cut: int) -> None:
    table, numbers = lives(), {"two": 0, "one": 1}
    found = in_order(packing.unpack_steps(of_kind(packed(table, cut), STEP_ROWS), numbers))
    for name, mine, theirs in zip(Steps._fields, found, in_order(from_arrow(table, numbers)), strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=name)


def test_steps_of_a_message_are_in_one_bucket(cut: int) -> None:
    seen: dict[int, int] = {}
    for batch in of_kind(packed(lives(), cut), STEP_ROWS):
        for bucket, blob in zip(batch["bucket"].to_pylist(), batch["blob"], strict=True):
            values = packing.from_blob(blob.as_buffer())
            assert 0 < values.num_rows <= packing.BLOB_ROWS
            assert all(seen.setdefault(id, bucket) == bucket for id in values["id"].to_pylist())
    assert len(set(seen.values())) > 1


def test_merged_marks_equal_those_of_the_whole_table(cut: int) -> None:
    table = lives()
    blobs = [blob.as_buffer() for batch in of_kind(packed(table, cut), MARK_ROWS) for blob in batch["blob"]]
    marks, reaches = merge_marks([packing.from_blob(blob) for blob in blobs])
    rows = table.to_pylist()
    assert sorted(marks, key=repr) == sorted(naive_marks(rows), key=repr)
    assert sorted(reaches) == sorted(naive_reaches(rows))


def test_packed_opening_steps_and_intervals_round_trip(cut: int) -> None:
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


_COLUMNS = ("topic", "partition", "kind", "batch_id", "details", "unit", "offset", "id", "count")


def naive_marks(rows: list[dict[str, Any]]) -> list[Mark]:
    found: dict[tuple[Any, ...], Mark] = {}
    for row in rows:
        if row["kind"] in MARK_KINDS:
            own = None if row["kind"] == "batch_committed" else row["offset"]
            said: list[Any] = [row[name] for name in _COLUMNS[:6]]
            key = (*said, own)
            mark = found.get(key) or Mark._make([*said, row["offset"], 0, 0, row["count"] or 0])
            first, named = min(mark.offset, row["offset"]), mark.named + (row["id"] is not None)
            found[key] = mark._replace(offset=first, rows=mark.rows + 1, named=named)
    return list(found.values())


def naive_reaches(rows: list[dict[str, Any]]) -> list[Reach]:
    by_place: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_place.setdefault((row["topic"], row["partition"]), []).append(row)
    return [_reach(place, mine) for place, mine in by_place.items()]


def _reach(place: tuple[str, int], rows: list[dict[str, Any]]) -> Reach:
    offsets = np.array([row["offset"] for row in rows])
    first_lease = min((row["unit"] for row in rows if row["kind"] == "leased"), default=NEVER)
    ahead = max(round((row["wall_time"] - row["timestamp"]).total_seconds() * 1000) for row in rows)
    last_unit = max(row["unit"] for row in rows)
    return Reach(*place, len(rows), int(offsets.min()), int(offsets.max()), last_unit, first_lease, ahead)
