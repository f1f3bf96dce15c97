"""Segments are kept while a stream row that a reader needs points into them."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from heapline.core.live_map import SegmentPins
from tests.unit.core.group_model import i64

BATCHES = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=8)


def thaw(kept: SegmentPins) -> SegmentPins:
    return SegmentPins.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(kept.to_state())))


@given(BATCHES, st.integers(0, 70), st.booleans())
def test_segment_is_needed_while_a_later_row_points_into_it(batches: list[list[int]], start: int, frozen: bool) -> None:
    kept, rows = SegmentPins(), list[tuple[int, int]]()
    for segments in batches:
        offsets = range(2 * len(rows), 2 * len(rows) + 2 * len(segments), 2)
        kept.add(i64(offsets), i64(segments))
        rows += zip(offsets, segments, strict=True)
    kept = thaw(kept) if frozen else kept
    for segment in range(6):
        assert kept.needed(segment, start) == any(segment == at and offset >= start for offset, at in rows)
        kept.drop(segment)
        assert not kept.needed(segment, 0)
