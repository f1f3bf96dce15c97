"""The disk as the journal sees it: a small protocol, and its one real implementation.

Everything durable goes through `Disk`, so that a test can put a disk there that tears writes, loses what
was not synced, fills up or fails. All calls block; all paths are plain strings; all failures are `OSError`
with their errno. What each call promises about a crash is said at the call. The protocol knows nothing of
segments or units.

Assumed of any disk: a 512-byte sector is written whole or not at all, sectors of one write may arrive in any
subset until a sync returns, and bytes that were allocated but never written read as zeros.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from typing import Protocol

from heapline.errors import DirectoryLocked

Buffer = bytes | bytearray | memoryview

SECTOR = 512
_IOV_MAX = 1024
_ZEROS = bytes(1 << 20)
#: Errors that mean "no room", as against "the disk is failing".
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_no_space(error: OSError) -> bool:
    return error.errno in NO_SPACE


class File(Protocol):
    """One open file. Offsets are explicit; there is no cursor."""

    path: str

    def pread(self, n: int, off: int) -> bytes:
        """Up to n bytes; fewer only at the end of the file."""

    def pwritev(self, parts: Sequence[Buffer], off: int) -> None:
        """All parts one after the other from `off`, or an error. Not durable until `fdatasync`."""

    def zero(self, off: int, n: int) -> None:
        """Write zeros, so that the blocks are allocated and a later sync of data needs no metadata."""

    def fallocate(self, off: int, n: int) -> None:
        """Reserve blocks, growing the file to at least off + n; what was there stays, the rest reads as zeros."""

    def fdatasync(self) -> None:
        """On return all that was written, and the file's size, survive a power cut. Never retried after an error."""

    def size(self) -> int: ...

    def truncate(self, n: int) -> None:
        """Set the size, in one step as far as a crash can tell; what is added is a hole that reads as zeros."""

    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class Disk(Protocol):
    """A directory tree. A name that appeared, moved or went is durable only after `fsync_dir` of its directory."""

    def open(self, path: str, *, write: bool = False) -> File:
        """An existing file; FileNotFoundError otherwise."""

    def create(self, path: str) -> File:
        """A new empty file open for writing; one that is there is emptied."""

    def listdir(self, path: str) -> list[str]:
        """Names, sorted; FileNotFoundError if there is no such directory."""

    def exists(self, path: str) -> bool: ...

    def rename(self, old: str, new: str) -> None:
        """Atomic; replaces a file called `new`."""

    def unlink(self, path: str) -> None: ...

    def fsync_dir(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None:
        """Parents too; nothing happens if it is there. Durable after `fsync_dir` of each parent."""

    def rmdir(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None:
        """Nothing happens if it is not there."""

    def read_file(self, path: str) -> bytes: ...

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        """Old content or new, never a mixture, and durable on return."""

    def lock(self, path: str) -> Lock:
        """Hold `path` for this process alone, or raise DirectoryLocked."""


class RealFile:
    """A file descriptor with the calls of `File`."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def pread(self, n: int, off: int) -> bytes:
        got = os.pread(self._fd, n, off)
        if len(got) == n or not got:
            return got
        pieces = [got]
        have = len(got)
        while have < n and (got := os.pread(self._fd, n - have, off + have)):
            pieces.append(got)
            have += len(got)
        return b"".join(pieces)

    def pwritev(self, parts: Sequence[Buffer], off: int) -> None:
        for first in range(0, len(parts), _IOV_MAX):
            some = parts[first : first + _IOV_MAX]
            want = sum(len(p) for p in some)
            done = os.pwritev(self._fd, some, off)
            if done < want:
                self._write_rest(b"".join(some), done, off)
            off += want

    def _write_rest(self, data: bytes, done: int, off: int) -> None:
        view = memoryview(data)
        while done < len(view):
            wrote = os.pwrite(self._fd, view[done:], off + done)
            if wrote == 0:
                raise OSError(errno.EIO, "a write made no progress", self.path)
            done += wrote

    def zero(self, off: int, n: int) -> None:
        for at in range(off, off + n, len(_ZEROS)):
            self.pwritev([memoryview(_ZEROS)[: min(len(_ZEROS), off + n - at)]], at)

    def fallocate(self, off: int, n: int) -> None:
        if n > 0:
            os.posix_fallocate(self._fd, off, n)

    def fdatasync(self) -> None:
        os.fdatasync(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, n: int) -> None:
        os.ftruncate(self._fd, n)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class RealLock:
    """An flock that ends with `release` or with the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class RealDisk:
    """The operating system's file system."""

    def open(self, path: str, *, write: bool = False) -> File:
        return RealFile(path, os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC))

    def create(self, path: str) -> File:
        return RealFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640))

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def fsync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def mkdir(self, path: str) -> None:
        os.makedirs(path, mode=0o750, exist_ok=True)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def remove_tree(self, path: str) -> None:
        if os.path.exists(path):
            shutil.rmtree(path)

    def read_file(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        temporary = path + ".tmp"
        file = self.create(temporary)
        try:
            file.pwritev([data], 0)
            file.fdatasync()
        except OSError:
            # A half-written temporary must not eat the space that was short in the first place.
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise
        finally:
            file.close()
        self.rename(temporary, path)
        self.fsync_dir(os.path.dirname(path) or ".")

    def lock(self, path: str) -> Lock:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DirectoryLocked(os.path.dirname(path) or path) from None
        except OSError:
            os.close(fd)
            raise
        return RealLock(fd)
