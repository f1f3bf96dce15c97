"""Prepared messages in the view `messages`: a row at or above the reported start can always be shown.

This holds even if its record is in another segment than the commit that made it visible.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from heapline.contract.message import Outgoing
from heapline.engine.log import bounds, index_after
from heapline.journal.log_bounds import log_start_path, read_log_start
from heapline.journal.reclaim import ReaderLease, write_lease
from heapline.spark.topic_log import DataLost
from tests.unit.engine.rig import Rig, opened
from tests.unit.engine.test_maintenance import BULK, churn, reclaim
from tests.unit.spark.log_rig import planned, read_work, release, rows, source_of


async def prepare(rig: Rig, priority: int = -200, delay: float | None = None) -> None:
    out = [Outgoing(b"prepared %d" % i, priority, delay=delay) for i in range(3)]
    await rig.hl.prepare_batch("b", "p", out, topic="jobs")


async def fill(rig: Rig, value: bytes, messages: int = 25) -> None:
    """More than a segment, all of it acked."""
    for _ in range(messages):
        await rig.hl.enqueue("jobs", value + BULK, priority=-100)
    await rig.hl.ack(await rig.hl.pop("jobs", messages, max_bytes=1 << 30))


async def commit(rig: Rig) -> int:
    """The offset of the first row of the commit."""
    at = (await rig.hl.offsets("jobs"))[0][1]
    await rig.hl.commit_batch("b", ["p"])
    return at


async def far_apart(rig: Rig) -> int:
    """Prepare in the first segment, commit in a later one, and finish. Return the position of the commit."""
    await prepare(rig)
    await fill(rig, b"between", 45)
    at = await commit(rig)
    await rig.hl.enqueue("jobs", b"after", priority=50)
    await rig.hl.ack(await rig.hl.pop("jobs", 3))
    return at


def from_start(rig: Rig, start: int, **options: str) -> list[dict[str, Any]]:
    return rows(rig, startingOffsets=json.dumps({"jobs": {"0": start}}), **options)


def first_segment(rig: Rig) -> int:
    return min(int(path.rpartition("/")[2].split(".")[0]) for path in rig.files(".seg") if "/jobs" in path)


async def squeezed(rig: Rig) -> None:
    """Reclaim only the first segment, as if only it were below the older snapshot."""
    runner = rig.runner()
    for _ in range(2):
        await rig.hl.enqueue("jobs", b"mark", priority=-1)
        await rig.hl.ack(await rig.hl.pop("jobs"))
        await rig.hl.snapshot("jobs")
    survey = await runner.maintenance.reclaimer._survey()
    assert await runner.maintenance.reclaimer._give_back(survey, 0)


async def reported_ranges(rig: Rig) -> dict[int, tuple[int, int]]:
    """Return the starts and ends according to broker, index and directory."""
    reported = await rig.hl.offsets("jobs")
    runner = rig.hl.topics.runner("jobs")
    index = index_after(runner, 0, await bounds(runner), None)
    assert dict(enumerate(zip(index.starts, index.ends, strict=True))) == reported
    log = source_of(rig).open(source_of(rig).topics()[0])
    log.refresh()
    assert {p: (log.starts()[p], end) for p, end in log.ends().items()} == reported
    return reported


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("view", ["messages", "events"])
async def test_log_start_is_above_commits_with_missing_records(view: str, streams: bool) -> None:
    async with opened(topic={"streams": streams}) as rig:
        at = await far_apart(rig)
        whole = rows(rig, view=view)
        await squeezed(rig)
        assert first_segment(rig) == 2
        start, _ = (await reported_ranges(rig))[0]
        assert start == at + 3  # and not where the second segment begins, some rows before the commit
        now = rows(rig, view=view)
        kept = [row for row in whole if row["offset"] >= start]
        assert now[: len(kept)] == kept
        assert from_start(rig, start, view=view) == now
        with pytest.raises(DataLost, match=f"rows {at} to {start - 1}"):
            from_start(rig, at, view=view)
        await rig.reopen()
        assert (await reported_ranges(rig))[0][0] == start
        assert from_start(rig, start, view=view) == now
        await fill(rig, b"more", 45)
        await reclaim(rig)
        await reclaim(rig)  # what still waited was moved on
        assert (await reported_ranges(rig))[0][0] > start


async def test_log_start_is_durable_before_its_segment_is_deleted() -> None:
    async with opened() as rig:
        at = await far_apart(rig)
        rig.disk.inject("unlink", path="0001.seg")
        with pytest.raises(OSError, match="injected"):
            await squeezed(rig)
        # Killed here: the reported start is too late, never too early.
        assert (await reported_ranges(rig))[0][0] == at + 3
        other = Rig(rig.disk.crash())
        await other.open()
        assert (await reported_ranges(other))[0][0] == at + 3
        assert first_segment(other) == 1
        await other.hl.close()


async def test_topic_can_grow_while_its_first_segment_is_deleted() -> None:
    async with opened() as rig:
        at = await far_apart(rig)
        runner = rig.runner()
        for _ in range(2):
            await rig.hl.enqueue("jobs", b"mark", priority=-1)
            await rig.hl.ack(await rig.hl.pop("jobs"))
            await rig.hl.snapshot("jobs")
        survey = await runner.maintenance.reclaimer._survey()
        await rig.hl.update_topic("jobs", partitions=4)
        write_lease(rig.disk, runner.loader.directory, ReaderLease("late", 1, 99, 1 << 60))
        assert await runner.maintenance.reclaimer._give_back(survey, 0)
        assert (first_segment(rig), (await reported_ranges(rig))[0][0]) == (2, at + 3)
        assert (await rig.hl.stats("jobs")).log.reloads_total == 0


async def test_reader_holds_the_records_of_its_rows() -> None:
    async with opened() as rig:
        at = await far_apart(rig)
        asked: dict[str, str] = {"startingOffsets": json.dumps({"jobs": {"0": at}})}
        work, options = planned(rig, **asked)
        (lease,) = rig.files(".lease")
        body = rig.disk.read_file(lease)
        assert json.loads(body)["segment"] == work[0].start.segment > 1
        before = read_work(rig, work, options)
        assert before.num_rows == 4
        rig.disk.write_file_atomic(lease, body)
        await reclaim(rig)
        assert first_segment(rig) == 1  # the lease is on a later segment, whose rows have their records here
        assert (await reported_ranges(rig))[0][0] == 0
        assert read_work(rig, work, options).equals(before)
        release(rig)
        await reclaim(rig)
        assert first_segment(rig) > 1


async def test_reader_lease_taken_while_the_start_is_raised_holds() -> None:
    async with opened() as rig:
        at = await far_apart(rig)
        write = rig.disk.write_file_atomic

        def taken_meanwhile(path: str, data: Any) -> None:
            if path.endswith(log_start_path("")):  # a reader that checked just before
                planned(rig, startingOffsets=json.dumps({"jobs": {"0": at}}))
            write(path, data)

        rig.disk.write_file_atomic = taken_meanwhile  # type: ignore[method-assign]
        await reclaim(rig)
        assert first_segment(rig) == 1
        assert (await reported_ranges(rig))[0][0] == at + 3


@pytest.mark.parametrize("delay", [None, 100_000.0])
async def test_retention_and_groups_keep_records_of_kept_commits(delay: float | None) -> None:
    async with opened(topic={"retention": 3600.0}) as rig:
        await prepare(rig, 200, delay)
        await fill(rig, b"between", 45)
        rig.clock.advance(3000)
        at = await commit(rig)
        await fill(rig, b"after")
        ids = [row["id"] for row in from_start(rig, at) if row["batch_id"]]
        assert len(ids) == 3
        for id in ids:
            await rig.hl.cancel("jobs", id)
        rig.clock.advance(1000)  # the first segment is old by now, the commit's is not
        await reclaim(rig)
        assert [row["id"] for row in from_start(rig, at) if row["batch_id"]] == ids
        rig.clock.advance(3000)
        await reclaim(rig)
        assert first_segment(rig) > 1


async def test_records_moved_before_their_commit_are_found() -> None:
    async with opened() as rig:
        await prepare(rig)
        await churn(rig, 40)
        await reclaim(rig)  # moves them
        await reclaim(rig)
        assert (first := first_segment(rig)) > 1
        await fill(rig, b"between", 45)
        at = await commit(rig)
        await rig.hl.ack(await rig.hl.pop("jobs", 3))
        await fill(rig, b"after", 5)
        whole = from_start(rig, at)
        assert [row["value"] for row in whole[:3]] == [b"prepared %d" % i for i in range(3)]
        while (start := (await reported_ranges(rig))[0][0]) <= at:
            assert from_start(rig, at)[: len(whole)] == whole
            await squeezed(rig)
        assert first_segment(rig) <= first + 2
        kept = [row for row in whole if row["offset"] >= start]
        assert start == at + 3
        assert from_start(rig, start)[: len(kept)] == kept


async def test_corrupt_log_start_is_ignored_and_backups_include_it() -> None:
    from heapline.journal.backup import copy_topic

    async with opened() as rig:
        await far_apart(rig)
        await squeezed(rig)
        folder = rig.runner().loader.directory
        reported = read_log_start(rig.disk, folder)
        assert reported[0] > 0
        copy_topic(rig.disk, folder, "/copy", rig.clock.wall_ms)
        assert read_log_start(rig.disk, "/copy") == reported
        rig.disk.damage(log_start_path(folder), 0)
        assert read_log_start(rig.disk, folder) == []


@pytest.mark.parametrize("name", ["startingTimestamp", "startingOffsetsByTimestamp"])
async def test_starting_time_before_the_log_start_resolves_to_the_log_start(name: str) -> None:
    async with opened() as rig:
        await far_apart(rig)
        await squeezed(rig)
        earliest = rows(rig)
        start = "1" if name == "startingTimestamp" else '{"jobs": {"0": 1}}'
        assert rows(rig, **{name: start}) == earliest


class Life:
    """Does anything with a topic, and remembers every row that was ever shown."""

    def __init__(self, rig: Rig, random: Random) -> None:
        self.rig, self.random = rig, random
        self.open: list[str] = []
        self.known: dict[tuple[int, int], dict[str, Any]] = {}
        self.starts = {0: 0, 1: 0}
        self.batches = 0

    async def step(self) -> None:
        await self.random.choice([self.prepare, self.prepare, self.commit, self.enqueue, self.work, self.keep])()

    async def prepare(self) -> None:
        self.batches += 1
        name = f"b{self.batches}"
        size = self.random.choice([10, 60_000])
        delay = self.random.choice([None, None, 3600.0])
        out = [Outgoing(b"%d" % i * size, i, key=f"k{i}", delay=delay) for i in range(self.random.randrange(1, 4))]
        await self.rig.hl.prepare_batch(name, "p", out, topic="jobs")
        self.open.append(name)

    async def commit(self) -> None:
        if self.open:
            name = self.open.pop(self.random.randrange(len(self.open)))
            if self.random.random() < 0.8:
                await self.rig.hl.commit_batch(name, ["p"])
            else:
                await self.rig.hl.abort_batch(name)

    async def enqueue(self) -> None:
        for i in range(self.random.randrange(20)):
            await self.rig.hl.enqueue("jobs", BULK, key=f"k{i}")

    async def work(self) -> None:
        await self.rig.hl.ack(await self.rig.hl.pop("jobs", self.random.randrange(1, 60), max_bytes=1 << 30))

    async def keep(self) -> None:
        await reclaim(self.rig)
        if self.random.random() < 0.3:
            await self.rig.reopen()

    async def check(self) -> None:
        reported = await reported_ranges(self.rig)
        now = {(row["partition"], row["offset"]): row for row in rows(self.rig)}
        for partition, (start, _) in reported.items():
            assert start >= self.starts[partition]
            self.starts[partition] = start
        self.known = {place: row for place, row in self.known.items() if place[1] >= self.starts[place[0]]}
        assert {place: now.get(place) for place in self.known} == self.known
        self.known = now


@pytest.mark.parametrize("seed", [1, 2])
async def test_row_is_stable_while_above_the_log_start(seed: int) -> None:
    async with opened(topic={"partitions": 2, "streams": seed % 2 == 0}) as rig:
        life = Life(rig, Random(seed))
        for _ in range(40):
            await life.step()
            await life.check()
        assert rig.runner().maintenance.segments_reclaimed_total or life.starts != {0: 0, 1: 0}
