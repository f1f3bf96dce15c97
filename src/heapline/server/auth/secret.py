"""Keep secrets from others: text that does not print itself, a filter for logs, and files that only their owner reads.

An API key is `hl_<id>_<secret>`. The id is public and may appear in logs; the secret is 256 random bits. The prefix
`hl_` makes a leaked key easy to find, and the id is all that is needed to revoke it.

`PrivateDisk` is the journal's disk with one difference: files that it creates have mode 0600, are never created through
a symbolic link, and belong to the owner of the directory. So `heapline keys` run by root leaves the server able to read
its own file.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat

from heapline.contract.errors import BadRequest
from heapline.journal.disk import File, Lock, RealDisk, RealFile

_MODE = 0o600
KEY = re.compile(r"hl_([0-9a-f]{16})_([A-Za-z0-9_-]{43})\Z")
_KEY_IN_TEXT = re.compile(r"hl_([0-9A-Za-z]{1,16})_[A-Za-z0-9_-]+")
_TOKEN_IN_TEXT = re.compile(r"eyJ[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)*")
_CREDENTIAL_IN_TEXT = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
_PEM_IN_TEXT = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


class Secret:
    """Text that `repr` and `str` do not show."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a secret cannot be pickled")


class SessionToken(Secret):
    """A token that replaces a password until it expires."""

    __slots__ = ("expires_at",)

    def __init__(self, text: str, expires_at: int) -> None:
        super().__init__(text)
        self.expires_at = expires_at  # wall ms


def new_key() -> tuple[str, Secret]:
    """Return a new id and the complete key."""
    key_id = secrets.token_hex(8)
    return key_id, Secret(f"hl_{key_id}_{secrets.token_urlsafe(32)}")


def redact(text: str) -> str:
    """Replace everything that looks like a credential, for audit lines and logs.

    >>> redact("Bearer abc, then hl_00112233_xyz")
    'Bearer […] then hl_00112233_[…]'
    """
    text = _PEM_IN_TEXT.sub("[private key]", text)
    text = _KEY_IN_TEXT.sub(r"hl_\1_[…]", text)
    text = _TOKEN_IN_TEXT.sub("[token]", text)
    return _CREDENTIAL_IN_TEXT.sub(lambda m: m.group() if m.group().endswith("_[…]") else f"{m[1]} […]", text)


def open_to_others(path: str) -> str | None:
    """Return the mode of a file that other users can read or change, or None if they cannot."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    return f"{mode:04o}" if mode & 0o077 else None


class PrivateDisk(RealDisk):
    mode_for_others = staticmethod(open_to_others)

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
        mode = open_to_others(path)
    except FileNotFoundError:
        raise BadRequest(f"file {path!r} does not exist") from None
    if mode is not None:
        raise BadRequest(f"other users can read or change {path!r} (mode {mode}); run `chmod 600` on it")
