"""Rows of the stream, their counts, and ranges of finished rows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.message import Outgoing
from heapline.core.events import (
    AnyEvent,
    BatchCommitted,
    Enqueued,
    Fired,
    Leased,
    Nacked,
    Released,
    Replayed,
    Rescheduled,
)
from heapline.core.groups.acked_ranges import DoneRanges
from heapline.core.groups.stream import MARK_ROWS, StreamCount, stream_of
from heapline.core.record import ROW
from tests.unit.core.group_model import i64
from tests.unit.core.partition_rig import Rig

FIRST, RETRY = 5 << 13, 5 << 13 | 2


def records(*dues: int) -> np.ndarray:
    rows = np.zeros(len(dues), dtype=ROW)
    rows["id"], rows["due"] = np.arange(len(dues)) + 70, dues
    return rows


PLACES = i64([1 << 13, 2 << 13, 3 << 13])


def test_message_without_delay_is_in_the_stream_at_its_row() -> None:
    event = Enqueued(0, 0, 3, 1)
    found = stream_of(event, 40, records(0, 9, 0), PLACES)
    assert [column.tolist() for column in found] == [[40, 42], [70, 72], [1 << 13, 3 << 13]]
    at_once = stream_of(event, 40, records(0, 0, 0), i64([1, 2, 3]))
    assert at_once.offsets.tolist() == [40, 41, 42]


def test_batch_messages_without_delay_are_in_the_stream_at_the_commit() -> None:
    event = BatchCommitted(i64([70, 71, 72]), "b", ["p"], 1, 0, False, None, PLACES, bytes([1, 0, 1]))
    found = stream_of(event, 40)
    assert [column.tolist() for column in found] == [[40, 42], [70, 72], [1 << 13, 3 << 13]]


@pytest.mark.parametrize("keys", [None, i64([1, 2, 3])], ids=["plain", "in turn"])
def test_delayed_message_enters_the_stream_when_it_fires_not_at_a_retry(keys: Any) -> None:
    event = Fired(False, 1, i64([7, 8, 9]), i64([FIRST, RETRY, FIRST]), keys)
    assert stream_of(event, 10).offsets.tolist() == [10, 12]


@pytest.mark.parametrize("keys", [None, i64([1, 2, 3])], ids=["plain", "in turn"])
def test_message_in_the_stream_is_not_added_again_when_it_fires(keys: Any) -> None:
    event = Fired(False, 1, i64([7, 8, 9]), i64([FIRST, RETRY, FIRST]), keys, bytes([0, 0, 1]))
    assert stream_of(event, 10).ids.tolist() == [7]


def test_message_rescheduled_to_now_enters_the_stream_at_that_row() -> None:
    ids, nothing = i64([1, 2, 3, 4]), i64([0] * 4)
    fields = (
        ids, i64([FIRST, FIRST, FIRST, RETRY]), bytes([1, 0, 1, 1]), nothing, nothing, i64([0, 0, 99, 0]), nothing,
        False, 1, False,
    )  # fmt: skip
    found = stream_of(Rescheduled(*fields), 20)
    assert (found.offsets.tolist(), found.ids.tolist()) == ([20], [1])
    assert not len(stream_of(Rescheduled(*fields, again=bytes([1] * 4)), 20).ids)


@pytest.mark.parametrize("fairness", ["none", "keys"])
@pytest.mark.parametrize("how", ["live", "replayed", "thawed"])
def test_delayed_again_messages_are_not_in_the_stream_twice(fairness: str, how: str) -> None:
    rig = Rig(fairness=fairness)
    put_off, dead, brought_forward = rig.enqueue(Outgoing(b""), Outgoing(b""), Outgoing(b""))
    (new,) = rig.enqueue(Outgoing(b"", delay=2.0))
    rig.bury(*rig.pop(3))
    rig.replay_dead([dead], [rig.now.steady + 2000])
    rig.replay_dead([put_off, brought_forward])
    for id in (put_off, brought_forward):
        rig.reschedule(id, due=rig.now.steady + 2000)
    rig.take_snapshot()
    if how != "live":
        rig.restart(rig.replayed() if how == "replayed" else rig.thawed())
    assert rig.p.entries.shown == {put_off, dead, brought_forward}
    rig.reschedule(brought_forward, due=rig.now.steady)  # the rig checks every event: no message is in the stream twice
    rig.advance(3000)
    (fired,) = rig.tick()
    assert set(fired.ids.tolist()) == {put_off, dead, new}
    assert stream_of(fired, 0).ids.tolist() == [new]
    assert not rig.p.entries.shown


@pytest.mark.parametrize(
    "event",
    [
        Replayed(i64([1]), i64([0]), i64([0]), 1),
        Released(i64([1]), i64([0]), 1),
        Nacked(i64([1]), i64([0]), i64([0]), None),
        Leased(i64([1]), b"\1", [], 0, 1),
        Fired(False, 1, count=3),
    ],
)
def test_worker_events_add_no_stream_rows(event: AnyEvent) -> None:
    assert not len(stream_of(event, 0).offsets)


def test_stream_is_counted_exactly_to_the_mark_after() -> None:
    count, offsets = StreamCount(), np.arange(0, 60_000, 3)
    for start in range(0, len(offsets), 1000):
        count.add(int(offsets[start]), 1000)
    again = StreamCount.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(count.to_state())))
    assert again.total == 20_000
    for offset in (0, 1, 29_999, 30_000):
        mark, below = again.mark_after(offset) or (-1, -1)
        assert offset <= mark
        assert below == np.searchsorted(offsets, mark)
        assert below - np.searchsorted(offsets, offset) <= MARK_ROWS + 1000
    assert again.mark_after(59_999) is again.mark_after(70_000) is None, "the caller counts from the end"
    again.forget_below(30_000, (60_000, 20_000))
    mark, below = again.mark_after(0) or (-1, -1)
    assert 30_000 <= mark <= 30_000 + 3 * (MARK_ROWS + 1000)
    assert below == np.searchsorted(offsets, mark)
    again.forget_below(60_000, (60_000, 20_000))
    assert again.mark_after(60_000) == (60_000, 20_000)
    again.add(80_000, 0)
    assert again.total == 20_000


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=12), st.integers(0, 70))
def test_done_ranges_agree_with_a_set(ranges: list[tuple[int, int]], edge: int) -> None:
    done, offsets = DoneRanges(), set[int]()
    for start, length in ranges:
        new = set(range(start, start + length)) - offsets
        done.add(i64([start]), i64([start + length]), i64([len(new)]))
        offsets |= new
    every = np.arange(80)
    assert done.contains(every).tolist() == [o in offsets for o in every.tolist()]
    assert done.rows == len(offsets)
    assert (done.starts[1:] > done.ends[:-1]).all(), "ranges that touch are one"
    end = done.end_at(edge)
    assert end not in offsets
    assert set(range(edge, end)) <= offsets
    assert done.rows_below(end) == len([o for o in offsets if o < end])
    assert done.cut(end) == len([o for o in offsets if o < end])
    assert done.rows == len([o for o in offsets if o > end])
    assert DoneRanges.from_state(done.to_state()).ends.tolist() == done.ends.tolist()


def test_mark_after_an_offset_counts_the_rows_below_it() -> None:
    count = StreamCount()
    for start in range(0, 20_000, 1000):
        count.add(start, 1000)
    for offset in (0, 1, 5000, 9999):
        mark = count.mark_after(offset)
        assert mark is not None
        assert mark[0] >= offset
        assert mark[0] == mark[1], "each offset is a row here"
    assert count.mark_after(19_999) is None
