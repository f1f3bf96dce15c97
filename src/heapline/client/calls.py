"""Calls of the service over one channel: the method by its name, errors as Heapline's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import grpc

from heapline.errors import Closed, HeaplineError, UnavailableError
from heapline.wire import codes
from heapline.wire.schema import METHODS

KEEPALIVE_MS = 20_000  # while calls wait: a server that vanishes without a word is missed. Servers allow 10 s and more.
BROKEN_WRITE = "Internal error from Core"
LOOKS, LOOK_SECONDS = 100, 0.01  # for the status of a call that broke
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.http2.max_pings_without_data", 0),
]


class Calls:
    def __init__(self, target: str, credential: str | None, timeout: float | None) -> None:
        keepalive = [("grpc.keepalive_time_ms", KEEPALIVE_MS)]
        keepalive += [(f"grpc.{name}_timeout_ms", KEEPALIVE_MS // 2) for name in ("keepalive", "http2.ping")]
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS + keepalive)
        self._metadata = None if credential is None else (("authorization", credential),)
        self._timeout = timeout
        self._closed = False
        self._stubs = {name: self._stub(name) for name in METHODS}

    def _stub(self, name: str) -> Any:
        method = METHODS[name]
        ways = {
            (False, False): self._channel.unary_unary,
            (False, True): self._channel.unary_stream,
            (True, True): self._channel.stream_stream,
        }
        make = ways[method.streams_in, method.streams_out]
        return make(
            method.path, request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )  # fmt: skip

    async def __call__(self, name: str, request: Any) -> Any:
        try:
            return await self._stubs[name](request, metadata=self._metadata, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            raise heapline_error(error) from None
        except grpc.aio.UsageError:
            raise Closed from None

    async def stream(self, name: str, request: Any) -> AsyncIterator[Any]:
        """The answers of a streaming method; `request` is one, or an async iterator of them."""
        streams_in = METHODS[name].streams_in
        call = self._stubs[name](*(() if streams_in else (request,)), metadata=self._metadata)
        ending = _Ending(call)
        sending = asyncio.ensure_future(_send(call, request)) if streams_in else None
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise await ending.error(error) from None
        except asyncio.CancelledError:
            if sending is not None and sending.done() and (problem := sending.exception()) is not None:
                raise problem from None  # of the iterator, which ended the call
            raise
        finally:
            call.cancel()
            if sending is not None:
                sending.cancel()  # gRPC would let it wait for requests of a stream that has ended

    async def close(self) -> None:
        await self._channel.close()


async def _send(call: Any, requests: AsyncIterable[Any]) -> None:
    try:
        async for request in requests:
            await call.write(request)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # the call has ended, and whoever reads the answers is told how
    except Exception:
        call.cancel()
        raise


class _Ending:
    """How a call ended, as gRPC heard it: a write that comes a moment too late puts an internal error in its place."""

    def __init__(self, call: Any) -> None:
        self._heard: Any = None
        call.add_done_callback(self._hear)

    def _hear(self, call: Any) -> None:
        code, trailing, details = (_at_once(f()) for f in (call.code, call.trailing_metadata, call.details))
        if details != BROKEN_WRITE:
            self._heard = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)

    async def error(self, error: Any) -> HeaplineError:
        if error.details() != BROKEN_WRITE:
            return heapline_error(error)
        for _ in range(LOOKS):
            if self._heard is not None:
                return heapline_error(self._heard)
            await asyncio.sleep(LOOK_SECONDS)
        return UnavailableError("the stream broke while something was being sent: connect again and retry")


def _at_once(coroutine: Any) -> Any:
    """What a coroutine returns that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("a call that has ended keeps its status to itself")


def heapline_error(error: Any) -> HeaplineError:
    """The exception that the server raised; without details, what the code says."""
    code, text = error.code().name, error.details() or ""
    for name, value in error.trailing_metadata() or ():
        if name == codes.METADATA:
            return codes.from_metadata(value, code, text)
    return codes.of_code(code, text)
