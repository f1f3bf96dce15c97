"""Which calls leave a line in the audit log, on whichever face they came: administration, logins, and refusals.

A line says who, what, which topic, about what, how it ended and the correlation id; never a payload. Refusals can be
had by anybody and in any number, so they are bounded: a hundred at once, ten a second after that, and what was left out
is counted in a line of its own. The event loop only queues lines, a thread writes them; a queue that is full because
the disk does not follow loses lines and counts them. What is queued when the process is killed is lost.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

from heapline.clock import Clock, SystemClock
from heapline.errors import ConfirmationNeeded, PermissionDenied, ResourceExhausted, Unauthenticated
from heapline.server.auth.audit import AuditLog
from heapline.server.auth.throttle import Allowance, Bucket
from heapline.server.front import ACTIONS, ADMIN, Visit

#: Carried out or failed, these leave a line. Cancelling one message does not: that is a producer's daily business.
AUDITED = frozenset(call for call, action in ACTIONS.items() if action is ADMIN and not call.startswith("List"))
AUDITED |= {"CreateSchedule", "PauseSchedule", "ResumeSchedule", "DeleteSchedule"}
AUDITED |= {"CancelReplay"}  # which finds out by itself whose it is
REFUSALS = (Unauthenticated, PermissionDenied, ConfirmationNeeded)
REFUSED = Allowance(burst=100, refill_ms=100)
QUEUED_MAX = 10_000
CLOSE_SECONDS = 5.0
NOBODY = "unknown"  # who calls when that is just what is not known


class Auditing:
    """An `Observer`. For one event loop, but for the thread that writes."""

    def __init__(self, log: AuditLog, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._writer = Writer(log)
        self._refusals = Bucket(REFUSED.burst, self._clock.boot_ms())
        self._left_out = 0

    def begin(self, visit: Visit) -> None:
        pass

    def admitted(self, visit: Visit) -> None:
        pass

    def end(self, visit: Visit, error: BaseException | None) -> None:
        if error is None and visit.call not in AUDITED:
            return
        # Who is turned away because too many were wrong before him is refused too.
        if isinstance(error, REFUSALS) or (visit.caller is None and isinstance(error, ResourceExhausted)):
            if not self._may_tell_refusal():
                return
        elif visit.call not in AUDITED:
            return
        who = NOBODY if visit.caller is None else visit.caller.principal.subject
        self._write(
            who, visit.call, topic=visit.topic or "", about=visit.about or _peer(visit), outcome=_outcome(error),
            count=visit.count, correlation_id=visit.correlation_id,
        )  # fmt: skip

    def logged_in(self, email: str, error: BaseException | None) -> None:
        """See `DirectoryGuard.on_login`."""
        if error is None or self._may_tell_refusal():
            self._write(NOBODY if error else f"user:{email}", "Login", about=email, outcome=_outcome(error))

    def _may_tell_refusal(self) -> bool:
        self._refusals.fill(REFUSED, self._clock.boot_ms())
        if self._refusals.tokens < 1:
            self._left_out += 1
            return False
        self._refusals.tokens -= 1
        return True

    def _write(self, who: str, call: str, **facts: Any) -> None:
        self._tell_left_out()
        self._writer.put(who, call, facts)

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._writer.put(NOBODY, "Refusals", {"outcome": "left out", "count": self._left_out})
            self._left_out = 0

    @property
    def lost(self) -> int:
        """Lines that could not be written: for an alarm."""
        return self._writer.lost

    async def close(self) -> None:
        self._tell_left_out()
        await asyncio.to_thread(self._writer.close)


def _outcome(error: BaseException | None) -> str:
    return "ok" if error is None else type(error).__name__


def _peer(visit: Visit) -> str:
    """Where a stranger calls from, as far as the face tells."""
    peer: Callable[[], str] | None = getattr(visit.context, "peer", None)
    return peer() if visit.caller is None and peer is not None else ""


class Writer:
    """Lines from the loop to the file, in their order; the thread starts with the first."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._queue: queue.Queue[tuple[str, str, dict[str, Any]] | None] = queue.Queue(QUEUED_MAX)
        self._thread: threading.Thread | None = None
        self._dropped = 0

    @property
    def lost(self) -> int:
        return self._dropped + self._log.lost

    def put(self, who: str, call: str, facts: dict[str, Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((who, call, facts))
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            who, call, facts = line
            self._log.write(who, call, **facts)

    def close(self) -> None:
        """Waits for what is queued, within reason."""
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=CLOSE_SECONDS)
            except queue.Full:
                return
            self._thread.join(CLOSE_SECONDS)
            self._thread = None
