"""Rows of a stream and places in it go over the wire and come back as they were."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.config import GroupConfig
from heapline.errors import BadRequest, DeliveryLost
from heapline.streams import GroupDeadLetter, GroupInfo, GroupOffset, Payloads, StreamBatch
from heapline.wire import stream_rows as rows
from heapline.wire.schema import pb

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@st.composite
def batches(draw: Any) -> StreamBatch:
    """Payloads lie somewhere in a buffer, with or without gaps, in any order."""
    count = draw(st.integers(0, 20))
    data = draw(st.binary(min_size=0, max_size=60))
    edges = draw(
        st.lists(st.tuples(st.integers(0, len(data)), st.integers(0, len(data))), min_size=count, max_size=count)
    )
    starts = np.array([min(pair) for pair in edges], dtype=np.int64)
    ends = np.array([max(pair) for pair in edges], dtype=np.int64)
    texts = st.one_of(st.none(), st.lists(st.one_of(st.none(), st.text(min_size=1)), min_size=count, max_size=count))
    headers = st.lists(
        st.one_of(st.none(), st.dictionaries(st.text(), st.text(), min_size=1)), min_size=count, max_size=count
    )

    def column(values: Any) -> Any:
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), dtype=np.int64)

    payloads: Any = Payloads(memoryview(data), starts, ends)
    return StreamBatch(
        None, "jobs", draw(st.integers(0, 1023)), column(st.integers(0, 1 << 62)), column(st.integers(0, 1 << 62)),
        draw(st.sampled_from([payloads, list(payloads)])), column(INT64), column(st.integers(1, 251)), column(INT64),
        draw(texts), draw(st.one_of(st.none(), headers)), draw(texts),
    )  # fmt: skip


def seen(batch: StreamBatch) -> list[tuple[Any, ...]]:
    return [
        (m.topic, m.partition, m.offset, m.id, m.payload, m.priority, m.attempts, m.key, m.headers, m._enqueued_ms,
         m.fairness_key)
        for m in batch.messages()
    ]  # fmt: skip


@given(batches())
def test_batch_comes_back_as_it_was(batch: StreamBatch) -> None:
    sent = pb.StreamColumns.FromString(rows.pack_batch(batch).SerializeToString())
    assert seen(rows.unpack_batch(None, "jobs", sent)) == seen(batch)


@pytest.mark.parametrize(
    "field", ["offsets", "ids", "priorities", "attempts", "enqueued_ms", "payload_sizes", "payloads"]
)
def test_columns_that_do_not_fit_together_are_refused(field: str) -> None:
    one = np.array([1], dtype=np.int64)
    columns = rows.pack_batch(StreamBatch(None, "jobs", 0, one, one, [b"x"], one, one, one))
    setattr(columns, field, getattr(columns, field) + b"\0")
    with pytest.raises(BadRequest):
        rows.unpack_batch(None, "jobs", columns)


@pytest.mark.parametrize(
    "place",
    ["earliest", "latest", 0, 17, {0: 5, 3: 0}, {}, datetime(2030, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)],
    ids=str,
)
def test_place_comes_back_as_it_was(place: Any) -> None:
    request = pb.ResetOffsetsRequest(to=rows.pack_place(place))
    assert rows.unpack_place(pb.ResetOffsetsRequest.FromString(request.SerializeToString()), "to") == place
    assert rows.unpack_place(pb.ResetOffsetsRequest(), "to") is None


def test_lost_rows_come_back_as_the_same_error() -> None:
    lost = DeliveryLost([0, 2, 0], [5, 7, 6], "jobs", "g")
    back = rows.unpack_lost(rows.pack_lost(lost), "jobs", "g")
    assert back is not None
    assert sorted(zip(back.partitions, back.offsets, strict=True)) == [(0, 5), (0, 6), (2, 7)]
    assert rows.unpack_lost([], "jobs", "g") is None


def test_group_and_dead_letter_come_back_as_they_were() -> None:
    moment = datetime(2030, 1, 31, tzinfo=UTC)
    info = GroupInfo(
        name="g", topic="jobs", config=GroupConfig(ack_timeout=2.5), generation=9, members={"a": [0, 1], "b": []},
        offsets=[GroupOffset(partition=0, committed=5, end=9, lag=3, outstanding=1, retrying=1, dead=1, member="a")],
        used_at=moment, holding=True,
    )  # fmt: skip
    assert rows.unpack_group(rows.pack_group(info)) == info
    letter = GroupDeadLetter(
        partition=1, offset=7, id=99, attempts=3, reason="no", died_at=moment, payload=b"", priority=-1, key="k",
        headers={"a": "b"},
    )  # fmt: skip
    assert rows.unpack_dead(rows.pack_dead(letter)) == letter
    bare = GroupDeadLetter(partition=1, offset=7, id=99, attempts=3, reason="no")
    assert rows.unpack_dead(rows.pack_dead(bare)) == bare


def test_request_that_names_more_rows_than_anybody_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_MAX", 4)
    monkeypatch.setattr(rows, "PARTS_MAX", 2)
    several = rows.unpack_rows([*rows.pack_rows({0: [1, 2]}), *rows.pack_rows({0: [3, 4]})])
    assert {p: some.tolist() for p, some in several.items()} == {0: [1, 2, 3, 4]}
    for many in (rows.pack_rows({0: [1, 2, 3], 1: [4, 5]}), rows.pack_rows({0: [1]}) * 3):
        with pytest.raises(BadRequest, match="at a time"):
            rows.unpack_rows(many)


def test_settings_that_are_nested_without_end_are_refused() -> None:
    with pytest.raises(BadRequest, match="object of settings"):
        rows.read_group_config("[" * 100_000)
