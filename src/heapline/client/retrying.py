"""Calls that outlive a connection: repeated with growing pauses, over several endpoints, until a deadline.

Has the shape of `Calls`, so the wire client stands on it as it stands on one channel. What passes by itself is
repeated: a connection that broke or could not be made, a server that stops, a topic that reloads. The rest are answers.

A call whose connection broke may have been carried out. Most calls can be made again all the same, because they carry
their identity (numbered messages, a pop's request id, tokens of leases) or say how things shall be. `ONCE` names those
that cannot: they are repeated only while it is certain that none of their tries has left this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from heapline.client.calls import Calls
from heapline.client.patience import (
    IN_DOUBT,
    SECONDS,
    UNSENT,
    log,
    not_again,
    out_of_time,
    passes_by_itself,
    pauses,
    unreached,
)
from heapline.errors import Closed, DeadlineExceeded, HeaplineError, TopicReloading, UnavailableError

#: Doing them twice is not doing them once: they would also hit what came in between.
ONCE = frozenset({
    "Purge", "DeleteHeap", "DlqReplay", "DlqDelete", "DeleteSchedule", "ForgetSink",
    "DeleteGroup", "ResetOffsets", "GroupDeadReplay", "GroupDeadDelete",
})  # fmt: skip


class _Link:
    """A channel to one endpoint. Left when it fails, and closed when the last call on it has ended."""

    def __init__(self, endpoint: str, calls: Calls) -> None:
        self.endpoint, self.calls = endpoint, calls
        self.under_way = 0
        self.left = False


class RetryingCalls:
    def __init__(self, endpoints: Sequence[str], make: Callable[[str], Calls], deadline: float) -> None:
        self._endpoints, self._make, self._deadline = endpoints, make, deadline
        self._turn = 0
        self._link: _Link | None = None
        self._links: set[_Link] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def until(self) -> float:
        """The moment, in the loop's time, at which a call that begins now must have ended."""
        seconds = SECONDS.get()
        return asyncio.get_running_loop().time() + (self._deadline if seconds is None else seconds)

    async def __call__(self, name: str, request: Any) -> Any:
        return (await self.ask(name, request))[0]

    async def ask(self, name: str, request: Any, until: float | None = None) -> tuple[Any, bool]:
        """The answer, and whether an earlier try of the same call may have been carried out."""
        loop = asyncio.get_running_loop()
        until = self.until() if until is None else until
        waits, waits_until = 0.0, None
        if name in ("Pop", "GroupFetch") and request.wait:
            waits, waits_until = request.wait, loop.time() + request.wait
            until += waits
        doubt = False
        if loop.time() >= until:
            raise self.out_of_time(name, UNSENT)
        for pause in pauses():
            try:
                return await self._try(name, request, until - loop.time()), doubt
            except DeadlineExceeded:
                raise self.out_of_time(name, IN_DOUBT, waits) from None
            except HeaplineError as error:
                if not passes_by_itself(error):
                    error.repeated = doubt
                    raise
                if self._closed:  # whatever the connection said when it was ended
                    raise Closed from None
                doubt = doubt or getattr(error, "reached", True)
                if doubt and name in ONCE:
                    raise not_again(name, error) from None
                if loop.time() + pause >= until:
                    known = f"{IN_DOUBT} (last: {error})" if doubt else unreached(self._endpoints)
                    late = self.out_of_time(name, known, waits)
                    late.reached = doubt
                    raise late from None
            await asyncio.sleep(pause)
            if waits_until is not None:
                request.wait = max(0.0, waits_until - loop.time())
        raise AssertionError("unreachable: pauses never end")

    async def _try(self, name: str, request: Any, seconds: float) -> Any:
        link = self._take()
        try:
            return await link.calls(name, request, max(0.0, seconds))
        except HeaplineError as error:
            self._blame(link, error)
            raise
        finally:
            self._give_back(link)

    async def stream(self, name: str, request: Any) -> AsyncIterator[Any]:
        """One try: what a stream that broke goes on with, only its reader knows."""
        link = self._take()
        try:
            async for answer in link.calls.stream(name, request):
                yield answer
        except HeaplineError as error:
            self._blame(link, error)
            if isinstance(error, Closed) and not self._closed:
                raise UnavailableError(str(error)) from None  # the server's broker was, not this client
            raise
        finally:
            self._give_back(link)

    def _take(self) -> _Link:
        if self._closed:
            raise Closed
        if self._link is None:
            endpoint = self._endpoints[self._turn % len(self._endpoints)]
            self._link = _Link(endpoint, self._make(endpoint))
            self._links.add(self._link)
        self._link.under_way += 1
        return self._link

    def _give_back(self, link: _Link) -> None:
        link.under_way -= 1
        if link.left and not link.under_way and link in self._links:
            self._links.discard(link)
            task = asyncio.ensure_future(link.calls.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _blame(self, link: _Link, error: HeaplineError) -> None:
        """The next call goes to the next endpoint, over a new channel; it is the same one if there is but one."""
        if self._link is link and passes_by_itself(error) and not isinstance(error, TopicReloading):
            log.info("left an endpoint", endpoint=link.endpoint, why=str(error))
            link.left = True
            self._link = None
            self._turn += 1

    def out_of_time(self, name: str, known: str, waited: float = 0.0) -> DeadlineExceeded:
        seconds = SECONDS.get()
        return out_of_time(name, (self._deadline if seconds is None else seconds) + waited, known)

    async def close(self) -> None:
        self._closed = True
        links, self._links = self._links, set()
        for link in links:
            await link.calls.close()
        if self._closing:
            await asyncio.wait(self._closing)
