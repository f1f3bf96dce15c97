"""Blocking calls over gRPC, for processes without an event loop that read logs or prepare batches: Spark's workers.

Every call is repeated at the next endpoint while the server cannot be reached, until `retry_seconds` have passed
without a response. So use it only for commands that may be repeated: those that read, and those of prepared batches. A
key is sent only to the servers that it was given for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc
from msgspec.structs import replace

from heapline.client.target import ClientTls, parse_target
from heapline.client.transports.grpc import open_channel, stub_of
from heapline.client.transports.grpc_status import heapline_error
from heapline.contract.call import Command, Feed, Page
from heapline.contract.errors import UnavailableError
from heapline.wire.protobuf import request_of, response_of

R = TypeVar("R")
RETRY_SECONDS = 60.0
PAUSE_FIRST, PAUSE_MAX = 0.05, 2.0  # seconds
CALL_SECONDS = 30.0


class BlockingGrpc:
    """Connects when it is first used. Close it with `close`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        credential: str | None,
        tls: ClientTls | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._endpoints, self._tls, self._retry_seconds = list(endpoints), tls, retry_seconds
        self._metadata = () if credential is None else (("authorization", credential),)
        self._channel: Any = None

    def do(self, command: Command[R]) -> R:
        """Carry out a command."""
        kind: Any = type(command)
        rpc, request = kind.facts.rpc, request_of(kind).pack(command)

        def call() -> Any:
            return self._stub(rpc)(request, metadata=self._metadata, timeout=CALL_SECONDS)

        result: R = response_of(kind).unpack(self._repeat(call))
        return result

    def every(self, command: Command[Page[R]]) -> list[R]:
        """Return the items of all pages of a list."""
        items: list[R] = []
        while True:
            page = self.do(command)
            items += page.items
            if page.cursor is None:
                return items
            command = replace(command, cursor=page.cursor)

    def begin(self, command: Command[R]) -> Started[R]:
        """Send a command without waiting for its result."""
        kind: Any = type(command)
        request = request_of(kind).pack(command)
        future = self._stub(kind.facts.rpc).future(request, metadata=self._metadata, timeout=CALL_SECONDS)
        return Started(self, command, future)

    def stream(self, make_feed: Callable[[], Feed[R]]) -> Iterator[R]:
        """Items of a feed. If the connection breaks, continue with the feed that `make_feed` then returns."""
        kind: Any = type(make_feed())
        responses: Any = iter(())
        is_open, codec = False, response_of(kind)

        def following() -> Any:
            nonlocal responses, is_open
            if not is_open:
                responses = self._stub(kind.facts.rpc)(request_of(kind).pack(make_feed()), metadata=self._metadata)
                is_open = True
            try:
                return next(responses, None)
            except grpc.RpcError:
                is_open = False
                raise

        try:
            while (response := self._repeat(following)) is not None:
                yield codec.unpack(response)
        finally:
            if is_open:
                responses.cancel()

    def _repeat(self, call: Callable[[], Any]) -> Any:
        until, pause = time.monotonic() + self._retry_seconds, PAUSE_FIRST
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                found = heapline_error(error)
                # A feed is cancelled here only because another call has abandoned the connection.
                is_transient = isinstance(found, UnavailableError) or error.code() is grpc.StatusCode.CANCELLED
                if not is_transient or time.monotonic() + pause > until:
                    raise found from None
            self._reconnect()
            time.sleep(pause)
            pause = min(pause * 2, PAUSE_MAX)

    def _stub(self, rpc: str) -> Any:
        if self._channel is None:
            self._channel = open_channel(grpc, *parse_target(self._endpoints[0], self._tls))
        return stub_of(self._channel, rpc)

    def _reconnect(self) -> None:
        """Use the next endpoint from now on."""
        self.close()
        self._endpoints.append(self._endpoints.pop(0))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class Started(Generic[R]):
    """A command that was sent."""

    def __init__(self, calls: BlockingGrpc, command: Command[R], future: Any) -> None:
        self._calls, self._command, self._future = calls, command, future

    def result(self) -> R:
        """Wait for the result. If the call failed, make it again, as `do` does."""
        try:
            message = self._future.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            return self._calls.do(self._command)
        result: R = response_of(type(self._command)).unpack(message)
        return result

    def cancel(self) -> None:
        self._future.cancel()
