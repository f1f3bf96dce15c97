"""The gRPC side of a call: from bytes to a request, through the front, and whatever happened told in gRPC's words.

A face (grpc_service.py, pop_stream.py) only says what a method does. Here it is made a gRPC handler that enters the
front first, turns Heapline's errors into codes, and tells nothing of any other error but that there was one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from heapline.errors import BadRequest, HeaplineError, Unauthenticated
from heapline.logs import Log
from heapline.server.front import Caller, Front, Visit
from heapline.server.front import correlation_id as new_id
from heapline.wire import codes
from heapline.wire.schema import METHODS, SERVICE, Method

log = Log("heapline.server")
CORRELATION = "x-correlation-id"
TEXT_MAX = 1000  # of a status: it travels in a header
HEAR_OUT_SECONDS = 2.0
HEAR_OUT_AT_ONCE = 8
KNOWN_MAX = 10_000
_heard_out = 0  # strangers, at the moment


def handler(front: Front, service: object) -> Any:
    """A generic gRPC handler of all methods; each is looked up on `service` by its name."""
    return _Handlers(front, service)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A unary handler is called when gRPC has the whole request, which is 64 MB of memory for whoever asks, as often
    as he asks. So whoever is not known yet is served as if the method took a stream, of which nothing but what fits the
    window is taken until it is read. Streams cost more: whoever was let in lately is served the short way. Either way
    the credential is checked, so what is kept here need not be: it is a hash, and may be wrong."""

    def __init__(self, front: Front, service: object) -> None:
        self._known: set[int] = set()
        made = {name: (method, _act(front, method, getattr(service, name), self)) for name, method in METHODS.items()}
        self._short = {f"/{SERVICE}/{name}": _handler(m, m.streams_in, act) for name, (m, act) in made.items()}
        self._careful = {f"/{SERVICE}/{name}": _handler(m, True, act) for name, (m, act) in made.items()}

    def service(self, handler_call_details: Any) -> Any:
        known = hash(_credential(handler_call_details.invocation_metadata)) in self._known
        return (self._short if known else self._careful).get(handler_call_details.method)

    def was_let_in(self, headers: dict[str, str]) -> None:
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known.add(hash(_credential(headers.items())))

    def was_refused(self, headers: dict[str, str]) -> None:
        self._known.discard(hash(_credential(headers.items())))


def _credential(headers: Any) -> tuple[Any, ...]:
    return tuple(value for name, value in headers or () if name in ("authorization", "x-api-key"))


def _act(front: Front, method: Method, act: Callable[..., Any], handlers: _Handlers) -> Callable[..., Any]:
    return (_streaming if method.streams_out else _unary)(front, method, act, handlers)


def _handler(method: Method, streams_in: bool, act: Callable[..., Any]) -> Any:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = kinds[streams_in, method.streams_out]
    # Requests are parsed by the handler: gRPC would tell a stranger what our parser thinks of his bytes.
    return make(act, response_serializer=_serialize)


def _unary(
    front: Front, method: Method, act: Callable[[Any, Caller], Awaitable[Any]], handlers: _Handlers
) -> Callable[..., Any]:
    async def handle(data: Any, context: Any) -> Any:
        headers = correlated(context)
        try:
            answer = await perform(front, method, act, data, headers, context)
            if type(data) is not bytes:
                handlers.was_let_in(headers)
            return answer
        except Exception as error:
            if isinstance(error, Unauthenticated):
                handlers.was_refused(headers)
            await tell(context, error, method.name, headers[CORRELATION])

    return handle


async def perform(
    front: Front, method: Method, act: Callable[[Any, Caller], Awaitable[Any]], data: Any, headers: dict[str, str],
    context: Any,
) -> Any:  # fmt: skip
    """One unary call, from its bytes to its response."""
    asked = _Asked(method, data)
    async with Visit(front, "grpc", method.name, None, headers, context, asked.read) as caller:
        return await act(asked.request, caller)


class _Asked:
    """A request that is read, if it is a stream, and parsed when it is known who sent it: 64 MB of a stranger's can be
    3 GB of messages."""

    __slots__ = ("_data", "_method", "request")

    def __init__(self, method: Method, data: Any) -> None:
        self._method, self._data, self.request = method, data, None

    async def read(self, visit: Visit) -> None:
        data = self._data
        if type(data) is not bytes:
            data = await anext(data, None)
            if data is None:
                raise BadRequest("there is no request in this call")
            assert visit.caller is not None
            visit.caller.must_be_valid()  # it takes as long as its sender likes: he may be out by now
        self.request = request = _parse(self._method, data)
        visit.topic = getattr(request, "topic", None)


def _streaming(
    front: Front, method: Method, act: Callable[[Any, Caller], AsyncIterator[Any]], handlers: _Handlers
) -> Callable[..., Any]:
    async def handle(data: Any, context: Any) -> None:
        admitted, headers = False, correlated(context)
        asked = None if method.streams_in else _Asked(method, data)
        try:
            read = None if asked is None else asked.read
            async with Visit(front, "grpc", method.name, None, headers, context, read) as caller:
                admitted = True
                handlers.was_let_in(headers)
                with caller.while_valid():
                    answers = act(_parse_all(method, data) if asked is None else asked.request, caller)
                    async with contextlib.aclosing(answers):  # type: ignore[type-var]
                        async for answer in answers:
                            await context.write(answer)
        except Exception as error:
            if method.streams_in and not admitted:
                await _hear_out(data)
            await tell(context, error, method.name, headers[CORRELATION])

    return handle


async def _hear_out(requests: Any) -> None:
    """Let a client finish its first sentence before it is refused: one whose write is cut off by the refusal is told
    of a broken stream by its own gRPC, instead of what we say. It is not parsed, and in a crowd nobody is heard out."""
    global _heard_out
    if _heard_out >= HEAR_OUT_AT_ONCE:
        return
    _heard_out += 1
    try:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(HEAR_OUT_SECONDS):
                await anext(requests, None)
    finally:
        _heard_out -= 1


def headers_of(context: Any) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def correlated(context: Any) -> dict[str, str]:
    """The headers, with a correlation id in any case. Who sends one gets it back; who sends none is told one only when
    something goes wrong: good calls stay short."""
    headers = headers_of(context)
    given, headers[CORRELATION] = CORRELATION in headers, new_id(headers.get(CORRELATION))
    if given:
        context.set_trailing_metadata(((CORRELATION, headers[CORRELATION]),))
    return headers


def _parse(method: Method, data: bytes) -> Any:
    try:
        return method.request.FromString(data)
    except DecodeError:
        raise BadRequest(f"these bytes are no {method.request.DESCRIPTOR.full_name}") from None


async def _parse_all(method: Method, stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in stream:
        yield _parse(method, data)


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


async def tell(context: Any, error: Exception, method: str, correlation_id: str) -> None:
    """End the call with what the error means."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError | asyncio.InvalidStateError):
        raise error  # gRPC's own: the call has ended already
    if isinstance(error, HeaplineError):
        code = getattr(grpc.StatusCode, codes.codes_of(type(error)).grpc)
        text = codes.describe(error)["text"][:TEXT_MAX]
        await context.abort(code, text, ((codes.METADATA, codes.to_metadata(error)), (CORRELATION, correlation_id)))
    log.exception("a call failed", method=method, correlation_id=correlation_id)
    await context.abort(grpc.StatusCode.INTERNAL, codes.INTERNAL_TEXT, ((CORRELATION, correlation_id),))
