"""The statistics of a topic.

Counts are exact and are not counted here (migrations/0005_counts.sql). How a topic's messages divide into priorities
and due times is read from at most SAMPLE_ROWS of them: exact if there are no more, otherwise an estimate whose sum is
right. The oldest message and the first lease are searched among as many of the shard.
"""

from __future__ import annotations

import contextlib
from typing import Any

import asyncpg
import numpy as np

from heapline.contract import topics
from heapline.contract.call import Context, Page, read_page
from heapline.contract.config import TopicConfig
from heapline.contract.errors import TopicNotFound
from heapline.contract.message import (
    DepthBucket,
    DueBucket,
    LatencyHistogram,
    PartitionStats,
    SpineStats,
    TopicStats,
)
from heapline.core.depth_histogram import DUE_WITHIN, PRIORITY_HIGHS, PRIORITY_LOWS, scaled
from heapline.core.ids import unix_ms_of
from heapline.core.latency import BOUNDS_MS, Latency
from heapline.core.order import Ordering
from heapline.sql.buffer import is_buffered
from heapline.sql.handlers import handles
from heapline.sql.home import Home
from heapline.sql.node import Node
from heapline.sql.ready_queue import depth_of
from heapline.sql.rings import slot_sizes
from heapline.sql.shard import Turn
from heapline.sql.statements import statement
from heapline.sql.topics import list_infos

SAMPLE_ROWS = 10_000
SAMPLE_BYTES = SAMPLE_ROWS * 400


@handles(topics.Stats)
async def stats(node: Node, command: topics.Stats, context: Context) -> TopicStats:
    home = node.home(command.topic)
    await home.flush(required=False)
    turn = await home.shard.read_topic(home.name)
    cuts, bounds = _cuts(turn.topic.ordering, turn.now), [turn.now + within * 1000 for within in DUE_WITHIN]
    async with home.shard.connection() as connection:
        row: dict[str, Any] = dict(await connection.fetchrow(statement("topic_counts"), turn.topic.id))
        depths = await _divide(
            connection, "ready", ("depth_by_key", "sample_by_key"), turn.topic.id, cuts, row["ready"]
        )
        dues = await _divide(
            connection, "delayed", ("depth_by_wake", "sample_by_wake"), turn.topic.id, bounds, row["delayed"]
        )
        if row["ready"]:
            row["oldest"] = await connection.fetchval(statement("oldest_ready"), turn.topic.id, SAMPLE_ROWS)
        if row["leased"]:
            row["ends"] = await connection.fetchval(statement("first_lease_end"), turn.topic.id, SAMPLE_ROWS)
        row["has_buffers"] = home.buffer is not None or await connection.fetchval(statement("has_flushed"))
        row["prepared"] = await connection.fetchval(statement("count_prepared"), turn.topic.id)
    row["durability"] = await home.durability(turn.topic.config)
    return _stats(home, turn, row, depths, dues)


@handles(topics.ListStats)
async def list_stats(node: Node, command: topics.ListStats, context: Context) -> Page[TopicStats]:
    async def read(topic: str) -> TopicStats | None:
        with contextlib.suppress(TopicNotFound):  # deleted meanwhile
            return await stats(node, topics.Stats(topic), context)
        return None

    return await read_page([info.name for info in await list_infos(node)], command.cursor, command.limit, read)


async def _divide(
    connection: asyncpg.Connection, ring: str, blocks: tuple[str, str], topic: int, bounds: list[int], total: int
) -> list[int]:
    """Return how the ready or delayed messages of a topic, `total` of them, divide at the bounds."""
    rows: Any = ()
    if total > SAMPLE_ROWS:
        size = sum(await slot_sizes(connection, ring))
        percent = min(100.0, 100 * SAMPLE_BYTES / size)
        rows = await connection.fetch(statement(blocks[1]), topic, bounds, percent)
    if total and not rows:
        rows = await connection.fetch(statement(blocks[0]), topic, bounds, SAMPLE_ROWS)
    counts: list[int] = scaled(_filled(rows, len(bounds) + 1), total).tolist()
    return counts


def _cuts(ordering: Ordering, now: int) -> list[int]:
    """Return the keys between the buckets of priorities, ascending."""
    cuts: list[int] = ordering.cuts(np.array(PRIORITY_LOWS[1:], dtype=np.int64), now).tolist()
    return cuts[::-1] if ordering.mode == "max" else cuts


def _filled(rows: Any, length: int) -> list[int]:
    counts = [0] * length
    for row in rows:
        counts[row["bucket"]] = row["count"]
    return counts


def _stats(home: Home, turn: Turn, row: dict[str, Any], depths: list[int], dues: list[int]) -> TopicStats:
    counters, shard, topic = home.counters, home.shard, turn.topic
    age = None if row.get("oldest") is None else max(0, turn.now - unix_ms_of(row["oldest"])) / 1000
    ends_in = None if row.get("ends") is None else max(0, row["ends"] - turn.now) / 1000
    counts = {name: row[name] for name in ("ready", "delayed", "leased", "dead")}
    whole = PartitionStats(
        partition=0,
        **counts,
        offset=0,
        leased_total=counters.leased,
        oldest_ready_age=age,
        lease_ends_in=ends_in,
        prepared=row["prepared"],
    )
    by_priority = depths[::-1] if topic.ordering.mode == "max" else depths
    buckets = zip(PRIORITY_LOWS, PRIORITY_HIGHS, by_priority, strict=True)
    return TopicStats(
        topic=topic.name,
        **counts,
        paused=topic.is_paused,
        durability=row["durability"],
        partitions=[whole],
        enqueued_total=counters.enqueued,
        duplicates_total=counters.duplicates,
        leased_total=counters.leased,
        acked_total=counters.acked,
        nacked_total=counters.nacked,
        lease_timeouts_total=counters.timeouts,
        dead_total=counters.dead,
        expired_total=counters.expired,
        dead_expired_total=counters.dead_expired,
        spine=_spine(topic.config, row["has_buffers"], counts["ready"]),
        oldest_ready_age=age,
        depth_by_priority=[DepthBucket(*bucket) for bucket in buckets if bucket[2]],
        due_histogram=[DueBucket(*bucket) for bucket in zip((*DUE_WITHIN, None), dues, strict=True)],
        lease_ends_in=ends_in,
        latencies={
            "enqueue": _histogram(counters.enqueue),
            "pop": _histogram(counters.pop),
            "commit": _histogram(shard.commits),
        },
    )


def _spine(config: TopicConfig, has_buffers: bool, ready: int) -> SpineStats:
    """Return the statistics of the order. Without a bound if pops may miss messages that are in a log or in Redis."""
    is_unbounded = has_buffers and is_buffered(config)
    return SpineStats(
        strategy="best_first",
        k=config.k,
        bound=None if is_unbounded else depth_of(config) + 1,
        partitions=1,
        available=1,
        candidates=int(ready > 0),
        updates_total=0,
        selections_total=0,
        refusals_total=0,
    )


def _histogram(latency: Latency) -> LatencyHistogram:
    tally = latency.tally()
    return LatencyHistogram(bounds_ms=list(BOUNDS_MS), counts=list(tally.counts), sum_ms=round(tally.sum_ms, 3))
