"""Which call is being served just now, for those who write about it and were not told: the log.

Kept in a context variable, behind a holder that is emptied when the call ends: tasks and timers that a call has started
carry a copy of its context on, perhaps for the life of a topic, and must neither keep the call alive nor speak in its
name.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar, Token

from heapline.server.front import Visit

_Holder = list[Visit]
_current: ContextVar[_Holder | None] = ContextVar("heapline_visit", default=None)


def current_visit() -> Visit | None:
    holder = _current.get()
    return holder[0] if holder else None


class Current:
    """An `Observer`."""

    def begin(self, visit: Visit) -> None:
        holder = [visit]
        visit.notes[Current] = (holder, _current.set(holder))

    def admitted(self, visit: Visit) -> None:
        pass

    def end(self, visit: Visit, error: BaseException | None) -> None:
        token: Token[_Holder | None]
        holder, token = visit.notes.pop(Current)
        holder.clear()
        with contextlib.suppress(ValueError):  # ended elsewhere, by whoever swept up an abandoned answer
            _current.reset(token)
