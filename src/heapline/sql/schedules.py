"""Schedules: the calls about them, and firing them.

What a schedule owes is decided by the pure book (core/schedules); a row holds the state of one schedule. A firing locks
that row and skips rows that another node has locked, so one node fires a schedule at a time. It enqueues the messages,
perhaps in another shard, and then moves the row's done mark. A node that is killed between the two leaves the mark, and
the next one enqueues again under the same numbers: the producer is the schedule, the epoch its incarnation, the
sequence the firing's planned time. The topic recognizes what it has. Users cannot use such a producer, because the
names of theirs contain no slash.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import asyncpg

from heapline.contract import schedules
from heapline.contract.call import HERE, PAGE_BYTES, Context, Page, PageBuilder, cursor_of, read_cursor
from heapline.contract.errors import (
    BadRequest,
    HeaplineError,
    IdempotencyConflict,
    ResourceExhausted,
    ScheduleNotFound,
    StaleEpoch,
    StaleSequence,
)
from heapline.contract.message import Outgoing
from heapline.contract.messages import pack_messages
from heapline.contract.schedules import Schedule, ScheduleInfo, schedule_name
from heapline.core.schedules.book import SCHEDULES_MAX, Book, Taken, schedule_info
from heapline.core.schedules.records import BookState, ScheduleFired, decode_state, encode_state
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql.dedup import Identity
from heapline.sql.enqueue import _store as store
from heapline.sql.handlers import handles
from heapline.sql.node import Node
from heapline.sql.placement import shard_of
from heapline.sql.rows import check_row, rows_of_batch
from heapline.sql.shard import Shard, lock_key
from heapline.sql.statements import statement

log = Log("heapline.sql")
T = TypeVar("T")
RETRY_MS = 5000  # until a failed firing is tried again
PAUSE_SECONDS = 0.02  # at least, between two checks for what is due
ROUNDS_MAX = 10  # rounds of firings that a change enqueues first
CHUNK_BYTES = 256 << 10  # of messages enqueued together
#: The topic has this firing. A different payload can only come from a schedule that was restored from an old copy.
KNOWN = (StaleSequence, IdempotencyConflict)
WHERE = "the table of schedules"


class Sent(NamedTuple):
    """The first `done` firings are in the topic; the rest is still owed."""

    done: int
    new: int  # how many of them were enqueued by this call
    error: HeaplineError | None = None  # why the rest was not enqueued


class Kept:
    """One schedule in its transaction: its row is locked, or does not exist."""

    def __init__(self, node: Node, shard: Shard, connection: asyncpg.Connection, name: str, now: int) -> None:
        self._node, self._shard, self._connection, self.name, self.now = node, shard, connection, name, now
        self.book = Book()
        self.problem: str | None = None

    @classmethod
    async def hold(cls, node: Node, shard: Shard, connection: asyncpg.Connection, name: str) -> Kept:
        await connection.execute(statement("lock_until_commit"), lock_key(f"heapline schedule {shard.schema} {name}"))
        kept = cls(node, shard, connection, name, (await shard.read_layout(connection)).now)
        row = await connection.fetchrow(statement("hold_schedule"), name)
        if row is not None:
            kept.load(row)
        return kept

    def load(self, row: Any) -> None:
        self.book = Book.from_state(decode_state(row["state"], WHERE))
        self.problem = row["problem"]

    @property
    def exists(self) -> bool:
        return self.name in self.book

    def info(self) -> ScheduleInfo:
        return schedule_info(self.book.get(self.name), self.problem, self.now)

    async def write(self, retry_at: int | None = None) -> None:
        """Write the row. `retry_at` is when firings that failed are tried again."""
        if not self.exists:
            await self._connection.execute(statement("delete_schedule"), self.name)
            return
        state, next_ms, _ = self.book.get(self.name)
        encoded = encode_state(BookState(incarnations=state.incarnation, schedules=[state]))
        wake = next_ms if retry_at is None else retry_at
        await self._connection.execute(statement("upsert_schedule"), self.name, encoded, wake, self.problem)

    async def set(self, schedule: Schedule) -> None:
        """Create or change the schedule."""
        if not self.exists:
            counts = await self._connection.fetchrow(statement("count_schedules"))
            if counts["kept"] >= SCHEDULES_MAX:
                raise ResourceExhausted("the number of schedules", SCHEDULES_MAX)
        number = await self._connection.fetchval(statement("next_incarnation"))
        before = self.book.to_state()
        known = max([number - 1, *(state.incarnation for state in before.schedules)])
        self.book = Book.from_state(BookState(incarnations=known, schedules=before.schedules))
        if self.book.set(schedule, self.now) is not None:
            self.problem = None

    # -- firing ------------------------------------------------------------------------------------------------------

    async def settle(self) -> bool:
        """Enqueue what the schedule owes and write the row. Return True if it owed something and all is enqueued."""
        taken = self.book.take_one(self.name, self.now) if self.exists else None
        if taken is None:
            return False
        sent = await self._send(taken)
        self._report(taken, sent)
        if isinstance(sent.error, StaleEpoch):
            await self._outdo(sent.error)
            await self.write()
            return False
        record = _record(taken, sent)
        if record is not None:
            self.book.apply(record)
        self.problem = None if sent.error is None else str(sent.error)
        await self.write(None if sent.error is None else self.now + RETRY_MS)
        return sent.error is None

    async def _send(self, taken: Taken) -> Sent:
        state = self.book.get(self.name).state
        identity = Identity(producer_of(self.name), state.incarnation, state.done_ms + 1)
        done = new = 0
        try:
            for chunk in _chunks(taken.messages):
                try:
                    new += await self._enqueue(chunk, taken.topic, identity)
                    done += len(chunk)
                except (*KNOWN, BadRequest):  # one of them is known, or together they are too large
                    for message in chunk:
                        with contextlib.suppress(*KNOWN):
                            new += await self._enqueue([message], taken.topic, identity)
                        done += 1
        except HeaplineError as error:
            return Sent(done, new, error)
        return Sent(done, new)

    async def _enqueue(self, messages: list[Outgoing], topic: str, identity: Identity) -> int:
        """Enqueue all messages or none. Return how many were new."""
        results = await store(self._node.home(topic), rows_of_batch(pack_messages(messages)), True, identity, HERE)
        return sum(not result.duplicate for result in results)

    async def _outdo(self, error: StaleEpoch) -> None:
        """Raise the incarnation above the topic's: this row is older than the topic, as after a restore."""
        home = self._node.home(self.book.get(self.name).state.schedule.topic)
        turn = await home.shard.read_topic(home.name)
        async with home.shard.connection() as connection:
            done = await connection.fetchval(statement("last_firing"), turn.topic.id, producer_of(self.name))
        self.book.outdo(self.name, error.current, done or 0, self.now)

    def _report(self, taken: Taken, sent: Sent) -> None:
        counts = self._node.firings
        counts.fired += sent.new
        for at in taken.times[sent.done - sent.new : sent.done]:
            counts.delay.add(max(0, self.now - at) / 1000)
        if sent.error is None:
            counts.missed += taken.missed
        else:
            counts.failed += 1
            if self.problem is None:
                log.warning("schedule cannot fire", schedule=self.name, topic=taken.topic, error=str(sent.error))


def producer_of(schedule: str) -> str:
    return f"_schedule/{schedule}"


def _chunks(messages: list[Outgoing]) -> list[list[Outgoing]]:
    """Split the messages, which have about the same size."""
    if not messages:  # all firings were skipped
        return []
    count = max(1, CHUNK_BYTES // (len(messages[0].payload) + 1024))
    return [messages[start : start + count] for start in range(0, len(messages), count)]


def _record(taken: Taken, sent: Sent) -> ScheduleFired | None:
    """Return the record of the firings that are done, or None if none are."""
    if sent.done == len(taken.messages):
        return taken.record
    if not sent.done:
        return None
    last = taken.times[sent.done - 1]
    return ScheduleFired(taken.name, taken.record.incarnation, last, last, sent.done)


# -- firing ------------------------------------------------------------------------------------------------------------


class Scheduler:
    """Fires the schedules of all shards; every node does."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._tasks = OwnedTasks()

    def start(self) -> None:
        for shard in self._node.shards:
            self._tasks.spawn(self._run(shard))

    async def close(self) -> None:
        await self._tasks.cancel()

    async def fire_due(self) -> None:
        """Fire everything that is due by now. Firings that cannot be enqueued are retried later."""
        for shard in self._node.shards:
            await self._fire_all(shard)

    async def _run(self, shard: Shard) -> None:
        longest = self._node.config.poll_interval
        was_read = True
        while True:
            pause = longest
            try:
                await self._fire_all(shard)
                async with shard.connection() as connection:
                    left = await connection.fetchval(statement("next_schedule"))
                pause = longest if left is None else min(longest, max(PAUSE_SECONDS, left / 1000))
                was_read = True
            except HeaplineError as error:
                if was_read:
                    log.warning("schedules cannot be read; will retry", shard=shard.index, error=str(error))
                was_read = False
            except Exception:  # a failed check must not stop the checks that follow
                log.exception("schedules failed; will retry", shard=shard.index)
            await asyncio.sleep(pause)

    async def _fire_all(self, shard: Shard) -> None:
        while await _alone(self._node, shard, self._fire_one(shard)):
            pass

    def _fire_one(self, shard: Shard) -> Callable[[asyncpg.Connection], Awaitable[bool]]:
        async def work(connection: asyncpg.Connection) -> bool:
            """Fire the schedule that is due longest. Return whether there was one."""
            now = (await shard.read_layout(connection)).now
            row = await connection.fetchrow(statement("due_schedule"), now)
            if row is None:
                return False
            kept = Kept(self._node, shard, connection, row["name"], now)
            kept.load(row)
            await kept.settle()
            return True

        return work


async def _alone(node: Node, shard: Shard, work: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
    """Run `work` in a transaction, one at a time in this process: it may need a second connection of the same pool."""
    async with node.scheduling[shard.index]:
        return await shard.run(work)


# -- calls -------------------------------------------------------------------------------------------------------------


def _home(node: Node, name: str) -> tuple[Shard, str]:
    """Return the shard of a schedule, and its full name."""
    full = schedule_name(name)
    namespace, _, rest = full.partition("/")
    return node.shards[shard_of(namespace, rest, len(node.shards))], full


async def _change(node: Node, name: str, change: Callable[[Kept], Awaitable[Any]], creates: bool = False) -> Kept:
    """Enqueue what a schedule owes, as far as possible, and then change it."""
    shard, full = _home(node, name)

    async def work(connection: asyncpg.Connection) -> Kept:
        kept = await Kept.hold(node, shard, connection, full)
        if not kept.exists and not creates:
            raise ScheduleNotFound(full)
        for _ in range(ROUNDS_MAX):
            if not await kept.settle():
                break
        before = kept.book.to_state()
        await change(kept)
        if kept.book.to_state().schedules != before.schedules:
            await kept.write()
        return kept

    return await _alone(node, shard, work)


@handles(schedules.CreateSchedule)
async def create(node: Node, command: schedules.CreateSchedule, context: Context) -> ScheduleInfo:
    schedule = command.schedule()
    home = node.home(schedule.topic)
    turn = await home.shard.read_topic(home.name)
    (row,) = rows_of_batch(pack_messages([schedule.message(turn.now)]))
    check_row(row, turn.topic.config, turn.topic.name)
    return (await _change(node, schedule.name, lambda kept: kept.set(schedule), creates=True)).info()


@handles(schedules.PauseSchedule)
async def pause(node: Node, command: schedules.PauseSchedule, context: Context) -> ScheduleInfo:
    async def change(kept: Kept) -> None:
        kept.problem = None  # owed firings are dropped
        kept.book.pause(kept.name, kept.now)

    return (await _change(node, command.name, change)).info()


@handles(schedules.ResumeSchedule)
async def resume(node: Node, command: schedules.ResumeSchedule, context: Context) -> ScheduleInfo:
    async def change(kept: Kept) -> None:
        kept.book.resume(kept.name, kept.now)

    return (await _change(node, command.name, change)).info()


@handles(schedules.DeleteSchedule)
async def delete(node: Node, command: schedules.DeleteSchedule, context: Context) -> None:
    async def change(kept: Kept) -> None:
        kept.book.delete(kept.name)

    await _change(node, command.name, change)


@handles(schedules.GetSchedule)
async def get(node: Node, command: schedules.GetSchedule, context: Context) -> ScheduleInfo:
    shard, full = _home(node, command.name)
    async with shard.connection() as connection:
        now = (await shard.read_layout(connection)).now
        row = await connection.fetchrow(statement("select_schedule"), full)
    if row is None:
        raise ScheduleNotFound(full)
    return _info(row, full, now)


@handles(schedules.ListSchedules)
async def list_schedules(node: Node, command: schedules.ListSchedules, context: Context) -> Page[ScheduleInfo]:
    after = read_cursor(command.cursor, str, "")
    start = schedule_name(after) if after else ""
    shares = await asyncio.gather(*(_list(shard, start, command.limit) for shard in node.shards))
    # A shard that returned only its first rows may have more after them, which must come before later names.
    cut = [rows for rows, _ in shares if len(rows) == command.limit or _bytes(rows) > PAGE_BYTES]
    ends = [rows[-1]["name"] for rows in cut]
    known = [(row, now) for rows, now in shares for row in rows if not ends or row["name"] <= min(ends)]
    page: PageBuilder[ScheduleInfo] = PageBuilder(command.limit)
    for row, now in sorted(known, key=_by_name):
        if not page.add(_info(row, row["name"], now)):
            return Page(page.items, cursor_of(page.items[-1].name))
    return Page(page.items, cursor_of(page.items[-1].name) if ends else None)


async def _list(shard: Shard, after: str, limit: int) -> tuple[list[Any], int]:
    async with shard.connection() as connection:
        now = (await shard.read_layout(connection)).now
        return await connection.fetch(statement("list_schedules"), after, limit, PAGE_BYTES), now


def _bytes(rows: list[Any]) -> int:
    return sum(len(row["state"]) for row in rows)


def _by_name(pair: tuple[Any, int]) -> str:
    name: str = pair[0]["name"]
    return name


def _info(row: Any, name: str, now: int) -> ScheduleInfo:
    book = Book.from_state(decode_state(row["state"], WHERE))
    return schedule_info(book.get(name), row["problem"], now)
