"""Move messages from the node's write-ahead log to one shard, in order and once.

A flush is one transaction: the messages by COPY, and the number of the last unit that they came from, the *mark*. So
after a crash, or a commit whose answer was lost, the mark says where to continue. A database that failed over to an
older state has lost messages and mark together, and they are flushed again: the log is kept for `keep` seconds longer
than it is needed. To notice that, the mark is read at least every `poll_interval`.

The database also stores which process has opened the log last. If that has not opened this directory, it uses a copy,
and the mark is about other messages: then nothing is flushed, and enqueues go to the database.

A call that must see what this node has acknowledged waits for the flush of its topic (`flush`). Messages of a topic
that was deleted meanwhile are dropped; if it was created again, they go there, because they may have been meant for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import asyncpg

from heapline.clock import Clock
from heapline.contract.errors import HeaplineError, JournalCorrupt, UnavailableError
from heapline.core.ids import unix_ms_of
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks
from heapline.sql.layout import COLUMNS, Layout, of_columns
from heapline.sql.rows import columns_of
from heapline.sql.shard import Name, Shard, Topic, lock_key, topic_of
from heapline.sql.statements import statement
from heapline.sql.timekeeper import Timekeeper
from heapline.sql.wal import Batch, LogUnit, Wal

log = Log("heapline.sql")
RETRY_SECONDS = 0.2  # after a flush that failed
RECLAIM_SECONDS = 30.0
REOPEN_MS = 5000  # between attempts to use a log again that could not be written
READY_COLUMNS = ("slot", *COLUMNS.split(", "))


class Stored(NamedTuple):
    """What a flush did, once it has committed."""

    mark: int
    topics: list[Topic]
    deadline: int | None  # when time alone changes something about the messages


class Flusher:
    def __init__(self, shard: Shard, wal: Wal, timekeeper: Timekeeper, clock: Clock, poll: float, keep: float) -> None:
        self._shard, self._wal, self._timekeeper, self._clock = shard, wal, timekeeper, clock
        self._poll, self._keep = poll, keep
        self._lock = lock_key(f"heapline wal {shard.schema} {wal.id}")
        self._tasks = OwnedTasks()
        self._work = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # unit, and who waits for its flush
        self._last_unit: dict[str, int] = {}  # by topic, while it has messages in the log
        self._replay_end = 0  # units up to here were found in the log when it was opened
        self._marks: deque[tuple[int, int]] = deque()  # (boot ms, mark), to keep the log longer than it is needed
        self._renamed: dict[int, int] = {}  # ids that were stored before, of other messages -> ids given instead
        self._reopen_at = 0  # boot ms
        self.mark = 0  # the last unit that is known to be in the database
        self.failures_total = 0
        self._behind_since: int | None = None  # boot ms; None: the database has everything
        wal.on_durable = self._on_durable

    async def open(self) -> None:
        """Open the log at the database's mark, and start flushing what is above it."""

        async def work(connection: asyncpg.Connection) -> int:
            return int((await self._enter(connection))["mark"])

        self.mark = await self._shard.run(work, lock=self._lock)
        await self._wal.open(self.mark)
        self._replay_end = self._wal.durable
        if self.lag:
            self._behind_since = self._clock.boot_ms()
            log.info("replaying the write-ahead log", shard=self._shard.index, units=self.lag)
        self._marks.append((self._clock.boot_ms(), self.mark))
        self._tasks.spawn(self._forever())
        self._tasks.spawn(self._reclaim_forever())

    async def close(self, seconds: float) -> None:
        """Flush everything, for at most this long. The rest is flushed by the next process with this directory."""
        if self.mark < self._wal.appended:
            try:
                async with asyncio.timeout(seconds):
                    await self.flush_all()
            except (HeaplineError, TimeoutError) as error:
                log.warning("write-ahead log not flushed; the next start replays it", error=str(error), units=self.lag)
        await self._tasks.cancel()
        self._wake_waiting(UnavailableError("this node is closing; retry on another"))

    @property
    def lag(self) -> int:
        """Units in the log that are not known to be in the database."""
        return self._wal.durable - self.mark

    @property
    def lag_ms(self) -> int:
        """For how many milliseconds the oldest unit has waited for its flush, at most; 0 if there is none."""
        return 0 if self._behind_since is None else self._clock.boot_ms() - self._behind_since

    def _on_durable(self) -> None:
        if self._behind_since is None:
            self._behind_since = self._clock.boot_ms()
        self._work.set()

    def appended(self, topic: str, unit: int) -> None:
        """Record that a unit has messages of a topic."""
        self._last_unit[topic] = unit

    async def flush(self, topic: str) -> None:
        """Wait until everything that this node has acknowledged for a topic is in the database."""
        unit = max(self._last_unit.get(topic, 0), self._replay_end)
        if unit > self.mark:
            await self._until(unit)

    async def flush_all(self) -> None:
        """Wait until everything that this node has acknowledged is in the database."""
        if self._wal.appended > self.mark:
            await self._until(self._wal.appended)

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
            elif unit <= self.mark or unit > self._wal.appended:  # the latter were never written
                future.set_result(None)
            else:
                left.append((unit, future))
        self._waiting = left

    # -- flushing --------------------------------------------------------------------------------------------------

    async def _forever(self) -> None:
        while True:
            try:
                self._work.clear()
                await self._reopen()
                began = self._clock.boot_ms()
                await self._flush(await self._wal.after(self.mark))
                self._wake_waiting()
                self._behind_since = began if self.lag > 0 else None
                if self.lag <= 0:
                    await self._sleep()
            except (HeaplineError, OSError, asyncpg.PostgresError) as error:
                self._wal.is_refused |= isinstance(error, JournalCorrupt)
                await self._failed(error)
            except Exception as error:  # a failed flush must not stop the flushes that follow
                log.exception("flush failed; will retry", shard=self._shard.index)
                await self._failed(error)

    async def _failed(self, error: Exception) -> None:
        self.failures_total += 1
        log.warning("flush failed; will retry", shard=self._shard.index, error=str(error), units=self.lag)
        shown = (
            error if isinstance(error, HeaplineError) else UnavailableError(f"cannot flush messages ({error}); retry")
        )
        self._wake_waiting(shown)
        await asyncio.sleep(RETRY_SECONDS)

    async def _sleep(self) -> None:
        """Wait for the next durable unit, at most for the poll interval."""
        try:
            async with asyncio.timeout(self._poll):
                await self._work.wait()
        except TimeoutError:
            return

    async def _reopen(self) -> None:
        """Open the log again, some time after a write to it has failed."""
        now = self._clock.boot_ms()
        if not self._wal.is_usable and not self._wal.is_refused and now >= self._reopen_at:
            self._reopen_at = now + REOPEN_MS
            await self._wal.open(self.mark)
            log.info("write-ahead log is in use again", shard=self._shard.index)

    async def _flush(self, units: Sequence[LogUnit]) -> None:
        """Store units, or only check the mark if there are none."""

        async def work(connection: asyncpg.Connection) -> Stored:
            row = await self._enter(connection)
            if row["mark"] != self.mark or not units:
                return Stored(row["mark"], [], None)
            layout = Layout(row["now"], row["ready_turn"], row["lease_turn"])
            return await self._store(connection, layout, units)

        if not units:
            async with self._shard.connection() as connection:
                row = await connection.fetchrow(statement("enter_flush"), self._wal.id)
            self._check_owner(row["owner"])
            self._continue_at(row["mark"])
            return
        try:
            stored = await self._shard.run(work, lock=self._lock)
        except asyncpg.UniqueViolationError as error:
            await self._rename(units, error)
            return
        self._continue_at(stored.mark)
        for topic in stored.topics:
            self._shard.wakeups.wake(topic.name)
        if stored.deadline is not None:
            self._timekeeper.expect(stored.deadline)
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
        self.mark = mark

    async def _store(self, connection: asyncpg.Connection, layout: Layout, units: Sequence[LogUnit]) -> Stored:
        batches = [batch for unit in units for batch in unit.batches]
        topics = await self._topics(connection, batches, layout.now)
        ready: list[tuple[Any, ...]] = []
        delayed: dict[int, list[tuple[Any, ...]]] = {}  # by topic
        deadlines: list[int] = []
        slot = layout.open("ready")
        for batch in batches:
            topic = topics.get(batch.topic)
            if topic is None:
                log.info("topic was deleted; its messages are dropped", topic=batch.name, count=len(batch.rows))
                continue
            for row in self._rows(batch, topic):
                due, expires = row[2], row[5]
                if due > layout.now:
                    delayed.setdefault(topic.id, []).append(row)
                    deadlines.append(due)
                else:
                    ready.append((slot, topic.id, *row[:4], 0, *row[4:7], None, *row[7:]))
                    if expires is not None:
                        deadlines.append(expires)
        if ready:
            await connection.copy_records_to_table(f"ready_{slot}", records=ready, columns=READY_COLUMNS)
            counts = Counter(row[1] for row in ready)
            await connection.execute(statement("count_flushed"), list(counts), list(counts.values()))
        for id, rows in delayed.items():
            await connection.execute(of_columns("insert_delayed"), id, *columns_of(rows))
        mark = units[-1].number
        await connection.execute(statement("insert_mark"), self._wal.id, mark, layout.now)
        return Stored(mark, list(topics.values()), min(deadlines, default=None))

    def _rows(self, batch: Batch, topic: Topic) -> Iterable[tuple[Any, ...]]:
        """Return the messages of a batch as they are stored, in the order of rows.Stored."""
        for id, key, due, priority, *rest in batch.rows:
            id = self._renamed.get(id, id)
            if topic.id != batch.topic:  # created again, perhaps with another order
                key = topic.ordering.key(priority, unix_ms_of(id))
            yield (id, key, due, priority, *rest)

    async def _topics(self, connection: asyncpg.Connection, batches: Sequence[Batch], now: int) -> dict[int, Topic]:
        """Return topics by the incarnation in the log: the same one, or else the one that has its name now."""
        wanted = {batch.topic: Name(batch.namespace, batch.name) for batch in batches}
        rows = await connection.fetch(statement("topics_by_id"), list(wanted))
        found = {row["id"]: topic_of(Name(row["namespace"], row["name"]), row, now) for row in rows}
        for id, name in wanted.items():
            if id not in found:
                row = await connection.fetchrow(statement("topic_by_name"), *name)
                if row is not None:
                    found[id] = topic_of(name, row, now)
        return found

    async def _rename(self, units: Sequence[LogUnit], error: Exception) -> None:
        """Give new ids to messages whose id is taken: they were acknowledged, so they must be stored."""
        batches = {row[0]: batch for unit in units for batch in unit.batches for row in batch.rows}
        async with self._shard.connection() as connection:
            rows = await connection.fetch(statement("stored_ids"), list(batches))
        taken = [row["id"] for row in rows]
        log.error("message id conflict; giving other ids", shard=self._shard.index, ids=taken, error=str(error))
        for id in taken:
            batch = batches[id]
            turn = await self._shard.read_topic(Name(batch.namespace, batch.name))
            (self._renamed[id],) = self._shard.node.mint(1, turn.now, turn.node_until)

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
