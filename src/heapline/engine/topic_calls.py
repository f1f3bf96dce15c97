"""Handlers of the calls on a topic as a whole: its settings, statistics, pausing, purging and snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator, Sequence

import numpy as np

from heapline.contract import inspection, topics
from heapline.contract.call import Context, Count, Page, page_of, read_page
from heapline.contract.check import fail, instant_to_ms
from heapline.contract.errors import CorruptionError, TopicNotFound, TopicReloading
from heapline.contract.inspection import DueHistogram, DueSpan, TopicSeries
from heapline.contract.message import (
    DepthBucket,
    DueBucket,
    LatencyHistogram,
    LogStats,
    PartitionStats,
    SpineStats,
    TopicAudit,
    TopicInfo,
    TopicStats,
    from_ms,
)
from heapline.core.depth_histogram import DUE_WITHIN, PRIORITY_HIGHS, PRIORITY_LOWS, herds
from heapline.core.events import Cancelled, Paused, Purged, Resumed, Throttled
from heapline.core.ids import unix_ms_of
from heapline.core.latency import BOUNDS_MS
from heapline.core.now import Now
from heapline.core.series import DAY, FIELDS, STEP, Series
from heapline.engine.counters import Counters
from heapline.engine.handlers import handles
from heapline.engine.metrics_source import disk_bytes
from heapline.engine.runner import TopicRunner
from heapline.engine.topic import Topic
from heapline.engine.topics import TopicKeeper

_DURABILITY = {
    "commit": "every answer is durable",
    "interval": "answers of the last fsync interval may be lost in a power failure",
    "os": "answers may be lost in a power failure, back to when the operating system last wrote",
}

USAGES = 100  # topics whose journals are measured together
Usage = tuple[int, int]  # bytes and segments of a journal
PURGE_ROWS = 20_000  # of a turn that removes a part of the waiting messages


@handles(topics.CreateTopic)
def create_topic(broker: TopicKeeper, command: topics.CreateTopic, context: Context) -> Awaitable[TopicInfo]:
    return broker.make_topic(command.topic, topics.given(command.config))


@handles(topics.UpdateTopic)
def update_topic(broker: TopicKeeper, command: topics.UpdateTopic, context: Context) -> Awaitable[TopicInfo]:
    return broker.change_topic(command.topic, topics.given(command.config))


@handles(topics.DeleteTopic)
def delete_topic(broker: TopicKeeper, command: topics.DeleteTopic, context: Context) -> Awaitable[None]:
    return broker.remove_topic(command.topic)


@handles(topics.ListTopics)
async def list_topics(broker: TopicKeeper, command: topics.ListTopics, context: Context) -> Page[TopicInfo]:
    return page_of(broker.topic_infos(), command.cursor, command.limit)


@handles(topics.GetTopic)
async def get_topic(broker: TopicKeeper, command: topics.GetTopic, context: Context) -> TopicInfo:
    return broker.topic_info(command.topic)


@handles(topics.Stats)
async def stats(broker: TopicKeeper, command: topics.Stats, context: Context) -> TopicStats:
    runner = broker.runner(command.topic)
    free, (usage,) = await runner.io.run(_usages, broker.path, [runner])
    return await _stats_of(runner, usage, free)


async def _stats_of(runner: TopicRunner, usage: Usage | FileNotFoundError, free: int | None) -> TopicStats:
    if isinstance(usage, FileNotFoundError):
        runner.check()  # the topic was deleted meanwhile
        raise usage
    return await runner.call(lambda now: topic_stats(runner, usage, free, now))


def _usages(path: str, runners: Sequence[TopicRunner]) -> tuple[int | None, list[Usage | FileNotFoundError]]:
    """Return the free bytes of the disk, and the bytes and segments of each topic's journal. Blocks on the disk."""
    space = disk_bytes(path)
    found: list[Usage | FileNotFoundError] = []
    for runner in runners:
        try:
            found.append(runner.loaded.journal.usage())
        except FileNotFoundError as error:
            found.append(error)
    return None if space is None else space[0], found


@handles(topics.ListStats)
async def list_stats(broker: TopicKeeper, command: topics.ListStats, context: Context) -> Page[TopicStats]:
    names = [info.name for info in broker.topic_infos()]
    known: dict[str, tuple[TopicRunner, Usage | FileNotFoundError, int | None]] = {}

    async def read(topic: str) -> TopicStats | None:
        # Deleted meanwhile, or not served now: the caller may not even know of this topic.
        with contextlib.suppress(TopicNotFound, TopicReloading, CorruptionError):
            runner = broker.runner(topic)
            if topic not in known:  # those of many topics at once: a thread costs more than what it reads
                first = names.index(topic)
                runners = [runner, *_served(broker, names[first + 1 : first + USAGES])]
                free, usages = await runner.io.run(_usages, broker.path, runners)
                known.update((each.name, (each, usage, free)) for each, usage in zip(runners, usages, strict=True))
            return await _stats_of(*known[topic])
        return None

    return await read_page(names, command.cursor, command.limit, read)


def _served(broker: TopicKeeper, names: Sequence[str]) -> Iterator[TopicRunner]:
    for name in names:
        with contextlib.suppress(TopicNotFound, TopicReloading, CorruptionError):
            yield broker.runner(name)


@handles(topics.Purge)
async def purge(broker: TopicKeeper, command: topics.Purge, context: Context) -> Count:
    runner = broker.runner(command.topic)
    before = None if command.enqueued_before is None else instant_to_ms(command.enqueued_before)

    def decide(now: Now) -> tuple[int, bool]:
        count = 0
        for partition in runner.loaded.topic.partitions:
            event = partition.decide_purge(now, before, PURGE_ROWS)
            if event is not None:
                count += event.count if isinstance(event, Purged) else len(event.ids)
                runner.loaded.emit(partition, event, now)
                if isinstance(event, Cancelled):
                    return count, True  # there may be more
        return count, False

    count, has_more = 0, True
    while has_more:
        removed, has_more = await runner.call(decide)
        count += removed
    return Count(count)


@handles(topics.CountPurge)
async def count_purge(broker: TopicKeeper, command: topics.CountPurge, context: Context) -> topics.WaitingCount:
    runner = broker.runner(command.topic)

    def count(now: Now) -> topics.WaitingCount:
        found = sum(partition.count_waiting(now.steady) for partition in runner.loaded.topic.partitions)
        return topics.WaitingCount(found, from_ms(now.steady))

    return await runner.call(count)


@handles(topics.PauseTopic)
def pause_topic(broker: TopicKeeper, command: topics.PauseTopic, context: Context) -> Awaitable[None]:
    runner = broker.runner(command.topic)
    until = None if command.until is None else instant_to_ms(command.until)
    return runner.call(lambda now: runner.loaded.emit(runner.loaded.topic.partitions[0], Paused(until), now))


@handles(topics.ResumeTopic)
def resume_topic(broker: TopicKeeper, command: topics.ResumeTopic, context: Context) -> Awaitable[None]:
    runner = broker.runner(command.topic)

    def decide(now: Now) -> None:
        if runner.loaded.topic.paused:
            runner.loaded.emit(runner.loaded.topic.partitions[0], Resumed(), now)

    return runner.call(decide)


@handles(topics.SetPartitionThrottled)
def set_partition_throttled(
    broker: TopicKeeper, command: topics.SetPartitionThrottled, context: Context
) -> Awaitable[None]:
    runner = broker.runner(command.topic)

    def decide(now: Now) -> None:
        count = len(runner.loaded.topic.partitions)
        if command.partition >= count:
            fail("partition", f"an integer from 0 to {count - 1}", command.partition)
        chosen = runner.loaded.topic.partitions[command.partition]
        wanted = (command.reason or "") if command.throttled else None
        if chosen.state.throttled != wanted:
            runner.loaded.emit(chosen, Throttled(command.throttled, wanted or ""), now)

    return runner.call(decide)


@handles(topics.Snapshot)
def snapshot(broker: TopicKeeper, command: topics.Snapshot, context: Context) -> Awaitable[None]:
    return broker.runner(command.topic).maintenance.snapshot()


@handles(topics.RecordAudit)
async def record_audit(broker: TopicKeeper, command: topics.RecordAudit, context: Context) -> None:
    now = from_ms(broker.clock.wall_ms())
    found = TopicAudit(
        until=min(command.until, now),
        recorded_at=now,
        messages=command.messages,
        lost=command.lost,
        doubled=command.doubled,
        early=command.early,
        refuted=command.refuted,
        topics=command.topics,
    )
    await broker.record_audit(command.topic, found)


@handles(inspection.StatsSeries)
async def stats_series(broker: TopicKeeper, command: inspection.StatsSeries, context: Context) -> TopicSeries:
    runner = None if command.topic is None else broker.runner(command.topic)
    series = broker.series.of(runner) or Series()
    since = broker.clock.wall_ms() // 1000 - DAY
    if command.since is not None:
        since = max(since, instant_to_ms(command.since) // 1000)
    points, steps = series.points(since)
    columns = dict(zip(FIELDS, points.T.tolist(), strict=True))
    return TopicSeries(
        topic="" if runner is None else runner.name,
        interval=STEP if broker.series.is_open else 0,
        times=columns.pop("time"),
        seconds=steps,
        **columns,
    )


# -- statistics -------------------------------------------------------------------------------------------------------


def topic_stats(runner: TopicRunner, usage: Usage, free: int | None, now: Now) -> TopicStats:
    topic, counters, heads = runner.loaded.topic, runner.counters, runner.loaded.delivery.heads
    manifest, blobs = runner.loaded.journal.snapshots.newest_bytes()
    heads.refresh(now.steady)
    partitions = [
        PartitionStats(
            partition=p.number,
            ready=p.entries.ready,
            delayed=p.entries.delayed,
            leased=len(p.entries.leases),
            dead=len(p.entries.dead),
            offset=p.state.offset,
            throttled=p.state.throttled,
            leased_total=heads.taken[p.number],
            updates_total=heads.updates[p.number],
            prepared=p.entries.prepared.count,
            oldest_ready_age=_age(p.census.oldest_ready(), now),
            blocked=p.entries.blocked if p.entries.parked.rows else 0,
            lease_ends_in=_left(p.entries.leases.next_deadline(), now),
        )
        for p in topic.partitions
    ]
    return TopicStats(
        topic=runner.name,
        ready=sum(p.ready for p in partitions),
        delayed=sum(p.delayed for p in partitions),
        leased=sum(p.leased for p in partitions),
        dead=sum(p.dead for p in partitions),
        paused=topic.paused,
        durability=_DURABILITY[topic.config.fsync],
        partitions=partitions,
        enqueued_total=counters.enqueued,
        duplicates_total=counters.duplicates,
        leased_total=counters.leased,
        acked_total=counters.acked,
        nacked_total=counters.nacked,
        lease_timeouts_total=counters.timeouts,
        dead_total=counters.dead,
        expired_total=counters.expired,
        dead_expired_total=counters.dead_expired,
        spine=_spine(runner),
        log=LogStats(
            commits_total=counters.commits,
            journal_bytes=usage[0],
            journal_segments=usage[1],
            journal_bytes_written_total=counters.bytes_written,
            memory_bytes=sum(p.state.nbytes for p in topic.partitions) + topic.live.nbytes,
            clock_jumps_total=runner.steady.jumps,
            reloads_total=counters.reloads,
            corrupt_records_total=counters.corrupt,
            snapshot_bytes=manifest + sum(blob.length for blob in blobs),
            snapshot_age=max(0, now.steady - runner.maintenance.snapshot_at) / 1000,
            disk_free_bytes=free,
            audit=runner.audit,
        ),
        oldest_ready_age=max((p.oldest_ready_age for p in partitions if p.oldest_ready_age is not None), default=None),
        depth_by_priority=_depths(topic, now),
        due_histogram=_dues(topic, now),
        lease_ends_in=min((p.lease_ends_in for p in partitions if p.lease_ends_in is not None), default=None),
        latencies=_latencies(counters),
    )


def _spine(runner: TopicRunner) -> SpineStats:
    heads, config = runner.loaded.delivery.heads, runner.loaded.topic.config
    return SpineStats(
        strategy=config.strategy,
        k=config.k,
        bound=1 if config.strategy == "best_first" else None,
        partitions=len(runner.loaded.topic.partitions),
        available=sum(p.state.throttled is None for p in runner.loaded.topic.partitions),
        candidates=heads.candidates,
        updates_total=sum(heads.updates),
        selections_total=heads.selections,
        refusals_total=heads.refusals,
    )


def _age(id: int | None, now: Now) -> float | None:
    return None if id is None else max(0, now.steady - unix_ms_of(id)) / 1000


def _left(deadline: int | None, now: Now) -> float | None:
    return None if deadline is None else max(0, deadline - now.steady) / 1000


def _latencies(counters: Counters) -> dict[str, LatencyHistogram]:
    bounds = list(BOUNDS_MS)
    return {
        name: LatencyHistogram(bounds_ms=bounds, counts=list(tally.counts), sum_ms=round(tally.sum_ms, 3))
        for name, tally in counters.latencies().items()
    }


def _depths(topic: Topic, now: Now) -> list[DepthBucket]:
    ordering = topic.partitions[0].entries.ordering
    cuts = ordering.cuts(np.array(PRIORITY_LOWS[1:], dtype=np.int64), now.steady)
    descend = ordering.mode == "max"
    cuts = cuts[::-1] if descend else cuts
    counts = sum(
        (p.census.depths(cuts) for p in topic.partitions if p.entries.ready), np.zeros(len(cuts) + 1, np.int64)
    )
    by_priority = (counts[::-1] if descend else counts).tolist()
    buckets = zip(PRIORITY_LOWS, PRIORITY_HIGHS, by_priority, strict=True)
    return [DepthBucket(*bucket) for bucket in buckets if bucket[2]]


def _dues(topic: Topic, now: Now) -> list[DueBucket]:
    return [DueBucket(*bucket) for bucket in zip((*DUE_WITHIN, None), _due(topic, now, DUE_WITHIN), strict=True)]


def _due(topic: Topic, now: Now, spans: Sequence[int]) -> list[int]:
    """Return how many messages are due within each of these seconds from now, and how many later."""
    delayed = (p.census.dues(now, spans) for p in topic.partitions if p.entries.delayed)
    counts: list[int] = sum(delayed, np.zeros(len(spans) + 1, np.int64)).tolist()
    return counts


@handles(inspection.GetDueTimes)
async def get_due_times(broker: TopicKeeper, command: inspection.GetDueTimes, context: Context) -> DueHistogram:
    runner = broker.runner(command.topic)

    def decide(now: Now) -> DueHistogram:
        def spans(seconds: int, number: int) -> tuple[int, list[DueSpan], int]:
            overdue, *counts, later = _due(runner.loaded.topic, now, range(0, seconds * number + 1, seconds))
            starts = (from_ms(now.wall + i * seconds * 1000) for i in range(number))
            marks = zip(starts, counts, herds(counts), strict=True)
            return overdue, [DueSpan(at, seconds, count, is_herd) for at, count, is_herd in marks], later

        overdue, hour, _ = spans(60, 60)
        _, day, later = spans(1800, 48)
        return DueHistogram(topic=runner.name, overdue=overdue, hour=hour, day=day, later=later)

    return await runner.call(decide)
