"""A broker over one gRPC channel: each command is one unary call, or all of them share a session (session.py)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Any, TypeVar

import grpc

from heapline.client.target import ClientTls, parse_target
from heapline.client.transports.grpc_status import StreamStatus, heapline_error
from heapline.client.transports.session import Session
from heapline.client.transports.transport import PopStream, RowStream, Transport, closed, seconds_left
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.errors import HeaplineError, Unauthenticated
from heapline.contract.groups import FetchedRows, GroupFetch
from heapline.contract.leases import Pop
from heapline.wire.descriptors import METHODS, pb
from heapline.wire.protobuf import request_of, response_of, struct_codec

R = TypeVar("R")
KEEPALIVE_MS = 20_000  # detects a silently lost server while calls wait; servers accept 10 s or more
NO_KEY = (
    "the server requires an API key; pass api_key=… to heapline.connect, or name a file with the key in "
    "HEAPLINE_API_KEY_FILE. The first admin key is in admin.key in the server's data directory"
)
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel connects immediately, however often others have failed
]


def open_channel(library: Any, address: str, tls: ClientTls | None) -> Any:
    """Return a channel of grpc.aio, or of grpc for code that blocks."""
    keepalive = [("grpc.keepalive_time_ms", KEEPALIVE_MS)]
    keepalive += [(f"grpc.{name}_timeout_ms", KEEPALIVE_MS // 2) for name in ("keepalive", "http2.ping")]
    if tls is None:
        return library.insecure_channel(address, options=_OPTIONS + keepalive)
    return library.secure_channel(address, tls.credentials(), options=_OPTIONS + keepalive)


def stub_of(channel: Any, rpc: str) -> Any:
    """Return the function of a channel that calls a method of the service."""
    method = METHODS[rpc]
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    return kinds[method.streams_in, method.streams_out](
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.response.FromString,
    )


class GrpcBroker(Transport):
    """`async with GrpcBroker("heaplines://queue:7400", credential="…", tls=ClientTls(ca="ca.crt")) as broker: …`

    Without a scheme and without `tls` the connection is not encrypted, which suits loopback only.
    """

    def __init__(
        self,
        target: str,
        *,
        credential: str | None = None,
        timeout: float | None = None,
        tls: ClientTls | None = None,
        session: bool = False,
    ) -> None:
        super().__init__()
        self._address, self._tls = parse_target(target, tls)
        self._has_credential = credential is not None
        self._metadata = () if credential is None else (("authorization", credential),)
        self._timeout = timeout
        self._channel: Any = None
        self._stubs: dict[Any, Any] = {}
        self._session = Session(lambda: self._stub("Session")(metadata=self._metadata), timeout) if session else None

    def open(self) -> None:
        self._channel = open_channel(grpc.aio, self._address, self._tls)

    async def close(self) -> None:
        await self._leases.close()
        if self._session is not None:
            await self._session.close()
        channel, self._channel = self._channel, None
        self._stubs.clear()  # an error that a caller keeps has our frames, which must not keep the connection
        if channel is not None:
            await channel.close()

    # -- calls -----------------------------------------------------------------------------------------------------

    async def _request(self, command: Command[R], context: Context) -> R:
        kind: Any = type(command)
        if self._session is not None:
            headers = None if context.trace is None and context.confirmation is None else _headers(context)
            try:
                return await self._session.call(command, headers, context.deadline)  # type: ignore[no-any-return]
            except Unauthenticated as refusal:
                raise self._error(refusal) from None
        timeout = seconds_left(context, self._timeout)
        stub = self._stubs.get(kind.facts.rpc) or self._stub(kind.facts.rpc)
        try:
            message = await stub(request_of(kind).pack(command), metadata=self._metadata_of(context), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise self._error(heapline_error(error)) from None
        except grpc.aio.UsageError:
            raise closed() from None
        result: R = response_of(kind).unpack(message)
        return result

    def _stub(self, rpc: str) -> Any:
        if (stub := self._stubs.get(rpc)) is not None:
            return stub
        if self._channel is None:
            raise closed()
        stub = self._stubs[rpc] = stub_of(self._channel, rpc)
        return stub

    def _metadata_of(self, context: Context) -> Any:
        return (*self._metadata, *_headers(context).items())

    def _error(self, error: HeaplineError) -> HeaplineError:
        if isinstance(error, Unauthenticated) and not self._has_credential:
            return Unauthenticated(NO_KEY)  # the server's text names a header, which is of no use to Python code
        return error

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream(self, feed: Feed[R] | PopStream | RowStream, context: Context = HERE, /) -> AsyncIterator[Any]:
        if isinstance(feed, PopStream):
            return self._leased(feed, context)
        if isinstance(feed, RowStream):
            return self._rows(feed, context)
        return self._feed(feed, context)

    async def _feed(self, feed: Feed[R], context: Context) -> AsyncIterator[R]:
        kind: Any = type(feed)
        codec = response_of(kind)
        call = self._stub(kind.facts.rpc)(request_of(kind).pack(feed), metadata=self._metadata_of(context))
        async with contextlib.aclosing(self._responses(call)) as responses:
            async for message in responses:
                yield codec.unpack(message)

    async def _leased(self, stream: PopStream, context: Context) -> AsyncIterator[Any]:
        request = request_of(Pop).pack(stream.start)
        request.ClearField("max_messages")  # the server's default limits a response; credits limit the rest
        codec = response_of(Pop)

        async def requests() -> AsyncIterator[Any]:
            yield pb.PopStreamRequest(start=request)
            async for credits in stream.credits:
                yield pb.PopStreamRequest(credits=credits)

        async with contextlib.aclosing(self._exchange("PopStream", requests(), context)) as responses:
            async for message in responses:
                yield codec.unpack(message)

    async def _rows(self, stream: RowStream, context: Context) -> AsyncIterator[FetchedRows]:
        request = request_of(GroupFetch).pack(stream.open)
        codec = struct_codec(FetchedRows, pb.FetchedRows)

        async def requests() -> AsyncIterator[Any]:
            first = True
            async for credits in stream.credits:
                yield pb.SubscribeRequest(open=request if first else None, credits=credits)
                first = False

        async with contextlib.aclosing(self._exchange("Subscribe", requests(), context)) as responses:
            async for message in responses:
                if message.HasField("fetched"):
                    yield codec.unpack(message.fetched)

    async def _exchange(self, rpc: str, requests: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any, None]:
        """Responses of a method that also takes a stream."""
        call = self._stub(rpc)(metadata=self._metadata_of(context))
        sending = asyncio.ensure_future(_send(call, requests))
        try:
            async with contextlib.aclosing(self._responses(call)) as responses:
                async for message in responses:
                    yield message
        except asyncio.CancelledError:
            if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
                raise error from None  # from the requests, which ended the call
            raise
        finally:
            sending.cancel()  # gRPC would let it wait for requests of a stream that has ended

    async def _responses(self, call: Any) -> AsyncGenerator[Any, None]:
        status = StreamStatus(call)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._error(await status.error(error)) from None
        finally:
            call.cancel()


def _headers(context: Context) -> dict[str, str]:
    headers = {"traceparent": context.trace, "x-confirmation": context.confirmation}
    return {name: value for name, value in headers.items() if value is not None}


async def _send(call: Any, requests: AsyncIterable[Any]) -> None:
    try:
        async for request in requests:
            await call.write(request)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # the call has ended, and the reader of its responses receives its status
    except Exception:
        call.cancel()
        raise
