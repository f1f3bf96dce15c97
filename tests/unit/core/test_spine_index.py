"""The index always returns the best candidate and the best of the rest, after any update, throttling or removal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from heapline.contract.errors import BadRequest
from heapline.core.spine.index import SpineIndex

PARTITIONS = st.integers(0, 6)
KEYS = st.lists(st.integers(0, 12), max_size=5)


class IndexNextToLists(RuleBasedStateMachine):
    """Against lists that are searched completely."""

    @initialize(fan_out=st.integers(1, 4))
    def begin(self, fan_out: int) -> None:
        self.index = SpineIndex(fan_out)
        self.shown: dict[int, list[tuple[int, int]]] = {}
        self.full: set[int] = set()
        self.throttled: set[int] = set()
        self.ids = 0

    def available(self) -> dict[int, list[tuple[int, int]]]:
        return {p: shown for p, shown in self.shown.items() if p not in self.throttled}

    @rule(partition=PARTITIONS)
    def add_or_remove(self, partition: int) -> None:
        if partition in self.shown:
            self.index.remove(partition)
            del self.shown[partition]
            self.throttled.discard(partition)
            self.full.discard(partition)
        else:
            self.index.add(partition)
            self.shown[partition] = []

    @rule(partition=PARTITIONS, keys=KEYS)
    def update(self, partition: int, keys: list[int]) -> None:
        if partition in self.shown:
            candidates = []
            for key in sorted(keys):
                self.ids += 1
                candidates.append((key, self.ids))
            self.index.update(partition, candidates)
            self.shown[partition] = candidates[: self.index.fan_out]
            self.full.discard(partition)
            if len(candidates) >= self.index.fan_out:
                self.full.add(partition)

    @rule(partition=PARTITIONS)
    def clear(self, partition: int) -> None:
        if partition in self.shown:
            self.index.clear(partition)
            self.shown[partition] = []
            self.full.discard(partition)

    @rule(partition=PARTITIONS, throttled=st.booleans())
    def throttle(self, partition: int, throttled: bool) -> None:
        if partition in self.shown:
            self.index.set_throttled(partition, "maintenance" if throttled else None)
            (self.throttled.add if throttled else self.throttled.discard)(partition)

    @rule(partition=PARTITIONS)
    def advance(self, partition: int) -> None:
        if self.available().get(partition):
            self.index.advance(partition)
            self.shown[partition].pop(0)
        else:
            with pytest.raises(BadRequest):
                self.index.advance(partition)

    @rule(n=st.integers(0, 8))
    def select(self, n: int) -> None:
        expected: list[tuple[int, int, int]] = []
        while len(expected) < n and not self.hungry():
            heads = [(shown[0], p) for p, shown in self.available().items() if shown]
            if not heads:
                break
            (key, id), partition = min(heads)
            self.shown[partition].pop(0)
            expected.append((partition, key, id))
        assert self.index.select(n) == expected

    def hungry(self) -> set[int]:
        return {p for p, shown in self.available().items() if not shown and p in self.full}

    @invariant()
    def knows_best_and_limits(self) -> None:
        if not hasattr(self, "index"):
            return
        heads = sorted((shown[0], p) for p, shown in self.available().items() if shown)
        best = self.index.best()
        assert best == ((heads[0][1], *heads[0][0]) if heads else None)
        for partition in range(8):
            others = [place for place, p in heads if p != partition]
            assert self.index.limit(partition) == (others[0] if others else None)
        assert self.index.hungry == self.hungry()
        assert self.index.candidate_count == sum(map(len, self.shown.values()))
        assert list(self.index.available) == sorted(self.available())


TestIndexNextToLists = IndexNextToLists.TestCase


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=600))
def test_stale_entries_are_bounded(updates: list[tuple[int, int]]) -> None:
    index = SpineIndex()
    for partition in range(4):
        index.add(partition)
    heads: dict[int, tuple[int, int]] = {}
    for id, (partition, key) in enumerate(updates):
        index.update(partition, [(key, id)])
        heads[partition] = (key, id)
        assert len(index._heap) <= 64 + 4 * 4 + 1
    best = min(((key, id, partition) for partition, (key, id) in heads.items()), default=None)
    assert index.best() == (best and (best[2], best[0], best[1]))


def test_selection_stops_where_a_partition_may_hold_something_better() -> None:
    index = SpineIndex(fan_out=2)
    for partition, candidates in {1: [(1, 1), (2, 2)], 2: [(9, 9)]}.items():
        index.add(partition)
        index.update(partition, candidates)
    assert index.select(3) == [(1, 1, 1), (1, 2, 2)]  # partition 1 may have a 3
    assert index.hungry == {1}
    index.update(1, [(3, 3)])
    assert index.select(9) == [(1, 3, 3), (2, 9, 9)]


@pytest.mark.parametrize(
    "call",
    [
        lambda index: SpineIndex(0),
        lambda index: index.add(1),
        lambda index: index.remove(9),
        lambda index: index.update(9, []),
        lambda index: index.update(1, [(2, 2), (1, 1)]),
        lambda index: index.advance(1),
        lambda index: index.set_throttled(9, "x"),
    ],
)
def test_invalid_call_is_rejected_and_changes_nothing(call: Any) -> None:
    index = SpineIndex(fan_out=4)
    index.add(1)
    with pytest.raises(BadRequest):
        call(index)
    assert list(index.partitions) == [1]
    assert index.best() is None
