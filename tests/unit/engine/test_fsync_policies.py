"""The fsync policies: what each syncs, what stats report, and changing it on a live topic."""

from __future__ import annotations

import asyncio
import random

import pytest

import heapline
from tests.unit.engine import held_io
from tests.unit.engine.rig import Rig, opened, until


def count_syncs(rig: Rig) -> list[str]:
    syncs: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "fdatasync" and path.endswith(".seg"):
            syncs.append(path)

    rig.disk.on_step = note
    return syncs


async def test_commit_syncs_every_unit() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        syncs = count_syncs(rig)
        for _ in range(5):
            await rig.hl.enqueue("jobs", b"x")
        assert len(syncs) == 5


@pytest.mark.parametrize("policy", ["interval", "os"])
async def test_relaxed_policy_answers_without_a_sync_and_says_so(policy: str) -> None:
    async with opened() as rig:
        await rig.topic("loose", fsync=policy, fsync_interval=60.0)
        await rig.hl.enqueue("loose", b"x")
        syncs = count_syncs(rig)
        for _ in range(5):
            await rig.hl.enqueue("loose", b"x")
        assert syncs == []
        assert "may be lost" in (await rig.hl.stats("loose")).durability


async def test_interval_policy_syncs_automatically() -> None:
    async with opened() as rig:
        await rig.topic("timed", fsync="interval", fsync_interval=0.005)
        await rig.hl.enqueue("timed", b"kept")
        journal = rig.runner("timed").loaded.journal
        await until(lambda: journal.durable_unit == journal.written_unit)
        other = Rig(rig.disk.crash())
        hl = await other.open()
        assert (await hl.stats("timed")).ready == 1
        await hl.close()


async def test_cleanly_closed_relaxed_topic_loses_nothing() -> None:
    async with opened() as rig:
        await rig.topic("loose", fsync="os")
        await rig.hl.enqueue("loose", b"x")
        await rig.hl.close()
        other = Rig(rig.disk.crash())
        hl = await other.open()
        assert (await hl.stats("loose")).ready == 1
        await hl.close()


async def test_policy_change_of_a_live_topic_takes_effect_immediately() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        (held,) = await rig.hl.pop("jobs")
        waiting = asyncio.create_task(rig.hl.pop("jobs", wait=60))
        await rig.hl.update_topic("jobs", fsync="os")
        assert "operating system" in (await rig.hl.stats("jobs")).durability
        syncs = count_syncs(rig)
        await rig.hl.enqueue("jobs", b"y")
        assert (syncs, [m.payload for m in await waiting]) == ([], [b"y"])
        await rig.hl.update_topic("jobs", fsync="commit")
        assert (await rig.hl.stats("jobs")).durability == "every answer is durable"
        syncs.clear()
        await rig.hl.enqueue("jobs", b"z")
        assert len(syncs) == 1
        await held.ack()
        stats = await rig.hl.stats("jobs")
        assert (stats.log.reloads_total, stats.enqueued_total) == (0, 3)


async def test_log_of_a_relaxed_topic_ends_at_the_durable_end() -> None:
    """The end in `offsets` is the durable end, and readers of the log see no further."""
    async with opened() as rig:
        await rig.topic("timed", fsync="interval", fsync_interval=60.0)
        for i in range(3):
            await rig.hl.enqueue("timed", b"%d" % i)
        start, end = (await rig.hl.offsets("timed"))[0]
        frames = [frame async for frame in rig.hl.read_log("timed")]
        assert (start, end) == (0, frames[-1].offset + frames[-1].row_count if frames else 0)


async def test_unknown_policy_is_refused() -> None:
    async with opened() as rig:
        with pytest.raises(heapline.BadRequest):
            await rig.hl.update_topic("jobs", fsync="sometimes")


@pytest.mark.parametrize("policy", ["os", "interval"])
def test_snapshot_under_a_relaxed_policy_is_never_ahead_of_its_journal(policy: str) -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened(fsync=policy, fsync_interval=50.0)
        for i in range(20):
            await hl.enqueue("jobs", bytes(1000), priority=i)
        await hl.snapshot("jobs")
        for seed in range(10):
            after = await rig.broker(rig.disk.crash(random.Random(seed))).__aenter__()
            assert (await after.stats("jobs")).ready == 20

    held_io.play(scene)


def test_interval_policy_continues_after_a_failed_sync() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened(fsync="interval", fsync_interval=0.05)
        await hl.enqueue("jobs", b"x")
        rig.disk.inject("fdatasync", path=".seg")
        await asyncio.sleep(2)
        await hl.enqueue("jobs", b"y")
        await asyncio.sleep(1)
        journal = hl.topics._runners["jobs"].loaded.journal
        assert hl.topics._runners["jobs"].counters.reloads == 1
        assert journal.durable_unit == journal.written_unit

    held_io.play(scene)


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_topic_continues_if_reopening_for_new_settings_is_interrupted(how: str) -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        if how == "fails":
            rig.disk.inject("open", path=".seg")
            await hl.update_topic("jobs", fsync="os")
        else:
            rig.io.hold = {"load"}
            updating = asyncio.ensure_future(hl.update_topic("jobs", fsync="os"))
            await held_io.spin()
            updating.cancel()
            await held_io.spin()
            rig.io.let_go()
        await asyncio.sleep(1)
        async with asyncio.timeout(5):
            await hl.enqueue("jobs", b"x")
        assert hl.topics._runners["jobs"].loaded.journal._policy == "os"

    held_io.play(scene)
