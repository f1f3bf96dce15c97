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
    ended = False
    try:
        while under_way or not ended:
            if reading is None and not ended and len(under_way) < AHEAD:
                reading = asyncio.ensure_future(_next(requests))
            waited = {f for f in (reading, under_way[0] if under_way else None) if f is not None}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if reading is not None and reading.done():
                request, reading = reading.result(), None
                if request is None:
                    ended = True
                elif front.stopping.is_set():
                    raise Stopping
                else:
                    caller.must_be_valid()
                    caller.must(Action.PRODUCE, request.topic)
                    under_way.append(asyncio.ensure_future(enqueue(request, caller)))
            while under_way and under_way[0].done():
                yield under_way.popleft().result()
    finally:
        for future in (*under_way, *([reading] if reading is not None else [])):
            future.cancel()


async def _next(requests: AsyncIterator[Any]) -> Any:
    return await anext(requests, None)
