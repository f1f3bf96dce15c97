"""Calls of the service over one channel: the method by its name, errors as Heapline's own.

Unary methods travel in a session (session.py) unless that is switched off; then each is a gRPC call of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import grpc

from heapline.client import tracing
from heapline.client.ending import Ending, heapline_error
from heapline.client.session import Late, Session
from heapline.client.target import ClientTls, parse_target
from heapline.errors import Closed
from heapline.wire.schema import METHODS

KEEPALIVE_MS = 20_000  # while calls wait: a server that vanishes without a word is missed. Servers allow 10 s and more.
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, however often others have failed
]


class Calls:
    def __init__(
        self, target: str, credential: str | None, timeout: float | None, *, sessions: bool = True,
        late: Late = lambda method, request, answer: None, tls: ClientTls | None = None,
    ) -> None:  # fmt: skip
        keepalive = [("grpc.keepalive_time_ms", KEEPALIVE_MS)]
        keepalive += [(f"grpc.{name}_timeout_ms", KEEPALIVE_MS // 2) for name in ("keepalive", "http2.ping")]
        options = _OPTIONS + keepalive
        address, tls = parse_target(target, tls)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=options)
        self._metadata = () if credential is None else (("authorization", credential),)
        self._timeout = timeout
        self._stubs = {name: self._stub(name) for name in METHODS}
        self._session = Session(self._open_session, late) if sessions else None

    def _open_session(self) -> Any:
        return self._stubs["Session"](metadata=self._metadata)

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

    async def __call__(self, name: str, request: Any, seconds: float | None = None) -> Any:
        seconds = self._timeout if seconds is None else seconds
        span = tracing.span_of(name, getattr(request, "topic", None))
        if span is None:
            return await self._call(name, request, None, seconds)
        with span:
            return await self._call(name, request, span.headers, seconds)

    async def _call(self, name: str, request: Any, headers: dict[str, str] | None, seconds: float | None) -> Any:
        if self._session is not None:
            answer = await self._session.call(name, request.SerializeToString(), seconds, headers)
            return METHODS[name].response.FromString(answer)
        metadata = self._metadata if headers is None else (*self._metadata, *headers.items())
        try:
            return await self._stubs[name](request, metadata=metadata, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise heapline_error(error) from None
        except grpc.aio.UsageError:
            raise Closed from None

    async def stream(self, name: str, request: Any) -> AsyncIterator[Any]:
        """The answers of a streaming method; `request` is one, or an async iterator of them."""
        metadata = (*self._metadata, *tracing.context_headers().items())
        streams_in = METHODS[name].streams_in
        call = self._stubs[name](*(() if streams_in else (request,)), metadata=metadata)
        ending = Ending(call)
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
        if self._session is not None:
            await self._session.close()
        await self._channel.close()
        self._stubs.clear()  # whoever keeps an error of ours keeps its frames, and those would keep the connection
        del self._channel


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
