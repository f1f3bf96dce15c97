"""Session: any number of calls over one gRPC stream, each run on its own and answered when it is done.

A unary gRPC call costs this process about three times as much as a message on an open stream, and one commit completes
many calls. So a client puts all calls that it has into one message, and one message carries all answers that are ready.
Every call is a request of its own at the gate, so a revoked key is rejected at its next call.

Bounded: a session with many calls in progress, or many answers that its client does not read, is not read further.
Calls that wait are counted separately, because a pop may wait for an enqueue that is sent after it.

When the stream breaks, its calls are cancelled, and leases that were not handed to gRPC are returned. Leases that were
handed to gRPC may have arrived; they stay until they expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from heapline.contract.call import CALLS, Command
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.logs import Log
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request, Stopping
from heapline.wire import codec, error_codes
from heapline.wire.descriptors import pb

CALLS_MAX = 1024  # in progress, or answered and not sent; calls that wait are not counted
BYTES_MAX = 64 << 20  # of requests in progress and answers not sent
RESPONSE_BYTES = 4 << 20  # about this many bytes of answers go into one message; a larger answer goes alone
OWN_HEADERS = ("traceparent", "tracestate", "x-correlation-id", "x-confirmation")  # the stream says who calls
log = Log("heapline.server")


class Session:
    """The calls of one stream. `request` is the stream's own, which was admitted."""

    def __init__(self, dispatcher: Dispatcher, request: Request) -> None:
        self._dispatcher, self._gate, self._stream = dispatcher, dispatcher.gate, request
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._waiting = 0  # calls in progress that wait for something to happen
        self._bytes = 0  # of requests in progress and answers not sent
        self._answers: list[tuple[Any, Any]] = []  # an answer, and the leases in it: (command, result, request) or None
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._error: Exception | None = None

    async def run(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        reader = asyncio.ensure_future(self._read(messages))
        stopping = asyncio.ensure_future(self._gate.stopping.wait())
        for future in (reader, stopping):
            future.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                while self._answers:
                    yield pb.SessionResponse(answers=self._next_answers())
                if self._error is not None:
                    raise self._error
                if not self._calls and reader.done():
                    return
                if not self._calls and stopping.done():
                    raise Stopping
                self._changed.clear()
                await self._changed.wait()
        finally:
            for task in (reader, stopping, *self._calls.values()):
                task.cancel()
            for _, leased in self._answers:
                if leased is not None:
                    self._dispatcher.return_leases(*leased)
            self._answers = []

    # -- calls in --------------------------------------------------------------------------------------------------

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        try:
            async for message in messages:
                for call in message.calls:
                    if not call.cancel:
                        await self._start(call)
                    elif call.number in self._calls:
                        self._calls[call.number].cancel()
        except Exception as error:
            self._error = error

    async def _start(self, call: Any) -> None:
        if call.number in self._calls:
            raise BadRequest(f"call {call.number} is in progress; number each call of a session differently")
        while self._is_full():
            self._has_room.clear()
            await self._has_room.wait()
        self._bytes += len(call.body)
        self._calls[call.number] = task = asyncio.ensure_future(self._run(call))
        task.add_done_callback(partial(self._end, call))

    def _is_full(self) -> bool:
        calls = len(self._calls) + len(self._answers)
        calls_max = CALLS_MAX + self._gate.limits.inflight_per_key
        return calls - self._waiting >= CALLS_MAX or calls >= calls_max or self._bytes >= BYTES_MAX

    def _end(self, call: Any, task: asyncio.Task[None]) -> None:
        del self._calls[call.number]
        self._bytes -= len(call.body)
        if task.cancelled():  # answered here, because a task that had not started cannot do it
            self._answers.append((pb.SessionAnswer(number=call.number, code="CANCELLED"), None))
        self._has_room.set()
        self._changed.set()

    async def _run(self, call: Any) -> None:
        kind, leased, waits = CALLS.get(call.command), None, False
        headers = self._stream.headers
        if call.headers:
            headers = {**headers, **{name: call.headers[name] for name in OWN_HEADERS if name in call.headers}}
        deadline = asyncio.get_running_loop().time() + call.timeout if call.timeout else None
        rpc = "Session" if kind is None else kind.facts.rpc
        request = Request(self._gate, "grpc", rpc, headers, peer=self._stream.peer, deadline=deadline)
        try:
            async with request:
                if kind is None or not issubclass(kind, Command):
                    raise BadRequest(f"call {call.command:#x} does not exist or is a stream; use a unary call")
                command = codec.decode_call(call.body, kind)
                if waits := kind.facts.waits and bool(getattr(command, "wait", 0)):
                    self._waiting += 1
                    self._has_room.set()
                result = await self._dispatcher.run(command, request, headers.get("x-confirmation"))
            answer = pb.SessionAnswer(number=call.number, body=codec.encode(result))
            leased = (command, result, request) if kind.facts.leases else None
        except HeaplineError as error:
            code = error_codes.codes_of(type(error)).grpc
            answer = pb.SessionAnswer(number=call.number, body=codec.encode(error), code=code)
        except Exception:
            log.exception("call failed", method=rpc, correlation_id=request.correlation_id)
            body = codec.encode({"text": f"{error_codes.INTERNAL_TEXT} (correlation id {request.correlation_id})"})
            answer = pb.SessionAnswer(number=call.number, body=body, code="INTERNAL")
        finally:
            self._waiting -= waits
        self._bytes += len(answer.body)
        self._answers.append((answer, leased))

    # -- answers out -----------------------------------------------------------------------------------------------

    def _next_answers(self) -> list[Any]:
        """Take the answers of the next message."""
        size = count = 0
        while count < len(self._answers) and size < RESPONSE_BYTES:
            size += len(self._answers[count][0].body)
            count += 1
        taken, self._answers = self._answers[:count], self._answers[count:]
        self._bytes -= size
        self._has_room.set()
        return [answer for answer, _ in taken]
