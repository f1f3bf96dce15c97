"""The gRPC streams of messages: EnqueueStream and PopStream.

EnqueueStream: batches in, answers out in the same order, a bounded number of them in progress. Reading ahead lets one
commit take many batches of a stream. The bound makes a client that sends faster than the disk writes wait. A batch that
fails ends the stream, after all batches before it are answered.

PopStream: messages flow as long as the client gives credits, one credit per message. At most one response is in
progress, and the next pop starts when gRPC has taken the last response. What a slow client does not read stays in the
topic, where other clients can pop it, and costs this process one batch at most. When a stream breaks, messages that
were handed to gRPC may have arrived, so they stay leased until their deadline. Messages that were popped and not handed
over are returned immediately.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from heapline.contract.errors import BadRequest
from heapline.contract.leases import Leased, Pop
from heapline.contract.messages import EnqueueBatch
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request, Stopping
from heapline.wire.protobuf import request_of, response_of

AHEAD = 16  # batches of an EnqueueStream in progress
CREDITS_MAX = 1 << 20
BATCH_DEFAULT = 1000
CHECK_EVERY = 10.0  # seconds after which an idle stream checks its credential
WAIT = 3600.0  # seconds of one pop that finds nothing


async def _next(messages: AsyncIterator[Any]) -> Any:
    return await anext(messages, None)


def credits_after(credits: int, more: int) -> int:
    """Return a stream's credits with those that a request adds, or raise BadRequest."""
    if more < 0 or credits + more > CREDITS_MAX:
        raise BadRequest(f"credits must not be negative, and at most {CREDITS_MAX} may be open, got {more}")
    return credits + more


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
                    await dispatcher.gate.pace(request, command)  # here: no later batch may overtake this one
                    in_progress.append(asyncio.ensure_future(dispatcher.step(command, request)))
            while in_progress and in_progress[0].done():
                yield answers.pack(in_progress.popleft().result())
        if stopping.done():
            raise Stopping
    finally:
        for future in (*in_progress, stopping, *([reading] if reading is not None else [])):
            future.cancel()
            future.add_done_callback(_ignore_error)


def _ignore_error(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # the stream has ended with the error of an earlier batch


class PopStream:
    def __init__(self, dispatcher: Dispatcher, request: Request, is_gone: Callable[[], bool]) -> None:
        self._dispatcher, self._request, self._is_gone = dispatcher, request, is_gone
        self._start: Pop
        self._as_columns = False
        self._credits = 0
        self._changed = asyncio.Event()  # credits came, or the client will send no more
        self._error: Exception | None = None
        self._has_ended = False

    async def run(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        stopping = asyncio.ensure_future(self._dispatcher.gate.stopping.wait())
        reader: asyncio.Future[None] | None = None
        codec = response_of(Pop)
        try:
            await self._open(messages, stopping)
            reader = asyncio.ensure_future(self._read(messages))
            while await self._has_credits(stopping):
                leased = await self._pop(stopping)
                if leased is None or leased.messages is None:
                    continue
                if self._has_ended or self._is_gone():
                    self._dispatcher.return_leases(self._start, leased, self._request)
                    return
                self._credits -= len(leased.messages)
                yield codec.pack(leased, self._as_columns)
        finally:
            stopping.cancel()
            if reader is not None:
                reader.cancel()

    async def _open(self, messages: AsyncIterator[Any], stopping: asyncio.Future[Any]) -> None:
        """Wait for the first request and take its options."""
        reading = asyncio.ensure_future(_next(messages))
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
        if not reading.done():
            raise Stopping
        first = reading.result()
        if first is None or not first.HasField("start"):
            raise BadRequest("the first request of a PopStream must have `start`")
        start = request_of(Pop).unpack(first.start)
        if start.request_id is not None:
            raise BadRequest("request_id is for single pops; omit it in a PopStream")
        batch = start.max_messages if first.start.HasField("max_messages") else BATCH_DEFAULT
        self._start = msgspec.structs.replace(start, max_messages=batch, wait=WAIT)
        self._as_columns = first.start.as_columns
        self._request.topic = start.topic
        self._dispatcher.gate.check(self._request, start)
        self._add(first.credits)

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        try:
            async for message in messages:
                if message.HasField("start"):
                    raise BadRequest("a PopStream has one `start`; open another stream")
                self._add(message.credits)
        except Exception as error:
            self._error = error
        self._has_ended = True
        self._changed.set()

    def _add(self, credits: int) -> None:
        self._credits = credits_after(self._credits, credits)
        self._changed.set()

    async def _has_credits(self, stopping: asyncio.Future[Any]) -> bool:
        """Wait until a message may be sent. Return False when the client has ended the stream."""
        while True:
            if self._error is not None:
                raise self._error
            if stopping.done():
                raise Stopping
            self._request.check_credential()
            if self._credits > 0 or self._has_ended:
                return not self._has_ended
            await self._next_change({stopping})

    async def _pop(self, stopping: asyncio.Future[Any]) -> Leased | None:
        """Return what a pop leased, or None if the client or the server ends the stream.

        The pop waits in the broker, which wakes it: an idle stream does nothing but check its credential.
        """
        command = self._start
        if command.max_messages > self._credits:
            command = msgspec.structs.replace(command, max_messages=self._credits)
        pop = asyncio.ensure_future(self._dispatcher.paced_step(command, self._request))
        try:
            while not pop.done() and not stopping.done() and not self._has_ended:
                self._request.check_credential()
                await self._next_change({pop, stopping})
            return pop.result() if pop.done() else None
        except asyncio.CancelledError:
            if pop.done() and not pop.cancelled() and pop.exception() is None:
                self._dispatcher.return_leases(command, pop.result(), self._request)
            raise
        finally:
            pop.cancel()

    async def _next_change(self, futures: set[asyncio.Future[Any]]) -> None:
        self._changed.clear()
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({changed, *futures}, timeout=CHECK_EVERY, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
