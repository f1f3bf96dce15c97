"""EnqueueStream: batches in, answers out in the same order, a bounded number of them in progress.

Reading ahead lets one commit take many batches of a stream. The bound makes a client that sends faster than the disk
writes wait. A batch that fails ends the stream, after all batches before it are answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from heapline.contract.messages import EnqueueBatch
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request, Stopping
from heapline.wire.protobuf import request_of, response_of

AHEAD = 16


async def enqueue_stream(dispatcher: Dispatcher, request: Request, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    in_progress: deque[asyncio.Future[Any]] = deque()
    reading: asyncio.Future[Any] | None = None
    stopping = asyncio.ensure_future(dispatcher.gate.stopping.wait())
    requests, answers = request_of(EnqueueBatch), response_of(EnqueueBatch)
    has_ended = False
    try:
        while in_progress or not has_ended:
            if stopping.done():
                has_ended = True  # an idle client learns of it now, not when it sends again
            elif reading is None and not has_ended and len(in_progress) < AHEAD:
                reading = asyncio.ensure_future(_next(messages))
            first = in_progress[0] if in_progress else None
            waited = {f for f in (first, *((reading, stopping) if not has_ended else ())) if f is not None}
            if waited:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if reading is not None and reading.done() and not stopping.done():
                message, reading = reading.result(), None
                if message is None:
                    has_ended = True
                else:
                    request.check_credential()
                    command = requests.unpack(message)
                    in_progress.append(asyncio.ensure_future(dispatcher.step(command, request)))
            while in_progress and in_progress[0].done():
                yield answers.pack(in_progress.popleft().result())
        if stopping.done():
            raise Stopping
    finally:
        for future in (*in_progress, stopping, *([reading] if reading is not None else [])):
            future.cancel()
            future.add_done_callback(_ignore_error)


async def _next(messages: AsyncIterator[Any]) -> Any:
    return await anext(messages, None)


def _ignore_error(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # the stream has ended with the error of an earlier batch
