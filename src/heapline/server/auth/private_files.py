"""Files that only their owner may read: created with mode 0600, and rejected if they have any other mode.

`PrivateDisk` is the journal's disk with one difference: files that it creates have mode 0600, are never created through
a symbolic link, and belong to the owner of the directory. So `heapline keys` run by root leaves the server able to read
its own file.
"""

from __future__ import annotations

import contextlib
import os
import stat

from heapline.contract.errors import BadRequest
from heapline.journal.disk import File, Lock, RealDisk, RealFile

_MODE = 0o600


class PrivateDisk(RealDisk):
    def create(self, path: str) -> File:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # a temporary file left by a crash may have another mode
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
        try:
            os.fchmod(fd, _MODE)  # whatever the umask was
            give_to_owner(fd, path)
        except OSError:
            os.close(fd)
            raise
        return RealFile(path, fd)

    def lock(self, path: str) -> Lock:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
        try:
            give_to_owner(fd, path)
        finally:
            os.close(fd)
        return super().lock(path)


def give_to_owner(fd: int, path: str) -> None:
    """Give a file that root created to the owner of its directory."""
    if os.geteuid() == 0:
        home = os.stat(os.path.dirname(path) or ".")
        os.fchown(fd, home.st_uid, home.st_gid)


def refuse_readable_by_others(path: str) -> None:
    """Raise BadRequest if other users can read or change the file."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        raise BadRequest(f"file {path!r} does not exist") from None
    if mode & 0o077:
        raise BadRequest(f"other users can read or change {path!r} (mode {mode:04o}); run `chmod 600` on it")
