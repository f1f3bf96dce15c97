"""A disk in memory that can be cut off, filled up and broken: the `Disk` of the journal for tests.

Bytes are durable after `fdatasync` (inode.py), names after `fsync_dir`. A power cut (`crash`) returns another disk with
the surviving data: everything that was synced, any subset of the unsynced sectors, and a prefix of the unsynced name
changes in each directory. A rename exists completely or not at all, even between directories.
`inject` makes calls fail, `cut_power_in` ends everything in the middle of an operation, `capacity` fills the disk,
`damage` makes a sector unreadable or wrong. Everything is drawn from the seed, so a run can be repeated.
"""

from __future__ import annotations

import errno
import os
import posixpath
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from heapline.contract.errors import DirectoryLocked
from heapline.journal.disk import Buffer, File, Lock
from tests.simulation.inode import BLOCK, SECTOR, Inode


class PowerCut(BaseException):
    """The machine stopped in the middle of a disk operation. Only the simulator catches it."""


class Directory:
    """Names as seen now, and as they are on the disk."""

    def __init__(self) -> None:
        self.entries: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}


Node = Inode | Directory
Change = list[tuple[Directory, str, Node | None]]  # names set, or removed, in one step


@dataclass
class Fault:
    """Calls of `operation` on a path that contains `path` fail: `times` of them, after `after` more have passed."""

    operation: str
    error: int
    path: str = ""
    after: int = 0
    times: int = 1


class FakeFile:
    def __init__(self, disk: FakeDisk, path: str, inode: Inode, writable: bool) -> None:
        self.path = path
        self._disk, self._inode, self._writable = disk, inode, writable
        self._is_open = True

    def _step(self, operation: str, write: bool = False) -> None:
        if not self._is_open or (write and not self._writable):
            raise OSError(errno.EBADF, "the file is closed, or not open for writing", self.path)
        self._disk.step(operation, self.path)

    def pread(self, n: int, off: int) -> bytes:
        self._step("pread")
        if self._inode.is_bad(n, off):
            raise OSError(errno.EIO, "a sector cannot be read", self.path)
        return self._inode.read(n, off)

    def pwritev(self, parts: Sequence[Buffer], off: int) -> None:
        data = b"".join(parts)
        rng = self._disk.rng
        try:
            self._step("pwritev", write=True)
        except OSError as error:
            if error.errno != errno.EBADF:  # part of it may have been taken before the error
                end = rng.randrange(off, off + len(data) + 1) // SECTOR * SECTOR
                part = data[: max(0, end - off)]
                if not self._inode.blocks_wanted(off, off + len(part)) and off + len(part) <= self.size():
                    self._inode.write(part, off, rng)
            raise
        self._disk.take_space(self._inode, off, off + len(data), self.path)
        self._inode.write(data, off, rng)

    def zero(self, off: int, n: int) -> None:
        self._step("zero", write=True)
        self._disk.take_space(self._inode, off, off + n, self.path)
        self._inode.write(bytes(n), off, self._disk.rng)

    def fallocate(self, off: int, n: int) -> None:
        self._step("fallocate", write=True)
        if n > 0:
            self._disk.take_space(self._inode, off, off + n, self.path)
            self._inode.grow(off + n)

    def fdatasync(self) -> None:
        try:
            self._step("fdatasync")
        except OSError as error:
            if error.errno != errno.EBADF:
                self._inode.fail_sync(self._disk.rng)
            raise
        self._inode.sync()

    def size(self) -> int:
        return len(self._inode.data)

    def truncate(self, n: int) -> None:
        self._step("truncate", write=True)
        self._inode.truncate(n)

    def close(self) -> None:
        self._is_open = False


class FakeLock:
    def __init__(self, locks: set[str], path: str) -> None:
        self._locks, self._path = locks, path

    def release(self) -> None:
        self._locks.discard(self._path)


class FakeDisk:
    """See the module.

    >>> disk = FakeDisk()
    >>> disk.write_file_atomic("/kept", b"synced, with its name")
    >>> disk.crash().read_file("/kept")
    b'synced, with its name'
    """

    def __init__(self, capacity: int | None = None, seed: int = 0) -> None:
        self.capacity = capacity  # bytes; None = no limit
        self.rng = random.Random(seed)
        self.steps = 0
        self.rates: dict[str, float] = {}  # operation -> probability of failing with EIO
        self.is_off = False
        self.on_step: Callable[[str, str], None] = lambda operation, path: None
        self._root = Directory()
        self._pending: list[Change] = []
        self._faults: list[Fault] = []
        self._cut_at: int | None = None
        self._locks: set[str] = set()

    # -- faults ----------------------------------------------------------------------------------------------------

    def inject(self, operation: str, error: int = errno.EIO, *, path: str = "", after: int = 0, times: int = 1) -> None:
        """Make calls fail: pread, pwritev, zero, fallocate, truncate, fdatasync, open, create, rename, unlink, …"""
        self._faults.append(Fault(operation, error, path, after, times))

    def clear_faults(self) -> None:
        self._faults.clear()
        self.rates.clear()

    def cut_power_in(self, steps: int | None) -> None:
        """Raise PowerCut after this many steps; None cancels that."""
        self._cut_at = None if steps is None else self.steps + steps

    def step(self, operation: str, path: str) -> None:
        """Every operation calls this first."""
        if self.is_off or (self._cut_at is not None and self.steps >= self._cut_at):
            self.is_off = True
            raise PowerCut
        self.steps += 1
        self.on_step(operation, path)
        for fault in self._faults:
            if fault.operation == operation and fault.path in path:
                fault.after -= 1
                if fault.after < 0 < fault.times:
                    fault.times -= 1
                    raise OSError(fault.error, f"injected: {os.strerror(fault.error)}", path)
        if self.rates.get(operation) and self.rng.random() < self.rates[operation]:
            raise OSError(errno.EIO, "injected at random", path)

    def damage(self, path: str, sector: int, how: str = "garbage") -> None:
        """Damage a sector with durable bytes: `eio`, `garbage`, `zeros` or `flip`."""
        self._inode(path).damage(sector, how, self.rng)

    corrupt_sector = damage

    # -- space -----------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        return sum(len(inode.blocks) for _, inode in self.walk()) * BLOCK

    def take_space(self, inode: Inode, off: int, end: int, path: str) -> None:
        wanted = inode.blocks_wanted(off, end)
        if wanted and self.capacity is not None and self.used + len(wanted) * BLOCK > self.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        inode.take_blocks(wanted)

    # -- power -----------------------------------------------------------------------------------------------------

    def crash(self, rng: random.Random | None = None) -> FakeDisk:
        """Cut the power: return another disk with the surviving data. This one is unchanged and can be cut again."""
        rng = rng or self.rng
        other = FakeDisk(self.capacity, rng.getrandbits(32))
        names: dict[Directory, dict[str, Node]] = {}
        stopped: set[Directory] = set()
        keep = rng.choice((0.0, 0.5, 0.9, 1.0))
        for change in self._pending:
            touched = {directory for directory, _, _ in change}
            if touched & stopped or rng.random() >= keep:
                stopped |= touched
                continue
            for directory, name, node in change:
                _set(names.setdefault(directory, dict(directory.durable)), name, node)
        _survive(self._root, other._root, names, rng)
        return other

    # -- names -----------------------------------------------------------------------------------------------------

    def _find(self, path: str) -> Node | None:
        node: Node | None = self._root
        for part in _parts(path):
            if not isinstance(node, Directory):
                return None
            node = node.entries.get(part)
        return node

    def _directory(self, path: str) -> Directory:
        found = self._find(path)
        if not isinstance(found, Directory):
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return found

    def _inode(self, path: str) -> Inode:
        found = self._find(path)
        if not isinstance(found, Inode):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return found

    def _change(self, *names: tuple[str, Node | None]) -> None:
        """Set or remove names, in one step."""
        change: Change = [(self._directory(posixpath.dirname(_norm(p))), posixpath.basename(p), n) for p, n in names]
        for directory, name, node in change:
            _set(directory.entries, name, node)
        self._pending.append(change)

    def open(self, path: str, *, write: bool = False) -> File:
        self.step("open", path)
        return FakeFile(self, path, self._inode(path), write)

    def create(self, path: str) -> File:
        self.step("create", path)
        found = self._find(path)
        if isinstance(found, Inode):
            found.truncate(0)
        else:
            found = Inode()
            self._change((path, found))
        return FakeFile(self, path, found, writable=True)

    def listdir(self, path: str) -> list[str]:
        self.step("listdir", path)
        return sorted(self._directory(path).entries)

    def exists(self, path: str) -> bool:
        self.step("exists", path)
        return self._find(path) is not None

    def rename(self, old: str, new: str) -> None:
        self.step("rename", old)
        node = self._find(old)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", old)
        target = self._find(new)
        if isinstance(target, Directory) and target.entries:
            raise OSError(errno.ENOTEMPTY, "the directory is not empty", new)
        self._change((old, None), (new, node))

    def unlink(self, path: str) -> None:
        self.step("unlink", path)
        self._inode(path)
        self._change((path, None))

    def fsync_dir(self, path: str) -> None:
        self.step("fsync_dir", path)
        wanted = {self._directory(path)}
        settled: list[Change] = []
        # Backwards, so that a directory takes along everything that earlier changes put in it.
        for change in reversed(self._pending):
            touched = {directory for directory, _, _ in change}
            if touched & wanted:
                wanted |= touched
                settled.append(change)
        for change in reversed(settled):
            for directory, name, node in change:
                _set(directory.durable, name, node)
        done = {id(change) for change in settled}
        self._pending = [change for change in self._pending if id(change) not in done]

    def mkdir(self, path: str) -> None:
        self.step("mkdir", path)
        at = "/"
        for part in _parts(path):
            at = posixpath.join(at, part)
            found = self._find(at)
            if found is None:
                self._change((at, Directory()))
            elif isinstance(found, Inode):
                raise FileExistsError(errno.EEXIST, "a file is in the way", at)

    def rmdir(self, path: str) -> None:
        self.step("rmdir", path)
        if self._directory(path).entries:
            raise OSError(errno.ENOTEMPTY, "the directory is not empty", path)
        self._change((path, None))

    def remove_tree(self, path: str) -> None:
        found = self._find(path)
        if isinstance(found, Directory):
            for name in sorted(found.entries):
                self.remove_tree(posixpath.join(path, name))
            self.rmdir(path)
        elif found is not None:
            self.unlink(path)

    def read_file(self, path: str) -> bytes:
        file = self.open(path)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        temporary = path + ".tmp"
        file = self.create(temporary)
        try:
            file.pwritev([data], 0)
            file.fdatasync()
        except OSError:
            self.unlink(temporary)
            raise
        finally:
            file.close()
        self.rename(temporary, path)
        self.fsync_dir(posixpath.dirname(_norm(path)))

    def lock(self, path: str) -> Lock:
        self.step("lock", path)
        if path in self._locks:
            raise DirectoryLocked(posixpath.dirname(path) or path)
        if self._find(path) is None:
            self._change((path, Inode()))
        self._locks.add(path)
        return FakeLock(self._locks, path)

    # -- for tests to read ---------------------------------------------------------------------------------------------

    def walk(self) -> Iterator[tuple[str, Inode]]:
        """Every file by path, in order."""
        yield from _walk(self._root, "")

    def contents(self) -> dict[str, bytes]:
        """Return the current content of every file, as a copy."""
        return {path: bytes(inode.data) for path, inode in self.walk()}


def _norm(path: str) -> str:
    return posixpath.normpath("/" + path)


def _parts(path: str) -> list[str]:
    return [part for part in _norm(path).split("/") if part]


def _set(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _walk(directory: Directory, path: str) -> Iterator[tuple[str, Inode]]:
    for name in sorted(directory.entries):
        node = directory.entries[name]
        if isinstance(node, Inode):
            yield f"{path}/{name}", node
        else:
            yield from _walk(node, f"{path}/{name}")


def _survive(
    directory: Directory, into: Directory, names: dict[Directory, dict[str, Node]], rng: random.Random
) -> None:
    for name, node in sorted(names.get(directory, directory.durable).items(), key=lambda item: item[0]):
        copy: Node
        if isinstance(node, Inode):
            copy = node.crashed(rng)
        else:
            copy = Directory()
            _survive(node, copy, names, rng)
        into.entries[name] = into.durable[name] = copy


__all__ = ["BLOCK", "SECTOR", "FakeDisk", "PowerCut"]
