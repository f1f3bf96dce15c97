"""Enqueues that Redis acknowledges (`durability="redis"`), and how they come to Postgres: once, by any node.

All nodes append to one list per shard. An element is a *unit*: what one node enqueued together, and an id. Any node
flushes the list, one at a time. In a transaction with a lock of its own it reads the first units, and stores their
messages and their ids. Only after the commit does it remove the units from the list. So a node that dies leaves its
units to the others, and a unit that is read again (the removal failed, or Redis brought it back) is known by its id.

*Ids* are kept for UNIT_KEEP_MS after the flush, and for as long as the list may contain the unit: they are forgotten
when a flush has read the whole list, except those that it has read. So it does not matter how long Redis is down.

A call that must see what this node has acknowledged waits for a flush that began after that and emptied the list of
what it found (`flush`). A node that acknowledges nothing through Redis flushes too: the policy may have been another.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg
import msgspec

from heapline.clock import Clock
from heapline.contract.errors import (
    Closed,
    CorruptionError,
    HeaplineError,
    JournalCorrupt,
    UnavailableError,
    UnknownFormat,
)
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql.flush_loop import FlushLoop
from heapline.sql.layout import Layout
from heapline.sql.redis import Redis, RedisDown, buffer_key
from heapline.sql.shard import EVERY_ANSWER, Shard, lock_key
from heapline.sql.statements import statement
from heapline.sql.unit_store import Stored, UnitStore
from heapline.sql.wal import BATCH_VERSION, Batch

log = Log("heapline.sql")
UNIT_BYTES = 1 << 20  # that are gathered for a unit; a single enqueue may be larger
SLICE_BYTES, SLICE_UNITS = 1 << 20, 1000  # of one flush, at most or one unit
UNIT_KEEP_MS = 600_000  # that the id of a flushed unit is kept at least
FORGET_MS = 30_000  # between deletions of ids
#: Returns the length of KEYS[1], and its first elements: up to ARGV[2] of them, until they have ARGV[1] bytes.
READ = """
local found, size = {}, 0
while size < tonumber(ARGV[1]) and #found < tonumber(ARGV[2]) do
  local unit = redis.call('LINDEX', KEYS[1], #found)
  if not unit then break end
  found[#found + 1] = unit
  size = size + #unit
end
return {redis.call('LLEN', KEYS[1]), found}
"""
#: Removes the first elements of KEYS[1] whose ids are among ARGV: others are there if another node removed these.
REMOVE = """
local ids, count = {}, 0
for i = 1, #ARGV do ids[ARGV[i]] = true end
while true do
  local unit = redis.call('LINDEX', KEYS[1], count)
  if not unit or not ids[string.sub(unit, 1, 8)] then break end
  count = count + 1
end
if count > 0 then redis.call('LTRIM', KEYS[1], count, -1) end
return count
"""
_ID = struct.Struct(">q")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Batch]).decode


class BufferDown(UnavailableError):
    """Messages that this node has acknowledged are in Redis, which cannot be reached."""


class Unit(NamedTuple):
    id: int
    batches: list[Batch]


class Slice(NamedTuple):
    """The first units of the list, and how many it had."""

    units: list[Unit]
    length: int

    @property
    def is_all(self) -> bool:
        return len(self.units) == self.length


class Turn(NamedTuple):
    """The result of a flush, once it has committed."""

    slice: Slice
    new: int  # units that were not stored before
    stored: Stored


def encode_unit(id: int, batches: Sequence[Batch]) -> bytes:
    return _ID.pack(id) + _encode(batches)


def decode_unit(data: bytes, key: str) -> Unit:
    try:
        unit = Unit(_ID.unpack_from(data)[0], _decode(memoryview(data)[_ID.size :]))
    except (struct.error, msgspec.MsgspecError) as error:
        raise JournalCorrupt(f"redis key {key}", 0, str(error)) from None
    for batch in unit.batches:
        if batch.version != BATCH_VERSION:
            raise UnknownFormat(f"redis key {key}", batch.version)
    return unit


def durability_of(settings: Mapping[str, str]) -> str:
    """Return what an acknowledgment by a Redis server with these settings means."""
    if not settings:
        return "enqueues are as durable as Redis is configured; this node may not read its settings"
    if settings["maxmemory"] != "0" and settings["maxmemory-policy"].startswith("allkeys"):
        return (
            f"enqueues may be lost: Redis evicts them when it is full (maxmemory-policy {settings['maxmemory-policy']})"
        )
    if settings["appendonly"] != "yes":
        return "enqueues that are not flushed are lost when Redis restarts: its append-only file is off"
    if settings["appendfsync"] != "always":
        return f"enqueues of the last seconds may be lost in a crash of Redis (appendfsync {settings['appendfsync']})"
    return EVERY_ANSWER


class RedisFlusher:
    def __init__(
        self, shard: Shard, redis: Redis, store: UnitStore, clock: Clock, poll: float, slow_mode: bool
    ) -> None:
        self._shard, self._redis, self._store, self._clock = shard, redis, store, clock
        self._slow_mode = slow_mode
        self._loop = FlushLoop(shard.index, poll, self._flush_next, self._wake)
        self._key = buffer_key(shard.index)
        self._lock = lock_key(f"heapline redis buffer {shard.schema}")
        self._tasks = OwnedTasks()
        self._gathered: list[tuple[str, Batch, asyncio.Future[None]]] = []  # topics and batches of the next units
        self._writing: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []  # for the next flush
        self._reads = 0  # flushes begun
        self._flushed_read = 0  # what was acknowledged before this flush began is in the database
        self._unflushed: dict[str, int] = {}  # by topic: flushes begun when Redis acknowledged its last messages
        self._backlog: tuple[int, int] | None = None  # a flush that did not read all, and how many units it left
        self._forget_at = 0  # boot ms
        self._behind_since: int | None = None  # boot ms; None: the database has everything
        self._is_refused = False  # the list has a unit that cannot be read, so nothing behind it is flushed
        self.depth = 0  # units in the list when it was last read

    def start(self) -> None:
        self._loop.start()

    async def close(self) -> None:
        await self._loop.close()
        await self._tasks.cancel()
        self._wake(Closed())
        self._answer([future for _, _, future in self._gathered], Closed())

    @property
    def failures_total(self) -> int:
        return self._loop.failures_total

    @property
    def lag_ms(self) -> int:
        """Return how many milliseconds the oldest unit has waited, as far as this node knows; 0 if there is none."""
        return 0 if self._behind_since is None else self._clock.boot_ms() - self._behind_since

    @property
    def is_slow(self) -> bool:
        """Whether enqueues go to Postgres because Redis is down, or its list cannot be read."""
        return self._slow_mode and not self._is_usable

    @property
    def _is_usable(self) -> bool:
        return self._redis.is_up and not self._is_refused

    async def durability(self) -> str:
        """Return what an acknowledgment means, by the settings of the server."""
        try:
            return durability_of(await self._redis.settings())
        except RedisDown:
            return "redis is down; " + ("enqueues go to Postgres" if self._slow_mode else "enqueues are refused")

    # -- appending -------------------------------------------------------------------------------------------------

    def accepts(self) -> bool:
        """Whether enqueues go to Redis now. In slow mode they go to Postgres if they cannot; else raise."""
        if not self._is_usable and not self._slow_mode:
            what = f"the redis key {self._key} has a unit that cannot be read" if self._redis.is_up else "redis is down"
            raise BufferDown(f"{what}, and durability is 'redis'; nothing was stored: retry later")
        return self._is_usable

    async def append(self, topic: str, batch: Batch) -> None:
        """Store messages of a topic in Redis; return when it has acknowledged them."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gathered.append((topic, batch, future))
        if self._writing is None:
            self._writing = self._tasks.spawn(self._write_all())
        await future

    async def _write_all(self) -> None:
        """Write units until nothing waits. While one is written, the next one is gathered."""
        try:
            while self._gathered:
                size, count = 0, 0
                while count < len(self._gathered) and size < UNIT_BYTES:
                    size += sum(len(row[-1]) for row in self._gathered[count][1].rows)
                    count += 1
                some, self._gathered = self._gathered[:count], self._gathered[count:]
                await self._write(some)
        finally:
            self._writing = None

    async def _write(self, gathered: Sequence[tuple[str, Batch, asyncio.Future[None]]]) -> None:
        data = encode_unit(secrets.randbits(63), [batch for _, batch, _ in gathered])
        error: HeaplineError | None = None
        try:
            await self._redis.run(lambda client: client.rpush(self._key, data))
        except RedisDown as down:
            error = UnavailableError(f"redis did not acknowledge the enqueue ({down}); the outcome is unknown: retry")
        except BaseException:  # this node is closing
            self._answer([future for *_, future in gathered], Closed())
            raise
        if self._behind_since is None:
            self._behind_since = self._clock.boot_ms()
        for topic, *_ in gathered:
            self._unflushed[topic] = self._reads
        self._answer([future for *_, future in gathered], error)
        self._loop.wake()

    def _answer(self, futures: Sequence[asyncio.Future[None]], error: HeaplineError | None) -> None:
        for future in futures:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    # -- flushing --------------------------------------------------------------------------------------------------

    async def flush(self, topic: str) -> None:
        """Wait until everything that this node has acknowledged for a topic is in the database."""
        if topic in self._unflushed:
            await self._until(self._unflushed[topic])

    async def flush_all(self) -> None:
        """Wait until everything that this node has acknowledged is in the database."""
        if self._unflushed:
            await self._until(max(self._unflushed.values()))

    async def _until(self, read: int) -> None:
        while self._flushed_read <= read:
            if not self._redis.is_up:
                raise self._down()
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            self._loop.wake()
            await future

    def _wake(self, error: HeaplineError | None = None) -> None:
        waiting, self._waiting = self._waiting, []
        self._answer(waiting, error)

    async def _flush_next(self) -> bool:
        """Flush the first units of the list. Return whether to wait until there are more, or until Redis is up."""
        if not self._redis.is_up:
            self._wake(self._down())
            return True
        try:
            return await self._round()
        except RedisDown as error:
            raise self._down() from error
        except CorruptionError:
            self._is_refused = True
            raise

    def _down(self) -> BufferDown:
        return BufferDown("messages that were acknowledged are in redis, which is down; retry later")

    async def _round(self) -> bool:
        """Flush the first units, if there are any. Return whether these were all."""
        if not self._unflushed:
            self.depth = await self._redis.run(lambda client: client.llen(self._key))
        is_due = self._clock.boot_ms() >= self._forget_at
        if not (self.depth or self._unflushed or is_due or self._is_refused):
            self._wake()
            return True
        began = self._clock.boot_ms()
        is_all = await self._flush(is_due)
        self._wake()
        self._behind_since = None if is_all and not self._unflushed else self._behind_since or began
        return is_all

    async def _flush(self, is_due: bool) -> bool:
        """Flush the first units, and forget old ids if that is due. Return whether these were all units."""
        self._reads += 1
        read = self._reads

        async def work(connection: asyncpg.Connection) -> Turn:
            layout = await self._shard.read_layout(connection)
            slice = await self._read()
            ids = [unit.id for unit in slice.units]
            known = {row["id"] for row in await connection.fetch(statement("flushed_units"), ids)}
            new = {unit.id: unit for unit in slice.units if unit.id not in known}
            stored = await self._store_new(connection, layout, list(new.values()))
            if is_due and slice.is_all:
                await connection.execute(statement("delete_old_units"), layout.now - UNIT_KEEP_MS, ids)
            return Turn(slice, len(new), stored)

        turn = await self._shard.run(work, lock=self._lock)
        self._is_refused = False
        self._store.committed(turn.stored)
        self._record(read, turn)
        if is_due and turn.slice.is_all:
            self._forget_at = self._clock.boot_ms() + FORGET_MS
        await self._remove(turn.slice.units)
        return turn.slice.is_all

    async def _store_new(self, connection: asyncpg.Connection, layout: Layout, units: Sequence[Unit]) -> Stored:
        if not units:
            return Stored([], None)
        await connection.execute(statement("insert_units"), [unit.id for unit in units], layout.now)
        return await self._store.store(connection, layout, [batch for unit in units for batch in unit.batches])

    def _record(self, read: int, turn: Turn) -> None:
        """Record what is in the database now: units are flushed in order, whichever node does it."""
        units, length = turn.slice
        self.depth = length - len(units)
        if turn.slice.is_all:
            self._flushed_read, self._backlog = read, None
        elif self._backlog is None:
            self._backlog = read, self.depth
        else:
            first, left = self._backlog
            self._backlog = first, left - turn.new
            if left <= turn.new:
                self._flushed_read, self._backlog = first, None
        self._unflushed = {topic: at for topic, at in self._unflushed.items() if at >= self._flushed_read}

    async def _read(self) -> Slice:
        async def read(client: Any) -> Any:
            return await client.eval(READ, 1, self._key, SLICE_BYTES, SLICE_UNITS)

        length, found = await self._redis.run(read)
        return Slice([decode_unit(data, self._key) for data in found], length)

    async def _remove(self, units: Sequence[Unit]) -> None:
        ids = [_ID.pack(unit.id) for unit in units]
        with contextlib.suppress(RedisDown):  # they are removed when they are read again
            await self._redis.run(lambda client: client.eval(REMOVE, 1, self._key, *ids))
