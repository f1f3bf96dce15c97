"""`heapline backup` of a directory in use: the copy is complete, and contains everything that had been answered."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.cli import backup as backup_module
from heapline.cli.backup import backup
from heapline.cli.journal.check import verify_topic
from heapline.cli.journal.topic_files import find_topics
from heapline.contract.config import BrokerConfig
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from heapline.contract.stream import ReplayFilter
from heapline.engine import EmbeddedBroker
from heapline.engine.catalog import Entry
from heapline.engine.replays import job_runner
from heapline.journal import RealDisk
from heapline.journal import backup as journal_backup
from heapline.journal.log_bounds import read_watermark
from heapline.journal.segment import segment_path
from heapline.server.auth import DirectoryGuard
from heapline.testing import FakeClock
from tests.conformance.worlds import UnsyncedDisk

BUSY = BrokerConfig(reclaim_interval=0.01, snapshot_bytes=1 << 18, cache_bytes=0)
SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 64 << 10, "retention": 0.0}


class Load:
    """Enqueue and ack messages; return which of them were answered, by payload."""

    def __init__(self, broker: heapline.contract.broker.Broker, topic: str) -> None:
        self.broker, self.topic = broker, topic
        self.asked: set[bytes] = set()
        self.enqueued: set[bytes] = set()
        self.ack_asked: set[bytes] = set()
        self.acked: set[bytes] = set()

    async def run(self) -> None:
        for number in range(1_000_000):
            payloads = [b"%d-%d-" % (number, i) + bytes(2000) for i in range(40)]
            self.asked.update(payloads)
            await self.broker.enqueue_batch(self.topic, [Outgoing(p, priority=i) for i, p in enumerate(payloads)])
            self.enqueued.update(payloads)
            messages = await self.broker.pop(self.topic, 39)
            self.ack_asked.update(m.payload for m in messages)
            await self.broker.ack(messages)
            self.acked.update(m.payload for m in messages)


def check_every_byte(copy: Path) -> None:
    places = find_topics(copy)
    assert not places.catalog_damage
    for place in places.topics:
        assert verify_topic(RealDisk(), place, running=False, replay=True).findings == []


async def payloads_in(copy: Path, topic: str) -> set[bytes]:
    """Return everything that a consumer of the copy can still get."""
    async with EmbeddedBroker(str(copy), disk=UnsyncedDisk()) as broker:
        stats = await broker.stats(topic)
        found = {m.payload for m in await broker.pop(topic, 100_000, max_bytes=1 << 30)}
        assert len(found) == stats.ready
        leased = stats.leased  # by a consumer of the original
        return found | {b"leased %d" % i for i in range(leased)}


async def test_backup_under_load_is_complete_and_passes_every_checksum(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with EmbeddedBroker(str(data), config=BUSY, disk=UnsyncedDisk()) as broker:
        await broker.create_topic("jobs", partitions=3, **SMALL)
        await broker.create_topic("other/idle", **SMALL)
        load = Load(broker, "jobs")
        running = asyncio.ensure_future(load.run())
        taken = []
        for number in range(4):
            while len(load.enqueued) < 2500 * (
                number + 1
            ):  # so that segments are created and deleted between the copies
                await asyncio.sleep(0.01)
                assert not running.done()
            before = set(load.enqueued), set(load.acked)
            await asyncio.to_thread(backup, data, tmp_path / f"copy{number}")
            taken.append((*before, set(load.asked), set(load.ack_asked)))
        running.cancel()
        reclaimed = broker.topics.runner("jobs").maintenance.segments_reclaimed_total
    assert reclaimed > 2  # otherwise this proves little
    for number, (enqueued, acked, asked, ack_asked) in enumerate(taken):
        copy = tmp_path / f"copy{number}"
        check_every_byte(copy)
        found = await payloads_in(copy, "jobs")
        leased = {p for p in found if p.startswith(b"leased")}
        missing = (enqueued - ack_asked) - found
        assert len(missing) <= len(leased) <= 39  # leased messages return when their leases end
        assert not found & acked
        assert found - leased <= asked


async def test_copy_is_served_like_the_original_with_its_keys_and_its_topics(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "deep" / "copy"
    data.mkdir()
    guard = await asyncio.to_thread(DirectoryGuard, data)
    await guard.close()
    async with EmbeddedBroker(str(data), disk=UnsyncedDisk()) as broker:
        await broker.create_topic("jobs", **SMALL)
        first = await broker.enqueue("jobs", b"first", delay=3600)
        await broker.prepare_batch("b1", "p1", {"jobs": [Outgoing(b"prepared")]})
        await broker.commit_batch("b1", ["p1"])
        await asyncio.to_thread(backup, data, copy)
        await broker.enqueue("jobs", b"after")
    assert (copy / "admin.key").read_bytes() == (data / "admin.key").read_bytes()
    assert (
        oct(os.stat(copy / "admin.key").st_mode & 0o777) == oct(os.stat(copy / "auth.json").st_mode & 0o777) == "0o600"
    )
    check_every_byte(copy)
    async with EmbeddedBroker(str(copy), disk=UnsyncedDisk()) as broker:
        assert (await broker.get("jobs", first.id)).state == "delayed"
        assert [m.payload for m in await broker.pop("jobs", 10)] == [b"prepared"]
        assert [b.state for b in await broker.list_batches()] == ["committed"]
    assert not list(data.glob("topics/*/*/readers/*"))  # the original is no longer held


async def test_unused_directory_is_copied_and_existing_target_rejected(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    async with EmbeddedBroker(str(data), disk=UnsyncedDisk()) as broker:
        await broker.create_topic("jobs", **SMALL)
        await broker.enqueue("jobs", b"x")
    await asyncio.to_thread(backup, data, copy)
    check_every_byte(copy)
    assert await payloads_in(copy, "jobs") == {b"x"}
    with pytest.raises(BadRequest):
        backup(data, copy)
    with pytest.raises(BadRequest):
        backup(tmp_path, tmp_path / "another")


async def test_interrupted_copy_has_no_catalog_and_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    async with EmbeddedBroker(str(data), disk=UnsyncedDisk()) as broker:
        await broker.create_topic("jobs", **SMALL)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("heapline.cli.backup._copy_root_files", fail)
    with pytest.raises(KeyboardInterrupt):
        backup(data, copy)
    with pytest.raises(heapline.contract.errors.CorruptionError):
        async with EmbeddedBroker(str(copy), disk=UnsyncedDisk()):
            pass


async def test_unit_being_written_is_omitted_entirely(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    async with EmbeddedBroker(str(data), disk=UnsyncedDisk()) as broker:
        await broker.create_topic("jobs", **SMALL)
        await broker.enqueue("jobs", b"x")
        folder = data / "topics" / "default" / "jobs.1"
        mark = read_watermark(RealDisk(), str(folder))
        assert mark is not None
        segment = Path(segment_path(str(folder), mark.segment))
        with segment.open("r+b") as file:  # half of the next write, as another process may see it
            file.seek(mark.byte_end)
            file.write(b"\xa5" * 700)
        await asyncio.to_thread(backup, data, copy)
    copied = (copy / segment.relative_to(data)).read_bytes()
    assert copied[mark.byte_end :].count(0) == len(copied) - mark.byte_end > 0
    check_every_byte(copy)


async def test_schedules_in_a_backup_do_not_fire_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, copy, clock, loop = tmp_path / "data", tmp_path / "copy", FakeClock(), asyncio.get_running_loop()
    copied: list[str] = []
    async with EmbeddedBroker(str(data), disk=UnsyncedDisk(), clock=clock) as broker:
        await broker.create_topic("jobs", **SMALL)
        await broker.create_schedule("tick", every=60, topic="jobs", misfire="all")
        await broker.create_schedule("changed", every=60, topic="jobs", misfire="all")

        async def fire() -> None:
            await broker.create_schedule("changed", every=60, topic="jobs", misfire="all", payload=b"new")
            clock.advance(60)
            await broker.fire_schedules()

        def copy_one(disk: object, source: Path, to: Path, entry: Entry) -> object:
            if copied == ["_system/schedules"]:
                asyncio.run_coroutine_threadsafe(fire(), loop).result()
            copied.append(entry.topic)
            return whole(disk, source, to, entry)  # type: ignore[arg-type]

        whole = backup_module._copy_topic
        monkeypatch.setattr(backup_module, "_copy_topic", copy_one)
        await asyncio.to_thread(backup, data, copy)
    assert copied == ["_system/schedules", "jobs"]
    check_every_byte(copy)
    async with EmbeddedBroker(str(copy), disk=UnsyncedDisk(), clock=clock) as broker:
        await broker.fire_schedules()
        clock.advance(60)
        await broker.fire_schedules()
        assert [info.state for info in await broker.list_schedules()] == ["active", "active"]
        names = ("heapline-schedule", "heapline-scheduled-at")
        found = [tuple(m.headers[name] for name in names) for m in await broker.pop("jobs", 100)]
        assert len(found) == len(set(found)) == 4


async def replayed_so_far(broker: EmbeddedBroker, count: int, clock: FakeClock) -> None:
    async with asyncio.timeout(30):
        while (await broker.get_replay("r")).replayed < count:
            clock.advance(0.5)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("before", "meanwhile"), [(0, 0), (0, 40), (30, 30), (30, 70)])
@pytest.mark.parametrize("into", ["a-target", "z-target", None])
async def test_replay_in_a_backup_continues_exactly_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, meanwhile: int, into: str | None
) -> None:
    data, copy, clock, loop = tmp_path / "data", tmp_path / "copy", FakeClock(), asyncio.get_running_loop()
    monkeypatch.setattr(job_runner, "BATCH_ROWS", 7)
    async with EmbeddedBroker(str(data), disk=UnsyncedDisk(), clock=clock) as broker:
        for topic in filter(None, ("jobs", into)):
            await broker.create_topic(topic, partitions=2, **SMALL)
        await broker.enqueue_batch("jobs", [Outgoing(b"%d" % i, key=str(i), priority=i % 3) for i in range(150)])
        wanted = ReplayFilter(priority_max=1)  # 100 of them
        await broker.start_replay("r", "jobs", into=into, rate=20, where=wanted)
        await replayed_so_far(broker, before, clock)

        def copy_one(disk: object, source: Path, to: Path, entry: Entry) -> object:
            asyncio.run_coroutine_threadsafe(replayed_so_far(broker, meanwhile, clock), loop).result()
            return whole(disk, source, to, entry)  # type: ignore[arg-type]

        whole = backup_module._copy_topic
        monkeypatch.setattr(backup_module, "_copy_topic", copy_one)
        await asyncio.to_thread(backup, data, copy)
    check_every_byte(copy)
    async with EmbeddedBroker(str(copy), disk=UnsyncedDisk(), clock=clock) as broker:
        await replayed_so_far(broker, 100, clock)
        found = [m.payload for m in await broker.pop(into or "jobs", 1000) if "heapline-replay" in m.headers]
        assert sorted(found) == sorted(b"%d" % i for i in range(150) if i % 3 <= 1)


async def test_fast_replay_older_than_its_target_in_a_backup_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown which of its rows are in: some may be deleted since."""
    data, copy, clock, loop = tmp_path / "data", tmp_path / "copy", FakeClock(), asyncio.get_running_loop()
    async with EmbeddedBroker(str(data), disk=UnsyncedDisk(), clock=clock) as broker:
        for topic in ("jobs", "target"):
            await broker.create_topic(topic, **SMALL)
        await broker.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(50)])
        await broker.start_replay("r", "jobs", into="target", mode="fast", rate=20)

        def copy_one(disk: object, source: Path, to: Path, entry: Entry) -> object:
            asyncio.run_coroutine_threadsafe(replayed_so_far(broker, 30, clock), loop).result()
            return whole(disk, source, to, entry)  # type: ignore[arg-type]

        whole = backup_module._copy_topic
        monkeypatch.setattr(backup_module, "_copy_topic", copy_one)
        await asyncio.to_thread(backup, data, copy)
    async with EmbeddedBroker(str(copy), disk=UnsyncedDisk(), clock=clock) as broker:
        async with asyncio.timeout(30):
            while (info := await broker.get_replay("r")).state == "running":  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert info.state == "failed"
        assert "older than" in str(info.error)


async def test_checkpoint_in_a_backup_is_never_past_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, copy, loop = tmp_path / "data", tmp_path / "copy", asyncio.get_running_loop()
    async with EmbeddedBroker(str(data), disk=UnsyncedDisk()) as broker:
        await broker.create_topic("jobs", **SMALL)

        async def go_on(payload: bytes) -> None:
            await broker.enqueue("jobs", payload)
            assert [row.payload async for row in broker.replay("jobs", checkpoint="c")] == [payload]

        def copy_segment(*args: Any) -> None:
            asyncio.run_coroutine_threadsafe(go_on(b"late"), loop).result()  # after the end of the copy is known
            whole(*args)

        await go_on(b"early")
        whole = journal_backup._Copy._copy_segment
        monkeypatch.setattr(journal_backup._Copy, "_copy_segment", copy_segment)
        await asyncio.to_thread(backup, data, copy)
    check_every_byte(copy)
    async with EmbeddedBroker(str(copy), disk=UnsyncedDisk()) as broker:
        for payload in (b"new", b"newer"):
            await broker.enqueue("jobs", payload)
        assert [row.payload async for row in broker.replay("jobs", checkpoint="c")] == [b"new", b"newer"]
