"""The spine in one process: whatever changed, a selection is the best of all, and its limits tell what was kept."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.core.heap import RunHeap
from heapline.engine import heads as heads_module
from heapline.engine.heads import Heads


class Box:
    """A partition as far as the spine sees it."""

    def __init__(self) -> None:
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


class World:
    def __init__(self, count: int) -> None:
        self.boxes = [Box() for _ in range(count)]
        self.changed: set[int] = set()
        self.heads = Heads(self.boxes, self.changed)  # type: ignore[arg-type]
        self.rows: list[set[tuple[int, int]]] = [set() for _ in range(count)]
        self.last_id = 0

    def add(self, number: int, key: int) -> None:
        self.last_id += 1
        self.boxes[number].heap.push([key], [self.last_id], [self.last_id])
        self.rows[number].add((key, self.last_id))
        self.changed.add(number)

    def waiting(self, without: int | None = None) -> list[tuple[int, int]]:
        return sorted(
            row for i, rows in enumerate(self.rows) for row in rows if i != without and self.boxes[i].throttled is None
        )

    def pop(self, want: int, cut: int | None = None) -> None:
        """Select, take the first `cut` of them, and compare with what is known to wait."""
        self.heads.refresh()
        chosen = self.heads.best(want)
        assert chosen.ids.tolist() == [id for _, id in self.waiting()[:want]]
        total = len(chosen.ids) if cut is None else min(cut, len(chosen.ids))
        given_ = np.bincount(chosen.owner[:total], minlength=len(chosen.owners)).tolist()
        limits = self.heads.limits(chosen, given_)
        for number, rows, count in zip(chosen.owners, chosen.rows, given_, strict=True):
            taken = list(zip(rows.keys[:count].tolist(), rows.ids[:count].tolist(), strict=True))
            assert set(taken) <= self.rows[number], "an owner gives what it has"
            self.rows[number] -= set(taken)
            self.boxes[number].heap.pop(count)
            self.changed.add(number)
        for number, limit in zip(chosen.owners, limits, strict=True):
            kept = self.waiting(without=number)
            assert limit == (kept[0][0] if kept else None)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 40), st.sampled_from([1, 3, 1000, 1 << 62]))
def test_a_selection_is_the_best_of_all_partitions_whatever_changed(seed: int, count: int, spread: int) -> None:
    rng = random.Random(seed)
    world = World(count)
    for _ in range(60):
        if rng.random() < 0.6:
            favourite = rng.randrange(count)
            for _ in range(rng.choice([1, 1, 30])):
                number = favourite if rng.random() < 0.7 else rng.randrange(count)
                world.add(number, rng.randrange(-spread, spread + 1))
        elif rng.random() < 0.1:
            number = rng.randrange(count)
            world.boxes[number].throttled = None if world.boxes[number].throttled == "" else ""
            world.changed.add(number)
        else:
            want = rng.choice([1, 1, 2, 7, 25])
            world.pop(want, rng.choice([None, rng.randrange(want + 1)]))


def test_keys_as_large_as_the_largest_number_are_not_taken_for_nothing() -> None:
    world = World(3)
    world.add(1, heads_module.NOTHING)
    world.pop(5)
    assert not world.waiting()


def test_partitions_that_cannot_give_are_not_looked_into() -> None:
    world = World(200)
    for number in range(200):
        for i in range(20):
            world.add(number, number * 100 + i)
    world.heads.refresh()
    chosen = world.heads.best(10)
    assert len(chosen.ids) == 10
    assert sum(box.looked_at > 0 for box in world.boxes) <= 10
    assert len(chosen.owners) <= 10


def test_one_partition_that_holds_all_the_best_gives_them_all() -> None:
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
