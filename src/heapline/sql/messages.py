"""Handlers of calls on single messages by their id: get, peek, cancel, reschedule."""

from __future__ import annotations

from typing import Any, NamedTuple

from heapline.contract import messages
from heapline.contract.call import Context, Page, cursor_of, read_cursor
from heapline.contract.check import instant_to_ms, seconds_to_ms
from heapline.contract.errors import MessageLeased, MessageNotFound, UnavailableError
from heapline.contract.fields import INT64_MIN
from heapline.contract.message import MessageInfo
from heapline.core.ids import unix_ms_of
from heapline.sql.events import record
from heapline.sql.handlers import handles
from heapline.sql.home import Home
from heapline.sql.info import departed, info_of
from heapline.sql.layout import of_columns
from heapline.sql.node import Node
from heapline.sql.shard import Turn
from heapline.sql.statements import statement

TRIES = 10  # to act on a message that moves meanwhile


@handles(messages.GetMessage)
async def get(node: Node, command: messages.GetMessage, context: Context) -> MessageInfo:
    home = node.home(command.topic)
    await home.flush()
    return await find(home, command.message_id)


async def find(home: Home, message_id: str | int) -> MessageInfo:
    """Return what is known of a message, whatever its state."""
    turn = await home.shard.read_topic(home.name)
    topic = turn.topic
    id = topic.find_id(message_id)
    async with home.shard.connection() as connection:
        row = await connection.fetchrow(of_columns("locate"), topic.id, id)
        if row is not None:
            return info_of(topic, row)
        ended = await connection.fetchrow(statement("select_ended"), topic.id, id)
        if ended is None:
            ended = await connection.fetchrow(statement("select_acked"), topic.id, id)
        if ended is None:
            raise MessageNotFound(topic.name, topic.ulid(id))
        return departed(topic, id, ended)


@handles(messages.Peek)
async def peek(node: Node, command: messages.Peek, context: Context) -> Page[MessageInfo]:
    home = node.home(command.topic)
    after = read_cursor(command.cursor, tuple[int, int, int], (INT64_MIN, INT64_MIN, -1))
    await home.flush()
    turn = await home.shard.read_topic(home.name)
    async with home.shard.connection() as connection:
        rows = await connection.fetch(
            of_columns("peek"), turn.topic.id, turn.now, *after, command.limit, command.max_bytes
        )
        chosen = rows[: command.limit]
        more = len(rows) > len(chosen)
        if chosen and not more and len(chosen) < command.limit:  # the page may have ended because of its bytes
            last = _order(chosen[-1])
            more = bool(await connection.fetch(of_columns("peek"), turn.topic.id, turn.now, *last, 1, 1))
    return Page([info_of(turn.topic, row) for row in chosen], cursor_of(_order(chosen[-1])) if more else None)


def _order(row: Any) -> tuple[int, int, int]:
    return row["key"], row["due"], row["id"]


@handles(messages.Cancel)
async def cancel(node: Node, command: messages.Cancel, context: Context) -> None:
    home = node.home(command.topic)
    await home.flush()

    async def work(turn: Turn) -> None:
        id = turn.topic.find_id(command.message_id)
        for _ in range(TRIES):
            row = await _waiting(turn, id)
            end = turn.layout.to_ended("cancel", source=row["place"])
            if await turn.connection.fetchval(end, turn.topic.id, id, turn.now):
                await record(turn.connection, turn.topic.id, turn.topic.config, "cancelled", turn.now, [id])
                return
        raise _restless(turn, id)

    await home.shard.in_topic(home.name, work)


async def _waiting(turn: Turn, id: int) -> Any:
    """Return the row of a message that waits. Raise if it is leased, dead or removed."""
    row = await turn.connection.fetchrow(of_columns("locate"), turn.topic.id, id)
    if row is None or row["place"] == "dead":
        raise MessageNotFound(turn.topic.name, turn.topic.ulid(id))
    if row["place"] == "leased":
        raise MessageLeased(turn.topic.name, turn.topic.ulid(id))
    return row


def _restless(turn: Turn, id: int) -> UnavailableError:
    return UnavailableError(f"message {turn.topic.ulid(id)} changed {TRIES} times while it was to be changed; retry")


@handles(messages.Reschedule)
async def reschedule(node: Node, command: messages.Reschedule, context: Context) -> None:
    home = node.home(command.topic)
    await home.flush()

    async def work(turn: Turn) -> Plan:
        id = turn.topic.find_id(command.message_id)
        for _ in range(TRIES):
            row = await _waiting(turn, id)
            plan = plan_of(command, row, turn)
            if await _move(home, turn, id, row["place"], plan):
                await record(
                    turn.connection,
                    turn.topic.id,
                    turn.topic.config,
                    "rescheduled",
                    turn.now,
                    [id],
                    priorities=[plan.priority],
                    dues=[plan.wake or 0],
                    expires=[plan.expires or 0],
                )
                return plan
        raise _restless(turn, id)

    plan = await home.shard.in_topic(home.name, work)
    for at in (plan.wake, plan.expires):
        if at is not None:
            home.expect(at)
    home.wake()


class Plan(NamedTuple):
    """A message's new values. `wake` is None if it is ready."""

    key: int
    due: int
    priority: int
    expires: int | None
    wake: int | None


def plan_of(command: messages.Reschedule, row: Any, turn: Turn) -> Plan:
    """Return the new values. Fields that are not given keep theirs, and a new due time restarts the time to live."""
    now = turn.now
    priority = row["priority"] if command.priority is None else int(command.priority)
    key = turn.topic.ordering.key(priority, unix_ms_of(row["id"]))
    if command.delay is not None:
        due = now + seconds_to_ms(command.delay)
    elif command.deliver_at is not None:
        due = max(now, instant_to_ms(command.deliver_at))
    else:
        return Plan(key, row["due"], priority, row["expires"], row["wake"])
    expires = None if row["ttl"] is None else due + row["ttl"]
    return Plan(key, due, priority, expires, due if due > now else None)


async def _move(home: Home, turn: Turn, id: int, source: str, plan: Plan) -> bool:
    values: list[Any] = [turn.topic.id, id, plan.key, plan.due, plan.priority, plan.expires]
    if plan.wake is None:
        move = turn.layout.to_ready("reschedule_to_ready", source=source)
    else:
        move = of_columns("reschedule_to_delayed", source=source)
        values.append(plan.wake)
    return bool(await turn.connection.fetchval(move, *values))
