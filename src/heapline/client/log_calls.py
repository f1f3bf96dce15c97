"""Blocking calls for processes that only read logs, or prepare batches, such as Spark's workers: no event loop, no
session.

What is called here may be called again: reading changes nothing, and preparing, committing and aborting a batch twice
is as good as once. So every call is repeated while a server cannot be reached, at the next endpoint, until `patience`
has passed without anything coming. A key is sent only to the servers that it was given for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc

from heapline.client.ending import heapline_error
from heapline.client.target import ClientTls, parse_target
from heapline.errors import UnavailableError
from heapline.wire.schema import METHODS

PATIENCE = 60.0  # seconds
PAUSE_FIRST, PAUSE_MAX = 0.05, 2.0
CALL_SECONDS = 30.0
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),
]
T = TypeVar("T")


class LogCalls:
    def __init__(
        self, endpoints: Sequence[str], credential: str | None, tls: ClientTls | None = None,
        patience: float = PATIENCE,
    ) -> None:  # fmt: skip
        self._endpoints, self._tls, self._patience = list(endpoints), tls, patience
        self._metadata = () if credential is None else (("authorization", credential),)
        self._channel: Any = None

    def __call__(self, name: str, request: Any) -> Any:
        return self._repeated(lambda: self._stub(name)(request, metadata=self._metadata, timeout=CALL_SECONDS))

    def begin(self, name: str, request: Any) -> Any:
        """A call that is not waited for: gRPC's own future. Who finds that it failed makes the call again, as above."""
        return self._stub(name).future(request, metadata=self._metadata, timeout=CALL_SECONDS)

    def stream(self, name: str, request_from: Callable[[], Any]) -> Iterator[Any]:
        """The answers of a streaming method. If it breaks it is asked again, for what `request_from` then says."""
        answers: Any = iter(())
        opened = False

        def following() -> Any:
            nonlocal answers, opened
            if not opened:
                answers = self._stub(name)(request_from(), metadata=self._metadata)
                opened = True
            try:
                return next(answers, None)
            except grpc.RpcError:
                opened = False
                raise

        try:
            while (answer := self._repeated(following)) is not None:
                yield answer
        finally:
            if opened:
                answers.cancel()

    def _repeated(self, act: Callable[[], T]) -> T:
        until, pause = time.monotonic() + self._patience, PAUSE_FIRST
        while True:
            try:
                return act()
            except grpc.RpcError as error:
                told = heapline_error(error)
                # Nobody here cancels what is still read: another call has left the connection meanwhile.
                again = isinstance(told, UnavailableError) or error.code() is grpc.StatusCode.CANCELLED
                if not again or time.monotonic() + pause > until:
                    raise told from None
            self._reconnect()
            time.sleep(pause)
            pause = min(pause * 2, PAUSE_MAX)

    def _stub(self, name: str) -> Any:
        if self._channel is None:
            address, tls = parse_target(self._endpoints[0], self._tls)
            if tls is None:
                self._channel = grpc.insecure_channel(address, options=_OPTIONS)
            else:
                self._channel = grpc.secure_channel(address, tls.credentials(), options=_OPTIONS)
        method = METHODS[name]
        make = self._channel.unary_stream if method.streams_out else self._channel.unary_unary
        return make(
            method.path, request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )  # fmt: skip

    def _reconnect(self) -> None:
        """At the next endpoint."""
        self.close()
        self._endpoints.append(self._endpoints.pop(0))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
