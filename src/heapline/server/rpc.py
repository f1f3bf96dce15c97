"""What every call goes through: who calls, what they may do, and how whatever happened is told.

A face (grpc_service.py, pop_stream.py) only says what a method does. Here it is made a gRPC handler that asks the guard
first, refuses work while the server stops, turns Heapline's errors into codes, and tells nothing of any other error but
that there was one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from heapline.errors import BadRequest, HeaplineError, Unauthenticated, UnavailableError
from heapline.logs import Log
from heapline.server.auth.principal import Action, Guard, Principal
from heapline.wire import codes
from heapline.wire.schema import METHODS, SERVICE, Method

log = Log("heapline.server")
TEXT_MAX = 1000  # of a status: it travels in a header

PRODUCE, CONSUME, ADMIN = Action.PRODUCE, Action.CONSUME, Action.ADMIN
#: What a caller must be allowed to do on the request's topic. None: the method asks by itself.
ACTIONS: dict[str, Action | None] = {
    "MakeHeap": ADMIN, "UpdateHeapConfig": ADMIN, "DeleteHeap": ADMIN, "ListHeaps": None, "Stats": CONSUME,
    "Purge": ADMIN, "Pause": ADMIN, "Resume": ADMIN, "SetPartitionThrottled": ADMIN, "Snapshot": ADMIN,
    "Enqueue": PRODUCE, "EnqueueBatch": PRODUCE, "EnqueueStream": None, "OpenProducer": PRODUCE,
    "PrepareBatch": None, "CommitBatch": PRODUCE, "AbortBatch": PRODUCE, "ListBatches": PRODUCE,
    "Pop": CONSUME, "PopStream": None, "Ack": CONSUME, "Nack": CONSUME, "Release": CONSUME, "Extend": CONSUME,
    "MoveToDLQ": CONSUME, "Get": CONSUME, "Peek": CONSUME, "Cancel": PRODUCE, "Reschedule": PRODUCE,
    "DlqList": CONSUME, "DlqPeek": CONSUME, "DlqReplay": ADMIN, "DlqDelete": ADMIN,
    "Offsets": CONSUME, "ReadLog": CONSUME,
}  # fmt: skip


class Caller:
    """Who is on the other side of one call."""

    __slots__ = ("_guard", "context", "principal")

    def __init__(self, guard: Guard, principal: Principal, context: Any) -> None:
        self._guard = guard
        self.principal = principal
        self.context = context

    def must(self, action: Action, topic: str | None) -> None:
        self._guard.check(self.principal, action, topic)

    def may(self, action: Action, topic: str) -> bool:
        with contextlib.suppress(HeaplineError):
            self._guard.check(self.principal, action, topic)
            return True
        return False

    def must_be_valid(self) -> None:
        """Asked again and again on streams: a credential may be revoked while they last."""
        if not self._guard.is_valid(self.principal):
            raise Unauthenticated("the credential of this stream is no longer valid: connect again with another")


class Stopping(UnavailableError):
    """Told as UnavailableError: the server is going away, another or the next one will serve."""

    def __init__(self) -> None:
        super().__init__("the server is stopping: connect again and retry")


class Front:
    """Makes handlers of methods, and knows which calls are under way."""

    def __init__(self, guard: Guard) -> None:
        if guard is None:
            raise ValueError("a server needs a guard: who may call is never left open by accident")
        self._guard = guard
        self.stopping = asyncio.Event()
        self.calls_under_way = 0
        self._idle = asyncio.Event()

    async def until_idle(self, seconds: float) -> None:
        """While stopping: until the last call has ended, or so long."""
        if self.calls_under_way:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    def _counted(self, handle: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def counted(data: Any, context: Any) -> Any:
            self.calls_under_way += 1
            try:
                return await handle(data, context)
            finally:
                self.calls_under_way -= 1
                if not self.calls_under_way and self.stopping.is_set():
                    self._idle.set()

        return counted

    def handler(self, service: object) -> Any:
        """A generic gRPC handler of all methods; each is looked up on `service` by its name."""
        made = {name: self._handler(method, getattr(service, name)) for name, method in METHODS.items()}
        return grpc.method_handlers_generic_handler(SERVICE, made)

    def _handler(self, method: Method, act: Callable[..., Any]) -> Any:
        act = self._streaming(method, act) if method.streams_out else self._unary(method, act)
        kinds = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        make = kinds[method.streams_in, method.streams_out]
        # Requests are parsed by the handler: gRPC would tell a stranger what our parser thinks of his bytes.
        return make(self._counted(act), response_serializer=_serialize)

    def _unary(self, method: Method, act: Callable[[Any, Caller], Awaitable[Any]]) -> Callable[..., Any]:
        action = ACTIONS[method.name]

        async def handle(data: bytes, context: Any) -> Any:
            try:
                request = _parse(method, data)
                caller = await self._admit(request, action, context)
                return await act(request, caller)
            except Exception as error:
                await tell(context, error, method.name)

        return handle

    def _streaming(self, method: Method, act: Callable[[Any, Caller], AsyncIterator[Any]]) -> Callable[..., Any]:
        action = ACTIONS[method.name]

        async def handle(data: Any, context: Any) -> None:
            try:
                request = _parse_all(method, data) if method.streams_in else _parse(method, data)
                caller = await self._admit(request, action, context)
                answers = act(request, caller)
                async with contextlib.aclosing(answers):  # type: ignore[type-var]
                    async for answer in answers:
                        await context.write(answer)
            except Exception as error:
                await tell(context, error, method.name)

        return handle

    async def _admit(self, request: Any, action: Action | None, context: Any) -> Caller:
        if self.stopping.is_set():
            raise Stopping
        principal = await self._guard.authenticate(_credential(context))
        caller = Caller(self._guard, principal, context)
        if action is not None:
            caller.must(action, getattr(request, "topic", None))
        return caller


def _parse(method: Method, data: bytes) -> Any:
    try:
        return method.request.FromString(data)
    except DecodeError:
        raise BadRequest(f"these bytes are no {method.request.DESCRIPTOR.full_name}") from None


async def _parse_all(method: Method, stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in stream:
        yield _parse(method, data)


def _credential(context: Any) -> str | None:
    for name, value in context.invocation_metadata() or ():
        if name in ("authorization", "x-api-key") and isinstance(value, str):
            return value
    return None


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


async def tell(context: Any, error: Exception, method: str) -> None:
    """End the call with what the error means."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError | asyncio.InvalidStateError):
        raise error  # gRPC's own: the call has ended already
    if isinstance(error, HeaplineError):
        code = getattr(grpc.StatusCode, codes.codes_of(type(error)).grpc)
        await context.abort(code, str(error)[:TEXT_MAX], ((codes.METADATA, codes.to_metadata(error)),))
    log.exception("a call failed", method=method)
    await context.abort(grpc.StatusCode.INTERNAL, codes.INTERNAL_TEXT)
