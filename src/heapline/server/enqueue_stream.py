"""EnqueueStream: batches in, answers out in the same order, a bounded number of them under way.

Reading ahead lets one commit take many batches of a stream; the bound lets a client that sends faster than the disk
writes wait in its own socket. A batch that fails ends the stream, after all before it were answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from heapline.server.auth.principal import Action
from heapline.server.front import Caller, Front, Stopping

AHEAD = 16


async def enqueue_stream(
    requests: AsyncIterator[Any], caller: Caller, enqueue: Callable[[Any, Caller], Awaitable[Any]], front: Front
) -> AsyncIterator[Any]:
    under_way: deque[asyncio.Future[Any]] = deque()
    reading: asyncio.Future[Any] | None = None
    stopping = asyncio.ensure_future(front.stopping.wait())
    ended = False
    try:
        while under_way or not ended:
            if stopping.done():
                ended = True  # an idle client hears of it at once, not when it sends again
            elif reading is None and not ended and len(under_way) < AHEAD:
                reading = asyncio.ensure_future(_next(requests))
            first = under_way[0] if under_way else None
            waited = {f for f in (first, *((reading, stopping) if not ended else ())) if f is not None}
            if waited:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if reading is not None and reading.done() and not stopping.done():
                request, reading = reading.result(), None
                if request is None:
                    ended = True
                else:
                    caller.must_be_valid()
                    caller.must(Action.PRODUCE, request.topic)
                    under_way.append(asyncio.ensure_future(enqueue(request, caller)))
            while under_way and under_way[0].done():
                yield under_way.popleft().result()
        if stopping.done():
            raise Stopping
    finally:
        for future in (*under_way, stopping, *([reading] if reading is not None else [])):
            future.cancel()
            future.add_done_callback(_forget)


async def _next(requests: AsyncIterator[Any]) -> Any:
    return await anext(requests, None)


def _forget(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # the stream has ended with the error of one before it
