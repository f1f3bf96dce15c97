"""RunHeap behaves like a sorted list, even while merges are pending, and bounds the work of each call."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from heapline.contract.errors import CorruptionError
from heapline.core.heap.run_heap import Rows, Run, RunHeap
from heapline.core.heap.runs import Column

LOWEST, HIGHEST = -(2**63), 2**63 - 1
TINY = {
    "front_rows": 6,
    "slice_rows": 16,
    "small_rows": 3,
    "singles_rows": 7,
    "fan_in": 2,
    "block_rows": 4,
    "few_part": 3,
}

Row = tuple[int, int, int]

keys = st.one_of(
    st.sampled_from([LOWEST, LOWEST + 1, -1, 0, 1, HIGHEST - 1, HIGHEST]),
    st.integers(-3, 12),
    st.integers(LOWEST, HIGHEST),
)
ids = st.one_of(st.integers(0, 40), st.sampled_from([0, HIGHEST]), st.integers(0, HIGHEST))
rows = st.tuples(keys, ids, st.integers(LOWEST, HIGHEST))
bounds = st.tuples(keys, ids)


def columns(batch: list[Row]) -> tuple[Column, Column, Column]:
    table = np.array(batch, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def listed(served: Rows | Run) -> list[Row]:
    part = served.rest() if isinstance(served, Run) else served
    return list(zip(part.keys.tolist(), part.ids.tolist(), part.positions.tolist(), strict=True))


def content(runs: list[Run]) -> list[Row]:
    return sorted(row for run in runs for row in listed(run))


def order(batch: list[Row]) -> list[tuple[int, int]]:
    return [row[:2] for row in batch]


class SortedListModel(RuleBasedStateMachine):
    """All operations against a sorted list. Thresholds are low enough that a merge is usually pending."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = RunHeap(**TINY)
        self.model: list[Row] = []
        self.captures: list[tuple[list[Run], list[Row]]] = []
        self.content_of_serial: dict[int, tuple[Any, ...]] = {}

    def serve(self, served: list[Row], expected_count: int) -> None:
        """Rows are served in (key, id) order; the order of equal (key, id) is not defined."""
        assert order(served) == order(self.model[:expected_count])
        for row in served:
            self.model.remove(row)

    @rule(batch=st.lists(rows, max_size=30))
    def push(self, batch: list[Row]) -> None:
        self.heap.push(*columns(batch))
        for row in batch:
            insort(self.model, row)

    @rule(start=st.integers(-5, 40), size=st.integers(1, 30))
    def push_rising_ids_of_few_keys(self, start: int, size: int) -> None:
        batch = [(start + n % 3, start * 100 + n, n) for n in range(size)]
        self.push(batch)

    @rule(batch=st.lists(rows, min_size=1, max_size=9))
    def push_one_by_one(self, batch: list[Row]) -> None:
        for row in batch:
            self.heap.push_one(*row)
            insort(self.model, row)

    @rule(n=st.integers(0, 40))
    def pop(self, n: int) -> None:
        self.serve(listed(self.heap.pop(n)), n)

    @rule(n=st.integers(1, 10))
    def pop_one_by_one(self, n: int) -> None:
        for _ in range(n):
            row = self.heap.pop_one()
            self.serve([] if row is None else [row], 1)

    @rule(n=st.integers(1, 30))
    def read_a_few(self, n: int) -> None:
        assert order(self.heap.first(n)[::-1]) == order(self.model[:n])

    @rule(n=st.integers(1, 12), more=st.integers(0, 12))
    def read_a_few_and_skip_some(self, n: int, more: int) -> None:
        seen = self.heap.first(n + more)[::-1][:n]
        self.heap.skip(len(seen))
        self.serve(seen, n)

    @rule(n=st.integers(0, 40))
    def peek_twice(self, n: int) -> None:
        seen = listed(self.heap.peek(n))
        assert order(seen) == order(self.model[:n])
        assert listed(self.heap.peek(n)) == seen

    @rule(bound=bounds)
    def count_below(self, bound: tuple[int, int]) -> None:
        assert self.heap.count_below(*bound) == bisect_left(self.model, bound)

    @rule(wanted=ids)
    def find(self, wanted: int) -> None:
        row = self.heap.find(wanted)
        assert (row in self.model and row[1] == wanted) if row else wanted not in {i for _, i, _ in self.model}

    @rule(chosen=st.sets(ids, max_size=6), position=st.integers(0, 9))
    def replace_positions(self, chosen: set[int], position: int) -> None:
        ordered = sorted(chosen)
        places = {each: position + at for at, each in enumerate(ordered)}
        count = self.heap.replace_positions(np.array(ordered, np.int64), np.array([*places.values()], np.int64))
        assert count == sum(row[1] in places for row in self.model)
        self.model = sorted((k, i, places.get(i, p)) for k, i, p in self.model)

    @rule(chosen=st.sets(ids, max_size=6))
    def discard(self, chosen: set[int]) -> None:
        count = self.heap.discard(np.array(sorted(chosen), np.int64))
        kept = [row for row in self.model if row[1] not in chosen]
        assert count == len(self.model) - len(kept)
        self.model = kept

    @rule(budget=st.sampled_from([1, 3, 8, 20]))
    def maintain(self, budget: int) -> None:
        assert self.heap.maintain(budget) == (self.heap.merge_count > 0)

    @rule()
    def capture(self) -> None:
        self.captures = [*self.captures[-2:], (self.heap.runs(), list(self.model))]

    @precondition(lambda self: self.captures)
    @rule()
    def restore_the_last_capture(self) -> None:
        runs, self.model = self.captures.pop()
        self.heap = RunHeap.from_runs(runs, **TINY)
        self.content_of_serial.clear()

    @rule()
    def clear(self) -> None:
        assert sorted(row for part in self.heap.clear() for row in listed(part)) == self.model
        self.model = []

    @rule()
    def head(self) -> None:
        assert self.heap.head() == (self.model[0][:2] if self.model else None)

    @invariant()
    def length_and_content_agree(self) -> None:
        assert len(self.heap) == len(self.model)
        assert content(self.heap.runs()) == self.model

    @invariant()
    def captures_stay_as_they_were(self) -> None:
        for runs, expected in self.captures:
            assert content(runs) == expected

    @invariant()
    def a_serial_never_names_other_content(self) -> None:
        for run in self.heap.runs():
            seen = (run.keys.tobytes(), run.ids.tobytes(), run.positions.tobytes())
            assert self.content_of_serial.setdefault(run.serial, seen) == seen


TestSortedListModel = SortedListModel.TestCase


# -- merges that are pending


def filled(batches: int, size: int, *, seed: int = 1, **thresholds: int) -> tuple[RunHeap, list[Row]]:
    """Return a heap of random rows whose lanes are not merged yet, and the same rows sorted."""
    generator = np.random.default_rng(seed)
    heap, everything = RunHeap(**thresholds), []
    for number in range(batches):
        batch_keys = generator.integers(-1000, 1000, size)
        batch_ids = np.arange(number * size, (number + 1) * size)
        heap.push(batch_keys, batch_ids, batch_ids * 7)
        everything += zip(batch_keys.tolist(), batch_ids.tolist(), (batch_ids * 7).tolist(), strict=True)
    return heap, sorted(everything)


SMALL = {"front_rows": 50, "slice_rows": 200, "small_rows": 40, "fan_in": 4, "singles_rows": 30, "block_rows": 16}


def pending_merge() -> tuple[RunHeap, list[Row]]:
    heap, everything = filled(12, 300, **SMALL)
    assert heap.maintain(300)
    assert heap.merge_count
    return heap, everything


def test_pops_during_a_pending_merge_serve_every_row_once_and_in_order() -> None:
    heap, everything = pending_merge()
    served: list[Row] = []
    while len(heap):
        served += listed(heap.pop(37))
        heap.maintain(90)
    assert served == everything


def test_merge_whose_inputs_were_all_popped_is_over() -> None:
    heap, everything = pending_merge()
    heap.pop(len(everything))
    assert not heap.maintain(10)
    assert heap.merge_count == 0
    heap.push_one(1, 2, 3)
    assert heap.pop_one() == (1, 2, 3)


def test_rows_pushed_during_a_pending_merge_are_served_in_their_place() -> None:
    heap, everything = pending_merge()
    late = [(key, 10_000 + key % 7, 1) for key in range(-1005, 1005, 3)]
    heap.push(*columns(late))
    while heap.maintain(90):
        pass
    assert listed(heap.pop(len(heap))) == sorted(everything + late)


def test_capture_during_a_merge_restores_every_row() -> None:
    heap, everything = pending_merge()
    heap.pop(100)
    heap.push_one(5, 77_777, 0)
    captured = heap.runs()
    while heap.maintain(500):
        pass
    heap.pop(1000)
    assert listed(RunHeap.from_runs(captured).pop(5000)) == sorted([*everything[100:], (5, 77_777, 0)])


def test_restored_heap_chains_runs_into_as_few_lanes_as_there_were() -> None:
    heap, _ = filled(40, 300, **SMALL)
    while heap.maintain(10_000):
        pass
    heap.pop(10)
    runs = heap.runs()
    assert len(runs) > 3 * heap.lane_count
    assert RunHeap.from_runs(runs).lane_count <= heap.lane_count + 1  # the front has become a lane


def test_serials_continue_above_the_largest_restored() -> None:
    run = Run(41, *columns([(1, 1, 1), (2, 2, 2)]))
    heap = RunHeap.from_runs([run])
    heap.push(*columns([(3, 3, 3)]))
    heap.pop(1)
    assert sorted(each.serial for each in heap.runs())[0] >= 41
    assert len({each.serial for each in heap.runs()}) == len(heap.runs())
    assert max(each.serial for each in heap.runs()) > 41


def test_runs_that_do_not_overlap_are_merged_without_being_rewritten() -> None:
    heap = RunHeap(**SMALL)
    for start in range(0, 1600, 200):
        batch = np.arange(start, start + 200)
        heap.push(batch, batch, batch)
    before = {run.serial for run in heap.runs()}
    while heap.maintain(100):
        pass
    assert heap.lane_count == 1
    assert {run.serial for run in heap.runs()} == before


# -- bounds on work and space, counted in rows


def worked(heap: RunHeap, call: Any, *args: Any) -> int:
    before = heap.work
    call(*args)
    return heap.work - before


def test_work_of_every_call_is_bounded_by_its_rows() -> None:
    heap = RunHeap(**SMALL)
    small_merges = 2 * 2 * SMALL["fan_in"] * SMALL["small_rows"]
    constant = small_merges + 6 * SMALL["front_rows"] + 3 * SMALL["singles_rows"]
    generator = np.random.default_rng(3)
    for turn in range(1500):
        size = int(generator.integers(1, 200))
        batch_keys = generator.integers(LOWEST, HIGHEST, size)
        assert worked(heap, heap.push, batch_keys, np.arange(size), np.arange(size)) <= 3 * size + constant
        assert worked(heap, heap.push_one, int(batch_keys[0]), turn, 0) <= constant
        lanes = 16 * heap.lane_count
        assert worked(heap, heap.pop, size // 3) <= 3 * size + constant + lanes
        assert worked(heap, heap.pop_one) <= constant + lanes
        assert worked(heap, heap.maintain, 100) <= 100 + 2 * SMALL["slice_rows"]
    assert len(heap) > 50_000


def test_maintained_heap_has_few_lanes_and_holds_little_more_than_its_rows() -> None:
    heap = RunHeap(**SMALL)
    generator = np.random.default_rng(4)
    for number in range(800):
        heap.push(generator.integers(LOWEST, HIGHEST, 100), np.arange(100) + number * 100, np.arange(100))
        heap.pop(20)
        heap.maintain(2000)
        slack = (heap.lane_count + 2) * SMALL["slice_rows"] + SMALL["front_rows"] * 4
        assert heap.nbytes <= 24 * (len(heap) + slack) + 168 * SMALL["singles_rows"]
    while heap.maintain(10_000):
        pass
    ranks = 7  # 4**6 * small_rows > 64,000
    assert heap.lane_count < ranks * SMALL["fan_in"]


def test_heap_without_maintenance_serves_the_same_rows() -> None:
    heap, everything = filled(60, 50, **SMALL)
    assert heap.lane_count > 3 * SMALL["fan_in"]
    assert listed(heap.pop(len(everything))) == everything


def test_capturing_shares_arrays_and_does_no_work() -> None:
    heap, _ = filled(40, 300, **SMALL)
    heap.pop(10)
    first, work = heap.runs(), heap.work
    second = heap.runs()
    assert heap.work == work
    assert [run.serial for run in first] == [run.serial for run in second]
    assert all(one.keys is other.keys for one, other in zip(first, second, strict=True))


# -- at full size


def wide(generator: np.random.Generator) -> Column:
    return generator.integers(LOWEST, HIGHEST, 1000, endpoint=True)


def few(generator: np.random.Generator) -> Column:
    return generator.integers(0, 10, 1000)


def both_ends(generator: np.random.Generator) -> Column:
    return generator.choice(np.array([LOWEST, HIGHEST, 0]), 1000)


@pytest.mark.parametrize("ids_rise", [True, False])
@pytest.mark.parametrize("draw", [wide, few, both_ends])
def test_order_at_full_size_is_that_of_one_sort(draw: Any, ids_rise: bool) -> None:
    generator = np.random.default_rng(5)
    heap, parts = RunHeap(), []
    for number in range(150):
        batch_ids = np.arange(number * 1000, (number + 1) * 1000) if ids_rise else generator.integers(0, HIGHEST, 1000)
        batch = draw(generator), batch_ids, generator.integers(0, HIGHEST, 1000)
        parts.append(np.stack(batch))
        heap.push(*batch)
        heap.maintain(5000)
    table = np.concatenate(parts, axis=1)
    expected = table[:, np.lexsort((table[1], table[0]))]
    start = 0
    while start < 150_000:
        served = np.stack(heap.pop(int(generator.integers(1, 9000))))
        assert np.array_equal(served, expected[:, start : start + served.shape[1]])
        start += served.shape[1]
        heap.maintain(5000)
    assert heap.pop_one() is None


# -- arguments and results


def test_push_copies_its_columns() -> None:
    heap = RunHeap()
    for batch in ([(1, 1, 1), (2, 2, 2)], [(4, 4, 4), (3, 3, 3)]):
        given = np.array(batch, dtype=np.int64).T.copy()
        heap.push(*given)
        given[:] = 99
    assert listed(heap.pop(4)) == [(n, n, n) for n in (1, 2, 3, 4)]


def test_push_takes_views_of_read_only_buffers() -> None:
    table = np.frombuffer(np.array([[2, 1, 0], [5, 6, 7]], dtype=np.int64).tobytes(), dtype=np.int64).reshape(2, 3)
    heap = RunHeap()
    heap.push(table[0], table[1], table[1])
    assert listed(heap.pop(3)) == [(0, 7, 7), (1, 6, 6), (2, 5, 5)]


def test_served_rows_cannot_be_written_to() -> None:
    heap, _ = filled(3, 10)
    assert not any(column.flags.writeable for column in heap.pop(5))
    assert not any(column.flags.writeable for run in heap.runs() for column in (run.keys, run.ids, run.positions))


def test_columns_of_unequal_length_are_refused() -> None:
    heap = RunHeap()
    with pytest.raises(ValueError, match="same length"):
        heap.push(np.arange(3), np.arange(2), np.arange(3))
    assert len(heap) == 0


def test_replaced_positions_keep_the_given_bits() -> None:
    heap = RunHeap()
    heap.push(*columns([(1, 10, 0x1203), (2, 11, 0x1204), (3, 10, 0x1205)]))
    assert heap.replace_positions(np.array([10]), np.array([0x7700]), keep=0xFF) == 2
    assert listed(heap.pop(3)) == [(1, 10, 0x7703), (2, 11, 0x1204), (3, 10, 0x7705)]


@pytest.mark.parametrize(
    ("runs", "complaint"),
    [
        ([Run(1, *columns([(2, 1, 0), (1, 1, 0)]))], "out of order"),
        ([Run(1, *columns([(1, 2, 0), (1, 1, 0)]))], "out of order"),
        ([Run(1, *columns([(1, 1, 0)]), 2)], "starts at 2 of 1"),
        ([Run(1, *columns([(1, 1, 0)]), -1)], "starts at -1"),
        ([Run(1, np.arange(2), np.arange(2), np.arange(1))], "differ in length"),
        ([Run(1, *columns([(1, 1, 0)])), Run(1, *columns([(1, 1, 0)]))], "same serial"),
    ],
)
def test_restoring_refuses_runs_that_no_heap_has_made(runs: list[Run], complaint: str) -> None:
    with pytest.raises(CorruptionError, match=complaint):
        RunHeap.from_runs(runs)
