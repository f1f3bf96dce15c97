"""Admission of enqueues: duplicates within a batch, and clocks outside the range of ids."""

from __future__ import annotations

import pytest

import heapline
from heapline import Outgoing
from tests.unit.engine import held_io


def test_row_that_repeats_a_refused_row_of_its_batch_is_not_taken_for_a_duplicate() -> None:
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
        assert hl._runners["jobs"].counters.reloads == 0

    held_io.play(scene)
