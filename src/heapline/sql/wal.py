"""The node's write-ahead log: enqueued messages that are durable here and not yet in Postgres.

Each shard has a log of its own, a journal (heapline.journal) whose units are numbered. A unit is one write and one
fdatasync, for all enqueues that arrived meanwhile. So what a journal promises holds: a torn last unit is cut, other
damage is refused with file and byte. The database stores the number of the last unit that was flushed, so a unit is
stored there once (flusher.py).

    wal/
    ├── LOCK            held by the one process that uses the directory
    ├── wal.json        WAL_VERSION 1: the deployment that the log belongs to, the id of each shard's log, and a
    │                   random number of each process that has opened the directory
    └── shard-0/        the journal of shard 0, and so on

The database stores that number, too. So it is noticed if a copy of the directory (of a cloned machine) is in use beside
the original: both append units with the same numbers, and what one has flushed says nothing about the other.

To change the format of a batch after a release: bump BATCH_VERSION, keep the decoder of the old one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from heapline.contract.errors import BadRequest, JournalCorrupt, UnavailableError, UnknownFormat
from heapline.journal.disk import Disk, Lock
from heapline.journal.journal import Journal
from heapline.journal.reclaim import delete_segment, held_by
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.unit import Frame, SealedUnit
from heapline.logs import Log

log = Log("heapline.sql")
WAL_VERSION = BATCH_VERSION = 1
SEGMENT_BYTES = 32 << 20
BATCH_BYTES_MAX = 4 << 20  # of one enqueue; larger ones are written to Postgres directly
MEMORY_BYTES_MAX = 32 << 20  # of units kept in memory until they are flushed; others are read from the log
OWNERS_MAX = 1000  # that are remembered: a database that failed over to an older state may know an earlier one
SLICE_BYTES = 4 << 20  # that are read from the log at a time
#: id, key, due, priority, ttl, expires, max_retries, name, headers, scope, hash, payload: as in rows.Stored
Row = tuple[
    int, int, int, int, int | None, int | None, int | None, bytes | None, bytes | None, int | None, bytes | None, bytes
]


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """The messages of one enqueue."""

    version: int
    topic: int  # its incarnation
    namespace: str
    name: str
    rows: list[Row]


class LogUnit(NamedTuple):
    """A durable unit of the log."""

    number: int
    batches: list[Batch]
    nbytes: int


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of wal.json."""

    version: int
    deployment: str
    logs: list[int]  # a random number per shard, under which Postgres knows the log
    owners: list[int] = []  # a random number of each process that has opened the directory, the newest last


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Batch).decode
_decode_identity = msgspec.json.Decoder(Identity).decode


def decode_batch(data: bytes, path: str) -> Batch:
    batch = _decode(data)
    if batch.version != BATCH_VERSION:
        raise UnknownFormat(path, batch.version)
    return batch


class WalDirectory:
    """The directory of a node's logs, locked by this process."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk, self.path = disk, path
        self._lock: Lock | None = None
        self.identity = Identity(WAL_VERSION, "", [])

    def open(self, deployment: str, shards: int) -> None:
        """Lock the directory, or create it. Raise BadRequest if it belongs to other databases."""
        disk, name = self.disk, f"{self.path}/wal.json"
        made = [path for path in _with_parents(self.path) if not disk.exists(path)]
        disk.mkdir(self.path)
        for path in made:  # a directory that a power cut removes takes its messages with it
            disk.fsync_dir(os.path.dirname(path) or ".")
        self._lock = disk.lock(f"{self.path}/LOCK")
        if disk.exists(name):
            self.identity = read_identity(disk, name)
            if (self.identity.deployment, len(self.identity.logs)) != (deployment, shards):
                raise BadRequest(
                    f"{self.path} is the write-ahead log of deployment {self.identity.deployment} with "
                    f"{len(self.identity.logs)} shards, not of {deployment} with {shards}; give another directory"
                )
        else:
            self.identity = self._create(deployment, shards)
        owners = [*self.identity.owners, secrets.randbits(62)][-OWNERS_MAX:]
        self.identity = msgspec.structs.replace(self.identity, owners=owners)
        disk.write_file_atomic(name, msgspec.json.encode(self.identity))

    def _create(self, deployment: str, shards: int) -> Identity:
        disk = self.disk
        for index in range(shards):  # left by a process that was killed before wal.json was written
            disk.remove_tree(self.log_path(index))
        ids = [secrets.randbits(62) | 1 for _ in range(shards)]
        for index, id in enumerate(ids):
            Journal.create(disk, self.log_path(index), incarnation=id, segment_bytes=SEGMENT_BYTES)
        return Identity(WAL_VERSION, deployment, ids)

    def log_path(self, shard: int) -> str:
        return f"{self.path}/shard-{shard}"

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _with_parents(path: str) -> list[str]:
    parent = os.path.dirname(path)
    return [path] if parent in ("", path) else [*_with_parents(parent), path]


def read_identity(disk: Disk, path: str) -> Identity:
    try:
        found = _decode_identity(disk.read_file(path))
    except msgspec.MsgspecError as error:
        raise JournalCorrupt(path, 0, str(error)) from None
    if found.version != WAL_VERSION:
        raise UnknownFormat(path, found.version)
    return found


class Wal:
    """The log of one shard: append and group commit on the event loop, I/O in one thread."""

    def __init__(self, disk: Disk, path: str, id: int, owners: Sequence[int], wall_ms: Callable[[], int]) -> None:
        self._disk, self._path, self.id, self.owners, self._wall_ms = disk, path, id, owners, wall_ms
        self.is_refused = False  # it will not be flushed, so it accepts nothing
        self._journal: Journal | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="heapline-wal")
        self._open_batches: dict[int, list[Batch]] = {}  # by unit, until it is durable
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._recent: deque[LogUnit] = deque()
        self._recent_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self.on_durable: Callable[[], None] = lambda: None
        self.durable = 0  # number of the last unit that is durable
        self.appended = 0  # number of the last unit that is durable, or is being written

    async def open(self, flushed: int) -> None:
        """Open the log for appending; after a failed write, open it again. Units above `flushed` are still needed."""
        journal = await self._run(self._open, flushed)
        self._recent.clear()
        self._recent_bytes = 0
        self._journal = journal
        self.durable = self.appended = journal.next_unit - 1

    def _open(self, flushed: int) -> Journal:
        if self._journal is not None:
            self._journal.close()
        after = max(flushed, self._reclaimed())
        journal, units = Journal.open(self._disk, self._path, incarnation=self.id, after_unit=after)
        for _ in units:  # Checked here, and read again when they are flushed. Raises if a flushed unit is missing.
            pass
        return journal

    def _reclaimed(self) -> int:
        """Return the last unit that the log no longer has. A database that was restored may not have it either."""
        first = read_header(self._disk, self._path, list_segments(self._disk, self._path)[0])
        return 0 if first is None else first.first_unit - 1

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._journal is not None:
            await self._run(self._journal.close)
        self._thread.shutdown(wait=False)

    def _require(self) -> Journal:
        if self._journal is None:
            raise UnavailableError(f"the write-ahead log {self._path} is not open; retry")
        return self._journal

    async def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    @property
    def is_usable(self) -> bool:
        """Whether the log accepts messages. After a failed write it has to be opened again."""
        return self._journal is not None and self._journal.poisoned is None and not self.is_refused

    # -- writing ---------------------------------------------------------------------------------------------------

    def append(self, batch: Batch) -> tuple[int, asyncio.Future[None]]:
        """Add a batch. Return its unit, and a future that is done when the batch is durable."""
        journal, data = self._require(), _encode(batch)
        journal.room(len(data), blocks=0, frames=1, wall=self._wall_ms())
        journal.add_frames([Frame(0, 0, 0, data)])
        unit = self.appended = journal.open_unit_number
        self._open_batches.setdefault(unit, []).append(batch)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(unit, []).append(future)
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())
        return unit, future

    async def _write_all(self) -> None:
        """Write units until nothing waits. While one is written, the next one fills."""
        try:
            while self._waiting:
                journal = self._require()
                journal.seal(0, self._wall_ms())
                units = journal.take_sealed()
                await self._run(_commit, journal, units)
                for unit in units:
                    self._written(unit)
                self.on_durable()
        except BaseException as error:  # the journal is poisoned: nothing that waits has a known outcome
            self._fail(error)
        finally:
            self._writing = None

    def _written(self, unit: SealedUnit) -> None:
        self.durable = unit.number
        self._recent.append(LogUnit(unit.number, self._open_batches.pop(unit.number), unit.nbytes))
        self._recent_bytes += unit.nbytes
        while self._recent_bytes > MEMORY_BYTES_MAX:
            self._recent_bytes -= self._recent.popleft().nbytes
        for future in self._waiting.pop(unit.number):
            if not future.done():
                future.set_result(None)

    def _fail(self, error: BaseException) -> None:
        log.error("cannot write the write-ahead log; enqueues go to postgres", path=self._path, error=repr(error))
        waiting, self._waiting, self._open_batches = self._waiting, {}, {}
        self.appended = self.durable  # no call waits for the flush of what may not be there
        for future in (future for futures in waiting.values() for future in futures):
            if not future.done():
                future.set_exception(
                    UnavailableError(f"cannot write the write-ahead log ({error}); the outcome is unknown: retry")
                )
        self.on_durable()

    # -- reading ---------------------------------------------------------------------------------------------------

    async def after(self, flushed: int) -> list[LogUnit]:
        """Return durable units above `flushed`, in order and without gaps: from memory, else a slice of the log."""
        while self._recent and self._recent[0].number <= flushed:
            self._recent_bytes -= self._recent.popleft().nbytes
        if flushed >= self.durable:
            return []
        if self._recent and self._recent[0].number == flushed + 1:
            return _first(self._recent)
        units: list[LogUnit] = await self._run(self._read, flushed)
        return units

    def _read(self, flushed: int) -> list[LogUnit]:
        found: list[LogUnit] = []
        size = 0
        reclaimed = self._reclaimed()
        if reclaimed > flushed:
            log.error(
                "the database has lost flushed messages that the log no longer has",
                path=self._path,
                units=reclaimed - flushed,
            )
            flushed = reclaimed
        for unit in self._require().reader().read_units(start_unit=flushed + 1):
            batches = [decode_batch(frame.events, self._path) for frame in unit]
            found.append(LogUnit(unit.number, batches, unit.header.nbytes))
            size += unit.header.nbytes
            if size >= SLICE_BYTES:
                break
        return found

    # -- reclaiming ------------------------------------------------------------------------------------------------

    async def reclaim(self, unneeded: int) -> None:
        """Delete segments whose units are all at or below `unneeded`."""
        await self._run(self._reclaim, unneeded)

    def _reclaim(self, unneeded: int) -> None:
        limits = {"older_unit": unneeded, "durable_unit": self._require().durable_unit, "now": self._wall_ms()}
        for segment in list_segments(self._disk, self._path):
            if held_by(self._disk, self._path, segment, **limits):
                return
            delete_segment(self._disk, self._path, segment, **limits)


def _commit(journal: Journal, units: Sequence[SealedUnit]) -> None:
    if journal.wants_prepare:
        journal.prepare()
    for unit in units:
        journal.commit(unit)


def _first(units: deque[LogUnit]) -> list[LogUnit]:
    """Return the first units, up to about SLICE_BYTES, at least one."""
    room = SLICE_BYTES

    def has_room(unit: LogUnit) -> bool:
        nonlocal room
        had, room = room, room - unit.nbytes
        return had > 0

    return list(takewhile(has_room, units))
