"""The timing wheel against a sorted list, and its promises by name.

Most tests lower the sizes, so that a few dozen rows fill slots, cascade, become far runs and are merged.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from heapline.contract.errors import BadRequest
from heapline.core.wheel import timer_chunks
from heapline.core.wheel.timer_chunks import I64_MAX, Mint, Sizes, sort_rows
from heapline.core.wheel.timer_layout import Far
from heapline.core.wheel.timing_wheel import Chunk, Timers, TimingWheel

TINY = Sizes(slots=3, fan_bits=1, chunk_rows=8, head_rows=4, slice_rows=2)
START = 1_700_000_000_000
DAY = 86_400_000
YEAR = 365 * DAY

Row = tuple[int, int, int, int]  # due, id, position, key: in the order of sorting


def column(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(values), np.int64)


def insert(wheel: TimingWheel, rows: list[Row]) -> None:
    dues, ids, positions, keys = (column(values) for values in zip(*rows, strict=True))
    wheel.insert(dues, keys, ids, positions)


def listed(timers: Timers) -> list[Row]:
    columns = (timers.dues, timers.ids, timers.positions, timers.keys)
    return list(zip(*(values.tolist() for values in columns), strict=True))


def rows_of(wheel: TimingWheel) -> list[Row]:
    """Everything stored, read through the chunks."""
    held: list[Row] = []
    for chunk in wheel.chunks():
        held.extend(listed(chunk.timers()))
    return sorted(held)


def numbered(dues: Iterable[int]) -> list[Row]:
    return [(due, number, number + 1000, -number) for number, due in enumerate(dues)]


#: Milliseconds from now: past, within the tick, within each level of a small wheel, and years away.
AHEAD = st.one_of(
    st.integers(-300, 300),
    st.integers(0, 5_000),
    st.integers(0, 60_000),
    st.sampled_from([-YEAR, DAY, YEAR, 30 * YEAR]),
)
#: Few ids and keys, so that rows often are equal in some columns only.
SMALL = st.integers(0, 40)
BATCH = st.lists(st.tuples(AHEAD, SMALL, st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=40)
SIZES = st.builds(
    Sizes,
    slots=st.integers(2, 4),
    fan_bits=st.integers(1, 2),
    chunk_rows=st.sampled_from([2, 8, 16]),
    head_rows=st.sampled_from([1, 4, 16]),
    slice_rows=st.sampled_from([1, 2, 8]),
)


class WheelMachine(RuleBasedStateMachine):
    @initialize(sizes=SIZES, tick_ms=st.sampled_from([10, 100, 1000]))
    def start(self, sizes: Sizes, tick_ms: int) -> None:
        self.sizes, self.tick_ms = sizes, tick_ms
        self.now = START
        self.wheel = TimingWheel(START, tick_ms, _sizes=sizes)
        self.model: list[Row] = []
        self.contents: dict[int, tuple[Row, ...]] = {}

    @rule(batch=BATCH)
    def insert(self, batch: list[Row]) -> None:
        rows = [(self.now + ahead, id, position, key) for ahead, id, position, key in batch]
        insert(self.wheel, rows)
        self.model = sorted(self.model + rows)

    @rule(row=st.tuples(AHEAD, SMALL, st.integers(0, 3), st.integers(0, 1)))
    def insert_one(self, row: Row) -> None:
        ahead, id, position, key = row
        self.wheel.insert_one(self.now + ahead, key, id, position)
        insort(self.model, (self.now + ahead, id, position, key))

    @rule(step=st.one_of(st.integers(-200, 3_000), st.sampled_from([0, 10, 100, 20_000, DAY, YEAR, -20_000, -YEAR])))
    def let_time_pass(self, step: int) -> None:
        self.now += step
        self.peek(5)

    @rule(limit=st.integers(0, 30))
    def peek(self, limit: int) -> None:
        expected = [row for row in self.model if row[0] <= self.now][:limit]
        assert listed(self.wheel.due(self.now, limit)) == expected

    @rule(limit=st.integers(1, 30))
    def fire(self, limit: int) -> None:
        due = listed(self.wheel.due(self.now, limit))
        self.take(len(due))

    @rule(n=st.integers(0, 30))
    def take(self, n: int) -> None:
        expected, self.model = self.model[:n], self.model[n:]
        assert listed(self.wheel.take(n)) == expected

    @rule()
    def wake(self) -> None:
        wake = self.wheel.next_wake()
        if not self.model:
            assert wake is None
            return
        first = self.model[0][0]
        assert wake is not None
        assert first <= wake < first + self.tick_ms
        if wake > self.now:
            assert wake % self.tick_ms == 0
            self.now = wake
        self.fire(30)

    @rule(id=SMALL)
    def find(self, id: int) -> None:
        expected = next((row for row in self.model if row[1] == id), None)
        found = self.wheel.find(id)
        assert found == (expected and (expected[0], expected[3], id, expected[2]))

    @rule(ids=st.sets(SMALL, max_size=5), position=st.integers(0, 3), keep=st.integers(0, 3))
    def replace_positions(self, ids: set[int], position: int, keep: int) -> None:
        changed = self.wheel.replace_positions(column(sorted(ids)), column(position + id for id in sorted(ids)), keep)
        assert changed == sum(row[1] in ids for row in self.model)
        self.model = sorted(
            (due, id, ((position + id) & ~keep | old & keep) if id in ids else old, key)
            for due, id, old, key in self.model
        )

    @rule(ids=st.sets(SMALL, max_size=5))
    def discard(self, ids: set[int]) -> None:
        kept = [row for row in self.model if row[1] not in ids]
        assert self.wheel.discard(column(sorted(ids))) == len(self.model) - len(kept)
        self.model = kept

    @rule(parity=st.integers(0, 2), before=AHEAD)
    def keep(self, parity: int, before: int) -> None:
        limit = self.now + before
        kept = [row for row in self.model if row[1] % 3 != parity or row[0] < limit]
        dropped = self.wheel.keep(lambda timers: (timers.ids % 3 != parity) | (timers.dues < limit))
        assert dropped == len(self.model) - len(kept)
        self.model = kept

    @rule(budget=st.integers(1, 40))
    def maintain(self, budget: int) -> None:
        self.wheel.maintain(budget)

    @rule()
    def maintain_until_done(self) -> None:
        rounds = 0
        while self.wheel.maintain(7):
            rounds += 1
            assert rounds < 1000

    @rule(tick_ms=st.sampled_from([10, 100, 1000]), sizes=SIZES)
    def restart_from_a_snapshot(self, tick_ms: int, sizes: Sizes) -> None:
        self.wheel = TimingWheel.from_chunks(
            self.now, tick_ms, self.wheel.chunks(), next_serial=self.wheel.next_serial, _sizes=sizes
        )
        self.tick_ms = tick_ms

    @rule()
    def clear(self) -> None:
        removed = [row for timers in self.wheel.clear() for row in listed(timers)]
        assert sorted(removed) == self.model
        self.model = []

    @invariant()
    def holds_exactly_the_rows_of_the_model(self) -> None:
        assert len(self.wheel) == len(self.model)
        assert rows_of(self.wheel) == self.model

    @invariant()
    def a_serial_always_means_the_same_rows(self) -> None:
        for chunk in self.wheel.chunks():
            content = tuple(listed(chunk.columns()))
            assert self.contents.setdefault(chunk.serial, content) == content


TestWheelMachine = WheelMachine.TestCase


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_row_is_never_served_before_its_due_time() -> None:
    wheel = TimingWheel(START)
    wheel.insert_one(START + 250, 0, 7, 0)
    assert listed(wheel.due(START + 249, 10)) == []
    assert listed(wheel.due(START + 250, 10)) == [(START + 250, 7, 0, 0)]


@pytest.mark.parametrize("tick_ms", [10, 100, 1000])
def test_rows_fire_at_most_one_tick_late_with_one_wakeup_per_tick(tick_ms: int) -> None:
    wheel = TimingWheel(START, tick_ms)
    spans = np.random.default_rng(1).integers(1, [[2_000], [60_000], [8 * 3_600_000], [YEAR]], (4, 100))
    rows = numbered(START + int(span) for span in spans.ravel())
    insert(wheel, rows)
    fired, wakes = [], 0
    while (now := wheel.next_wake()) is not None:
        wakes += 1
        due = listed(wheel.take(len(wheel.due(now, 1000).ids)))
        assert due, "woken for nothing"
        assert all(0 <= now - row[0] < tick_ms for row in due)
        fired += due
    assert fired == sorted(rows)
    assert wakes == len({-(-row[0] // tick_ms) for row in rows})


def test_rows_already_due_wake_immediately() -> None:
    wheel = TimingWheel(START)
    wheel.due(START + 130, 1)
    wheel.insert_one(START + 120, 0, 1, 0)
    wake = wheel.next_wake()
    assert wake is not None
    assert wake <= START + 130
    wheel.insert_one(START - YEAR, 0, 2, 0)
    wake = wheel.next_wake()
    assert wake is not None
    assert wake <= START + 130


def test_empty_wheel_has_no_wake() -> None:
    wheel = TimingWheel(START)
    assert wheel.next_wake() is None
    wheel.insert_one(START, 0, 1, 0)
    wheel.take(1)
    assert wheel.next_wake() is None


def test_a_jump_of_years_costs_by_the_slots_in_use_not_by_the_ticks_between(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = TimingWheel(START)
    rows = numbered(START + span for span in (50, 3_000, 100_000, 3_600_000, 10 * DAY, 9 * YEAR, 20 * YEAR))
    insert(wheel, rows)
    looked_at: list[int] = []

    class Counting(dict):  # type: ignore[type-arg]
        def __contains__(self, number: object) -> bool:
            looked_at.append(1)
            return super().__contains__(number)

    monkeypatch.setattr(wheel._layout, "_levels", [Counting(slots) for slots in wheel._layout._levels])
    assert listed(wheel.due(START + 10 * YEAR, 100)) == rows[:6]
    assert len(looked_at) < 200


def test_a_clock_set_back_makes_rows_wait_again_and_loses_none() -> None:
    wheel = TimingWheel(START, _sizes=TINY)
    rows = numbered(START + 37 * number for number in range(200))
    insert(wheel, rows)
    assert listed(wheel.due(START + YEAR, 3)) == rows[:3]
    for now in (START + 500, START - YEAR, START + 100, START):
        assert listed(wheel.due(now, 300)) == [row for row in rows if row[0] <= now]
    late = [(START + 90_000, 900, 0, 0), (START + 50, 901, 0, 0)]
    insert(wheel, late)
    assert wheel.next_wake() == START
    assert listed(wheel.due(START + DAY, 300)) == sorted(rows + late)


def test_after_a_jump_there_and_back_rows_wait_in_slots_again() -> None:
    wheel = TimingWheel(START)
    insert(wheel, numbered(START + 100 * number for number in range(2_000)))
    wheel.due(START + YEAR, 1)
    assert wheel._layout.front.count == 2_000
    wheel.due(START, 1)
    assert wheel._layout.front.count == 1
    insert(wheel, numbered([START + DAY] * 10))
    assert wheel._layout.front.count == 1


def test_rows_at_the_ends_of_time_are_stored_and_served() -> None:
    wheel = TimingWheel(START)
    rows = numbered([-(1 << 63), 0, I64_MAX - 1, I64_MAX, I64_MAX])
    insert(wheel, rows)
    assert listed(wheel.due(START, 10)) == rows[:2]
    while wheel.maintain(1):
        pass
    assert listed(wheel.due(I64_MAX, 10)) == rows
    assert listed(wheel.due(START, 10)) == rows[:2]
    assert listed(wheel.take(10)) == rows


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_row_inserted_into_the_slot_being_fired_takes_its_place_in_order() -> None:
    wheel = TimingWheel(START, _sizes=TINY)
    now = START + 1_000
    insert(wheel, [(now, id, 0, 0) for id in range(0, 40, 2)])
    assert [row[1] for row in listed(wheel.due(now, 5))] == [0, 2, 4, 6, 8]
    wheel.take(5)
    insert(wheel, [(now, id, 0, 0) for id in (1, 11, 13, 39)])
    assert [row[1] for row in listed(wheel.due(now, 5))] == [1, 10, 11, 12, 13]
    wheel.take(5)
    insert(wheel, [(now - 1, 99, 0, 0)])
    assert [row[1] for row in listed(wheel.take(100))] == [99, *range(14, 40, 2), 39]


def test_removal_does_not_depend_on_the_layout_of_rows() -> None:
    random = np.random.default_rng(2)
    rows = numbered((START + random.integers(0, 40, 300) ** 3).tolist())
    at_once = TimingWheel(START)
    insert(at_once, rows)
    one_by_one = TimingWheel(START + DAY, _sizes=TINY)
    for due, id, position, key in reversed(rows):
        one_by_one.insert_one(due, key, id, position)
    ticking = TimingWheel(START - YEAR, 10, _sizes=TINY)
    insert(ticking, rows[:150])
    ticking.due(START + 500, 10)
    insert(ticking, rows[150:])
    restored = TimingWheel.from_chunks(START + 9_000, 1000, ticking.chunks(), _sizes=TINY)
    expected = sorted(rows)
    for n in (1, 7, 30, 2, 100, 160):
        taken, expected = expected[:n], expected[n:]
        for wheel in (at_once, one_by_one, ticking, restored):
            assert listed(wheel.take(n)) == taken


def test_rows_equal_in_due_time_and_id_are_taken_by_position_then_key() -> None:
    rows = [(START, 5, position, key) for position in range(4) for key in range(3)]
    for seed in range(5):
        wheel = TimingWheel(START, _sizes=TINY)
        for number in np.random.default_rng(seed).permutation(len(rows)).tolist():
            due, id, position, key = rows[number]
            wheel.insert_one(due, key, id, position)
        assert [listed(wheel.take(1))[0] for _ in rows] == rows


def test_rows_whose_positions_become_equal_are_taken_by_key() -> None:
    wheel = TimingWheel(START)
    insert(wheel, [(START, 5, 1, 9), (START, 5, 2, 8), (START, 5, 3, 7)])
    assert wheel.replace_positions(column([5]), column([4])) == 3
    assert [listed(wheel.take(1))[0] for _ in range(3)] == [(START, 5, 4, 7), (START, 5, 4, 8), (START, 5, 4, 9)]


def test_peeking_removes_nothing() -> None:
    wheel = TimingWheel(START)
    insert(wheel, numbered([START] * 10))
    assert listed(wheel.due(START, 4)) == listed(wheel.due(START, 4))
    assert len(wheel) == 10


def test_taking_more_than_there_is_takes_all() -> None:
    wheel = TimingWheel(START)
    insert(wheel, numbered([START, START + YEAR]))
    assert len(wheel.take(5).ids) == 2
    assert len(wheel.take(5).ids) == 0
    assert len(wheel) == 0


# --- work -------------------------------------------------------------------------------------------------------------


def sorted_rows_counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect how many rows each sort from now on gets."""
    import heapline.core.wheel.timer_chunks as timer_chunks

    counts: list[int] = []

    def counting(rows: npt.NDArray[np.int64], kind: Literal["quicksort", "stable"]) -> npt.NDArray[np.int64]:
        counts.append(rows.shape[1])
        return sort_rows(rows, kind)

    monkeypatch.setattr(timer_chunks, "sort_rows", counting)
    return counts


def test_a_hundred_thousand_rows_due_at_one_instant_are_served_by_bounded_sorts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel, now, count = TimingWheel(START), START + 5_000, 100_000
    ids = np.random.default_rng(3).permutation(count)
    for batch in np.split(ids, 100):
        wheel.insert(np.full(1000, now), batch, batch, batch)
    counts = sorted_rows_counted(monkeypatch)
    served = 0
    while len(due := wheel.due(now, 4096).ids):
        assert due.tolist() == list(range(served, served + len(due)))
        served += len(wheel.take(len(due)).ids)
    assert served == count
    assert max(counts) <= 4 * Sizes().head_rows
    assert sum(counts) <= 2 * count


def test_a_tick_cascades_one_slice_however_many_rows_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = TimingWheel(START, _sizes=Sizes(slice_rows=50))
    insert(wheel, numbered(range(START + 20_000, START + 30_000)))
    moved: list[int] = []
    place = wheel._layout.place

    def counting(rows: npt.NDArray[np.int64]) -> None:
        moved[-1] += rows.shape[1]
        place(rows)

    monkeypatch.setattr(wheel._layout, "place", counting)
    for now in range(START, START + 20_000, 100):
        moved.append(0)
        assert not len(wheel.due(now, 10).ids)
    assert max(moved) == 50
    assert len(wheel.due(START + 30_000, 20_000).ids) == 10_000


def test_merging_far_runs_leaves_few_of_them_and_every_row() -> None:
    sizes = Sizes(chunk_rows=64)
    wheel = TimingWheel(START, _sizes=sizes)
    dues = START + YEAR + np.random.default_rng(4).integers(0, YEAR, 20_000)
    for begin in range(0, 20_000, 100):
        part = dues[begin : begin + 100]
        wheel.insert(part, part, np.arange(begin, begin + 100), part)
    far = wheel._layout._far
    before = len(far._lanes)
    while wheel.maintain(500):
        assert sum(chunk.count for chunk in wheel.chunks()) == 20_000
    assert before > 150
    assert len(far._lanes) <= 3 * 8
    assert wheel.take(20_000).dues.tolist() == sorted(dues.tolist())


def test_a_lane_stays_in_order_through_merges_of_merged_lanes() -> None:
    wheel = TimingWheel(START, _sizes=Sizes(chunk_rows=64))
    random, merged = np.random.default_rng(7), 0
    for begin in range(0, 12_000, 100):
        dues = START + YEAR + random.integers(0, YEAR, 100)
        wheel.insert(dues, dues, np.arange(begin, begin + 100), dues)
        while wheel.maintain(150):
            inputs = wheel._layout._far._inputs
            merged += any(len(lane.chunks) > 1 for lane in inputs)
            for lane in wheel._layout._far._lanes:
                in_lane = [due for chunk in lane.chunks for due in chunk.timers().dues.tolist()]
                assert in_lane == sorted(in_lane)
    assert merged, "no merged lane was merged again"


def test_merge_in_progress_needs_little_memory_beside_the_rows() -> None:
    wheel = TimingWheel(START, _sizes=Sizes(chunk_rows=8192))
    dues = START + YEAR + np.random.default_rng(5).integers(0, YEAR, 200_000)
    for part in np.split(dues, 200):
        wheel.insert(part, part, part, part)
    more = True
    while more:
        assert wheel.nbytes <= 32 * 200_000 * 1.5
        more = wheel.maintain(4096)
    assert wheel.nbytes <= 32 * 200_000 * 1.1


def test_arrays_consumed_by_more_than_half_are_freed() -> None:
    wheel = TimingWheel(START)
    dues = START + YEAR + np.arange(60_000, dtype=np.int64) * 60_000
    wheel.insert(dues, dues, dues, dues)
    for day in range(366, 406, 5):
        wheel.take(len(wheel.due(START + day * DAY, 60_000).ids))
        assert wheel.nbytes <= 2.1 * 32 * len(wheel)


# --- safety of arrays and snapshots -----------------------------------------------------------------------------------


def test_columns_may_be_reused_by_the_caller_after_an_insert() -> None:
    wheel = TimingWheel(START)
    columns = [column([START, START + 1]) for _ in range(4)]
    wheel.insert(*columns)
    for values in columns:
        values[:] = 0
    assert wheel.due(START + 5, 5).dues.tolist() == [START, START + 1]


def test_peeked_rows_are_read_only_and_outlive_later_changes() -> None:
    wheel = TimingWheel(START)
    insert(wheel, numbered([START] * 50))
    due = wheel.due(START, 20)
    before = listed(due)
    with pytest.raises(ValueError, match="read-only"):
        due.ids[0] = 9
    wheel.take(20)
    wheel.replace_positions(column(range(50)), column(range(50)))
    assert listed(due) == before


def test_snapshot_does_not_change_with_the_wheel() -> None:
    wheel = TimingWheel(START, _sizes=TINY)
    rows = numbered(START + 77 * number for number in range(100))
    insert(wheel, rows)
    chunks = wheel.chunks()
    wheel.due(START + 3_000, 100)
    wheel.take(60)
    wheel.maintain(20)
    assert listed(TimingWheel.from_chunks(START, 100, chunks).take(100)) == rows


def test_unchanged_chunks_keep_their_serials_across_snapshot_and_restart() -> None:
    sizes = Sizes(chunk_rows=64)
    wheel = TimingWheel(START, _sizes=sizes)
    dues = START + YEAR + np.random.default_rng(6).integers(0, YEAR, 4_000)
    for part in np.split(dues, 40):
        wheel.insert(part, part, part, part)
    serials = {chunk.serial for chunk in wheel.chunks()}
    restored = TimingWheel.from_chunks(START + DAY, 100, wheel.chunks(), _sizes=sizes)
    assert {chunk.serial for chunk in restored.chunks()} == serials
    restored.insert_one(START + 2 * YEAR, 0, 0, 0)
    added = {chunk.serial for chunk in restored.chunks()} - serials
    assert added
    assert min(added) > max(serials)


def test_a_merged_run_is_recognised_as_one_after_a_restart() -> None:
    mint = Mint(Sizes(chunk_rows=8))
    far = Far(mint)
    ladder = [mint.chunk(np.array([[10 * step + i for i in range(8)]] * 4)) for step in range(5)]
    far.restore(reversed(ladder))
    assert [len(lane.chunks) for lane in far._lanes] == [5]


def test_a_snapshot_written_column_by_column_is_read_back_with_its_cursor() -> None:
    wheel = TimingWheel(START)
    rows = numbered(START + number for number in range(10))
    insert(wheel, rows)
    wheel.due(START + 50, 10)
    wheel.take(4)
    stored = [(chunk.serial, *chunk.columns(), chunk.start) for chunk in wheel.chunks()]
    restored = TimingWheel.from_chunks(START, 100, [Chunk.of_columns(*fields) for fields in stored])
    assert listed(restored.take(10)) == rows[4:]


@pytest.mark.parametrize("tick_ms", [9, 1001, 0, -1])
def test_a_tick_outside_ten_ms_to_a_second_is_refused(tick_ms: int) -> None:
    with pytest.raises(BadRequest, match="tick"):
        TimingWheel(START, tick_ms)


def test_a_jump_over_many_timers_merges_no_more_than_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage of a day everything becomes due at once; sorting it all would be a long pause."""
    wheel, rng, merged = TimingWheel(0), np.random.default_rng(3), [0]
    for start in range(0, 200_000, 1000):
        ids = np.arange(start, start + 1000)
        wheel.insert(rng.integers(1, 86_400_000, 1000), ids, ids, ids)
        wheel.maintain(8192)
    join = timer_chunks.join

    def counted(parts: Any) -> Any:
        merged[0] += sum(part.shape[1] for part in parts)
        return join(parts)

    monkeypatch.setattr(timer_chunks, "join", counted)
    served, slices = 0, 0
    while len(wheel):
        before = merged[0]
        rows = wheel.due(100_000_000, 1000)
        assert merged[0] - before < 25_000
        served += len(wheel.take(len(rows.ids)).ids)
        slices += 1
    assert (served, slices) == (200_000, 200)
