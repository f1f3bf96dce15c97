"""A disk that is a few dictionaries: fast, and lost with the object. It simulates no faults; `FakeDisk` does.

Writes are durable immediately, because nothing survives this process anyway. A file's trailing zeros use no memory, so
that a journal's preallocated segments cost only what was written to them.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Sequence

from heapline.contract.errors import DirectoryLocked
from heapline.journal.disk import Buffer, File, Lock


class _Node:
    """A file's bytes; those from `len(data)` to `size` are zeros."""

    __slots__ = ("data", "size")

    def __init__(self) -> None:
        self.data = bytearray()
        self.size = 0


class MemoryFile:
    def __init__(self, path: str, node: _Node, writable: bool) -> None:
        self.path = path
        self._node = node
        self._writable = writable

    def pread(self, n: int, off: int) -> bytes:
        node = self._node
        n = min(n, node.size - off)
        if n <= 0:
            return b""
        got = bytes(node.data[off : off + n])
        return got if len(got) == n else got + bytes(n - len(got))

    def pwritev(self, parts: Sequence[Buffer], off: int) -> None:
        node = self._changed()
        data = node.data
        if off > len(data):
            data.extend(bytes(off - len(data)))
        for part in parts:
            data[off : off + len(part)] = part
            off += len(part)
        node.size = max(node.size, off)

    def zero(self, off: int, n: int) -> None:
        node = self._changed()
        end = min(off + n, len(node.data))
        if end > off:
            node.data[off:end] = bytes(end - off)
        node.size = max(node.size, off + n)

    def fallocate(self, off: int, n: int) -> None:
        node = self._changed()
        node.size = max(node.size, off + n)

    def fdatasync(self) -> None:
        pass

    def size(self) -> int:
        return self._node.size

    def truncate(self, n: int) -> None:
        node = self._changed()
        del node.data[n:]
        node.size = n

    def close(self) -> None:
        pass

    def _changed(self) -> _Node:
        if not self._writable:
            raise OSError(errno.EBADF, "the file is open for reading only", self.path)
        return self._node


class _Lock:
    def __init__(self, held: set[str], path: str) -> None:
        self._held, self._path = held, path

    def release(self) -> None:
        self._held.discard(self._path)


class MemoryDisk:
    """A disk in memory. Every name is the complete path; a directory is a set of the names in it."""

    def __init__(self) -> None:
        self._files: dict[str, _Node] = {}
        self._directories: dict[str, set[str]] = {"/": set()}
        self._locks: set[str] = set()

    def open(self, path: str, *, write: bool = False) -> File:
        return MemoryFile(path, self._file(path), write)

    def create(self, path: str) -> File:
        path = _norm(path)
        parent = self._directory(posixpath.dirname(path))
        node = self._files.get(path)
        if node is None:
            node = self._files[path] = _Node()
            parent.add(posixpath.basename(path))
        else:
            node.data.clear()
            node.size = 0
        return MemoryFile(path, node, True)

    def listdir(self, path: str) -> list[str]:
        return sorted(self._directory(_norm(path)))

    def exists(self, path: str) -> bool:
        path = _norm(path)
        return path in self._files or path in self._directories

    def rename(self, old: str, new: str) -> None:
        old, new = _norm(old), _norm(new)
        parent = self._directory(posixpath.dirname(new))
        if old in self._files:
            self._files[new] = self._files.pop(old)
        else:
            self._directory(old)
            if self._directories.get(new):
                raise OSError(errno.ENOTEMPTY, "the directory is not empty", new)
            self._move_below(old, new)
        self._directory(posixpath.dirname(old)).discard(posixpath.basename(old))
        parent.add(posixpath.basename(new))

    def _move_below(self, old: str, new: str) -> None:
        for table in (self._files, self._directories):
            for path in [p for p in table if p == old or p.startswith(old + "/")]:
                table[new + path[len(old) :]] = table.pop(path)  # type: ignore[assignment]

    def unlink(self, path: str) -> None:
        path = _norm(path)
        self._file(path)
        del self._files[path]
        self._directory(posixpath.dirname(path)).discard(posixpath.basename(path))

    def fsync_dir(self, path: str) -> None:
        self._directory(_norm(path))

    def mkdir(self, path: str) -> None:
        path = _norm(path)
        if path in self._directories:
            return
        if path in self._files:
            raise FileExistsError(errno.EEXIST, "a file is in the way", path)
        parent = posixpath.dirname(path)
        self.mkdir(parent)
        self._directories[path] = set()
        self._directories[parent].add(posixpath.basename(path))

    def rmdir(self, path: str) -> None:
        path = _norm(path)
        if self._directory(path):
            raise OSError(errno.ENOTEMPTY, "the directory is not empty", path)
        del self._directories[path]
        self._directory(posixpath.dirname(path)).discard(posixpath.basename(path))

    def remove_tree(self, path: str) -> None:
        path = _norm(path)
        if path in self._files:
            self.unlink(path)
        elif path in self._directories:
            for name in list(self._directories[path]):
                self.remove_tree(f"{path}/{name}")
            self.rmdir(path)

    def read_file(self, path: str) -> bytes:
        file = self.open(path)
        return file.pread(file.size(), 0)

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        self.create(path).pwritev([data], 0)

    def lock(self, path: str) -> Lock:
        path = _norm(path)
        if path in self._locks:
            raise DirectoryLocked(posixpath.dirname(path))
        self._locks.add(path)
        return _Lock(self._locks, path)

    def _file(self, path: str) -> _Node:
        node = self._files.get(_norm(path))
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return node

    def _directory(self, path: str) -> set[str]:
        names = self._directories.get(path)
        if names is None:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return names


def _norm(path: str) -> str:
    return posixpath.normpath("/" + path) if not path.startswith("/") else posixpath.normpath(path)


__all__ = ["MemoryDisk"]
