"""Calls of the service over one channel: the method by its name, errors as Heapline's own.

Unary methods travel in a session (session.py) unless that is switched off; then each is a gRPC call of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from heapline.client.session import Session
from heapline.client.target import ClientTls, parse_target
from heapline.errors import Closed, HeaplineError, UnavailableError
from heapline.wire import codes
from heapline.wire.schema import METHODS

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects at once, however often others have failed
    # A server that has vanished without a word is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_NOT_CONNECTED = "failed to connect"
# What gRPC says when a stream ends under a write; the server's own words are lost then.
_CUT_OFF = "Internal error from Core"


class Calls:
    def __init__(
        self, target: str, credential: str | None, timeout: float | None, *, sessions: bool = True,
        late: Callable[[str, bytes], None] = lambda method, answer: None, tls: ClientTls | None = None,
    ) -> None:  # fmt: skip
        address, tls = parse_target(target, tls)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=_OPTIONS)
        self._metadata = None if credential is None else (("authorization", credential),)
        self._timeout = timeout
        self._closed = False
        self._stubs = {name: self._stub(name) for name in METHODS}
        self._session = Session(self._open_session, heapline_error, late) if sessions else None

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
        if self._session is not None:
            answer = await self._session.call(name, request.SerializeToString(), seconds)
            return METHODS[name].response.FromString(answer)
        try:
            return await self._stubs[name](request, metadata=self._metadata, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise heapline_error(error) from None
        except grpc.aio.UsageError:
            raise Closed from None

    async def stream(self, name: str, request: Any) -> AsyncIterator[Any]:
        """The answers of a streaming method; `request` is one, or an async iterator of them."""
        call = self._stubs[name](request, metadata=self._metadata)
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise heapline_error(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._channel.close()


def heapline_error(error: Any) -> HeaplineError:
    """The exception that the server raised; without details, what the code says."""
    code, text = error.code().name, error.details() or ""
    if code == "INTERNAL" and text == _CUT_OFF:
        code, text = "UNAVAILABLE", "the stream broke while it was written to: call again"
    for name, value in error.trailing_metadata() or ():
        if name == codes.METADATA:
            return codes.from_metadata(value, code, text)
    told = codes.of_code(code, text)
    if isinstance(told, UnavailableError) and text.startswith(_NOT_CONNECTED):
        told.reached = False
    return told
