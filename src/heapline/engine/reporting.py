"""What a topic tells about itself: `stats`."""

from __future__ import annotations

from heapline.engine.runner import TopicRunner
from heapline.model import PartitionStats, TopicStats

_DURABILITY = {
    "commit": "every answer is durable",
    "interval": "answers of the last fsync interval may be lost in a power failure",
    "os": "answers may be lost in a power failure, back to when the operating system last wrote",
}


def topic_stats(runner: TopicRunner, usage: tuple[int, int]) -> TopicStats:
    topic, counters = runner.topic, runner.counters
    partitions = [
        PartitionStats(
            partition=p.number, ready=p.ready, delayed=p.delayed, leased=len(p.leases), dead=len(p.dead),
            offset=p.offset, blocked=p.blocked if p.parked.rows else 0,
        )
        for p in topic.partitions
    ]  # fmt: skip
    return TopicStats(
        topic=runner.name,
        ready=sum(p.ready for p in partitions),
        delayed=sum(p.delayed for p in partitions),
        leased=sum(p.leased for p in partitions),
        dead=sum(p.dead for p in partitions),
        paused=topic.paused,
        durability=_DURABILITY[topic.config.fsync],
        partitions=partitions,
        enqueued_total=counters.enqueued + runner.admission.enqueued,
        duplicates_total=counters.duplicates + runner.admission.duplicates,
        leased_total=counters.leased + runner.delivery.leased,
        acked_total=counters.acked,
        nacked_total=counters.nacked,
        lease_timeouts_total=counters.timeouts,
        dead_total=counters.dead,
        expired_total=counters.expired,
        commits_total=counters.commits + runner.committer.commits,
        journal_bytes=usage[0],
        journal_segments=usage[1],
        journal_bytes_written_total=counters.bytes_written + runner.committer.bytes_written,
        memory_bytes=sum(p.nbytes for p in topic.partitions) + topic.live.nbytes,
        clock_jumps_total=runner.steady.jumps,
        reloads_total=counters.reloads,
        corrupt_records_total=counters.corrupt,
    )
