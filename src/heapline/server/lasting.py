"""Calls that last, and the end of them when the credential they came with ends: streams, and pops that wait.

Whoever changes keys or users in this process calls `look`, and what may no longer be is ended there and then. Changes
of other processes (`heapline keys revoke` beside the server) and tokens that run out are noticed by `watch`, within
two seconds: half a second here and at most one in the store. Each principal is asked for once, however many calls it
has open, so idle streams cost next to nothing.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from heapline.errors import Unauthenticated
from heapline.logs import Log
from heapline.server.auth.principal import Guard, Principal

log = Log("heapline.server")
LOOK_EVERY = 0.5  # seconds
ENDED = "the credential of this call is no longer valid: connect again with another"


class Lasting:
    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._open: set[WhileValid] = set()

    def __len__(self) -> int:
        return len(self._open)

    def hold(self, principal: Principal) -> WhileValid:
        """`with lasting.hold(principal): …` raises Unauthenticated in there as soon as the principal is out."""
        return WhileValid(self._open, principal)

    def look(self) -> None:
        asked: dict[int, bool] = {}
        for held in list(self._open):
            who = id(held.principal)
            if who not in asked:
                asked[who] = self._guard.is_valid(held.principal)
            if not asked[who]:
                held.end()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                if self._open:
                    self.look()
            except Exception:  # whatever it was, the next look must come
                log.exception("credentials of open streams could not be looked at")


class WhileValid:
    """Ends its block as `asyncio.timeout` does: by cancelling the task, and telling that cancellation from others."""

    def __init__(self, among: set[WhileValid], principal: Principal) -> None:
        self._among, self.principal = among, principal
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._ended = False

    def end(self) -> None:
        if self._task is not None and not self._ended:
            self._ended = True
            self._task.cancel()

    def __enter__(self) -> WhileValid:
        self._task = asyncio.current_task()
        assert self._task is not None, "used inside a task"
        self._cancelling = self._task.cancelling()
        self._among.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._among.discard(self)
        assert self._task is not None
        if not self._ended or self._task.uncancel() > self._cancelling:
            return
        # Also when the block had just come to its end: what it brings is for nobody any more.
        if error is None or isinstance(error, asyncio.CancelledError):
            raise Unauthenticated(ENDED) from None
