"""An in-memory disk for the journal's tests, and helpers to write and read small journals on it.

The disk records which sectors were written since the last sync, so that a power cut can revert any subset of them.
Names are durable immediately; lost renames are tested with the simulator's disk.
"""

from __future__ import annotations

import copy
import errno
import posixpath
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import DirectoryLocked
from heapline.core.record import size_class
from heapline.journal.block import make_block, new_rows
from heapline.journal.disk import SECTOR, Buffer, File, Lock
from heapline.journal.journal import Journal
from heapline.journal.unit import Frame, Unit
from heapline.journal.writer import SyncPolicy

BLOCK = 4096
PATH = "/data/topic"
I64 = npt.NDArray[np.int64]


class PowerCut(BaseException):
    """Raised in the middle of an operation; only the test may catch it."""


@dataclass
class Inode:
    data: bytearray = field(default_factory=bytearray)
    blocks: set[int] = field(default_factory=set)
    unsynced: dict[int, bytes] = field(default_factory=dict)  # sector -> what it held when last synced


class MemoryFile:
    def __init__(self, disk: MemoryDisk, path: str, inode: Inode, writable: bool) -> None:
        self.disk, self.path, self.inode, self.writable = disk, path, inode, writable

    def pread(self, n: int, off: int) -> bytes:
        self.disk.step("pread", self.path)
        return bytes(self.inode.data[off : off + n])

    def pwritev(self, parts: Sequence[Buffer], off: int) -> None:
        self._write(b"".join(parts), off, "pwritev")

    def zero(self, off: int, n: int) -> None:
        self._write(bytes(n), off, "zero")

    def _write(self, data: bytes, off: int, what: str) -> None:
        assert self.writable
        end = off + len(data)
        self.disk.allocate(self.inode, off, end)
        held = self.inode.data
        for sector in range(off // SECTOR, -(-end // SECTOR)):
            self.inode.unsynced.setdefault(sector, bytes(held[sector * SECTOR : (sector + 1) * SECTOR]))
        if len(held) < end:
            held.extend(bytes(end - len(held)))
        held[off:end] = data
        self.disk.step(what, self.path)

    def fallocate(self, off: int, n: int) -> None:
        self.disk.step("fallocate", self.path)
        self.disk.allocate(self.inode, off, off + n)
        if len(self.inode.data) < off + n:
            self.inode.data.extend(bytes(off + n - len(self.inode.data)))

    def fdatasync(self) -> None:
        self.disk.step("fdatasync", self.path)
        self.inode.unsynced.clear()

    def size(self) -> int:
        return len(self.inode.data)

    def truncate(self, n: int) -> None:
        data = self.inode.data
        if n < len(data):
            del data[n:]
            self.inode.blocks = {b for b in self.inode.blocks if b * BLOCK < n}
        else:
            data.extend(bytes(n - len(data)))

    def close(self) -> None:
        pass


class MemoryLock:
    def __init__(self, disk: MemoryDisk, path: str) -> None:
        self._disk, self._path = disk, path

    def release(self) -> None:
        self._disk.locks.discard(self._path)


class MemoryDisk:
    """Files by path. `on_step` is called at every operation and may raise; `space` is the disk's size in bytes."""

    def __init__(self, space: int | None = None) -> None:
        self.files: dict[str, Inode] = {}
        self.directories = {"/", "/data"}
        self.locks: set[str] = set()
        self.space = space
        self.steps = 0
        self.on_step: Callable[[str, str], None] = lambda what, path: None
        self.log: list[tuple[str, str]] = []

    def step(self, what: str, path: str) -> None:
        self.steps += 1
        self.log.append((what, path))
        self.on_step(what, path)

    def allocate(self, inode: Inode, off: int, end: int) -> None:
        wanted = set(range(off // BLOCK, -(-end // BLOCK)))
        if self.space is not None:
            used = sum(len(i.blocks) for i in self.files.values())
            if (used + len(wanted - inode.blocks)) * BLOCK > self.space:
                raise OSError(errno.ENOSPC, "no space left in the test's disk")
        inode.blocks |= wanted

    def copy(self) -> MemoryDisk:
        """Return another disk with the same files, nothing in flight and no faults."""
        other = MemoryDisk()
        other.files = copy.deepcopy(self.files)
        other.directories = set(self.directories)
        return other

    def cut_power(self, rng: random.Random) -> MemoryDisk:
        """Apply a power cut: of what was not synced, keep any subset of sectors."""
        other = self.copy()
        for inode in other.files.values():
            lose = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
            for sector, old in inode.unsynced.items():
                if rng.random() < lose:
                    start = sector * SECTOR
                    keep = min(SECTOR, len(inode.data) - start)
                    inode.data[start : start + keep] = old.ljust(SECTOR, b"\0")[:keep]
            inode.unsynced.clear()
        return other

    def open(self, path: str, *, write: bool = False) -> File:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return MemoryFile(self, path, self.files[path], write)

    def create(self, path: str) -> File:
        assert posixpath.dirname(path) in self.directories, path
        self.step("create", path)
        self.files[path] = Inode()
        return MemoryFile(self, path, self.files[path], True)

    def listdir(self, path: str) -> list[str]:
        if path not in self.directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        below = [p for p in [*self.files, *self.directories] if posixpath.dirname(p) == path and p != path]
        return sorted(posixpath.basename(p) for p in below)

    def exists(self, path: str) -> bool:
        return path in self.files or path in self.directories

    def rename(self, old: str, new: str) -> None:
        self.step("rename", new)
        if old in self.directories:
            self.directories = {_moved(p, old, new) for p in self.directories}
            self.files = {_moved(p, old, new): inode for p, inode in self.files.items()}
        else:
            self.files[new] = self.files.pop(old)

    def unlink(self, path: str) -> None:
        self.step("unlink", path)
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        del self.files[path]

    def fsync_dir(self, path: str) -> None:
        self.step("fsync_dir", path)

    def mkdir(self, path: str) -> None:
        while path not in self.directories:
            self.directories.add(path)
            path = posixpath.dirname(path)

    def rmdir(self, path: str) -> None:
        self.directories.remove(path)

    def remove_tree(self, path: str) -> None:
        self.files = {p: i for p, i in self.files.items() if not p.startswith(path + "/")}
        self.directories = {p for p in self.directories if p != path and not p.startswith(path + "/")}

    def read_file(self, path: str) -> bytes:
        file = self.open(path)
        return file.pread(file.size(), 0)

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        file = self.create(path + ".tmp")
        file.pwritev([data], 0)
        file.fdatasync()
        self.rename(path + ".tmp", path)
        self.fsync_dir(posixpath.dirname(path))

    def lock(self, path: str) -> Lock:
        if path in self.locks:
            raise DirectoryLocked(posixpath.dirname(path))
        self.locks.add(path)
        return MemoryLock(self, path)


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(old + "/") else path


def open_journal(disk: MemoryDisk, **options: object) -> tuple[Journal, list[Unit]]:
    """Return the journal at PATH, created if necessary, and its units."""
    if not disk.exists(PATH):
        Journal.create(disk, PATH, incarnation=7, segment_bytes=int(str(options.pop("segment_bytes", 64 << 10))))
    options.pop("segment_bytes", None)
    journal, units = Journal.open(disk, PATH, **options)  # type: ignore[arg-type]
    return journal, list(units)


def put(
    journal: Journal,
    payloads: Sequence[bytes],
    *,
    smalls: Sequence[bytes] | None = None,
    first_id: int = 1,
    partition: int = 0,
    first_offset: int = 0,
    time: int = 0,
) -> I64:
    """Add one block and one frame to the open unit and return the positions."""
    rows = new_rows(len(payloads))
    rows["id"] = np.arange(first_id, first_id + len(payloads))
    rows["priority"] = -5
    block = make_block(rows, smalls, payloads)
    events = b"events of %d" % first_id
    journal.room(block.nbytes + len(events), time=time)
    segment, at = journal.add_block(block)
    journal.add_frames([Frame(partition, first_offset, len(payloads), events, first_id)])
    sizes = size_class(np.array([len(p) for p in payloads], np.int64))
    positions: I64 = journal.layout.pack(segment, at + 80 * np.arange(len(payloads)), sizes, 0)
    return positions


def commit(journal: Journal, time: int = 0) -> int:
    """Seal and commit everything and return the last unit's number."""
    journal.seal(time, time)
    if journal.wants_prepare:
        journal.prepare()
    for unit in journal.take_sealed():
        journal.commit(unit)
    return journal.written_unit


def write_units(journal: Journal, sizes: Iterable[int], start: int = 1) -> list[I64]:
    """Write one unit per size, each with one message of that many bytes."""
    placed = []
    for number, size in enumerate(sizes, start):
        placed.append(put(journal, [bytes([number % 251 + 1]) * size], first_id=number, first_offset=number - 1))
        commit(journal, time=1000 + number)
    return placed


def contents(units: Iterable[Unit]) -> list[tuple[int, bytes, bytes]]:
    """Return the comparable parts of units: number, events, payloads."""
    return [
        (u.number, b"|".join(f.events for f in u.frames), b"|".join(bytes(u.payloads(b)) for b in u.blocks))
        for u in units
    ]


def policies() -> list[SyncPolicy]:
    return ["commit", "interval", "os"]
