"""The tail of a stream holds every row from its start on, and rows that it has returned never change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heapline.core.groups.deliveries import Columns
from heapline.core.groups.stream import StreamTail

BATCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), max_size=20)


def rows_at(offset: int, count: int) -> Columns:
    offsets = np.arange(offset, offset + count)
    return Columns(offsets, offsets + 1000, offsets * 8192)


@given(BATCHES, st.integers(0, 500), st.integers(1, 600))
def test_tail_returns_all_rows_from_its_start_and_none_before(
    batches: list[tuple[int, int]], start: int, limit: int
) -> None:
    tail, end, model = StreamTail(5, 600), 5, list[int]()
    views: list[tuple[list[int], np.ndarray]] = []
    for gap, count in batches:
        rows = rows_at(end + gap, count)
        tail.append(rows)
        model += rows.offsets.tolist()
        end += gap + count
        page = tail.read(tail.start, 10_000, end)
        assert page is not None
        assert page.rows.offsets.tolist() == [o for o in model if o >= tail.start]
        views.append((page.rows.ids.tolist(), page.rows.ids))
    held = len([o for o in model if o >= tail.start])
    assert held == len(model) or held >= 600 - 400, "it keeps nearly as much as it may"
    assert held <= 2 * 1000
    page = tail.read(5 + start, limit, end)
    if 5 + start < tail.start:
        assert page is None
    else:
        assert page is not None
        wanted = [o for o in model if o >= 5 + start]
        assert page.rows.offsets.tolist() == wanted[:limit]
        assert page.rows.positions.tolist() == [8192 * o for o in wanted[:limit]]
        assert page.end == (wanted[limit] if len(wanted) > limit else max(end, 5 + start)), (
            "all rows below it were scanned"
        )
    for before, view in views:
        assert view.tolist() == before


def test_rows_are_durable_up_to_the_end_of_the_last_durable_unit() -> None:
    tail = StreamTail(10, 100)
    tail.append(rows_at(10, 4))
    tail.sealed(7, 14)
    tail.append(rows_at(14, 4))
    tail.sealed(8, 19)
    assert [tail.durable_end(unit) for unit in (6, 7, 8, 9)] == [10, 14, 19, 19]
    page = tail.read(10, 100, 14)
    assert page is not None
    assert (page.rows.offsets.tolist(), page.end) == ([10, 11, 12, 13], 14)
