"""Handlers of the log: a topic's recorded events by offset (events.py), in the form of the log broker's frames."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from heapline.contract import log
from heapline.contract.call import Context
from heapline.contract.check import fail
from heapline.contract.errors import BadRequest
from heapline.contract.message import LogEvent, LogFrame
from heapline.core.ids import unix_ms_of
from heapline.sql.events import DROPPED
from heapline.sql.handlers import feeds, handles
from heapline.sql.node import Node
from heapline.sql.shard import Shard, Topic
from heapline.sql.statements import statement

PAGE_ROWS, PAGE_EVENTS = 500, 20_000  # read at once
FRAME_EVENTS = 20_000
NEW = ("enqueued", "batch_committed")


@handles(log.GetOffsets)
async def get_offsets(node: Node, command: log.GetOffsets, context: Context) -> log.Offsets:
    home = node.home(command.topic)
    await home.flush()
    topic = _recorded(await home.shard.read_topic(home.name))
    await node.timekeepers[home.shard.index].events.catch_up()
    start, end = await _bounds(home.shard, topic)
    return log.Offsets([start], [end])


def _recorded(turn: Any) -> Topic:
    topic: Topic = turn.topic
    if not topic.config.retention:
        raise BadRequest(
            f"topic {topic.name!r} does not record events; set its retention, in seconds: update_topic("
            f"{topic.name!r}, retention=86400)"
        )
    return topic


async def _bounds(shard: Shard, topic: Topic) -> tuple[int, int]:
    async with shard.connection() as connection:
        row = await connection.fetchrow(statement("event_bounds"), topic.id)
    return (0, 0) if row is None else (row["start"], row["next"])


@feeds(log.ReadLog)
async def read_log(node: Node, feed: log.ReadLog, context: Context) -> AsyncIterator[LogFrame]:
    home = node.home(feed.topic)
    topic = _recorded(await home.shard.read_topic(home.name))
    if feed.partition:
        fail("partition", "0", feed.partition)
    if feed.end is None:
        await home.flush()
        await node.timekeepers[home.shard.index].events.catch_up()
    start, end = await _bounds(home.shard, topic)
    if feed.start and feed.start < start:
        raise _reclaimed(feed.start, start)
    at, end = max(feed.start, start), end if feed.end is None else min(end, feed.end)
    while at < end:
        async with home.shard.connection() as connection:
            rows = await connection.fetch(statement("read_events"), topic.id, at, end, PAGE_ROWS, PAGE_EVENTS)
        if not rows:
            raise _reclaimed(at, (await _bounds(home.shard, topic))[0])
        for row in rows:
            if row["first"] > at:
                raise _reclaimed(at, row["first"])
            ids = np.array(row["ids"], dtype=np.int64)
            for low in range(at - row["first"], len(ids), FRAME_EVENTS):
                yield _frame(topic, row, ids, low, min(low + FRAME_EVENTS, len(ids)))
            at = row["first"] + len(ids)


def _reclaimed(offset: int, start: int) -> BadRequest:
    return BadRequest(f"offset {offset} of partition 0 was reclaimed; the log starts at {start}")


def _frame(topic: Topic, row: Any, ids: Any, low: int, high: int) -> LogFrame:
    """Return events [low, high) of a row."""
    offset, kind = row["first"] + low, row["kind"]
    columns: dict[str, Any] = {}
    if kind in NEW:
        times = unix_ms_of(ids[low:high])
        columns = {"id": ids[low:high], "enqueued_at": times, "at": times}
    else:
        columns["ids"] = ids[low:high]
        if kind in (DROPPED, "dead_lettered"):
            columns["kept"], kind = kind != DROPPED, "dead_lettered"
        elif kind == "expired":
            columns["returned"] = True
    for name, column in _ARRAYS.items():
        if row[name] is not None:
            columns[column] = np.array(row[name][low:high], dtype=np.int64)
    for name, (column, read) in _SHARED.items():
        if row[name] is not None:
            columns[column] = read(row[name])
    event = LogEvent(kind=kind, offset=offset, row_count=high - low, columns=columns)
    return LogFrame(
        topic=topic.name,
        partition=0,
        unit=row["seq"],
        offset=offset,
        row_count=high - low,
        time_ms=row["at"],
        wall_ms=row["at"],
        events=[event],
        id_suffix=topic.id_suffix,
    )


#: Columns of the table, and their names in the log.
_ARRAYS = {
    "priorities": "priority", "dues": "due", "expires": "expires", "max_retries": "max_retries",
    "sizes": "payload_len", "attempts": "attempts",
}  # fmt: skip
_SHARED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "deadline": ("deadline", int),
    "holder": ("holder", bytes.decode),
    "reason": ("reason", str),
    "batch": ("batch_id", str),
}
