"""Which call is being served just now, for those who write about it and were not told: the log.

Kept in a context variable: the visit's own notes, from which it is taken when the call ends. Tasks and timers that a
call has started carry a copy of its context on, perhaps for the life of a topic, and must neither keep the call alive
nor speak in its name. For the same reason nothing is put back at the end: every call has a task, so a context, of its
own, and an answer that was abandoned may be ended in another one.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from heapline.server.front import Visit

_current: ContextVar[dict[type, Any] | None] = ContextVar("heapline_visit", default=None)


def current_visit() -> Visit | None:
    notes = _current.get()
    return notes.get(Current) if notes else None


class Current:
    """An `Observer`."""

    def begin(self, visit: Visit) -> None:
        visit.notes[Current] = visit
        _current.set(visit.notes)

    def admitted(self, visit: Visit) -> None:
        pass

    def end(self, visit: Visit, error: BaseException | None) -> None:
        del visit.notes[Current]
