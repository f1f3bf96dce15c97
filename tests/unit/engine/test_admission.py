"""Admission of enqueues: partitions, duplicates within a batch, and clocks outside the range of ids."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import heapline
from heapline import Outgoing
from heapline.core.ids import partition_of
from heapline.engine.admission import SHARE_ROWS
from tests.unit.engine import held_io


def test_row_that_repeats_a_refused_row_of_its_batch_is_not_a_duplicate() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        who = {"producer_id": "p", "epoch": await hl.open_producer("jobs", "p")}
        first = await hl.enqueue("jobs", b"a", seq=1, **who)
        batch = [Outgoing(b"a", seq=1, idempotency_key="k"), Outgoing(b"a", seq=2, idempotency_key="k")]
        assert [r.id for r in await hl.enqueue_batch("jobs", batch, atomic=False, **who)] == [first.id] * 2
        batch = [Outgoing(b"other", seq=1, idempotency_key="l"), Outgoing(b"other", seq=3, idempotency_key="l")]
        results = await hl.enqueue_batch("jobs", batch, atomic=False, **who)
        assert [type(r.error) for r in results] == [heapline.IdempotencyConflict] * 2

    held_io.play(scene)


def test_clock_beyond_the_range_of_ids_refuses_enqueues_without_a_reload() -> None:
    async def scene(rig: held_io.Rig) -> None:
        rig.clock.jump_wall(75 * 366 * 86400)
        hl = await rig.opened()
        with pytest.raises(heapline.ResourceExhausted):
            await hl.enqueue("jobs", b"x")
        assert hl.topics._runners["jobs"].counters.reloads == 0

    held_io.play(scene)


async def together(hl: Any, sizes: list[int]) -> list[list[int]]:
    """Enqueue batches of these sizes in one turn; return the partition of each message."""
    batches = [hl.enqueue_batch("jobs", [Outgoing(b"x")] * size) for size in sizes]
    return [[partition_of(result.id) for result in results] for results in await asyncio.gather(*batches)]


def test_calls_of_a_turn_share_a_partition_and_turns_rotate_partitions() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened(partitions=3)
        used = []
        for _ in range(6):
            (partition,) = {p for parts in await together(hl, [1, 5, 20]) for p in parts}
            used.append(partition)
        assert sorted(used[:3]) == [0, 1, 2]
        assert used[:3] == used[3:]

    held_io.play(scene)


def test_large_turn_uses_several_partitions_and_splits_no_call() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened(partitions=4)
        placed = await together(hl, [SHARE_ROWS // 2] * 5 + [SHARE_ROWS + 1])
        assert [len(set(parts)) for parts in placed] == [1] * 6
        first, second, third, fourth, fifth, large = (parts[0] for parts in placed)
        assert (first, third) == (second, fourth)
        assert len({first, third, fifth, large}) == 4

    held_io.play(scene)


def test_keys_place_messages_whatever_their_turn() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened(partitions=5)
        batch = [Outgoing(b"x", key=f"customer-{n % 7}") for n in range(20)]
        first = await hl.enqueue_batch("jobs", batch)
        for _ in range(3):
            again = await asyncio.gather(hl.enqueue("jobs", b"y"), hl.enqueue_batch("jobs", batch))
            assert [partition_of(r.id) for r in again[1]] == [partition_of(r.id) for r in first]

    held_io.play(scene)
