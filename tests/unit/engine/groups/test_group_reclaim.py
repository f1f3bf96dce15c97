"""Groups while segments are rewritten and deleted: every row is delivered, and nothing is deleted too early."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.engine.groups.group_calls import fetch, fill, offsets, payloads
from tests.unit.engine.rig import Rig, opened, settle


async def test_rewritten_row_is_delivered_after_its_segment_is_deleted() -> None:
    async with opened(topic={"retention_hard_bytes": 4 << 20}, rewrite_below=1.0) as rig:
        await rig.hl.create_group("jobs", "g")
        await rig.hl.enqueue("jobs", b"late", delay=10.0)
        for _ in range(16):
            await fill(rig, 250, b"x" * 1000)
            await rig.hl.ack(await rig.hl.pop("jobs", 250))
        rig.clock.advance(11)
        for _ in range(4):
            await fill(rig, 250, b"x" * 1000)
            await rig.hl.ack([m for m in await rig.hl.pop("jobs", 251) if m.payload != b"late"])
        for _ in range(6):
            await fill(rig, 1)
            await rig.hl.snapshot("jobs")
            await rig.runner().maintenance.reclaim()
        assert rig.runner().maintenance.segments_reclaimed_total > 0
        assert rig.runner().maintenance.records_moved_total > 0
        await rig.reopen()
        seen: list[bytes] = []
        while (got := await fetch(rig.hl)).batches:
            seen += payloads(got)
            if b"late" in payloads(got):
                await rig.hl.group_nack("jobs", "g", "a", offsets(got), session="s")
            else:
                await rig.hl.group_ack("jobs", "g", "a", offsets(got), session="s")
        assert b"late" in seen
        rig.clock.advance(60)
        assert b"late" in payloads(await fetch(rig.hl))  # again, found by the recorded position
        (place,) = await rig.hl.group_offsets("jobs", "g")
        assert place.dead == 0


async def worked_off(rig: Rig) -> None:
    """Several segments that nothing needs, and two snapshots after them."""
    for _ in range(12):
        await fill(rig, 250, b"x" * 1000)
        await rig.hl.ack(await rig.hl.pop("jobs", 250))
    rig.clock.advance(60)
    for _ in range(2):
        await fill(rig, 1)
        await rig.hl.snapshot("jobs")


async def test_group_created_during_a_deletion_begins_after_the_segment() -> None:
    async with opened(rewrite_below=0) as rig:
        await rig.hl.create_group("jobs", "r", unused_after=0.0)
        await worked_off(rig)
        rig.io.hold = {"_delete"}
        reclaiming = asyncio.ensure_future(rig.runner().maintenance.reclaim())
        await settle(200)
        assert rig.io.held
        info = await rig.hl.create_group("jobs", "g")
        (place,) = await rig.hl.reset_offsets("jobs", "r", to="earliest")
        rig.io.step()
        rig.io.hold = set()
        await reclaiming
        first = rig.runner().loaded.topic.following.floors[0]
        assert info.offsets[0].committed == place.committed > 0
        assert info.lag == place.lag
        assert first >= info.offsets[0].committed


@pytest.mark.parametrize("policy", ["interval", "os"])
async def test_events_that_free_a_segment_are_synced_before_its_deletion(policy: str) -> None:
    async with opened(topic={"fsync": policy, "fsync_interval": 60.0}, rewrite_below=0) as rig:
        await rig.hl.create_group("jobs", "g", unused_after=0.0)
        await worked_off(rig)
        rig.io.hold = {"_delete"}
        reclaiming = asyncio.ensure_future(rig.runner().maintenance.reclaim())
        await settle(200)
        assert rig.io.held
        journal = rig.runner().loaded.journal
        assert journal.durable_unit == journal.written_unit
        after = Rig(rig.disk.crash())  # the unlink itself may come through
        await after.open()
        (place,) = await after.hl.group_offsets("jobs", "g")
        assert place.committed >= rig.runner().loaded.topic.following.floors[0] > 0
        await after.hl.close()
        rig.io.step()
        rig.io.hold = set()
        await reclaiming
