"""The audit log: who did what to which topic and how it ended, as JSON lines in `audit.jsonl` (0600).

Calls whose facts name audited fields leave a line; so do logins, and every rejected call. A line has a fixed set of
fields and no place for a payload. Names from outside are shortened, and everything that looks like a credential is
removed. Anyone can cause rejections, so their lines are bounded: a hundred in a burst, ten per second after that. Those
left out are counted in a line of their own.

The event loop only queues lines, and a thread writes them. If the disk does not keep up, lines are dropped and counted.
Lines in the queue are lost if the process is killed. A line is one write with O_APPEND, so several processes may write
to the file. It is rotated by size, under a lock. A line that cannot be written does not stop the server; it is counted,
and the counter is there to be alarmed on.

Administrators read the log with the command ReadAudit, from the newest line back through the rotated files.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from heapline.clock import Clock, SystemClock
from heapline.contract.admin import AuditLine, ReadAudit
from heapline.contract.call import BY_RPC, Page
from heapline.contract.errors import (
    BadRequest,
    ConfirmationNeeded,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from heapline.core.rate import TokenBucket
from heapline.logs import Log
from heapline.server.auth.principals import ANONYMOUS
from heapline.server.auth.secret import give_to_owner, redact
from heapline.server.gate import Observer, Request

FILE = "audit.jsonl"
BYTES_MAX = 64 << 20
KEPT = 5
TEXT_MAX = 256
REJECTIONS = (Unauthenticated, PermissionDenied, ConfirmationNeeded)
REJECTIONS_PER_SECOND, REJECTIONS_BURST = 10, 10.0  # the burst in seconds
QUEUED_MAX = 10_000
READ_BYTES_MAX = 1 << 20  # of the file per page
CLOSE_SECONDS = 5.0
log = Log(__name__)


class Audit(Observer):
    """Use it from one event loop."""

    def __init__(self, file: AuditLog, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._file = file
        self._writer = Writer(file)
        self._rejections = TokenBucket(REJECTIONS_PER_SECOND, self._clock.boot_ms(), REJECTIONS_BURST)
        self._left_out = 0

    def end(self, request: Request, error: BaseException | None) -> None:
        kind = BY_RPC.get(request.rpc)
        is_audited = kind is not None and kind.facts.audit is not None
        if error is None and not is_audited:
            return
        # A client that the throttle turns away before it is authenticated is rejected too.
        if isinstance(error, REJECTIONS) or (request.caller is ANONYMOUS and isinstance(error, ResourceExhausted)):
            if not self._may_write_rejection():
                return
        elif not is_audited:
            return
        self._write(
            request.caller.subject,
            request.rpc,
            topic=request.topic,
            about=request.about or _peer(request),
            outcome=_outcome(error),
            count=request.count,
            correlation_id=request.correlation_id,
        )

    def logged_in(self, subject: str, error: BaseException | None) -> None:
        """Record a login; see `StoreGuard.on_login`."""
        if error is None or self._may_write_rejection():
            about = subject.partition(":")[2]
            self._write(ANONYMOUS.subject if error else subject, "Login", about=about, outcome=_outcome(error))

    def _may_write_rejection(self) -> bool:
        if not self._rejections.room(self._clock.boot_ms()):
            self._left_out += 1
            return False
        self._rejections.take(1)
        return True

    def _write(self, who: str, call: str, **fields: Any) -> None:
        self._write_left_out()
        self._writer.put(who, call, fields)

    def _write_left_out(self) -> None:
        if self._left_out:
            self._writer.put(ANONYMOUS.subject, "Refusals", {"outcome": "left out", "count": self._left_out})
            self._left_out = 0

    @property
    def lost(self) -> int:
        """The number of lines that could not be written."""
        return self._writer.lost

    async def read(self, command: ReadAudit, request: Request) -> Page[AuditLine]:
        """Handle ReadAudit. A line appears here once the writing thread has written it."""
        return await asyncio.to_thread(self._file.read, command.limit, command.cursor)

    async def close(self) -> None:
        self._write_left_out()
        await asyncio.to_thread(self._writer.close)


def _peer(request: Request) -> str:
    """Return where an unauthenticated client connects from."""
    return request.peer() if request.caller is ANONYMOUS and request.peer is not None else ""


def _outcome(error: BaseException | None) -> str:
    return "ok" if error is None else type(error).__name__


class Writer:
    """Takes lines from the event loop to the file, in order. Its thread starts with the first line."""

    def __init__(self, file: AuditLog) -> None:
        self._file = file
        self._queue: queue.Queue[tuple[str, str, dict[str, Any]] | None] = queue.Queue(QUEUED_MAX)
        self._thread: threading.Thread | None = None
        self._dropped = 0

    @property
    def lost(self) -> int:
        return self._dropped + self._file.lost

    def put(self, who: str, call: str, fields: dict[str, Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((who, call, fields))
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            who, call, fields = line
            self._file.write(who, call, **fields)

    def close(self) -> None:
        """Wait for the queued lines, but not forever."""
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=CLOSE_SECONDS)
            except queue.Full:
                return
            self._thread.join(CLOSE_SECONDS)
            self._thread = None


# -- the file ----------------------------------------------------------------------------------------------------------


class Line(msgspec.Struct, frozen=True, kw_only=True):
    at: int  # wall ms
    who: str
    call: str
    topic: str = ""
    about: str = ""  # the id of a key, the email of a user, the name of a group, …
    outcome: str = "ok"  # or the name of the error
    count: int = 0  # messages, keys, … that the call affected
    correlation_id: str = ""


_decode_line = msgspec.json.Decoder(Line).decode


class AuditLog:
    def __init__(self, directory: str, clock: Clock, *, bytes_max: int = BYTES_MAX, kept: int = KEPT) -> None:
        self._path, self._clock = f"{directory}/{FILE}", clock
        self._bytes_max, self._kept = bytes_max, kept
        self.lost = 0

    def write(self, who: str, call: str, *, count: int = 0, **texts: str) -> None:
        """Write a line. `texts` are other fields of Line."""
        cleaned = {name: _clean(text) for name, text in texts.items()}
        line = Line(at=self._clock.wall_ms(), who=_clean(who), call=_clean(call), count=count, **cleaned)
        data = msgspec.json.encode(line) + b"\n"
        try:
            with self._open() as fd:
                if os.write(fd, data) != len(data):
                    raise OSError("only part of a line was written")
        except OSError as error:
            self.lost += 1
            log.error("audit line not written", cause=type(error).__name__, lost=self.lost)

    def read(self, limit: int, cursor: str | None = None) -> Page[AuditLine]:
        """Return up to `limit` lines, newest first, and a cursor if there are older ones.

        A cursor is the inode of a file and a position in it, so it stays valid when the files are rotated.
        """
        inode, end = _read_cursor(cursor)
        lines: list[AuditLine] = []
        left, seen = READ_BYTES_MAX, set()
        for path in (self._path, *(f"{self._path}.{number}" for number in range(1, self._kept + 1))):
            with suppress(FileNotFoundError), open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino in seen or inode not in (None, stat.st_ino):
                    continue  # rotated meanwhile, or newer than the cursor
                seen.add(stat.st_ino)
                position = stat.st_size if end is None else min(end, stat.st_size)
                inode = end = None
                start = max(0, position - left)
                file.seek(start)
                data = file.read(position - start)
                left -= len(data)
                for line in reversed(data.splitlines(keepends=True)):
                    if len(lines) == limit or (position - len(line) == start > 0):
                        break  # enough, or the start of this line was not read
                    position -= len(line)
                    if (found := _decoded(line)) is not None:
                        lines.append(found)
                if len(lines) == limit or not left:
                    return Page(lines, f"{stat.st_ino}-{position}")
        return Page(lines)

    @contextmanager
    def _open(self) -> Iterator[int]:
        """Open the file for a line, and rotate it first if it is full."""
        fd = self._open_file()
        try:
            if os.fstat(fd).st_size >= self._bytes_max:
                self._rotate(fd)
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

    def _rotate(self, fd: int) -> None:
        """Rename audit.jsonl to audit.jsonl.1, that to .2, and so on; drop the last. One process does it at a time."""
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if not os.path.samestat(os.fstat(fd), os.stat(self._path)):
                return  # another process has rotated it
        except FileNotFoundError:
            return  # another process has rotated it and not written yet
        for number in range(self._kept - 1, 0, -1):
            if os.path.exists(f"{self._path}.{number}"):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        os.replace(self._path, f"{self._path}.1")


def _read_cursor(cursor: str | None) -> tuple[int | None, int | None]:
    if cursor is None:
        return None, None
    inode, _, position = cursor.partition("-")
    if not (inode.isascii() and inode.isdigit() and position.isascii() and position.isdigit() and len(cursor) < 40):
        raise BadRequest("cursor is not valid; pass the cursor of the page before, or omit it")
    return int(inode), int(position)


def _decoded(line: bytes) -> AuditLine | None:
    """Return the line, or None if a crash left only part of it."""
    try:
        found = _decode_line(line)
    except msgspec.MsgspecError:
        return None
    fields = msgspec.structs.asdict(found)
    return AuditLine(**fields | {"at": datetime.fromtimestamp(found.at / 1000, UTC)})


def _clean(text: str) -> str:
    # Redacted before it is cut: no pattern finds half a secret.
    text = redact(text)
    return text if len(text) <= TEXT_MAX else text[:TEXT_MAX] + "…"
