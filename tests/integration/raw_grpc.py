"""A plain gRPC client for tests of the server: one unary call per command, no retries, raw messages where needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc
import msgspec

from heapline.client.transports.transport import Transport, closed
from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Context
from heapline.contract.errors import ConfirmationNeeded, HeaplineError, UnavailableError
from heapline.wire import error_codes
from heapline.wire.descriptors import METHODS
from heapline.wire.protobuf import request_of, response_of

BROKEN_WRITE = "Internal error from Core"


def error_of(error: grpc.aio.AioRpcError) -> HeaplineError:
    trailers = dict(error.trailing_metadata() or ())
    return error_codes.from_metadata(trailers.get(error_codes.METADATA, b""), error.code().name, error.details() or "")


class Calls:
    """Methods by name, with messages as they are."""

    def __init__(self, channel: Any, credential: str | None, timeout: float | None) -> None:
        self.channel, self.timeout = channel, timeout
        self.metadata = () if credential is None else (("authorization", credential),)

    async def __call__(self, name: str, message: Any, **headers: str) -> Any:
        method = METHODS[name]
        stub = self.channel.unary_unary(method.path, lambda m: m.SerializeToString(), method.response.FromString)
        metadata = (*self.metadata, *((key.replace("_", "-"), value) for key, value in headers.items()))
        try:
            return await stub(message, metadata=metadata, timeout=self.timeout)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None

    def open(self, name: str, message: Any = None) -> Any:
        """Open a stream and return gRPC's own call."""
        method = METHODS[name]
        make = self.channel.stream_stream if method.streams_in else self.channel.unary_stream
        stub = make(method.path, lambda m: m.SerializeToString(), method.response.FromString)
        return stub(metadata=self.metadata) if message is None else stub(message, metadata=self.metadata)

    async def stream(self, name: str, messages: Any) -> AsyncIterator[Any]:
        """Send messages, or one message, and yield the responses."""
        is_stream = METHODS[name].streams_in
        call = self.open(name, None if is_stream else messages)
        statuses: list[HeaplineError] = []
        call.add_done_callback(lambda ended: statuses.extend(_status(ended)))
        writing = asyncio.ensure_future(_write(call, messages)) if is_stream else None
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise await _ended(error, statuses) from None
        finally:
            call.cancel()
            if writing is not None:
                writing.cancel()


async def _write(call: Any, messages: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream has ended
        async for message in messages:
            await call.write(message)
        await call.done_writing()


def _status(call: Any) -> list[HeaplineError]:
    """Return the status of a call that has just ended, unless gRPC has replaced it."""
    code, trailers, details = (_result(f()) for f in (call.code, call.trailing_metadata, call.details))
    if details == BROKEN_WRITE or code is grpc.StatusCode.OK:
        return []
    return [error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details))]


def _result(coroutine: Any) -> Any:
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the call has ended")


async def _ended(error: grpc.aio.AioRpcError, statuses: list[HeaplineError]) -> HeaplineError:
    """A write just after a stream ends makes gRPC replace the status: wait for the one that the server sent."""
    if error.details() != BROKEN_WRITE:
        return error_of(error)
    for _ in range(100):
        if statuses:
            return statuses[0]
        await asyncio.sleep(0.01)
    return UnavailableError("the stream broke")


class RawGrpc(Broker):
    """A broker over gRPC. Destructive calls are confirmed automatically."""

    def __init__(
        self, target: str, credential: str | None = None, timeout: float | None = None, tls: Any = None
    ) -> None:
        self._target, self._credential, self._timeout = target.removeprefix("heapline+tls://"), credential, timeout
        self._tls = tls  # with the files `ca`, `certificate` and `key`

    async def __aenter__(self) -> Self:
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),  # other channels' failures to connect do not delay this one
        ]
        if self._tls is None:
            self.channel = grpc.aio.insecure_channel(self._target, options=options)
        else:
            files = (self._tls.ca, self._tls.key, self._tls.certificate)
            ca, key, certificate = (None if file is None else file.read_bytes() for file in files)
            credentials = grpc.ssl_channel_credentials(ca, key, certificate)
            self.channel = grpc.aio.secure_channel(self._target, credentials, options=options)
        self.calls = Calls(self.channel, self._credential, self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.channel.close()

    async def do(self, command: Any, context: Context = HERE, /) -> Any:
        kind = type(command)
        message = request_of(kind).pack(command)
        headers = {} if context.confirmation is None else {"x_confirmation": context.confirmation}
        try:
            response = await self.calls(kind.facts.rpc, message, **headers)
        except ConfirmationNeeded as needed:
            if context.confirmation is not None:
                raise
            return await self.do(command, msgspec.structs.replace(context, confirmation=needed.token))
        return response_of(kind).unpack(response)

    async def stream(self, feed: Any, context: Context = HERE, /) -> AsyncIterator[Any]:  # type: ignore[override]
        kind = type(feed)
        async for response in self.calls.stream(kind.facts.rpc, request_of(kind).pack(feed)):
            yield response_of(kind).unpack(response)


class GrpcBroker(Transport):
    """Like a transport: pops have request ids, and those of cancelled callers are returned."""

    def __init__(self, target: str, credential: str | None = None) -> None:
        super().__init__()
        self._raw, self._is_open = RawGrpc(target, credential), False

    async def __aenter__(self) -> Self:
        await self._raw.__aenter__()
        self._is_open = True
        return self

    async def close(self) -> None:
        if self._is_open:
            await self._leases.wait()
            self._is_open = False
            await self._raw.close()

    async def _request(self, command: Any, context: Context) -> Any:
        if not self._is_open:
            raise closed()
        return await self._raw.do(command, context)

    def stream(self, feed: Any, context: Context = HERE, /) -> AsyncIterator[Any]:
        if not self._is_open:
            raise closed()
        return self._raw.stream(feed, context)
