"""The audit log: who did what to which topic, and how it ended, as JSON lines in `audit.jsonl` (0600).

A line has a fixed set of fields, and there is no place in it for a payload. Names and ids that came from outside are
shortened, and whatever looks like a credential is taken out. A line goes out in one write with O_APPEND, so several
processes may write side by side; the file is turned over by size under a lock. A line that cannot be written does not
stop the server: it is counted, and the counter is for an alarm. Which calls are worth a line is decided by the faces.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from heapline.clock import Clock
from heapline.logs import Log
from heapline.server.auth.private import give_to_owner
from heapline.server.auth.secret import redact

FILE = "audit.jsonl"
BYTES_MAX = 64 << 20
KEPT = 5
TEXT_MAX = 256
log = Log(__name__)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    at: int  # wall ms
    who: str
    call: str
    topic: str
    about: str  # the id of a key, the email of a user, the id of a message
    outcome: str  # "ok", or the name of the error
    count: int  # messages, keys, … that it was about
    correlation_id: str


class AuditLog:
    def __init__(self, directory: str, clock: Clock, *, bytes_max: int = BYTES_MAX, kept: int = KEPT) -> None:
        self._path, self._clock = f"{directory}/{FILE}", clock
        self._bytes_max, self._kept = bytes_max, kept
        self.lost = 0

    def write(
        self, who: str, call: str, *, topic: str = "", about: str = "", outcome: str = "ok", count: int = 0,
        correlation_id: str = "",
    ) -> None:  # fmt: skip
        line = Line(
            at=self._clock.wall_ms(), who=_clean(who), call=_clean(call), topic=_clean(topic), about=_clean(about),
            outcome=_clean(outcome), count=count, correlation_id=_clean(correlation_id),
        )  # fmt: skip
        data = msgspec.json.encode(line) + b"\n"
        try:
            with self._open() as fd:
                if os.write(fd, data) != len(data):
                    raise OSError("a line was written in part")
        except OSError as error:
            self.lost += 1
            log.error("an audit line could not be written", cause=type(error).__name__, lost=self.lost)

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The file to write to, turned over first if it is full."""
        fd = self._open_file()
        try:
            if os.fstat(fd).st_size >= self._bytes_max:
                self._turn_over(fd)
                os.close(fd)
                fd = self._open_file()
            yield fd
        finally:
            os.close(fd)

    def _open_file(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        give_to_owner(fd, self._path)
        return fd

    def _turn_over(self, fd: int) -> None:
        """audit.jsonl becomes audit.jsonl.1, that .2, and so on; the last goes. One process at a time does it."""
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if not os.path.samestat(os.fstat(fd), os.stat(self._path)):
                return  # another process was faster
        except FileNotFoundError:
            return  # and has not begun the next yet
        for number in range(self._kept - 1, 0, -1):
            if os.path.exists(f"{self._path}.{number}"):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        os.replace(self._path, f"{self._path}.1")


def _clean(text: str) -> str:
    # Redacted before it is cut: half a secret is one that no pattern finds.
    text = redact(text)
    return text if len(text) <= TEXT_MAX else text[:TEXT_MAX] + "…"
