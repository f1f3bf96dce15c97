"""Session: any number of unary calls over one stream, each carried out by itself and answered when it is done.

A unary gRPC call costs this process about three times what a message on an open stream does, and a commit answers many
calls at once. So a client puts what it has to ask at a moment into one message, and one message answers what is ready.
Every call is a visit of its own at the front: a key that was revoked is refused at the next call.

Bounded: a session that has much under way, or many answers that its client does not read, is not read on. Pops that
wait are not counted there: they may wait for the very enqueue that comes behind them, and the limit on calls of a key
bounds them.

When the stream breaks, calls under way are ended as if their own connection had broken, and what was popped and not
handed to gRPC goes back at once, unless the pop has a name (`request_id`): whoever repeats it may have the same leases
by now. What was handed over may have arrived, so it stays leased until its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from heapline.errors import BadRequest, HeaplineError
from heapline.logs import Log
from heapline.server.front import Caller, Front, Stopping, correlation_id
from heapline.server.rpc import CORRELATION, TEXT_MAX, headers_of, perform
from heapline.wire import codes
from heapline.wire.schema import METHODS, pb

CALLS_MAX = 1024  # under way, or answered and not sent, at a time; and pops that wait
BYTES_MAX = 64 << 20  # of requests under way and answers not sent
ANSWER_BYTES = 4 << 20  # about as many bytes of answers go into one message; a larger one goes alone
WAITING = ("Pop", "GroupFetch")
OWN_HEADERS = ("traceparent", "tracestate", "x-correlation-id")  # that a call may bring; who calls is the stream's
log = Log("heapline.server")

Act = Callable[[Any, Caller], Awaitable[Any]]


class Session:
    def __init__(self, front: Front, service: object, caller: Caller, give_back: Callable[[Any], None]) -> None:
        self._front = front
        self._service = service
        self._context = caller.context
        self._headers = headers_of(caller.context)
        self._give_back = give_back  # the leases of a PopResponse that nobody will get
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._pops = 0  # of these, how many may wait
        self._bytes = 0  # of requests under way, and of answers
        self._answers: list[tuple[Any, Any]] = []  # what to send, and of a pop its request and PopResponse
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._problem: Exception | None = None

    async def run(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        reader = asyncio.ensure_future(self._read(requests))
        stopping = asyncio.ensure_future(self._front.stopping.wait())
        for future in (reader, stopping):
            future.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                while self._answers:
                    yield pb.SessionResponse(answers=[answer for answer, _ in self._take()])
                if self._problem is not None:
                    raise self._problem
                if not self._calls and reader.done():
                    return
                if not self._calls and stopping.done():
                    raise Stopping
                self._changed.clear()
                await self._changed.wait()
        finally:
            reader.cancel()
            stopping.cancel()
            for task in self._calls.values():
                task.cancel()
            for _, popped in self._answers:
                if popped is not None and not pb.PopRequest.FromString(popped[0]).HasField("request_id"):
                    self._give_back(popped[1])
            self._answers = []

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                for call in request.calls:
                    if call.cancel:
                        if call.number in self._calls:
                            self._calls[call.number].cancel()
                    else:
                        await self._begin(call)
        except Exception as error:
            self._problem = error

    async def _begin(self, call: Any) -> None:
        if call.number in self._calls:
            raise BadRequest(f"call {call.number} is under way: give each call of a session a number of its own")
        while self._is_full():
            self._room.clear()
            await self._room.wait()
        waits = call.method in WAITING and _waits(call.method, call.request)
        self._pops += waits
        self._bytes += len(call.request)
        self._calls[call.number] = task = asyncio.ensure_future(self._carry_out(call))
        task.add_done_callback(lambda task: self._end(call, task, waits))

    def _is_full(self) -> bool:
        calls = len(self._calls) + len(self._answers)
        # Of more calls than a key may have, those that are over are answered at once: that bound holds up nobody long.
        most = CALLS_MAX + self._front.limits.inflight_per_key
        return calls - self._pops >= CALLS_MAX or calls >= most or self._bytes >= BYTES_MAX

    def _end(self, call: Any, task: asyncio.Task[None], waits: bool) -> None:
        del self._calls[call.number]
        self._pops -= waits
        if task.cancelled():  # told here: one that had not begun yet could not say so itself
            self._answers.append((pb.SessionAnswer(number=call.number, code="CANCELLED", text="cancelled"), None))
        self._bytes -= len(call.request)
        self._room.set()
        self._changed.set()

    async def _carry_out(self, call: Any) -> None:
        popped, headers = None, self._headers
        if call.headers:
            headers = headers | {name: call.headers[name] for name in OWN_HEADERS if name in call.headers}
        headers = headers | {CORRELATION: correlation_id(headers.get(CORRELATION))}
        try:
            method = METHODS.get(call.method)
            if method is None or method.streams_in or method.streams_out:
                raise BadRequest(f"{call.method[:100]!r} is no unary method of this service")
            act = getattr(self._service, call.method)
            response = await perform(self._front, method, act, call.request, headers, self._context)
            answer = pb.SessionAnswer(number=call.number, response=response.SerializeToString())
            popped = (call.request, response) if call.method == "Pop" else None
        except HeaplineError as error:
            code = codes.codes_of(type(error)).grpc
            answer = pb.SessionAnswer(
                number=call.number,
                code=code,
                error=codes.to_metadata(error),
                text=codes.describe(error)["text"][:TEXT_MAX],
            )
        except Exception:
            told = headers[CORRELATION]
            log.exception("a call failed", method=call.method, correlation_id=told)
            text = f"{codes.INTERNAL_TEXT}, under {told}"
            answer = pb.SessionAnswer(number=call.number, code="INTERNAL", text=text)
        self._bytes += len(answer.response)
        self._answers.append((answer, popped))

    def _take(self) -> list[tuple[Any, Any]]:
        """The next message's answers."""
        size = count = 0
        while count < len(self._answers) and size < ANSWER_BYTES:
            size += len(self._answers[count][0].response)
            count += 1
        taken, self._answers = self._answers[:count], self._answers[count:]
        self._bytes -= size
        self._room.set()
        return taken


def _waits(method: str, request: bytes) -> bool:
    try:
        return bool(METHODS[method].request.FromString(request).wait)
    except DecodeError:
        return False  # told when it is carried out
