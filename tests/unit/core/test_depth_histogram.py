"""The histogram equals a count of all messages, and reads few of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.core.depth_histogram import BLOCK_ROWS, DUE_WITHIN, PRIORITY_HIGHS, PRIORITY_LOWS, Census, herds, scaled
from heapline.core.fairness.keys import Parking
from heapline.core.heap.run_heap import Run, RunHeap
from heapline.core.now import Now
from heapline.core.order import PRIORITY_LIMIT, Ordering
from heapline.core.wheel.timer_chunks import Sizes
from heapline.core.wheel.timing_wheel import TimingWheel
from tests.unit.core.test_order import urgency
from tests.unit.core.test_run_heap import TINY

NOW = Now(1_790_000_000_000, 1_790_000_005_000)
TINY_WHEEL = Sizes(slots=4, fan_bits=1, chunk_rows=8, head_rows=4, slice_rows=4)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
PRIORITIES = st.integers(-30, 30) | INT64 | st.sampled_from(PRIORITY_LOWS + PRIORITY_HIGHS)
LOWS = np.array(PRIORITY_LOWS[1:], dtype=np.int64)


def of(heap: RunHeap | None = None, delays: Any = None, calendar: Any = None) -> Census:
    entries: Any = SimpleNamespace(
        heap=heap or RunHeap(),
        parked=Parking(),
        delays=TimingWheel(NOW.steady) if delays is None else delays,
        calendar=TimingWheel(NOW.wall) if calendar is None else calendar,
    )
    entries.ready, entries.delayed = len(entries.heap), len(entries.delays) + len(entries.calendar)
    return Census(entries)


def by_priority(census: Census, ordering: Ordering) -> list[int]:
    cuts = ordering.cuts(LOWS, NOW.steady)
    if ordering.mode == "max":
        return census.depths(cuts[::-1])[::-1].tolist()
    return census.depths(cuts).tolist()


def test_buckets_cover_all_priorities_symmetrically() -> None:
    assert (PRIORITY_LOWS[0], PRIORITY_HIGHS[-1]) == (-(1 << 63), (1 << 63) - 1)
    assert [high + 1 for high in PRIORITY_HIGHS[:-1]] == PRIORITY_LOWS[1:] == sorted(PRIORITY_LOWS[1:])
    buckets = list(zip(PRIORITY_LOWS, PRIORITY_HIGHS, strict=True))[1:-1]
    assert {(-high, -low) for low, high in buckets} == set(buckets)
    assert {(0, 0), (1, 1), (2, 4), (5, 9), (10, 19), (20, 49), (50, 99)} <= set(buckets)


@given(
    st.sampled_from(["min", "max"]),
    st.lists(st.lists(PRIORITIES, max_size=40), max_size=8),
    st.lists(PRIORITIES, max_size=6),
    st.integers(0, 60),
)
def test_depths_count_every_ready_message(mode: str, batches: list[list[int]], singles: list[int], popped: int) -> None:
    ordering, heap, waiting, next_id = Ordering(mode), RunHeap(**TINY), list[tuple[int, int]](), 1
    for batch in [*batches, *([p] for p in singles)]:
        ids = np.arange(next_id, next_id + len(batch))
        next_id += len(batch)
        keys = ordering.keys(np.array(batch, dtype=np.int64), ids)
        heap.push(keys, ids, ids) if len(batch) != 1 else heap.push_one(*keys.tolist(), *ids.tolist(), 0)
        waiting += zip(keys.tolist(), batch, strict=True)
    heap.pop(popped)
    left = [priority for _, priority in sorted(waiting)][popped:]
    expected = [sum(low <= p <= high for p in left) for low, high in zip(PRIORITY_LOWS, PRIORITY_HIGHS, strict=True)]
    assert by_priority(of(heap), ordering) == expected


@given(
    st.sampled_from(["min", "max"]),
    st.sampled_from([0.001, 1.0, 1000.0]),
    st.lists(st.tuples(st.integers(-500, 500) | st.integers(-PRIORITY_LIMIT, PRIORITY_LIMIT), st.integers(0, 10**7))),
)
def test_depths_of_an_aging_topic_use_effective_priorities(
    mode: str, rate: float, messages: list[tuple[int, int]]
) -> None:
    ordering, heap = Ordering(mode, rate), RunHeap()
    columns = np.array([(p, NOW.steady - waited) for p, waited in messages], dtype=np.int64).reshape(-1, 2)
    ids = np.arange(1, len(messages) + 1)
    heap.push(ordering.keys(columns[:, 0], columns[:, 1]), ids, ids)
    counts, below = np.array([0, *by_priority(of(heap), ordering)]).cumsum(), 0
    for at, low in enumerate(PRIORITY_LOWS):
        if abs(low) >= PRIORITY_LIMIT:
            continue
        effective = [
            urgency(mode, rate, p, at, NOW.steady) * (1 if mode == "min" else -1) for p, at in columns.tolist()
        ]
        below, doubt = sum(e < low for e in effective), sum(abs(e - low) * 1024 <= 2 for e in effective)
        assert abs(int(counts[at]) - below) <= doubt, "keys are rounded to 1/1024 of a unit"


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 40 * 86400 * 1000) | st.integers(-3, 20_000)), max_size=80))
def test_due_histogram_equals_a_count_of_every_message(rows: list[tuple[bool, int]]) -> None:
    wheels = {wall: TimingWheel(NOW[wall], _sizes=TINY_WHEEL) for wall in (False, True)}
    expected = [0] * (len(DUE_WITHIN) + 1)
    for id, (wall, wait) in enumerate(rows):
        wheels[wall].insert_one(NOW[wall] + wait, 0, id, 0)
        expected[next((i for i, s in enumerate(DUE_WITHIN) if wait <= s * 1000), len(DUE_WITHIN))] += 1
    for wall in wheels:
        wheels[wall].maintain(20)
    assert of(None, wheels[False], wheels[True]).dues(NOW).tolist() == expected


@given(st.lists(st.lists(st.integers(0, 9), max_size=60), max_size=6), st.integers(0, 100))
def test_oldest_ready_is_exact_until_rows_are_popped_and_never_too_recent(
    batches: list[list[int]], popped: int
) -> None:
    heap, rng = RunHeap(**TINY), np.random.default_rng(1)
    rows: list[tuple[int, int]] = []
    for batch in batches:
        ids = rng.integers(1, 1 << 40, len(batch))
        heap.push(np.array(batch, dtype=np.int64), ids, ids)
        rows += zip(batch, ids.tolist(), strict=True)
    census = of(heap)
    oldest = min((id for _, id in rows), default=None)
    assert census.oldest_ready() == oldest
    heap.pop(popped)
    left = sorted(rows)[popped:]
    found = Census(census._entries).oldest_ready() if left else None
    assert left == [] or (found is not None and oldest is not None and oldest <= found <= min(id for _, id in left))


def test_oldest_ready_changes_when_its_block_is_consumed() -> None:
    heap = RunHeap()
    count = 3 * BLOCK_ROWS
    keys = np.arange(count)
    ids = 1_000_000 - keys  # the newest messages are served first
    ids[10] = 1
    heap.push(keys, ids, ids)
    census = of(heap)
    heap.pop(BLOCK_ROWS - 1)
    assert census.oldest_ready() == 1, "of the same block"
    heap.pop(10)
    while heap._end - heap._at > 0 and heap._at < BLOCK_ROWS:
        heap.pop(1)
    assert census.oldest_ready() == 1_000_000 - count + 1


@given(st.lists(st.integers(0, 1000), min_size=1), st.integers(0, 1 << 40))
def test_scaled_counts_keep_their_shares_and_add_up_to_the_total(counts: list[int], total: int) -> None:
    if sum(counts):
        parts = scaled(counts, total).tolist()
        assert sum(parts) == total
        assert all(abs(part - count * total / sum(counts)) <= 1 for part, count in zip(parts, counts, strict=True))


class Counted(np.ndarray):
    """A column that counts the rows which are read from it."""

    rows_read = 0

    def item(self, *at: Any) -> Any:
        Counted.rows_read += 1
        return super().item(*at)

    def searchsorted(self, values: Any, *rest: Any) -> Any:  # type: ignore[override]
        Counted.rows_read += np.size(values) * max(1, len(self).bit_length())
        return np.asarray(self).searchsorted(values, *rest)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Counted.rows_read += len(self)
        return getattr(ufunc, method)(*(np.asarray(i) if isinstance(i, Counted) else i for i in inputs), **options)


def rows_read_by_census(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of rows read by the second call on this many messages, half of them delayed."""
    rng, heap, wheel = np.random.default_rng(5), RunHeap(), TimingWheel(NOW.steady)
    for start in range(0, count // 2, 5000):
        ids = np.arange(start, start + 5000)
        heap.push(rng.integers(-1000, 1 << 20, 5000), ids, ids)
        wheel.insert(NOW.steady + rng.integers(1, 86_400_000, 5000), ids, ids, ids)
        heap.maintain()
        wheel.maintain()
    heap.head()
    runs = heap.runs()
    counted = [Run(run.serial, *(c.view(Counted) for c in run[1:4]), run.start) for run in runs]  # type: ignore[misc]
    for chunk in wheel._layout:
        chunk.rows = chunk.rows.view(Counted)
    monkeypatch.setattr(heap, "runs", lambda: counted)
    census = of(heap, wheel)
    for _ in range(2):
        Counted.rows_read = 0
        assert sum(by_priority(census, Ordering("min"))) == int(census.dues(NOW).sum()) == count // 2
        assert census.oldest_ready() == 0
    return Counted.rows_read


def test_statistics_of_a_million_rows_read_few_more_than_of_ten_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = rows_read_by_census(10_000, monkeypatch), rows_read_by_census(1_000_000, monkeypatch)
    assert 100 < few < 5000
    assert many < 5000, "of a million"
    assert many < 10 * few, "a hundred times the messages are more runs, but not a hundred times as many"


def test_oldest_id_of_a_run_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = RunHeap()
    ids = np.arange(100_000)
    heap.push(ids, ids, ids)
    census = of(heap)
    looked: list[int] = []
    reduceat = np.minimum.reduceat

    class Minimum:
        accumulate = np.minimum.accumulate

        @staticmethod
        def reduceat(column: Any, at: Any) -> Any:
            looked.append(len(column))
            return reduceat(column, at)

    monkeypatch.setattr("heapline.core.depth_histogram.np.minimum", Minimum)
    for _ in range(5):
        assert census.oldest_ready() == 0
    assert sum(looked) == 100_000


@pytest.mark.parametrize(
    ("counts", "marked"),
    [
        ([0] * 60, []), ([500, *[1] * 59], [0]), ([99, *[0] * 59], []), ([1000] * 60, []),
        ([*[10] * 30, 5000, *[10] * 29], [30]), ([3000, 3000, *[0] * 58], [0, 1]),
    ],
    ids=str,
)  # fmt: skip
def test_herd_stands_out_from_the_other_spans(counts: list[int], marked: list[int]) -> None:
    assert [i for i, is_herd in enumerate(herds(counts)) if is_herd] == marked
