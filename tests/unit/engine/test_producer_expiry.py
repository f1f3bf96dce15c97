"""A client's own producer name is forgotten a day after its last use, so that short-lived clients cost nothing."""

from __future__ import annotations

import pytest

import heapline
from heapline.contract.message import Outgoing
from tests.unit.engine.rig import Rig, opened

DAY = 24 * 3600.0


def epochs(rig: Rig, name: str) -> list[int | None]:
    return [partition.state.sequences.epoch_of(name) for partition in rig.runner().loaded.topic.partitions]


async def say(rig: Rig, name: str, seq: int, **options: int) -> bool:
    """Enqueue; return whether it was a duplicate."""
    batch = [Outgoing(b"x", seq=seq)]
    (result,) = await rig.hl.enqueue_batch("jobs", batch, producer_id=name, epoch=1, **options)
    return result.duplicate


async def pass_a_day(rig: Rig) -> None:
    rig.clock.advance(DAY + 1)
    await rig.hl.enqueue("jobs", b"something to snapshot")
    await rig.hl.snapshot("jobs")


@pytest.mark.parametrize("window", [1.0, DAY])
async def test_temporary_producer_is_forgotten_a_day_after_its_last_use_and_others_never(window: float) -> None:
    async with opened(topic={"dedup_window": window}) as rig:
        await say(rig, "sdk-1", 0)
        await say(rig, "billing", 0)
        rig.clock.advance(DAY - 1)
        await rig.hl.snapshot("jobs")
        assert (epochs(rig, "sdk-1"), epochs(rig, "billing")) == ([1], [1])
        await pass_a_day(rig)
        assert (epochs(rig, "sdk-1"), epochs(rig, "billing")) == ([None], [1])
        other = Rig(rig.disk.crash())
        await other.open()
        assert (epochs(other, "sdk-1"), epochs(other, "billing")) == ([None], [1])
        await other.hl.close()


async def test_longer_window_keeps_it_longer() -> None:
    async with opened(topic={"dedup_window": 3 * DAY}) as rig:
        await say(rig, "sdk-1", 0)
        await pass_a_day(rig)
        assert await say(rig, "sdk-1", 0)


async def test_producer_used_in_one_partition_is_kept_in_all() -> None:
    async with opened(topic={"partitions": 8}) as rig:
        await say(rig, "sdk-1", 0)
        for seq in range(1, 4):
            rig.clock.advance(DAY / 2)
            await say(rig, "sdk-1", seq)
            await rig.hl.snapshot("jobs")
            assert epochs(rig, "sdk-1") == [1] * 8
        await pass_a_day(rig)
        assert epochs(rig, "sdk-1") == [None] * 8


async def test_client_that_returns_after_days_continues_with_dedup() -> None:
    async with opened() as rig:
        assert not await say(rig, "sdk-1", 0)
        await pass_a_day(rig)
        assert not await say(rig, "sdk-1", 1, answered_below=1)
        assert await say(rig, "sdk-1", 1, answered_below=1)
        with pytest.raises(heapline.StaleSequence):
            await say(rig, "sdk-1", 0, answered_below=1)
