"""The events of the messages of a topic with a `retention`, as a log that can be read by offset.

*Recording.* The transaction that changes messages inserts a row for all that it changed in the same way, with a number
from a sequence. An event that depends on another one has the higher number, because its transaction saw the other one
committed before it drew. So the order of numbers is a correct history. But rows become visible as transactions commit,
in any order: a reader that continued after the highest number it saw would miss rows.

*Offsets.* So readers go by offsets, which rows get later, without gaps, when no lower number can appear any more. For
that, `EventKeeper` first reads how far numbers have been drawn, and then takes a transaction id. A transaction has its
id before it draws, so all of these numbers belong to lower ids. When none of these is in progress, the rows up to there
are final. A transaction that stays open delays the events after it, on its whole server; it never loses one.

*Retention.* Rows are in a ring of slots by time. A slot is truncated when its last event is older than the longest
retention of any topic, and topics then start after what it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from heapline.contract.config import TopicConfig
from heapline.sql.rows import Stored
from heapline.sql.statements import statement

if TYPE_CHECKING:
    from heapline.sql.shard import Shard

SLOTS = 8
SLOT_SHARE = 6  # a slot is open for this part of the longest retention
NUMBERED_MAX = 5000  # rows that get offsets in one transaction
WAIT_SECONDS, PAUSE_SECONDS = 1.0, 0.01  # for transactions in progress, before bounds are answered without them
DROPPED = "dropped"  # a message that would be a dead letter, on a topic without a dead-letter queue


# -- recording ---------------------------------------------------------------------------------------------------------


async def record(
    connection: asyncpg.Connection,
    topic: int,
    config: TopicConfig,
    kind: str,
    at: int,
    ids: Sequence[int],
    *,
    priorities: Sequence[int] | None = None,
    dues: Sequence[int] | None = None,
    expires: Sequence[int] | None = None,
    max_retries: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    attempts: Sequence[int] | None = None,
    deadline: int | None = None,
    holder: bytes | None = None,
    reason: str | None = None,
    batch: str | None = None,
) -> None:
    """Record what this transaction has done to messages, if their topic keeps events."""
    if config.retention and ids:
        columns = (priorities, dues, expires, max_retries, sizes, attempts, deadline, holder, reason, batch)
        await connection.execute(statement("record_event"), topic, kind, at, ids, *columns)


async def record_new(
    connection: asyncpg.Connection,
    topic: int,
    config: TopicConfig,
    at: int,
    rows: Stored,
    is_delayed: bool,
    batch: str | None = None,
) -> None:
    """Record messages that this transaction has stored."""
    if not config.retention:
        return
    await record(
        connection,
        topic,
        config,
        "enqueued" if batch is None else "batch_committed",
        at,
        rows.ids,
        priorities=rows.priorities,
        dues=rows.dues if is_delayed else None,
        expires=[end or 0 for end in rows.expires] or None,
        max_retries=[-1 if limit is None else limit for limit in rows.max_retries] or None,
        sizes=[len(payload) for payload in rows.payloads],
        batch=batch,
    )


# -- offsets and retention ---------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """Numbers up to `drawn` belong to transactions with ids below `transaction`."""

    drawn: int
    transaction: int


class EventKeeper:
    """Gives events of one shard their offsets, and truncates old ones. Any node does it; they take turns."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._lock = shard.own_lock("events")

    async def number(self) -> None:
        """Give offsets to what was committed when this was called last, or later.

        A sample that has to wait is kept in the database: in the memory of a node it could outlast a failover to an
        older state, in which its ids and numbers are used again.
        """
        async with self._shard.connection() as connection:
            row = await connection.fetchrow(statement("last_event_number"))
        if row["sample_drawn"] is not None:
            await self._number_up_to(Sample(row["sample_drawn"], row["sample_transaction"]))
            return
        sample = await self._take_sample()
        if sample is not None and not await self._number_up_to(sample):
            async with self._shard.connection() as connection:
                await connection.execute(statement("keep_sample"), *sample)

    async def catch_up(self) -> None:
        """Give offsets to all events that are committed now, unless a transaction stays open for too long."""
        sample = await self._take_sample()
        if sample is None:
            return
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not await self._number_up_to(sample):  # noqa: ASYNC110 - nothing reports the end of a transaction
                    await asyncio.sleep(PAUSE_SECONDS)
        except TimeoutError:
            return

    async def _take_sample(self) -> Sample | None:
        """Return how far numbers are drawn, or None if all of these have offsets."""
        async with self._shard.connection() as connection:
            row = await connection.fetchrow(statement("last_event_number"))
            if row["drawn"] <= row["upto"]:
                return None
            # In this order: a transaction that begins to draw in between has a higher id.
            return Sample(row["drawn"], await connection.fetchval(statement("next_transaction")))

    async def _number_up_to(self, sample: Sample) -> bool:
        """Give offsets to the events of a sample. Return False if some of its transactions are in progress."""
        async with self._shard.connection() as connection:
            if await connection.fetchval(statement("oldest_transaction")) < sample.transaction:
                return False

        async def work(connection: asyncpg.Connection) -> int:
            count: int = await connection.fetchval(statement("number_events"), sample.drawn, NUMBERED_MAX)
            return count

        while await self._shard.run(work, lock=self._lock) == NUMBERED_MAX:
            continue
        return True

    async def turn(self) -> None:
        """Open the next slot when the open one has its share, and truncate the oldest one if its time is over."""

        async def work(connection: asyncpg.Connection) -> None:
            row = await connection.fetchrow(_look())
            turn, now, kept = row["turn"], row["now"], round(1000 * (row["retention"] or 0))
            opened, following = row["firsts"][turn % SLOTS], row["firsts"][(turn + 1) % SLOTS]
            if opened is not None and opened <= now - kept / SLOT_SHARE and following is None:
                await connection.execute(statement("turn_events"), turn + 1)
            used = (slot % SLOTS for slot in range(turn + 1, turn + SLOTS) if row["lasts"][slot % SLOTS] is not None)
            oldest = next(used, None)
            if oldest is not None and row["lasts"][oldest] < now - kept:
                await self._truncate(connection, oldest)

        try:
            await self._shard.run(work, lock=self._lock)
        except asyncpg.LockNotAvailableError:
            return  # it is being read, or a transaction that wrote to it is open: the next turn tries again

    async def _truncate(self, connection: asyncpg.Connection, slot: int) -> None:
        await connection.execute(statement("raise_event_starts", offsets=f"event_offsets_{slot}"))
        await connection.execute(statement("short_lock_timeout"))
        for table in (f"events_{slot}", f"event_offsets_{slot}"):
            await connection.execute(statement("lock_slot", table=table))
            await connection.execute(statement("truncate_slot", table=table))


@cache
def _look() -> str:
    def each(order: str) -> str:
        return ", ".join(statement("event_at", events=f"events_{slot}", order=order) for slot in range(SLOTS))

    return statement("look_at_events", firsts=each("ASC"), lasts=each("DESC"))
