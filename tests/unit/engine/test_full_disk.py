"""A full disk refuses enqueues by name, and can still be drained with the two spare segments."""

from __future__ import annotations

import pytest

import heapline
from tests.simulation.fake_disk import FakeDisk
from tests.unit.engine.rig import Rig, opened, until

MiB = 1 << 20


async def fill(rig: Rig) -> int:
    """Enqueue until the disk is full; return how many messages were accepted."""
    for count in range(2000):
        try:
            await rig.hl.enqueue("jobs", b"x" * 50_000, priority=count)
        except heapline.StorageFull:
            return count
    raise AssertionError("the disk is never full")


async def test_full_disk_refuses_enqueues_and_can_be_drained() -> None:
    disk = FakeDisk(capacity=12 * MiB)
    async with opened(disk, spare_segment_bytes=MiB, reclaim_interval=0.01, snapshot_interval=0.0) as rig:
        count = await fill(rig)
        assert count > 50
        with pytest.raises(heapline.StorageFull, match="can be drained"):
            await rig.hl.enqueue_batch("jobs", [heapline.Outgoing(b"x")])
        with pytest.raises(heapline.ResourceExhausted):  # its branch of the tree
            await rig.hl.enqueue("jobs", b"x", idempotency_key="k")
        drained = 0
        while messages := await rig.hl.pop("jobs", 10, max_bytes=1 << 30):
            await messages[0].nack(backoff=0)
            await rig.hl.ack(messages[1:])
            again = await rig.hl.pop("jobs", 1)
            await rig.hl.ack(again)
            drained += len(messages)
        assert drained == count
        assert (await rig.hl.stats("jobs")).log.reloads_total == 0

        await until(lambda: rig.runner().loaded.journal.can_grow)
        assert await fill(rig) > count // 2, "drained space is returned"


async def test_full_disk_loses_nothing_over_a_restart() -> None:
    disk = FakeDisk(capacity=10 * MiB)
    async with opened(disk, spare_segment_bytes=MiB) as rig:
        count = await fill(rig)
        await rig.hl.ack(await rig.hl.pop("jobs", 5))
        hl = await rig.reopen()
        assert (await hl.stats("jobs")).ready == count - 5
        with pytest.raises(heapline.StorageFull):
            await hl.enqueue("jobs", b"x" * 50_000)
        assert len(await hl.pop("jobs", 1000, max_bytes=1 << 40)) == count - 5


async def test_non_atomic_batch_reports_each_row_a_full_disk_rejected() -> None:
    async with opened(FakeDisk(capacity=10 * MiB), spare_segment_bytes=MiB) as rig:
        results = await rig.hl.enqueue_batch("jobs", [heapline.Outgoing(b"x" * 50_000)] * 400, atomic=False)
        taken = [r for r in results if r.error is None]
        assert 20 < len(taken) < 400
        assert {type(r.error) for r in results} == {type(None), heapline.StorageFull}
        assert (await rig.hl.stats("jobs")).ready == len(taken)


async def test_purge_and_cancel_work_on_a_full_disk() -> None:
    async with opened(FakeDisk(capacity=10 * MiB), spare_segment_bytes=MiB) as rig:
        count = await fill(rig)
        (head,) = await rig.hl.peek("jobs", 1)
        await rig.hl.cancel("jobs", head.id)
        assert await rig.hl.purge("jobs") == count - 1


async def test_topic_on_a_full_disk_is_refused_by_name_and_leaves_nothing_behind() -> None:
    async with opened(FakeDisk(capacity=10 * MiB), spare_segment_bytes=MiB) as rig:
        await fill(rig)
        before = rig.disk.used
        for _ in range(30):
            try:
                await rig.topic("another", segment_bytes=8 * MiB)
            except heapline.StorageFull:
                break
        else:
            raise AssertionError("a topic was created on a full disk")
        assert rig.disk.used <= before + 8192
        assert [info.name for info in await rig.hl.list_topics()] == ["jobs"]
        hl = await rig.reopen()
        assert [info.name for info in await hl.list_topics()] == ["jobs"]
