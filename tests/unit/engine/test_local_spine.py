"""The spine in one process: a selection is always the best of all partitions, and its limits are correct."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.contract.config import TopicConfig
from heapline.core.heap.run_heap import RunHeap
from heapline.engine import local_spine as heads_module
from heapline.engine.local_spine import Heads


class Box:
    """A partition as the spine sees it."""

    def __init__(self) -> None:
        self.entries = self.state = self
        self.heap = RunHeap()
        self.throttled: str | None = None
        self.looked_at = 0

    @property
    def ready(self) -> int:
        return len(self.heap)

    def head(self) -> tuple[int, int] | None:
        return self.heap.head()

    def eligible(self, count: int) -> Any:
        rows = self.heap.peek(count)
        self.looked_at += len(rows.ids)
        return rows

    def candidates(self, count: int) -> list[Any]:
        rows = self.heap.first(count)
        self.looked_at += len(rows)
        return rows


class World:
    def __init__(self, count: int, **config: Any) -> None:
        self.boxes = self.partitions = [Box() for _ in range(count)]
        self.changed = self.new_heads = set[int]()
        self.config = TopicConfig(**config)
        self.growths: list[Any] = []
        self.fair = None
        self.now = 0
        self.heads = Heads(self)  # type: ignore[arg-type]
        self.rows: list[set[tuple[int, int]]] = [set() for _ in range(count)]
        self.last_id = 0

    def add(self, number: int, key: int) -> None:
        self.last_id += 1
        self.boxes[number].heap.push_one(key, self.last_id, self.last_id)
        self.rows[number].add((key, self.last_id))
        self.changed.add(number)

    def waiting(self, without: int | None = None) -> list[tuple[int, int]]:
        return sorted(
            row for i, rows in enumerate(self.rows) for row in rows if i != without and self.boxes[i].throttled is None
        )

    def choose(self, want: int) -> list[int]:
        return self.heads.choose(want, self.now).ids[:want].tolist()

    def pop(self, want: int, cut: int | None = None) -> None:
        """Select, take the first `cut` of them, and compare with the waiting messages."""
        chosen = self.heads.choose(want, self.now)
        assert chosen.ids[:want].tolist() == [id for _, id in self.waiting()[:want]]
        total = min(want, len(chosen.ids)) if cut is None else min(cut, want, len(chosen.ids))
        limits = self.heads.limits(chosen, total)
        for i, number in enumerate(chosen.owners):
            taken = {
                (key, id)
                for key, id, whose in zip(
                    *(c[:total].tolist() for c in (chosen.keys, chosen.ids, chosen.owner)), strict=True
                )
                if whose == i
            }
            assert taken == set(sorted(self.rows[number])[: len(taken)]), "each partition gives its first"
            self.rows[number] -= taken
            self.boxes[number].heap.pop(len(taken))
            self.changed.add(number)
        for number, limit in zip(chosen.owners, limits, strict=True):
            kept = self.waiting(without=number)
            assert limit == (kept[0][0] if kept else None)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 40), st.sampled_from([1, 3, 1000, 1 << 62]))
def test_selection_is_the_best_of_all_partitions_whatever_changed(seed: int, count: int, spread: int) -> None:
    rng = random.Random(seed)
    world = World(count)
    for _ in range(60):
        if rng.random() < 0.6:
            favorite = rng.randrange(count)
            for _ in range(rng.choice([1, 1, 30])):
                number = favorite if rng.random() < 0.7 else rng.randrange(count)
                world.add(number, rng.randrange(-spread, spread + 1))
        elif rng.random() < 0.1:
            number = rng.randrange(count)
            world.boxes[number].throttled = None if world.boxes[number].throttled == "" else ""
            world.changed.add(number)
        else:
            want = rng.choice([1, 1, 2, 7, 25])
            world.pop(want, rng.choice([None, rng.randrange(want + 1)]))


def test_key_equal_to_the_largest_number_is_not_treated_as_empty() -> None:
    world = World(3)
    world.add(1, heads_module.NOTHING)
    world.pop(5)
    assert not world.waiting()


def test_selection_reads_only_partitions_with_chosen_messages() -> None:
    world = World(200)
    for number in range(200):
        for i in range(20):
            world.add(number, number * 100 + i)
    chosen = world.heads.choose(10, 0)
    assert len(world.choose(10)) == 10
    assert sum(box.looked_at > 0 for box in world.boxes) <= 10
    assert len(chosen.owners) <= 10


def test_partition_that_holds_all_the_best_provides_all_of_them() -> None:
    world = World(20)
    for i in range(500):
        world.add(3, i)
    for number in range(20):
        world.add(number, 10_000 + number)
    world.pop(400)
    assert len(world.rows[3]) == 101


@pytest.mark.parametrize("want", [1, 5])
def test_partitions_added_later_are_seen(want: int) -> None:
    world = World(2)
    world.add(0, 50)
    world.pop(1)
    world.boxes.append(Box())
    world.rows.append(set())
    world.add(2, 1)
    world.add(0, 2)
    world.pop(want)


# -- other strategies --------------------------------------------------------------------------------------------------


def test_round_robin_takes_from_partitions_in_turn_and_keeps_order_within_each() -> None:
    world = World(3, strategy="round_robin")
    for number in range(3):
        for key in (5, 1, 3):
            world.add(number, 100 * number + key)
    chosen = world.heads.choose(7, 0)
    assert (chosen.keys[:7] // 100).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert (chosen.keys[:7] % 100).tolist() == [1, 1, 1, 3, 3, 3, 5]
    world.heads.took(7)
    assert (world.heads.choose(2, 0).keys // 100).tolist() == [1, 2], "it continues after the last partition"


def test_weighted_serves_partitions_in_proportion_to_their_weights() -> None:
    world = World(2, strategy="weighted", partition_weights={1: 3.0})
    for number in range(2):
        for _ in range(20):
            world.add(number, number)
    assert (world.heads.choose(8, 0).keys[:8]).tolist().count(1) == 6


def test_changed_strategy_takes_effect() -> None:
    world = World(2)
    world.add(0, 5)
    world.add(0, 6)
    world.add(1, 9)
    assert world.choose(2) == [1, 2]
    world.config = TopicConfig(strategy="round_robin")
    assert sorted(world.choose(2)) == [1, 3]


# -- freshness ---------------------------------------------------------------------------------------------------------


def test_new_best_message_waits_for_freshness_before_worse_ones() -> None:
    world = World(2, min_freshness=0.1)
    world.add(0, 50)
    assert world.choose(5) == []
    assert world.heads.look_again_at == 100
    world.now = 100
    assert world.choose(5) == [1]
    world.add(1, 7)
    world.now = 150
    assert world.choose(5) == [], "the better one is too fresh, and the worse one must not go first"
    assert world.heads.look_again_at == 250
    world.add(1, 60)  # behind its head: not fresh on account of the head
    world.now = 250
    assert world.choose(5) == [2, 1, 3]
    assert world.heads.look_again_at is None


def test_message_promoted_to_head_is_not_fresh() -> None:
    world = World(2, min_freshness=0.1)
    world.add(0, 1)
    world.add(0, 2)
    world.heads.refresh(0)
    world.now = 100
    assert world.choose(1) == [1]
    world.boxes[0].heap.pop(1)
    world.changed.add(0)
    assert world.choose(1) == [2]


def test_messages_better_than_a_fresh_one_are_served() -> None:
    world = World(2, min_freshness=0.1)
    world.add(0, 1)
    world.add(0, 9)
    world.choose(1)
    world.now = 100
    world.add(1, 5)
    assert world.choose(5) == [1]


def test_other_strategies_skip_partitions_whose_head_is_too_fresh() -> None:
    world = World(2, strategy="round_robin", min_freshness=0.1)
    world.add(0, 50)
    world.choose(1)
    world.now = 100
    world.add(1, 7)
    assert world.choose(5) == [1]


def test_heads_older_than_the_limit_are_read_again() -> None:
    world = World(2, max_staleness=1.0)
    world.add(0, 1)
    world.choose(1)
    before = sum(world.heads.updates)
    world.now = 1000
    world.choose(1)
    assert sum(world.heads.updates) == before
    world.now = 1001
    world.choose(1)
    assert sum(world.heads.updates) == before + 2
