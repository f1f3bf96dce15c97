"""The counters of a topic, and its `stats`. Counters survive a reload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from heapline.contract.message import DepthBucket, DueBucket, LatencyHistogram, PartitionStats, SpineStats, TopicStats
from heapline.core.depth_histogram import DUE_WITHIN, PRIORITY_HIGHS, PRIORITY_LOWS
from heapline.core.events import Acked, AnyEvent, DeadLettered, Expired, GroupDead, GroupMembers, LeaseExpired, Nacked
from heapline.core.ids import unix_ms_of
from heapline.core.latency import BOUNDS_MS, Latency, Tally
from heapline.core.now import Now
from heapline.core.partition import LEASE_EXPIRED
from heapline.engine.topic import Topic

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner

_DURABILITY = {
    "commit": "every answer is durable",
    "interval": "answers of the last fsync interval may be lost in a power failure",
    "os": "answers may be lost in a power failure, back to when the operating system last wrote",
}


class Counters:
    """Totals since the topic was opened."""

    def __init__(self) -> None:
        self.acked = self.nacked = self.timeouts = self.dead = self.expired = 0
        self.reloads = self.corrupt = 0
        self.timeouts_last = 0  # leases that expired without retries left; `timeouts` are the others
        self.enqueue = Latency()  # calls, from request to answer
        self.pop = Latency()  # pops that got messages, without the time that they waited for one
        self.commit = Latency()  # units: from handing to the disk until known to be durable
        self.late = Latency()  # how late the engine handled planned timers
        self.fired = Latency()  # delayed messages, including retries: from due to fired
        self.rebalances = 0  # times that partitions were reassigned to the members of a group
        self.group_dead = 0  # rows that became dead letters of groups
        self.commits = self.bytes_written = self.enqueued = self.duplicates = self.leased = 0

    def latencies(self) -> dict[str, Tally]:
        return {name: getattr(self, name).tally() for name in ("enqueue", "pop", "commit", "late", "fired")}

    def count(self, event: AnyEvent) -> None:
        if isinstance(event, Acked):
            self.acked += len(event.ids)
        elif isinstance(event, Nacked):
            self.nacked += len(event.ids)
        elif isinstance(event, LeaseExpired):
            self.timeouts += len(event.ids)
        elif isinstance(event, DeadLettered):
            self.dead += len(event.ids)
            if event.reason == LEASE_EXPIRED:
                self.timeouts_last += len(event.ids)
        elif isinstance(event, Expired):
            self.expired += len(event.ids)
        elif isinstance(event, GroupMembers):
            self.rebalances += 1
        elif isinstance(event, GroupDead):
            self.group_dead += len(event.ids)


def topic_stats(runner: TopicRunner, usage: tuple[int, int], now: Now) -> TopicStats:
    topic, counters, heads = runner.loaded.topic, runner.counters, runner.loaded.delivery.heads
    heads.refresh(now.steady)
    partitions = [
        PartitionStats(
            partition=p.number,
            ready=p.ready,
            delayed=p.delayed,
            leased=len(p.leases),
            dead=len(p.dead),
            offset=p.offset,
            throttled=p.throttled,
            leased_total=heads.taken[p.number],
            updates_total=heads.updates[p.number],
            prepared=p.prepared.count,
            oldest_ready_age=_age(p.census.oldest_ready(), now),
            blocked=p.blocked if p.parked.rows else 0,
            lease_ends_in=_left(p.leases.next_deadline(), now),
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
        commits_total=counters.commits,
        journal_bytes=usage[0],
        journal_segments=usage[1],
        journal_bytes_written_total=counters.bytes_written,
        memory_bytes=sum(p.nbytes for p in topic.partitions) + topic.live.nbytes,
        clock_jumps_total=runner.steady.jumps,
        reloads_total=counters.reloads,
        corrupt_records_total=counters.corrupt,
        spine=_spine(runner),
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
        available=sum(p.throttled is None for p in runner.loaded.topic.partitions),
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
    ordering = topic.partitions[0].ordering
    cuts = ordering.cuts(np.array(PRIORITY_LOWS[1:], dtype=np.int64), now.steady)
    descend = ordering.mode == "max"
    cuts = cuts[::-1] if descend else cuts
    counts = sum((p.census.depths(cuts) for p in topic.partitions if p.ready), np.zeros(len(cuts) + 1, np.int64))
    by_priority = (counts[::-1] if descend else counts).tolist()
    buckets = zip(PRIORITY_LOWS, PRIORITY_HIGHS, by_priority, strict=True)
    return [DepthBucket(*bucket) for bucket in buckets if bucket[2]]


def _dues(topic: Topic, now: Now) -> list[DueBucket]:
    counts = sum((p.census.dues(now) for p in topic.partitions if p.delayed), np.zeros(len(DUE_WITHIN) + 1, np.int64))
    return [DueBucket(*bucket) for bucket in zip((*DUE_WITHIN, None), counts.tolist(), strict=True)]
