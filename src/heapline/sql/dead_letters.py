"""Handlers of dead letters: list, replay and delete them, in slices, because there may be millions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from heapline.contract import dead_letters
from heapline.contract.call import Context, Count, Page, cursor_of, read_cursor
from heapline.contract.dead_letters import matches, size_of
from heapline.contract.errors import MessageNotFound
from heapline.contract.fields import MessageId
from heapline.contract.ids import parse_id
from heapline.contract.message import DlqFilter, MessageInfo, from_ms
from heapline.sql.delayed import FOREVER
from heapline.sql.handlers import handles
from heapline.sql.home import Home
from heapline.sql.info import info_of
from heapline.sql.layout import of_columns
from heapline.sql.messages import find
from heapline.sql.node import Node
from heapline.sql.shard import Topic, Turn
from heapline.sql.statements import statement

SLICE = 1000
PAGE_ROWS = 100  # read at once for a list: each row has its payload
FIRST = (-1, -1)


@handles(dead_letters.ListDeadLetters)
async def list_dead_letters(node: Node, command: dead_letters.ListDeadLetters, context: Context) -> Page[MessageInfo]:
    home = node.home(command.topic)
    topic = (await home.shard.read_topic(home.name)).topic
    last = after = read_cursor(command.cursor, tuple[int, int], FIRST)
    items: list[MessageInfo] = []
    size = 0
    async with home.shard.connection() as connection:
        while rows := await connection.fetch(of_columns("list_dead"), topic.id, *after, PAGE_ROWS):
            for row in rows:
                after = (row["at"], row["id"])
                info = info_of(topic, row)
                if command.where is not None and not matches(info, command.where):
                    continue
                size += size_of(info)
                if items and (len(items) == command.limit or size > command.max_bytes):
                    return Page(items, cursor_of(last))
                items.append(info)
                last = after
    return Page(items)


@handles(dead_letters.GetDeadLetter)
async def get_dead_letter(node: Node, command: dead_letters.GetDeadLetter, context: Context) -> MessageInfo:
    info = await find(node.home(command.topic), command.message_id)
    if info.state != "dead":
        raise MessageNotFound(command.topic, info.message_id)
    return info


@handles(dead_letters.ReplayDeadLetters)
async def replay_dead_letters(node: Node, command: dead_letters.ReplayDeadLetters, context: Context) -> Count:
    """Return dead letters to the queue; with a rate, the n-th becomes due n/rate seconds from now."""
    home, rate, count = node.home(command.topic), command.rate, 0
    start: int | None = None
    async for ids in _find(home, command.ids, command.where):

        async def work(turn: Turn, ids: list[int] = ids, first: int = count) -> int:
            nonlocal start
            start = turn.now if start is None else start
            dues = [turn.now if rate is None else start + round((first + n) * 1000 / rate) for n in range(len(ids))]
            pairs = list(zip(ids, dues, strict=True))
            now = [id for id, due in pairs if due <= turn.now]
            later = [(id, due) for id, due in pairs if due > turn.now]
            moved: int = await turn.connection.fetchval(
                turn.layout.to_ready("dead_to_ready"), turn.topic.id, now, turn.now
            )
            if later:
                moved += await turn.connection.fetchval(
                    of_columns("dead_to_delayed"), turn.topic.id, [id for id, _ in later], [due for _, due in later]
                )
            return moved

        count += await home.shard.in_topic(home.name, work, locked=False)
        home.wake()
        if rate is not None:
            home.expect(0)  # the timekeeper reads the deadlines again
    return Count(count)


@handles(dead_letters.DeleteDeadLetters)
async def delete_dead_letters(node: Node, command: dead_letters.DeleteDeadLetters, context: Context) -> Count:
    home, count = node.home(command.topic), 0
    async for ids in _find(home, command.ids, command.where):

        async def work(turn: Turn, ids: list[int] = ids) -> int:
            end = turn.layout.to_ended("dead_to_ended")
            deleted: int = await turn.connection.fetchval(end, turn.topic.id, ids, turn.now, FOREVER)
            return deleted

        count += await home.shard.in_topic(home.name, work, locked=False)
    return Count(count)


async def _find(home: Home, message_ids: list[MessageId] | None, where: DlqFilter | None) -> AsyncIterator[list[int]]:
    """Yield the ids of the requested dead letters in slices, oldest first."""
    topic = (await home.shard.read_topic(home.name)).topic
    found = _all(home, topic) if message_ids is None else _named(home, topic, sorted(_own_ids(topic, message_ids)))
    async for rows in found:
        chosen = [row["id"] for row in rows if where is None or matches(_facts(topic, row), where)]
        if chosen:
            yield chosen


async def _all(home: Home, topic: Topic) -> AsyncIterator[list[Any]]:
    after = FIRST
    while True:
        async with home.shard.connection() as connection:
            rows = await connection.fetch(statement("dead_facts"), topic.id, *after, SLICE)
        if not rows:
            return
        after = (rows[-1]["at"], rows[-1]["id"])
        yield rows


async def _named(home: Home, topic: Topic, ids: list[int]) -> AsyncIterator[list[Any]]:
    """Look the ids up, however many other dead letters there are."""
    rows: list[Any] = []
    for start in range(0, len(ids), SLICE):
        async with home.shard.connection() as connection:
            rows += await connection.fetch(statement("dead_facts_of"), topic.id, ids[start : start + SLICE])
    rows.sort(key=lambda row: (row["at"], row["id"]))
    for start in range(0, len(rows), SLICE):
        yield rows[start : start + SLICE]


def _own_ids(topic: Topic, message_ids: list[MessageId]) -> set[int]:
    """Return the integers of ids. A ULID of another topic names no message here."""
    pairs = [parse_id(message_id) for message_id in message_ids]
    return {id for id, suffix in pairs if suffix is None or suffix == topic.id_suffix}


def _facts(topic: Topic, row: Any) -> MessageInfo:
    """Return what a filter looks at."""
    id, at, priority, reason, name = row
    return MessageInfo(
        id=id,
        topic=topic.name,
        partition=0,
        state="dead",
        priority=priority,
        reason=reason,
        ended_at=from_ms(at),
        key=None if name is None else name.decode(),
    )
