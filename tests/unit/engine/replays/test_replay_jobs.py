"""Replays into a topic: each message exactly once, whatever fails; what they preserve; how they end."""

from __future__ import annotations

import asyncio
import errno
import random
from typing import Any

import pytest

import heapline
from heapline.contract import replays
from heapline.contract.stream import ReplayFilter, ReplayInfo
from heapline.engine import EmbeddedBroker
from heapline.engine.replays import job_runner, jobs, manager, reader, scan
from tests.simulation.fake_disk import FakeDisk, PowerCut
from tests.unit.engine.rig import PATH, Rig, StepIo, opened, settle, until


async def ended(hl: Any, name: str = "r", *states: str) -> ReplayInfo:
    async with asyncio.timeout(30):
        while (info := await hl.get_replay(name)).state == "running":  # noqa: ASYNC110 - nothing tells the end of it
            await asyncio.sleep(0)
    return info


async def waits(hl: Any, name: str = "r") -> ReplayInfo:
    """Wait until it reports what it waits for."""
    async with asyncio.timeout(30):
        while (info := await hl.get_replay(name)).error is None:
            assert info.state == "running"
            await asyncio.sleep(0)
    return info


async def fill(hl: Any, count: int, topic: str = "jobs") -> None:
    for i in range(count):
        await hl.enqueue(topic, b"%d" % i, key=str(i), priority=i)


async def drained(hl: Any, topic: str) -> list[bytes]:
    found = []
    while messages := await hl.pop(topic, 100):
        found += [m.payload for m in messages]
        await hl.ack(messages)
    return found


# -- fields ------------------------------------------------------------------------------------------------------------


async def test_replayed_messages_keep_their_fields_and_name_their_source() -> None:
    async with opened(topic={"fairness": "keys"}) as rig:
        await rig.topic("other", fairness="keys")
        first = await rig.hl.enqueue(
            "jobs", b"a", priority=3, key="k", headers={"h": "v"}, ttl=3600, max_retries=7, fairness_key="f"
        )
        await rig.hl.start_replay("r", "jobs", into="other")
        info = await ended(rig.hl)
        assert (info.state, info.replayed, info.skipped, info.done_share) == ("done", 1, 0, 1.0)
        (message,) = await rig.hl.pop("other", 1)
        assert (message.payload, message.priority, message.key) == (b"a", 3, "k")
        assert message.fairness_key == "f"
        assert message.headers == {
            "h": "v", "heapline-replay": "r", "heapline-replayed-from": "jobs/0/0",
            "heapline-replayed-id": first.message_id,
        }  # fmt: skip
        found = await rig.hl.get("other", message.id)
        assert found.expires_at is not None
        partition = rig.runner("other").loaded.topic.partitions[0]
        assert partition.entries.limits[message.id] == 7


async def test_priority_and_due_time_can_be_replaced() -> None:
    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 3)
        await rig.hl.start_replay("r", "jobs", into="other", priority=9, delay=60)
        await ended(rig.hl)
        stats = await rig.hl.stats("other")
        assert (stats.ready, stats.delayed) == (0, 3)
        rig.clock.advance(61)
        await rig.hl.stats("other")
        assert {m.priority for m in await rig.hl.pop("other", 10)} == {9}


async def test_replay_into_its_own_topic_does_not_loop() -> None:
    async with opened(topic={"partitions": 3}) as rig:
        await fill(rig.hl, 30)
        await rig.hl.start_replay("r", "jobs")
        info = await ended(rig.hl)
        assert info.replayed == 30
        assert sorted(await drained(rig.hl, "jobs")) == sorted([b"%d" % i for i in range(30)] * 2)


async def test_filtered_rows_are_counted_as_skipped() -> None:
    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 10)
        await rig.hl.start_replay("r", "jobs", into="other", where=ReplayFilter(priority_min=7))
        info = await ended(rig.hl)
        assert (info.replayed, info.skipped) == (3, 7)


async def test_replay_name_belongs_to_one_request() -> None:
    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 3)
        await rig.hl.start_replay("r", "jobs", into="other", start=1)
        first = await ended(rig.hl)
        assert await rig.hl.start_replay("r", "default/jobs", into="default/other", start=1) == first
        for options in ({"start": 0}, {"start": 1, "priority": 3}, {"start": 1, "into": "jobs"}):
            with pytest.raises(heapline.ReplayExists):
                await rig.hl.start_replay("r", "jobs", **{"into": "other", **options})
        await rig.reopen()
        assert await rig.hl.start_replay("r", "jobs", into="other", start=1) == first
        assert len(await drained(rig.hl, "other")) == 2
        assert [info.name for info in await rig.hl.list_replays()] == ["r"]
        with pytest.raises(heapline.ReplayNotFound):
            await rig.hl.get_replay("s")


async def test_oldest_ended_replays_are_also_forgotten_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "ENDED_MAX", 2)
    async with opened() as rig:
        await rig.topic("other")
        for i in range(5):
            rig.clock.advance(1)
            await rig.hl.start_replay(f"r{i}", "jobs", into="other")
            await ended(rig.hl, f"r{i}")
        await rig.reopen()
        assert [info.name for info in await rig.hl.list_replays()] == ["r2", "r3", "r4"]


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_replay_into_a_full_topic_waits_with_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "PAUSE", 0.0)
    async with opened() as rig:
        await rig.topic("other", max_backlog=3)
        await fill(rig.hl, 10)
        await rig.hl.start_replay("r", "jobs", into="other")
        assert "max_backlog" in str((await waits(rig.hl)).error)
        got: list[bytes] = []
        async with asyncio.timeout(30):
            while len(got) < 10:
                got += await drained(rig.hl, "other")
                await asyncio.sleep(0)
        info = await ended(rig.hl)
        assert (info.state, info.error, info.replayed) == ("done", None, 10)
        assert got == [b"%d" % i for i in range(10)]


async def test_replay_that_waits_enqueues_count_messages_across_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "PAUSE", 0.0)
    async with opened() as rig:
        await rig.topic("other", max_backlog=3)
        await fill(rig.hl, 10)
        await rig.hl.start_replay("r", "jobs", into="other", count=7)
        got: list[bytes] = []
        async with asyncio.timeout(30):
            while len(got) < 7:
                new = await drained(rig.hl, "other")
                if new:
                    await rig.reopen()
                got += new
                await asyncio.sleep(0)
        info = await ended(rig.hl)
        assert (info.state, info.replayed, info.done_share) == ("done", 7, 1.0)
        assert await drained(rig.hl, "other") == []
        assert got == [b"%d" % i for i in range(7)]


async def test_deleted_target_ends_the_replay_even_if_recreated(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        await rig.topic("other", max_backlog=1)
        await fill(rig.hl, 5)
        await rig.hl.start_replay("r", "jobs", into="other")
        await waits(rig.hl)
        await rig.hl.delete_topic("other")
        await rig.topic("other")
        info = await ended(rig.hl)
        assert info.state == "failed"
        assert "'other' was deleted; the one that has its name now is another" in str(info.error)
        assert await drained(rig.hl, "other") == []


async def test_unacceptable_message_ends_the_replay_and_is_named() -> None:
    async with opened() as rig:
        await rig.topic("other", max_payload_bytes=100)
        await rig.hl.enqueue("jobs", b"small")
        await rig.hl.enqueue("jobs", b"." * 101)
        await rig.hl.start_replay("r", "jobs", into="other")
        info = await ended(rig.hl)
        assert info.state == "failed"
        assert "offset 1 of partition 0" in str(info.error)


async def reclaim(rig: Rig) -> None:
    for _ in range(3):
        await rig.hl.enqueue("jobs", b".")
        await rig.hl.snapshot("jobs")
    await rig.runner().maintenance.reclaim()


@pytest.mark.parametrize("reason", ["full", "slow", "restarted"])
async def test_rows_are_kept_until_a_waiting_replay_ends(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """For space in its target or for its rate, for any time, and even if the broker is restarted."""
    monkeypatch.setattr(job_runner, "PAUSE", 0.0)
    monkeypatch.setattr(job_runner, "PAUSE_MAX", 0.0)
    monkeypatch.setattr(reader, "LOOK_MS", 1)
    monkeypatch.setattr(scan.MergedScan.read, "__defaults__", (5, 1 << 20))
    async with opened() as rig:
        await rig.topic("other", max_backlog=1000 if reason == "slow" else 1)
        for i in range(40):
            await rig.hl.enqueue("jobs", b"%d" % i + b"." * 50_000)
            await rig.hl.ack(await rig.hl.pop("jobs"))
        await rig.hl.start_replay("r", "jobs", into="other", rate=0.01 if reason == "slow" else None)
        async with asyncio.timeout(30):
            while not (await rig.hl.get_replay("r")).replayed:  # noqa: ASYNC110
                await asyncio.sleep(0)
        for _ in range(6):
            rig.clock.advance(300)
            await asyncio.sleep(0.01)  # it reads the clock now and then
            await settle()
            if reason == "restarted":
                await rig.reopen()
            await reclaim(rig)
        assert (await rig.hl.offsets("jobs"))[0][0] == 0
        async with asyncio.timeout(60):
            while (info := await rig.hl.get_replay("r")).state == "running":
                await drained(rig.hl, "other")
                rig.clock.advance(300)
                await asyncio.sleep(0)
        assert (info.state, info.replayed) == ("done", 40)
        await until(lambda: not rig.files(".lease"))
        await reclaim(rig)
        assert (await rig.hl.offsets("jobs"))[0][0] > 0


async def test_reclaimed_rows_end_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "PAUSE", 0.0)
    async with opened() as rig:
        await rig.topic("other", max_backlog=1)
        for i in range(40):
            await rig.hl.enqueue("jobs", b"%d" % i + b"." * 50_000)
            await rig.hl.ack(await rig.hl.pop("jobs"))
        await rig.hl.start_replay("r", "jobs", into="other")
        await waits(rig.hl)
        for path in rig.files(".lease"):
            rig.disk.unlink(path)  # as if it had expired: the broker was down for long
        await reclaim(rig)
        first = (await rig.hl.offsets("jobs"))[0][0]
        assert first > 1, "the test would prove nothing"
        info = await ended(rig.hl)
        assert info.state == "failed"
        assert f"the log starts at {first}" in str(info.error)


async def test_cancelled_replay_stays_cancelled_and_keeps_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "BATCH_ROWS", 2)
    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 20)
        await rig.hl.start_replay("r", "jobs", into="other", rate=0.001)
        async with asyncio.timeout(30):
            while not (await rig.hl.get_replay("r")).replayed:  # noqa: ASYNC110
                await asyncio.sleep(0)
        info = await rig.hl.cancel_replay("r")
        assert (info.state, info.replayed) == ("cancelled", 1)
        assert await rig.hl.cancel_replay("r") == info
        await rig.reopen()
        assert await rig.hl.get_replay("r") == info
        assert await drained(rig.hl, "other") == [b"0"]


async def test_damaged_file_blocks_only_its_own_replay_name() -> None:
    async with opened() as rig:
        await rig.topic("other")
        for name in ("r", "s"):
            await rig.hl.start_replay(name, "jobs", into="other")
            await ended(rig.hl, name)
        file = rig.disk.open(f"{PATH}/replays/r.json", write=True)
        file.pwritev([b"!"], 60)
        await rig.reopen()
        for attempt in (rig.hl.get_replay("r"), rig.hl.start_replay("r", "jobs", into="other")):
            with pytest.raises(heapline.CorruptionError):
                await attempt
        assert (await rig.hl.get_replay("s")).state == "done"


async def test_replay_waits_while_its_position_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "PAUSE", 0.0)
    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 5)
        rig.disk.inject("pwritev", errno.ENOSPC, path="replays", after=1, times=3)
        await rig.hl.start_replay("r", "jobs", into="other")
        assert "its place cannot be kept" in str((await waits(rig.hl)).error)
        info = await ended(rig.hl)
        assert (info.state, info.error) == ("done", None)
        assert await drained(rig.hl, "other") == [b"%d" % i for i in range(5)]


async def test_failed_writes_of_the_target_neither_duplicate_nor_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "BATCH_ROWS", 3)
    monkeypatch.setattr(job_runner, "PAUSE", 0.0)
    for after in range(0, 14, 2):
        async with opened() as rig:
            await rig.topic("other")
            await fill(rig.hl, 20)
            rig.disk.inject("fdatasync", path="other", after=after)
            await rig.hl.start_replay("r", "jobs", into="other")
            info = await ended(rig.hl)
            assert (info.state, info.replayed) == ("done", 20)
            rig.disk.clear_faults()
            assert await drained(rig.hl, "other") == [b"%d" % i for i in range(20)]


# -- crashes -----------------------------------------------------------------------------------------------------------


class CutIo(StepIo):
    """After a power cut no operation is answered."""

    is_cut = False

    def _do(self, *job: Any) -> None:
        if self.is_cut:
            return
        try:
            super()._do(*job)
        except PowerCut:
            self.is_cut = True


class CutRig(Rig):
    async def open(self) -> EmbeddedBroker:
        self.io = CutIo()
        self.hl = EmbeddedBroker(PATH, config=self.config, disk=self.disk, io=self.io, clock=self.clock)
        opening = asyncio.ensure_future(self.hl.__aenter__())
        await until(lambda: opening.done() or self.io.is_cut)  # type: ignore[attr-defined]
        return self.hl

    async def crash(self, draw: random.Random) -> None:
        """Return the disk as a power cut leaves it."""
        self.io.is_cut = True  # type: ignore[attr-defined]
        self.hl.topics.replays.stop()
        for runner in self.hl.topics._all_runners():
            runner.is_closed = True
            for task in list(runner.tasks):
                task.cancel()
        for _ in range(4):  # cleanup waits for a disk that does not answer
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await settle(10)
        self.disk = self.disk.crash(draw)


@pytest.mark.parametrize("mode", ["all", "fast"])
@pytest.mark.parametrize("seed", range(6))
async def test_replay_interrupted_anywhere_enqueues_each_message_once(
    seed: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_runner, "BATCH_ROWS", 3)
    monkeypatch.setattr(job_runner, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(scan.MergedScan.read, "__defaults__", (5, 1 << 20))
    draw = random.Random(seed)
    rig = CutRig(FakeDisk(seed=seed))
    await rig.open()
    await rig.topic(partitions=2)
    await rig.topic("other", partitions=draw.choice([1, 3]), dedup_window=1.0)
    await fill(rig.hl, 40)
    gone: set[bytes] = set()
    for message in await rig.hl.pop("jobs", 7):
        gone.add(message.payload)
        await message.ack()
    await rig.hl.start_replay("r", "jobs", into="other", mode=mode)
    cuts = 0
    while cuts < 12:
        rig.disk.cut_power_in(draw.randrange(1, 60))
        states: list[str] = []

        async def watch(states: list[str] = states) -> None:
            states.append((await ended(rig.hl)).state)

        watching = asyncio.ensure_future(watch())
        await until(lambda: watching.done() or rig.io.is_cut)  # type: ignore[attr-defined]  # noqa: B023
        if states:
            break
        cuts += 1
        await rig.crash(draw)
        rig.clock.advance(draw.choice([0.1, 5000]))  # single numbers are forgotten after a second
        await rig.open()
    rig.disk.cut_power_in(None)
    if rig.io.is_cut:  # type: ignore[attr-defined]
        await rig.crash(draw)
        await rig.open()
    info = await ended(rig.hl)
    assert info.state == "done"
    expected = {b"%d" % i for i in range(40)} - (gone if mode == "fast" else set())
    got = await drained(rig.hl, "other")
    assert sorted(got) == sorted(expected), f"after {cuts} cuts"
    assert (info.replayed, info.skipped) == (len(expected), 40 - len(expected))
    await rig.hl.close()
    assert cuts or seed % 2, "the test would prove nothing without cuts"


@pytest.mark.parametrize("seed", range(10))
async def test_interrupted_reader_misses_no_row_and_sees_none_three_times(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "SAVE_ROWS", 4)
    monkeypatch.setattr(scan.MergedScan.read, "__defaults__", (4, 1 << 20))
    draw = random.Random(seed)
    rig = CutRig(FakeDisk(seed=seed))
    await rig.open()
    await rig.topic(partitions=2)
    await fill(rig.hl, 40)
    seen: list[bytes] = []

    async def reader() -> None:
        async for row in rig.hl.replay("jobs", checkpoint="mine"):
            seen.append(row.payload)  # type: ignore[union-attr]
            await asyncio.sleep(0)

    rig.disk.cut_power_in(draw.randrange(1, 120))
    reading = asyncio.ensure_future(reader())
    await until(lambda: reading.done() or rig.io.is_cut)  # type: ignore[attr-defined]
    await settle()
    before = list(seen)
    await rig.crash(draw)
    await rig.open()
    await reader()
    await rig.hl.close()
    assert set(seen) == {b"%d" % i for i in range(40)}
    assert max(map(seen.count, seen)) <= 2
    assert len(set(before)) == len(before)
    assert len(seen) <= 40 + 8, "rows are repeated only since the last checkpoint"


# -- others ------------------------------------------------------------------------------------------------------------


async def test_producer_of_a_replay_cannot_be_opened_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By accident or on purpose: the replay would be fenced, and end."""
    monkeypatch.setattr(job_runner, "BATCH_ROWS", 2)
    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 6)
        await rig.hl.start_replay("r", "jobs", into="other", rate=100)
        async with asyncio.timeout(30):
            while not (await rig.hl.get_replay("r")).replayed:  # noqa: ASYNC110
                await asyncio.sleep(0)
        [partition] = rig.runner("other").loaded.topic.partitions
        names = partition.state.sequences._producers
        for name in [*names, "replay.r"]:
            try:
                await rig.hl.open_producer("other", name)
            except heapline.BadName:
                continue
        rig.clock.advance(60)
        info = await ended(rig.hl)
        assert (info.state, info.replayed) == ("done", 6)


async def test_forgotten_replay_name_can_be_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "ENDED_MAX", 1)
    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 3)
        for name in ("r", "s", "t", "r"):
            await rig.hl.start_replay(name, "jobs", into="other")
            assert (await ended(rig.hl, name)).replayed == 3
            rig.clock.advance(1)
        assert len(await drained(rig.hl, "other")) == 12


async def test_replay_cancelled_during_a_checkpoint_stays_cancelled() -> None:
    """A thread does not stop when its caller is cancelled."""
    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 4)
        await rig.hl.start_replay("r", "jobs", into="other", rate=0.001)
        async with asyncio.timeout(30):
            while not (await rig.hl.get_replay("r")).replayed:  # noqa: ASYNC110
                await asyncio.sleep(0)
        rig.io.hold.add("save")
        rig.clock.advance(10_000)
        await until(lambda: bool(rig.io.held))
        cancels = [asyncio.ensure_future(rig.hl.cancel_replay("r")) for _ in range(2)]
        await settle()
        while rig.io.held or not all(cancel.done() for cancel in cancels):
            rig.io.held.reverse()  # threads: the later one may be faster
            rig.io.step(len(rig.io.held))
            await settle()
        assert {(await cancel).state for cancel in cancels} == {"cancelled"}
        await rig.reopen()
        assert (await rig.hl.get_replay("r")).state == "cancelled"


async def test_jobs_that_cannot_be_listed_at_first_start_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "PAUSE", 0.0)
    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 4)
        await rig.hl.start_replay("r", "jobs", into="other", rate=0.001)
        await rig.hl.close()
        rig.disk.inject("listdir", path="replays", times=2)
        await rig.open()
        with pytest.raises(heapline.UnavailableError, match="cannot list the replays"):
            await rig.hl.get_replay("r")
        rig.clock.advance(10_000)
        async with asyncio.timeout(30):
            while rig.hl.topics.replays._refusal is not None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert (await rig.hl.get_replay("r")).state == "running"


async def test_jobs_are_listed_again_after_a_bug_and_calls_fail_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manager, "PAUSE", 0.0)
    async with opened() as rig:
        await rig.topic("other")
        await rig.hl.start_replay("r", "jobs", into="other")
        await ended(rig.hl)
        await rig.hl.close()
        with monkeypatch.context() as patch:
            patch.setattr(jobs, "load", lambda *_: 1 / 0)
            await rig.open()
            with pytest.raises(heapline.UnavailableError, match="see the server's log"):
                await rig.hl.get_replay("r")
        async with asyncio.timeout(30):
            while rig.hl.topics.replays._refusal is not None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert (await rig.hl.get_replay("r")).state == "done"
        assert caplog.text.count("cannot list replays; will retry") == 1
        assert "ZeroDivisionError" in caplog.text


async def test_old_job_that_cannot_be_deleted_is_logged_and_does_not_delay_new_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manager, "ENDED_MAX", 1)
    async with opened() as rig:
        await rig.topic("other")
        for name in ("r", "s"):
            await rig.hl.start_replay(name, "jobs", into="other")
            await ended(rig.hl, name)
            rig.clock.advance(1)
        rig.disk.inject("unlink", path="replays")
        for name, left in (("t", ["r", "s", "t"]), ("u", ["t", "u"])):
            await rig.hl.start_replay(name, "jobs", into="other")
            await ended(rig.hl, name)
            rig.clock.advance(1)
            assert [info.name for info in await rig.hl.list_replays()] == left
        assert "cannot be forgotten" in caplog.text


async def test_unexpected_error_is_reported_and_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "PAUSE", 0.0)
    monkeypatch.setattr(job_runner, "PAUSE_MAX", 0.0)

    def broken(*args: Any) -> Any:
        raise RuntimeError("secret payload")

    async with opened() as rig:
        await rig.topic("other")
        await fill(rig.hl, 3)
        with monkeypatch.context() as patch:
            patch.setattr(job_runner, "outgoing", broken)
            await rig.hl.start_replay("r", "jobs", into="other")
            error = str((await waits(rig.hl)).error)
        assert "log" in error
        assert "secret" not in error
        info = await ended(rig.hl)
        assert (info.state, info.replayed, info.error) == ("done", 3, None)
