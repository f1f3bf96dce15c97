"""Files that only their owner may read: made so from their first byte, and refused when they are not.

`PrivateDisk` is the journal's disk with one difference: what it makes has mode 0600, is never made through a symbolic
link, and belongs to whom the directory belongs to, so that a `heapline keys` run by root leaves the server able to
read its own file.
"""

from __future__ import annotations

import contextlib
import os
import stat

from heapline.errors import BadRequest
from heapline.journal.disk import File, Lock, RealDisk, RealFile

_MODE = 0o600


class PrivateDisk(RealDisk):
    def create(self, path: str) -> File:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # a temporary left by a crash, perhaps of another mode
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
    """What root makes belongs to whom the directory belongs to."""
    if os.geteuid() == 0:
        home = os.stat(os.path.dirname(path) or ".")
        os.fchown(fd, home.st_uid, home.st_gid)


def refuse_readable_by_others(path: str) -> None:
    """A secret that others can read is no secret: say so instead of using it."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        raise BadRequest(f"there is no file {path!r}") from None
    if mode & 0o077:
        raise BadRequest(f"{path!r} can be read or changed by others (mode {mode:04o}): run `chmod 600` on it")
