"""Read a node's metrics as rows: name, labels, value. The names are those of the server's table.

Totals and latencies are those of this node. The numbers of stored messages are those of all nodes; they are read from
the databases at most once per DEPTH_SECONDS. A shard that is away or slow leaves out its topics.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import NamedTuple

from heapline.contract.errors import HeaplineError
from heapline.core.latency import Tally
from heapline.logs import Log
from heapline.sql.counters import Counters
from heapline.sql.node import Node
from heapline.sql.redis import RedisDown
from heapline.sql.shard import Name, Shard
from heapline.sql.statements import statement

log = Log("heapline.sql")
DEPTH_SECONDS = 15.0
WHOLE = "0"  # the one partition of a topic
_GAUGES = {"ready": "backlog", "delayed": "delayed", "dead": "dead_letters"}


class Row(NamedTuple):
    name: str
    labels: tuple[str, ...]
    value: int | float | Tally


class Depths:
    """The numbers of stored messages by topic, read now and then."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._rows: list[Row] = []
        self._read_at = -DEPTH_SECONDS

    async def read(self) -> list[Row]:
        if monotonic() - self._read_at >= DEPTH_SECONDS:
            self._read_at = monotonic()
            shares = await asyncio.gather(*(_depths(shard) for shard in self._node.shards))
            self._rows = [row for share in shares for row in share] + await self._prefetched()
        return self._rows

    async def _prefetched(self) -> list[Row]:
        """Return the depth of the ready queues that this node has used."""
        rows = []
        try:
            for topic, queue in list(self._node.ready_queues.items()):
                rows.append(Row("prefetched", (topic,), await queue.depth()))
        except RedisDown:
            return []
        return rows


async def _depths(shard: Shard) -> list[Row]:
    try:
        async with shard.connection() as connection:
            found = await connection.fetch(statement("depths"), timeout=DEPTH_SECONDS / 3)
            schedules = await connection.fetchrow(statement("count_schedules"))
    except HeaplineError as error:
        log.warning("depths not counted; will retry", shard=shard.index, error=str(error))
        return []
    rows = [
        Row("topics", (), len(found)),
        Row("schedules", (), schedules["kept"]),
        Row("schedules_failing", (), schedules["failing"]),
    ]
    for row in found:
        topic = Name(row["namespace"], row["name"]).canonical
        rows += [Row(name, (topic, WHOLE), row[column]) for column, name in _GAUGES.items()]
        rows.append(Row("inflight", (topic,), row["leased"]))
    return rows


def rows_of(node: Node, depths: list[Row]) -> list[Row]:
    rows = list(depths)
    for shard in node.shards:
        label = str(shard.index)
        used, idle = shard.connections
        rows += [
            Row("shard_up", (label,), int(shard.is_up)),
            Row("shard_connections", (label, "used"), used),
            Row("shard_connections", (label, "idle"), idle),
            Row("shard_commits_total", (label,), shard.commits_total),
            Row("shard_commit_latency_ms", (label,), shard.commits.tally()),
        ]
    for index, flusher in node.flushers():
        rows += [
            Row("buffered_units", (str(index),), flusher.depth),
            Row("flush_failures_total", (str(index),), flusher.failures_total),
            Row("flush_lag_ms", (str(index),), flusher.lag_ms),
            Row("slow_mode", (str(index),), int(flusher.is_slow)),
        ]
    if node.redis is not None:
        rows += [
            Row("redis_up", (), int(node.redis.is_up)),
            Row("redis_failures_total", (), node.redis.failures_total),
        ]
    firings = node.firings
    rows += [
        Row("schedule_fired_total", (), firings.fired),
        Row("schedule_missed_total", (), firings.missed),
        Row("schedule_failures_total", (), firings.failed),
        Row("schedule_delay_ms", (), firings.delay.tally()),
    ]
    for topic, counters in node.all_counters():
        rows += [Row(name, (topic,), value) for name, value in _totals(counters).items()]
    return rows


def _totals(counters: Counters) -> dict[str, int | Tally]:
    return {
        "enqueued_total": counters.enqueued,
        "duplicates_total": counters.duplicates,
        "leased_total": counters.leased,
        "prefetched_total": counters.prefetched,
        "acked_total": counters.acked,
        "nacked_total": counters.nacked,
        "lease_timeouts_total": counters.timeouts,
        "retries_total": counters.nacked + counters.timeouts,
        "dlq_total": counters.dead,
        "expired_total": counters.expired,
        "dead_letters_expired_total": counters.dead_expired,
        "enqueue_latency_ms": counters.enqueue.tally(),
        "pop_latency_ms": counters.pop.tally(),
    }
