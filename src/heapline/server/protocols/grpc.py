"""The gRPC interface: every call of the contract as a method, and the streams that carry many commands.

Methods are derived from the contract and the proto's descriptors (wire/protobuf.py). A request is read and parsed only
after its sender is authenticated: 64 MB from an unauthenticated client can become 3 GB of messages. Heapline's errors
become gRPC codes with their data in a trailer. Of any other error the client learns only that there was one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from heapline.contract.call import BY_RPC
from heapline.contract.errors import BadRequest, HeaplineError, Unauthenticated
from heapline.logs import Log
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request
from heapline.server.protocols.message_streams import PopStream, enqueue_stream
from heapline.server.protocols.subscribe_stream import Subscriptions
from heapline.wire import error_codes
from heapline.wire.descriptors import METHODS, Method
from heapline.wire.frames.format import COMPRESS_MIN
from heapline.wire.protobuf import AS_COLUMNS, request_of, response_of

log = Log("heapline.server")
CORRELATION = "x-correlation-id"
CONFIRMATION = "x-confirmation"
TEXT_MAX = 1000  # characters of a status: it travels in a header
FIRST_MESSAGE_SECONDS = 2.0
FIRST_MESSAGES_AT_ONCE = 8
KNOWN_MAX = 10_000
_first_messages = 0  # of rejected streams that are being read


class GrpcHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The methods of the service.

    gRPC calls a unary handler when it has the complete request, which is up to 64 MB of memory for anyone who sends
    one. So a client that is not known yet is served as if the method took a stream: gRPC then buffers no more than its
    window until the handler reads. Streams cost more, so clients that were admitted recently are served as unary
    calls. The credential is checked in both cases, so the set of known clients may be wrong; it holds hashes only.
    """

    def __init__(self, dispatcher: Dispatcher, subscriptions: Subscriptions) -> None:
        self._dispatcher, self._gate = dispatcher, dispatcher.gate
        self._subscriptions = subscriptions
        self._known: set[int] = set()
        handlers = {name: self._handler(method) for name, method in METHODS.items()}
        self._short = {m.path: _register(m, m.streams_in, handlers[name]) for name, m in METHODS.items()}
        self._careful = {m.path: _register(m, True, handlers[name]) for name, m in METHODS.items()}

    def service(self, handler_call_details: Any) -> Any:
        is_known = hash(_credential(handler_call_details.invocation_metadata)) in self._known
        return (self._short if is_known else self._careful).get(handler_call_details.method)

    def _admitted(self, request: Request) -> None:
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known.add(hash(_credential(request.headers.items())))

    # -- the kinds of methods --------------------------------------------------------------------------------------

    def _handler(self, method: Method) -> Callable[..., Any]:
        if method.streams_in:
            return self._stream(method)
        return self._feed(method) if method.streams_out else self._unary(method)

    def _request(self, method: Method, context: Any) -> Request:
        remaining = context.time_remaining()
        request = Request(
            self._gate,
            "grpc",
            method.name,
            {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)},
            is_stream=method.streams_out,
            peer=context.peer,
            deadline=None if remaining is None else asyncio.get_running_loop().time() + remaining,
        )
        # A client that sends a correlation id receives it back. Others receive one only with an error.
        if CORRELATION in request.headers:
            context.set_trailing_metadata(((CORRELATION, request.correlation_id),))
        return request

    def _unary(self, method: Method) -> Callable[..., Any]:
        kind: Any = BY_RPC[method.name]

        async def handle(data: Any, context: Any) -> Any:
            request, is_known = self._request(method, context), type(data) is bytes
            try:
                async with request:
                    message = _parse(method, data if is_known else await _read(data, request))
                    command = request_of(kind).unpack(message)
                    result = await self._dispatcher.run(command, request, request.headers.get(CONFIRMATION))
                    answer = response_of(kind).pack(result, getattr(message, AS_COLUMNS, True))
                if not is_known:
                    self._admitted(request)
                if answer.ByteSize() > COMPRESS_MIN and self._dispatcher.compressed.has(request.topic):
                    await _compress(context)
                return answer
            except Exception as error:
                if isinstance(error, Unauthenticated):
                    self._known.discard(hash(_credential(request.headers.items())))
                await _abort(context, error, request)

        return handle

    def _feed(self, method: Method) -> Callable[..., Any]:
        kind: Any = BY_RPC[method.name]

        async def handle(data: Any, context: Any) -> None:
            request, codec = self._request(method, context), response_of(kind)
            try:
                async with request:
                    message = _parse(method, data if type(data) is bytes else await _read(data, request))
                    feed, as_columns = request_of(kind).unpack(message), getattr(message, AS_COLUMNS, True)
                    self._admitted(request)
                    is_first = True

                    async def send(item: Any) -> None:
                        nonlocal is_first
                        if is_first and await self._dispatcher.compressed.ask(request.topic):
                            await _compress(context)
                        is_first = False
                        await context.write(codec.pack(item, as_columns))

                    await self._dispatcher.feed(feed, request, send)
            except Exception as error:
                await _abort(context, error, request)

        return handle

    def _stream(self, method: Method) -> Callable[..., Any]:
        async def handle(data: Any, context: Any) -> None:
            is_admitted, request = False, self._request(method, context)
            try:
                async with request:
                    self._gate.admit(request)
                    is_admitted = True
                    self._admitted(request)
                    with self._gate.credentials.hold(request):
                        messages = (_parse(method, item) async for item in data)
                        answers = self._answers(method, messages, request, context)
                        async with contextlib.aclosing(answers):  # type: ignore[type-var]
                            async for answer in answers:
                                await context.write(answer)
            except Exception as error:
                if not is_admitted:
                    await _read_first(data)
                await _abort(context, error, request)

        return handle

    def _answers(
        self, method: Method, messages: AsyncIterator[Any], request: Request, context: Any
    ) -> AsyncIterator[Any]:
        if method.name == "EnqueueStream":
            return enqueue_stream(self._dispatcher, request, messages)
        if method.name == "PopStream":
            return PopStream(self._dispatcher, request, context.done).run(messages)
        assert method.name == "Subscribe"
        return self._subscriptions.open(self._dispatcher, request).run(messages)


def _register(method: Method, streams_in: bool, handle: Callable[..., Any]) -> Any:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    # No request deserializer: gRPC would send the parser's messages to unauthenticated clients.
    return kinds[streams_in, method.streams_out](handle, response_serializer=method.response.SerializeToString)


# -- requests ----------------------------------------------------------------------------------------------------------


async def _compress(context: Any) -> None:
    """Compress the answers of this call with gzip, if the client accepts that."""
    context.set_compression(grpc.Compression.Gzip)
    await context.send_initial_metadata(())  # gRPC announces it only here


def _credential(headers: Any) -> tuple[Any, ...]:
    return tuple(value for name, value in headers or () if name in ("authorization", "x-api-key"))


async def _read(stream: AsyncIterator[bytes], request: Request) -> bytes:
    """Return the message of a unary request that arrives as a stream of one."""
    data = await anext(stream, None)
    if data is None:
        raise BadRequest("the call has no request message")
    request.check_credential()  # a client may take long to send it
    return data


def _parse(method: Method, data: bytes) -> Any:
    try:
        return method.request.FromString(data)
    except DecodeError:
        raise BadRequest(f"cannot decode the request as {method.request.DESCRIPTOR.full_name}") from None


async def _read_first(messages: Any) -> None:
    """Read the first message of a rejected stream, without parsing it.

    If the rejection cuts off a client's write, the client's gRPC reports a broken stream instead of our status. Not
    done for many streams at a time.
    """
    global _first_messages
    if _first_messages >= FIRST_MESSAGES_AT_ONCE:
        return
    _first_messages += 1
    try:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                await anext(messages, None)
    finally:
        _first_messages -= 1


# -- errors ------------------------------------------------------------------------------------------------------------


async def _abort(context: Any, error: Exception, request: Request) -> None:
    """End the call with the status of an error."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError | asyncio.InvalidStateError):
        raise error  # from gRPC: the call has already ended
    if isinstance(error, HeaplineError):
        code = getattr(grpc.StatusCode, error_codes.codes_of(type(error)).grpc)
        text = error_codes.advise(error_codes.describe(error), "grpc")[:TEXT_MAX]
        trailers = ((error_codes.METADATA, error_codes.to_metadata(error)), (CORRELATION, request.correlation_id))
        await context.abort(code, text, trailers)
    log.exception("call failed", method=request.rpc, correlation_id=request.correlation_id)
    await context.abort(grpc.StatusCode.INTERNAL, error_codes.INTERNAL_TEXT, ((CORRELATION, request.correlation_id),))
