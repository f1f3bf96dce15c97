"""Segments stay while an unpassed row of the stream points into them."""

from __future__ import annotations

from unittest import mock

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from heapline.core import pins
from heapline.core.pins import SegmentPins
from tests.unit.core.group_model import i64

BATCHES = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=8)


def thaw(kept: SegmentPins) -> SegmentPins:
    return SegmentPins.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(kept.to_state())))


@given(BATCHES, st.integers(0, 30), st.booleans())
def test_segment_is_pinned_while_an_unpassed_row_points_into_it(
    batches: list[list[int]], below: int, frozen: bool
) -> None:
    kept, rows = SegmentPins(), list[tuple[int, int]]()
    with mock.patch.object(pins, "_RUN_ROWS", 3):
        for segments in batches:
            offsets = range(2 * len(rows), 2 * len(rows) + 2 * len(segments), 2)
            kept.add(i64(offsets), i64(segments))
            rows += zip(offsets, segments, strict=True)
    kept = thaw(kept) if frozen else kept
    kept.passed(below)
    for segment in range(6):
        if any(segment == at and offset >= below for offset, at in rows):
            assert kept.pinned(segment)
    kept.passed(2 * len(rows))
    assert not any(kept.pinned(segment) for segment in range(6))


def test_segment_is_free_once_its_run_is_passed() -> None:
    kept = SegmentPins()
    with mock.patch.object(pins, "_RUN_ROWS", 2):
        kept.add(i64([1, 2]), i64([7, 7]))
        kept.add(i64([5]), i64([8]))
    kept.passed(2)
    assert kept.pinned(7)
    kept.passed(3)
    assert not kept.pinned(7)
    assert kept.pinned(8)
