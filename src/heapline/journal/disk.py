"""The disk as the journal sees it: a small protocol, and its real implementation.

All durable I/O goes through `Disk`, so that a test can substitute a disk that tears writes, loses unsynced data, fills
up or fails. All calls block, all paths are plain strings, and all failures are `OSError` with their errno. Each method
states what it guarantees after a crash. The protocol knows nothing of segments or units.

Assumptions about any disk: a 512-byte sector is written completely or not at all; until a sync returns, any subset of a
write's sectors may have arrived; bytes that were allocated but never written read as zeros.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from typing import Protocol

from heapline.contract.errors import DirectoryLocked

Buffer = bytes | bytearray | memoryview

SECTOR = 512
_IOV_MAX = 1024
_ZEROS = bytes(1 << 20)
#: Errors that mean "no space", as opposed to a failing disk.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_no_space(error: OSError) -> bool:
    return error.errno in NO_SPACE


class File(Protocol):
    """One open file. Offsets are explicit; there is no cursor."""

    path: str

    def pread(self, n: int, off: int) -> bytes:
        """Return up to n bytes; fewer only at the end of the file."""

    def pwritev(self, parts: Sequence[Buffer], off: int) -> None:
        """Write all parts consecutively from `off`, or raise. Not durable until `fdatasync`."""

    def zero(self, off: int, n: int) -> None:
        """Write zeros, so that the blocks are allocated and a later data sync needs no metadata."""

    def fallocate(self, off: int, n: int) -> None:
        """Reserve blocks, growing the file to at least off + n. Existing bytes stay; the rest reads as zeros."""

    def fdatasync(self) -> None:
        """Make all written bytes and the file's size survive a power cut. Never retried after an error."""

    def size(self) -> int: ...

    def truncate(self, n: int) -> None:
        """Set the size, atomically as far as a crash can tell. Added bytes are a hole that reads as zeros."""

    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class Disk(Protocol):
    """A directory tree. Created, renamed and deleted names are durable only after `fsync_dir` of their directory."""

    def open(self, path: str, *, write: bool = False) -> File:
        """Open an existing file. Raise FileNotFoundError if it does not exist."""

    def create(self, path: str) -> File:
        """Create an empty file open for writing. Empties an existing one."""

    def listdir(self, path: str) -> list[str]:
        """Return the names, sorted. Raise FileNotFoundError if the directory does not exist."""

    def exists(self, path: str) -> bool: ...

    def rename(self, old: str, new: str) -> None:
        """Rename atomically, replacing a file called `new`."""

    def unlink(self, path: str) -> None: ...

    def fsync_dir(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None:
        """Create a directory and its parents if they do not exist. Durable after `fsync_dir` of each parent."""

    def rmdir(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None:
        """Delete a directory tree if it exists."""

    def read_file(self, path: str) -> bytes: ...

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        """Replace a file's content atomically: a crash leaves the old or the new content. Durable on return."""

    def lock(self, path: str) -> Lock:
        """Lock `path` for this process, or raise DirectoryLocked."""


class RealFile:
    """A file descriptor that implements `File`."""

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
            # A partial temporary file must not use up the scarce space.
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
