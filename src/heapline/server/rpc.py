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

from heapline.errors import BadRequest, HeaplineError
from heapline.logs import Log
from heapline.server.front import Caller, Front, Visit
from heapline.server.front import correlation_id as new_id
from heapline.wire import codes
from heapline.wire.schema import METHODS, SERVICE, Method

log = Log("heapline.server")
CORRELATION = "x-correlation-id"
TEXT_MAX = 1000  # of a status: it travels in a header
HEAR_OUT_SECONDS = 2.0


def handler(front: Front, service: object) -> Any:
    """A generic gRPC handler of all methods; each is looked up on `service` by its name."""
    made = {name: _handler(front, method, getattr(service, name)) for name, method in METHODS.items()}
    return grpc.method_handlers_generic_handler(SERVICE, made)


def _handler(front: Front, method: Method, act: Callable[..., Any]) -> Any:
    act = _streaming(front, method, act) if method.streams_out else _unary(front, method, act)
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = kinds[method.streams_in, method.streams_out]
    # Requests are parsed by the handler: gRPC would tell a stranger what our parser thinks of his bytes.
    return make(act, response_serializer=_serialize)


def _unary(front: Front, method: Method, act: Callable[[Any, Caller], Awaitable[Any]]) -> Callable[..., Any]:
    async def handle(data: bytes, context: Any) -> Any:
        headers = correlated(context)
        try:
            return await perform(front, method, act, data, headers, context)
        except Exception as error:
            await tell(context, error, method.name, headers[CORRELATION])

    return handle


async def perform(
    front: Front, method: Method, act: Callable[[Any, Caller], Awaitable[Any]], data: bytes, headers: dict[str, str],
    context: Any,
) -> Any:  # fmt: skip
    """One unary call, from its bytes to its response."""
    request = _parse(method, data)
    async with Visit(front, "grpc", method.name, getattr(request, "topic", None), headers, context) as caller:
        return await act(request, caller)


def _streaming(front: Front, method: Method, act: Callable[[Any, Caller], AsyncIterator[Any]]) -> Callable[..., Any]:
    async def handle(data: Any, context: Any) -> None:
        admitted, headers = False, correlated(context)
        request = _parse_all(method, data) if method.streams_in else None
        try:
            request = request or _parse(method, data)
            topic = getattr(request, "topic", None)
            async with Visit(front, "grpc", method.name, topic, headers, context) as caller:
                admitted = True
                with caller.while_valid():
                    answers = act(request, caller)
                    async with contextlib.aclosing(answers):  # type: ignore[type-var]
                        async for answer in answers:
                            await context.write(answer)
        except Exception as error:
            if method.streams_in and not admitted:
                await _hear_out(request)
            await tell(context, error, method.name, headers[CORRELATION])

    return handle


async def _hear_out(requests: Any) -> None:
    """Let a client finish its first sentence before it is refused: one whose write is cut off by the refusal is told
    of a broken stream by its own gRPC, instead of what we say."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(HEAR_OUT_SECONDS):
            await anext(requests, None)


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
