"""Read a broker's metrics as plain numbers. Each topic is read in one event-loop step.

Unlike `stats` this waits for no commit and needs no turn: it is for monitoring, and must answer when the disk does not.
The server defines the metrics' public names. `TimedDisk` is a real disk that measures each fdatasync.
"""

from __future__ import annotations

import asyncio
import os
from threading import Lock
from time import perf_counter
from typing import NamedTuple

from heapline.core.groups.group import Group
from heapline.core.ids import unix_ms_of
from heapline.core.latency import Latency, Tally
from heapline.engine.runner import TopicRunner
from heapline.engine.schedules.scheduler import Scheduler
from heapline.engine.topics import TopicKeeper
from heapline.journal.disk import File, RealDisk, RealFile


class PartitionMeasures(NamedTuple):
    number: int
    ready: int
    delayed: int
    leased: int
    dead: int
    prepared: int
    throttled: bool
    oldest_ready_ms: int  # age of the oldest ready message, since its enqueue; 0 if there is none
    snapshot_bytes: int  # of the newest snapshot, this partition's own part


class GroupMeasures(NamedTuple):
    name: str
    lag: int
    members: int
    outstanding: int
    dead: int


class TopicMeasures(NamedTuple):
    name: str
    serving: bool
    paused: bool
    partitions: list[PartitionMeasures]
    totals: dict[str, int]  # since the process opened the topic
    latencies: dict[str, Tally]
    snapshot_bytes_shared: int  # of the newest snapshot, the part shared by partitions
    snapshot_age_ms: int | None  # of the newest, or since the topic was opened; None: just now
    journal_bytes: int
    journal_segments: int
    memory_bytes: int
    uncommitted_bytes: int
    groups: list[GroupMeasures] = []  # noqa: RUF012 - never modified


class ScheduleMeasures(NamedTuple):
    kept: int
    failing: int  # schedules whose last firing could not be enqueued
    fired: int  # since the process started, as the rest
    missed: int
    failed: int
    delay: Tally
    journal: TopicMeasures | None  # their journal, once it exists


class Measures(NamedTuple):
    topics: list[TopicMeasures]  # in the order in which they were opened or created
    system: TopicMeasures | None  # the journal of batch decisions
    refused: int  # topics that are not served because their files are corrupt
    schedules: ScheduleMeasures | None = None
    fsync: Tally | None = None  # all files of the directory, if its disk measures it
    disk_bytes: tuple[int, int] | None = None  # free for this user, and size, of the directory's file system


async def measure(broker: TopicKeeper) -> Measures:
    runners = broker._all_runners()
    usage = await broker._io_or_fail().run(lambda: [runner.loaded.journal.usage() for runner in runners])
    measured = {}
    for runner, used in zip(runners, usage, strict=True):
        measured[runner] = _of_topic(runner, *used)
        await asyncio.sleep(0)  # about 0.5 ms per topic: yield to other tasks
    decisions, keeps = broker.batches.decisions.topic.runner, broker.schedules.store.topic.runner
    system = measured.pop(decisions, None) if decisions is not None else None
    schedules = _of_schedules(broker.schedules, measured.pop(keeps, None) if keeps is not None else None)
    fsync = broker.disk.tally() if isinstance(broker.disk, TimedDisk) else None
    space = await broker._io_or_fail().run(lambda: disk_bytes(broker.path))
    return Measures(list(measured.values()), system, len(broker._refused), schedules, fsync, space)


def disk_bytes(path: str) -> tuple[int, int] | None:
    """Return the free bytes and the size of the file system. None: the disk is in memory."""
    try:
        space = os.statvfs(path)
    except FileNotFoundError:  # an in-memory disk
        return None
    return space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize


def _of_schedules(schedules: Scheduler, journal: TopicMeasures | None) -> ScheduleMeasures:
    s = schedules
    return ScheduleMeasures(len(s), s.failing, s.fired, s.missed, s.failed, s.delay.tally(), journal)


def _of_topic(runner: TopicRunner, journal_bytes: int, journal_segments: int) -> TopicMeasures:
    topic, now = runner.loaded.topic, runner.steady.now()
    manifest, blobs = runner.loaded.journal.snapshots.newest_bytes()
    by_partition = dict.fromkeys(range(len(topic.partitions)), 0)
    for blob in blobs:  # named <kind>-<partition>-…
        by_partition[int(blob.name.split("-")[1])] += blob.length
    partitions = []
    for p in topic.partitions:
        oldest = p.census.oldest_ready()
        age = 0 if oldest is None else max(0, now.steady - unix_ms_of(oldest))
        partitions.append(
            PartitionMeasures(
                p.number,
                p.entries.ready,
                p.entries.delayed,
                len(p.entries.leases),
                len(p.entries.dead),
                p.entries.prepared.count,
                p.state.throttled is not None,
                age,
                by_partition[p.number],
            )
        )
    age_ms = now.steady - runner.maintenance.snapshot_at if runner.maintenance.snapshot_at else None
    return TopicMeasures(
        runner.name,
        runner.is_serving,
        topic.paused,
        partitions,
        _totals(runner),
        runner.counters.latencies(),
        manifest,
        age_ms,
        journal_bytes,
        journal_segments,
        sum(p.state.nbytes for p in topic.partitions) + topic.live.nbytes,
        runner.loaded.committer.waiting_bytes if runner.is_serving else 0,
        [_of_group(runner, group) for group in topic.groups],
    )


def _of_group(runner: TopicRunner, group: Group) -> GroupMeasures:
    counts, places = runner.loaded.topic.counts, group.partitions
    return GroupMeasures(
        group.name,
        sum(place.lag(counts[number].total) for number, place in places.items()),
        len(group.members.leases),
        sum(place.outstanding for place in places.values()),
        sum(len(place.dead) for place in places.values()),
    )


def _totals(runner: TopicRunner) -> dict[str, int]:
    counters, maintenance = runner.counters, runner.maintenance
    return {
        "enqueued": counters.enqueued,
        "duplicates": counters.duplicates,
        "leased": counters.leased,
        "acked": counters.acked,
        "nacked": counters.nacked,
        "retries": counters.nacked + counters.timeouts,  # without those that became dead letters
        "timeouts": counters.timeouts + counters.timeouts_last,
        "dead": counters.dead,
        "expired": counters.expired,
        "dead_expired": counters.dead_expired,
        "commits": counters.commits,
        "bytes_written": counters.bytes_written,
        "reloads": counters.reloads,
        "corrupt": counters.corrupt,
        "clock_jumps": runner.steady.jumps,
        "snapshots": maintenance.snapshots_total,
        "segments_reclaimed": maintenance.segments_reclaimed_total,
        "records_moved": maintenance.records_moved_total,
        "redeliveries": runner.streams.redelivered,
        "rebalances": counters.rebalances,
        "moved_on": maintenance.reclaimer.groups_moved_on_total + runner.streams.moved_on,
        "group_timeouts": runner.streams.timeouts,
        "group_dead": counters.group_dead,
    }


class TimedDisk(RealDisk):
    def __init__(self) -> None:
        self._syncs, self._lock = Latency(), Lock()

    def open(self, path: str, *, write: bool = False) -> File:
        return self._timed(super().open(path, write=write))

    def create(self, path: str) -> File:
        return self._timed(super().create(path))

    def _timed(self, file: File) -> File:
        assert isinstance(file, RealFile)
        return _TimedFile(self, file)

    def synced(self, seconds: float) -> None:
        with self._lock:  # several threads sync
            self._syncs.add(seconds)

    def tally(self) -> Tally:
        with self._lock:
            return self._syncs.tally()


class _TimedFile(RealFile):
    def __init__(self, disk: TimedDisk, file: RealFile) -> None:
        super().__init__(file.path, file._fd)
        self._disk = disk

    def fdatasync(self) -> None:
        began = perf_counter()
        super().fdatasync()
        self._disk.synced(perf_counter() - began)
