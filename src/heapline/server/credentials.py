"""End streams and waiting calls when their credential is revoked or expires.

A change to keys or users in this process calls `check`, which ends the affected calls immediately. Changes by other
processes (`heapline keys revoke` next to the server) and expired tokens are noticed by `watch`, within two seconds:
half a second here and at most one in the store. Each principal is checked once, however many calls it has open, so idle
streams cost almost nothing.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Protocol

from heapline.contract.errors import HeaplineError, Unauthenticated, UnavailableError
from heapline.logs import Log
from heapline.server.auth.principals import Guard, Principal

log = Log("heapline.server")
CHECK_EVERY = 0.5  # seconds
ENDED = "the credential of this call is no longer valid; connect again with another one"


class Caller(Protocol):
    """A request, whose caller may be replaced when its connection renews its credential."""

    caller: Principal


class Held(Protocol):
    """Something that must end with the credential of its request's caller."""

    @property
    def request(self) -> Caller: ...

    def end(self, error: HeaplineError) -> None: ...


class Credentials:
    """The open calls that depend on a credential."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._open: set[Held] = set()

    def __len__(self) -> int:
        return len(self._open)

    def hold(self, request: Caller) -> WhileValid:
        """`with credentials.hold(request): …` raises Unauthenticated in the block when its caller's credential ends,
        and UnavailableError when it can no longer be checked."""
        return WhileValid(self._open, request)

    def add(self, held: Held) -> None:
        """End `held` when the credential of its request's caller ends. `discard` must follow."""
        self._open.add(held)

    def discard(self, held: Held) -> None:
        self._open.discard(held)

    def check(self) -> None:
        ends: dict[int, HeaplineError | None] = {}
        for held in list(self._open):
            caller = held.request.caller
            who = id(caller)
            if who not in ends:
                ends[who] = self._why_ended(caller)
            if (error := ends[who]) is not None:
                held.end(error)

    def _why_ended(self, principal: Principal) -> HeaplineError | None:
        try:
            return None if self._guard.is_valid(principal) else Unauthenticated(ENDED)
        except UnavailableError as error:
            return error

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY)
            try:
                if self._open:
                    self.check()
            except Exception:  # a failed check must not stop the checks that follow
                log.exception("credentials of open streams not checked; will retry")


class WhileValid:
    """Ends its block as `asyncio.timeout` does: cancels the task, and recognizes its own cancellation."""

    def __init__(self, among: set[Held], request: Caller) -> None:
        self._among, self.request = among, request
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._ended: HeaplineError | None = None

    def end(self, error: HeaplineError) -> None:
        if self._task is not None and self._ended is None:
            self._ended = error
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
        if self._ended is None or self._task.uncancel() > self._cancelling:
            return
        # Even if the block has just finished: its result must not reach a caller without a valid credential.
        if error is None or isinstance(error, asyncio.CancelledError):
            raise self._ended.with_traceback(None) from None
