"""Apply decisions about leases: move their messages, in the transaction that holds their rows."""

from __future__ import annotations

import asyncpg

from heapline.contract.config import TopicConfig
from heapline.sql.counters import Counters
from heapline.sql.events import DROPPED, record
from heapline.sql.layout import Layout, of_columns
from heapline.sql.retries import Held, Outcomes
from heapline.sql.statements import statement


def text_of(reason: str | None) -> str | None:
    """Return a reason as the database can store it: without NUL."""
    return None if reason is None else reason.replace("\0", "\N{SYMBOL FOR NULL}")


async def hold(
    connection: asyncpg.Connection, slot: int, topic_id: int, ids: list[int], tokens: list[int]
) -> list[Held]:
    """Lock the rows of leases in one slot, and return those that are there."""
    rows = await connection.fetch(statement("hold_leases", lease=f"lease_{slot}"), topic_id, ids, tokens)
    return [Held(*row) for row in rows]


async def settle(
    connection: asyncpg.Connection,
    layout: Layout,
    slot: int,
    topic_id: int,
    config: TopicConfig,
    outcomes: Outcomes,
    *,
    reason: str | None = None,  # kept with messages that return
    cause: str = "",  # of dead letters
    kind: str = "released",  # the event of messages that return
    returned_attempts: int = 0,  # added to the attempts of messages that are ready again
) -> None:
    """Move the messages of leases in one slot. The caller holds their rows."""
    lease, now = f"lease_{slot}", layout.now
    reason, cause = text_of(reason), text_of(cause) or ""
    if outcomes.ready:
        move = layout.to_ready("lease_to_ready", lease=lease)
        await connection.execute(move, topic_id, outcomes.ready, returned_attempts, reason)
    if outcomes.delayed:
        move = of_columns("lease_to_delayed", lease=lease)
        await connection.execute(move, topic_id, outcomes.delayed, outcomes.wakes, reason)
    if outcomes.dead and config.dlq:
        await connection.execute(of_columns("lease_to_dead", lease=lease), topic_id, outcomes.dead, cause, now)
    end = layout.to_ended("lease_to_ended", lease=lease)
    if outcomes.dead and not config.dlq:
        await connection.execute(end, topic_id, outcomes.dead, "dropped", cause, now)
    if outcomes.expired:
        await connection.execute(end, topic_id, outcomes.expired, "expired", None, now)
    if config.retention:
        wakes = outcomes.wakes
        await record(connection, topic_id, config, kind, now, outcomes.ready, reason=reason)
        await record(connection, topic_id, config, kind, now, outcomes.delayed, dues=wakes, reason=reason)
        died = "dead_lettered" if config.dlq else DROPPED
        await record(connection, topic_id, config, died, now, outcomes.dead, reason=cause)
        await record(connection, topic_id, config, "expired", now, outcomes.expired)


def count(counters: Counters, outcomes: Outcomes) -> None:
    counters.dead += len(outcomes.dead)
    counters.expired += len(outcomes.expired)


async def acked_before(connection: asyncpg.Connection, topic_id: int, ids: list[int], tokens: list[int]) -> set[int]:
    """Return the ids that were acked with these tokens: an ack that is resent is valid."""
    return {row["id"] for row in await connection.fetch(statement("was_acked"), topic_id, ids, tokens)}
