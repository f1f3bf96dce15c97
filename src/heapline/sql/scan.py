"""Handlers of scans: all messages of a topic by ranges of ids, for readers of the whole state such as Spark.

A message keeps its id while it moves between tables, and one statement sees all of them at one time. So a message that
is in the queue throughout a scan is in exactly one answer, whatever happens to it meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import asyncpg

from heapline.contract import messages
from heapline.contract.call import Context
from heapline.sql.handlers import handles
from heapline.sql.info import info_of
from heapline.sql.layout import COLUMNS
from heapline.sql.node import Node
from heapline.sql.shard import Turn
from heapline.sql.statements import statement

PARTS_MAX = 1000
SAMPLE_ROWS = 10_000  # from which the bounds of ranges are estimated


class Blocks(NamedTuple):
    """The statements for messages of one kind."""

    scan: str
    first: str
    last: str
    sample: str


WAITING = Blocks("scan_waiting", "first_waiting", "last_waiting", "sample_waiting")
DEAD = Blocks("scan_dead", "first_dead", "last_dead", "sample_dead")


@handles(messages.ScanMessages)
async def scan_messages(node: Node, command: messages.ScanMessages, context: Context) -> messages.MessageScan:
    home = node.home(command.topic)
    await home.flush()
    columns = COLUMNS if command.payloads else COLUMNS.replace("payload", "NULL::bytea AS payload")
    scan = statement((DEAD if command.dead else WAITING).scan, columns=columns)
    first, end, limit = command.first_id, command.end_id, command.limit

    async def work(connection: asyncpg.Connection) -> tuple[Turn, list[Any], bool]:
        turn = await home.shard.enter(connection, home.name)
        await connection.execute(statement("scan_in_order"))
        rows = await connection.fetch(scan, turn.topic.id, first, end, limit, command.max_bytes)
        if len(rows) == limit:
            return turn, rows, False
        # Fewer rows than the limit end the range, or the answer is full.
        more = rows and await connection.fetch(scan, turn.topic.id, rows[-1]["id"] + 1, end, 1, 1)
        return turn, rows, not more

    turn, rows, is_last = await home.shard.run(work)
    items = [info_of(turn.topic, row) for row in rows]
    return messages.MessageScan(items, turn.now, turn.topic.id, None if is_last else rows[-1]["id"] + 1)


@handles(messages.SplitMessages)
async def split_messages(node: Node, command: messages.SplitMessages, context: Context) -> messages.IdRanges:
    home = node.home(command.topic)
    await home.flush()
    blocks = DEAD if command.dead else WAITING

    async def work(connection: asyncpg.Connection) -> messages.IdRanges:
        topic = (await home.shard.enter(connection, home.name)).topic
        await connection.execute(statement("scan_in_order"))
        first = await connection.fetchval(statement(blocks.first), topic.id)
        last = await connection.fetchval(statement(blocks.last), topic.id)
        if first is None or last is None:
            return messages.IdRanges([], topic.id)
        row = await connection.fetchrow(statement("topic_counts"), topic.id)
        total = row["dead"] if command.dead else row["ready"] + row["delayed"] + row["leased"]
        parts = min(PARTS_MAX, max(command.parts, -(-total // command.rows)))
        inner: list[int] = []
        if parts > 1:
            percent = min(100.0, 100 * SAMPLE_ROWS / max(1, total))
            sample = await connection.fetch(statement(blocks.sample), topic.id, percent)
            inner = _cuts(sorted(row["id"] for row in sample), parts)
        return messages.IdRanges(sorted({first, *(id for id in inner if first < id <= last), last + 1}), topic.id)

    return await home.shard.run(work)


def _cuts(sample: list[int], parts: int) -> list[int]:
    """Return the ids at which sorted ids divide into equal parts."""
    return [sample[len(sample) * n // parts] for n in range(1, parts)] if sample else []
