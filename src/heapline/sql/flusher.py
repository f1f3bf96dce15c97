"""Move messages from the node's write-ahead log to one shard, in order and once.

A flush is one transaction: the messages by COPY, and the number of the last unit that they came from, the *mark*. So
after a crash, or a commit whose answer was lost, the mark says where to continue. A database that failed over to an
older state has lost messages and mark together, and they are flushed again: the log is kept for `keep` seconds longer
than it is needed. To notice that, the mark is read at least every `poll_interval`.

The database also stores which process has opened the log last. If that has not opened this directory, it uses a copy,
and the mark is about other messages: then nothing is flushed, and enqueues go to the database.

A call that must see what this node has acknowledged waits for the flush of its topic (`flush`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import asyncpg

from heapline.clock import Clock
from heapline.contract.errors import CorruptionError, HeaplineError, JournalCorrupt, UnavailableError
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql.flush_loop import FlushLoop
from heapline.sql.layout import Layout
from heapline.sql.shard import EVERY_ANSWER, Shard, lock_key
from heapline.sql.statements import statement
from heapline.sql.unit_store import Stored, UnitStore
from heapline.sql.wal import Batch, LogUnit, Wal

log = Log("heapline.sql")
RECLAIM_SECONDS = 30.0
REOPEN_MS = 5000  # between attempts to use a log again that could not be written


class Flushed(NamedTuple):
    """The result of a flush, once it has committed."""

    mark: int
    stored: Stored | None  # None: nothing, because the database's mark was another


class Flusher:
    def __init__(self, shard: Shard, wal: Wal, store: UnitStore, clock: Clock, poll: float, keep: float) -> None:
        self._shard, self._wal, self._store, self._clock = shard, wal, store, clock
        self._keep = keep
        self._loop = FlushLoop(shard.index, poll, self._flush_next, self._wake_waiting)
        self._lock = lock_key(f"heapline wal {shard.schema} {wal.id}")
        self._tasks = OwnedTasks()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # unit, and who waits for its flush
        self._last_unit: dict[str, int] = {}  # by topic, while it has messages in the log
        self._replay_end = 0  # units up to here may be of any topic: they were there when the log was opened, or lost
        self._marks: deque[tuple[int, int]] = deque()  # (boot ms, mark), to keep the log longer than it is needed
        self._reopen_at = 0  # boot ms
        self.mark = 0  # the last unit that is known to be in the database
        self._behind_since: int | None = None  # boot ms; None: the database has everything
        wal.on_durable = self._on_durable

    async def open(self) -> None:
        """Open the log at the database's mark, and start flushing what is above it."""

        async def work(connection: asyncpg.Connection) -> int:
            return int((await self._enter(connection))["mark"])

        self.mark = await self._shard.run(work, lock=self._lock)
        await self._wal.open(self.mark)
        self._replay_end = self._wal.durable
        if self.depth:
            self._behind_since = self._clock.boot_ms()
            log.info("replaying the write-ahead log", shard=self._shard.index, units=self.depth)
        self._marks.append((self._clock.boot_ms(), self.mark))
        self._loop.start()
        self._tasks.spawn(self._reclaim_forever())

    async def close(self) -> None:
        """Stop. What is not flushed is flushed by the next process with this directory."""
        await self._loop.close()
        await self._tasks.cancel()
        await self._wal.close()
        self._wake_waiting(UnavailableError("this node is closing; retry on another"))

    async def durability(self) -> str:
        """Return what an acknowledgment means."""
        return EVERY_ANSWER

    @property
    def depth(self) -> int:
        """Units in the log that are not known to be in the database."""
        return self._wal.durable - self.mark

    @property
    def lag_ms(self) -> int:
        """Return an upper bound of the milliseconds that the oldest unit has waited; 0 if there is none."""
        return 0 if self._behind_since is None else self._clock.boot_ms() - self._behind_since

    def _on_durable(self) -> None:
        if self._behind_since is None:
            self._behind_since = self._clock.boot_ms()
        self._loop.wake()

    @property
    def failures_total(self) -> int:
        return self._loop.failures_total

    @property
    def is_slow(self) -> bool:
        """Whether enqueues go to Postgres directly, because the log cannot be written."""
        return not self._wal.is_usable

    def accepts(self) -> bool:
        """Whether the log accepts messages."""
        return self._wal.is_usable

    async def append(self, topic: str, batch: Batch) -> None:
        """Store messages of a topic in the log; return when they are durable."""
        unit, durable = self._wal.append(batch)
        self._last_unit[topic] = unit
        await durable

    async def flush(self, topic: str) -> None:
        """Wait until everything that this node has acknowledged for a topic is in the database."""
        unit = self._present(max(self._last_unit.get(topic, 0), self._replay_end))
        if unit > self.mark:
            await self._until(unit)

    async def flush_all(self) -> None:
        """Wait until everything that this node has acknowledged is in the database."""
        if self._wal.appended > self.mark:
            await self._until(self._wal.appended)

    def _present(self, unit: int) -> int:
        """Return the unit, or the last one before it in the log if its write failed. Those before it are waited for."""
        return min(unit, self._wal.appended)

    async def _until(self, unit: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((unit, future))
        await future

    def _wake_waiting(self, error: HeaplineError | None = None) -> None:
        """Wake calls whose unit was flushed, or all of them with an error."""
        left = []
        for unit, future in self._waiting:
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            elif self._present(unit) <= self.mark:
                future.set_result(None)
            else:
                left.append((unit, future))
        self._waiting = left

    # -- flushing --------------------------------------------------------------------------------------------------

    async def _flush_next(self) -> bool:
        """Flush the next units. Return whether the database has everything."""
        began = self._clock.boot_ms()
        try:
            await self._reopen()
            await self._flush(await self._wal.after(self.mark))
        except CorruptionError:
            self._wal.is_refused = True
            raise
        self._wake_waiting()
        self._behind_since = began if self.depth > 0 else None
        return self.depth <= 0

    async def _reopen(self) -> None:
        """Open the log again, some time after a write to it has failed."""
        now = self._clock.boot_ms()
        if not self._wal.is_usable and not self._wal.is_refused and now >= self._reopen_at:
            self._reopen_at = now + REOPEN_MS
            await self._wal.open(self.mark)
            log.info("write-ahead log is in use again", shard=self._shard.index)

    async def _flush(self, units: Sequence[LogUnit]) -> None:
        """Store units, or only check the mark if there are none."""

        async def work(connection: asyncpg.Connection) -> Flushed:
            row = await self._enter(connection)
            if row["mark"] != self.mark:
                return Flushed(row["mark"], None)
            layout, mark = Layout(*(row[name] for name in Layout._fields)), units[-1].number
            stored = await self._store.store(connection, layout, batches)
            await connection.execute(statement("insert_mark"), self._wal.id, mark, layout.now)
            return Flushed(mark, stored)

        if not units:
            async with self._shard.connection() as connection:
                row = await connection.fetchrow(statement("enter_flush"), self._wal.id)
            self._check_owner(row["owner"])
            self._continue_at(row["mark"])
            return
        batches = [batch for unit in units for batch in unit.batches]
        flushed = await self._shard.run(work, lock=self._lock)
        self._continue_at(flushed.mark)
        if flushed.stored is not None:
            self._store.committed(flushed.stored)
        self._last_unit = {topic: unit for topic, unit in self._last_unit.items() if unit > self.mark}

    async def _enter(self, connection: asyncpg.Connection) -> Any:
        """Read the mark, in a transaction that has the log's lock. Record that this process flushes the log now."""
        row = await connection.fetchrow(statement("enter_flush"), self._wal.id)
        self._check_owner(row["owner"])
        if row["owner"] != self._wal.owners[-1]:
            await connection.execute(statement("upsert_wal_owner"), self._wal.id, self._wal.owners[-1])
        return row

    def _check_owner(self, owner: int | None) -> None:
        if owner is not None and owner not in self._wal.owners:
            raise JournalCorrupt(
                f"write-ahead log of shard {self._shard.index}",
                0,
                "a copy of its directory has been opened since, so it is unknown what of this one was flushed; stop "
                "the process that uses the copy, and give each node a directory of its own",
            )

    def _continue_at(self, mark: int) -> None:
        """Continue after the database's mark, which is what counts."""
        if mark > self._wal.durable:
            raise JournalCorrupt(
                f"write-ahead log of shard {self._shard.index}",
                0,
                f"the database has unit {mark} of it, which is not in this directory: another process has a copy",
            )
        if mark < self.mark:
            log.error(
                "the database has lost flushed messages; flushing them again",
                shard=self._shard.index,
                units=self.mark - mark,
            )
            self._replay_end = self._wal.durable
        self.mark = mark

    # -- reclaiming ------------------------------------------------------------------------------------------------

    async def _reclaim_forever(self) -> None:
        while True:
            await asyncio.sleep(RECLAIM_SECONDS)
            try:
                await self.reclaim()
            except (HeaplineError, OSError) as error:
                log.warning("write-ahead log not reclaimed; will retry", shard=self._shard.index, error=str(error))

    async def reclaim(self) -> None:
        """Delete segments that were flushed long ago, and marks that a newer one replaces."""
        now = self._clock.boot_ms()
        self._marks.append((now, self.mark))
        while len(self._marks) > 1 and now - self._marks[1][0] >= self._keep * 1000:
            self._marks.popleft()
        at, unneeded = self._marks[0]
        if now - at >= self._keep * 1000:
            await self._wal.reclaim(min(unneeded, self.mark))
        async with self._shard.connection() as connection:
            await connection.execute(statement("delete_old_marks"), self._wal.id, self.mark)
