"""A disk in memory that is fast to copy, and blocking work done immediately: for tests that open many directories.

It loses nothing and never fails; for disks that do, see heapline.testing. A copy shares all bytes with its original
until one of them writes.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from heapline.contract.errors import DirectoryLocked
from heapline.engine.io import Io
from heapline.journal.disk import Buffer, File, Lock

T = TypeVar("T")


class _Content:
    """The content of a file, whatever its name; shared between disks as long as it is `bytes`."""

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self.data = data

    def own(self) -> bytearray:
        if not isinstance(self.data, bytearray):
            self.data = bytearray(self.data)
        return self.data


class RamFile:
    def __init__(self, path: str, content: _Content) -> None:
        self.path, self._content = path, content

    def pread(self, n: int, off: int) -> bytes:
        return bytes(self._content.data[off : off + n])

    def pwritev(self, parts: Sequence[Buffer], off: int) -> None:
        new = b"".join(parts)
        data = self._content.own()
        data.extend(bytes(max(0, off - len(data))))
        data[off : off + len(new)] = new

    def zero(self, off: int, n: int) -> None:
        self.pwritev([bytes(n)], off)

    def fallocate(self, off: int, n: int) -> None:
        if off + n > self.size():
            self.truncate(off + n)

    def fdatasync(self) -> None:
        pass

    def size(self) -> int:
        return len(self._content.data)

    def truncate(self, n: int) -> None:
        data = self._content.own()
        del data[n:]
        data.extend(bytes(n - len(data)))

    def close(self) -> None:
        pass


class _RamLock:
    def __init__(self, locks: set[str], path: str) -> None:
        self._locks, self._path = locks, path

    def release(self) -> None:
        self._locks.discard(self._path)


class RamDisk:
    def __init__(self) -> None:
        self._files: dict[str, _Content] = {}
        self._directories: set[str] = {"/"}
        self._locks: set[str] = set()

    def copy(self) -> RamDisk:
        other = RamDisk()
        for path, content in self._files.items():
            content.data = bytes(content.data)
            other._files[path] = _Content(content.data)
        other._directories = set(self._directories)
        return other

    def paths(self) -> list[str]:
        return sorted(self._files)

    def directories(self) -> list[str]:
        return sorted(self._directories - {"/"})

    def open(self, path: str, *, write: bool = False) -> File:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return RamFile(path, self._files[path])

    def create(self, path: str) -> File:
        self._files[path] = _Content()
        return RamFile(path, self._files[path])

    def listdir(self, path: str) -> list[str]:
        if path not in self._directories:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        within = path.rstrip("/") + "/"
        below = (p for p in [*self._files, *self._directories] if p.startswith(within) and p != within)
        return sorted({p[len(within) :].partition("/")[0] for p in below})

    def exists(self, path: str) -> bool:
        return path in self._files or path in self._directories

    def rename(self, old: str, new: str) -> None:
        if old in self._files:
            self._files[new] = self._files.pop(old)
            return
        moved = {p for p in self._directories if p == old or p.startswith(old + "/")}
        self._directories = self._directories - moved | {new + p[len(old) :] for p in moved}
        for path in [p for p in self._files if p.startswith(old + "/")]:
            self._files[new + path[len(old) :]] = self._files.pop(path)

    def unlink(self, path: str) -> None:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        del self._files[path]

    def fsync_dir(self, path: str) -> None:
        pass

    def mkdir(self, path: str) -> None:
        while path not in self._directories:
            self._directories.add(path)
            path = posixpath.dirname(path)

    def rmdir(self, path: str) -> None:
        self._directories.discard(path)

    def remove_tree(self, path: str) -> None:
        self._files = {p: d for p, d in self._files.items() if not p.startswith(path + "/")}
        self._directories = {p for p in self._directories if p != path and not p.startswith(path + "/")}

    def read_file(self, path: str) -> bytes:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return bytes(self._files[path].data)

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        self._files[path] = _Content(bytes(data))

    def lock(self, path: str) -> Lock:
        if path in self._locks:
            raise DirectoryLocked(posixpath.dirname(path))
        self._locks.add(path)
        return _RamLock(self._locks, path)


class InlineIo(Io):
    """An `Io` that runs everything immediately, in the only thread."""

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass
