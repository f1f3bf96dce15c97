"""Calls for processes without an event loop that read logs or prepare batches: Spark's workers.

Every call is repeated at the next endpoint while the server cannot be reached, until `retry_seconds` have passed
without a response. So use it only for commands that may be repeated: those that read, and those of prepared batches. A
key is sent only to the servers that it was given for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from msgspec.structs import replace

from heapline.client.target import ClientTls, parse_target
from heapline.contract.call import Command, Feed, Page
from heapline.contract.errors import BadRequest, Closed, HeaplineError, UnavailableError
from heapline.wire import blocking_connection as blocking
from heapline.wire.connection import with_alpn

R = TypeVar("R")
T = TypeVar("T")
RETRY_SECONDS = 60.0
PAUSE_FIRST, PAUSE_MAX = 0.05, 2.0  # seconds
CALL_SECONDS = 30.0


class BlockingCalls:
    """Connects when it is first used. Close it with `close`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        credential: str | None,
        tls: ClientTls | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._targets = [parse_target(endpoint, tls) for endpoint in endpoints]
        if any(target.is_http for target in self._targets):
            raise BadRequest("this needs the native wire; name the server as host:port, not as http://…")
        self._credential, self._retry_seconds = credential, retry_seconds
        self._open: blocking.BlockingConnection | None = None

    def do(self, command: Command[R]) -> R:
        """Run a command."""
        return self._repeat(lambda: self._connection().call(command, timeout=CALL_SECONDS))

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
        return Started(self, command, self._repeat(lambda: self._connection().begin(command)))

    def stream(self, make_feed: Callable[[], Feed[R]]) -> Iterator[R]:
        """Items of a feed. If the connection breaks, continue with the feed that `make_feed` then returns."""
        items: Iterator[R] | None = None

        def following() -> R | None:
            nonlocal items
            if items is None:
                items = self._connection().feed(make_feed())
            try:
                return next(items, None)
            except HeaplineError:
                items = None
                raise

        try:
            while (item := self._repeat(following)) is not None:
                yield item
        finally:
            if items is not None:
                items.close()  # type: ignore[attr-defined]

    def _repeat(self, call: Callable[[], T]) -> T:
        until, pause = time.monotonic() + self._retry_seconds, PAUSE_FIRST
        while True:
            used = self._open
            try:
                return call()
            except (UnavailableError, Closed) as error:
                # A connection is closed here only because another call has given it up.
                if time.monotonic() + pause > until:
                    raise UnavailableError(str(error)) from None
            if self._open is used or used is None:
                self._reconnect()
            time.sleep(pause)
            pause = min(pause * 2, PAUSE_MAX)

    def _connection(self) -> blocking.BlockingConnection:
        if self._open is None:
            target = self._targets[0]
            tls = None if target.tls is None else with_alpn(target.tls.context())
            self._open = blocking.connect(target.address, self._credential, tls=tls)
        return self._open

    def _reconnect(self) -> None:
        """Use the next endpoint from now on."""
        self.close()
        self._targets.append(self._targets.pop(0))

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


class Started(Generic[R]):
    """A command that was sent."""

    def __init__(self, calls: BlockingCalls, command: Command[R], sent: blocking.Started[R]) -> None:
        self._calls, self._command, self._sent = calls, command, sent

    def result(self) -> R:
        """Wait for the result. If the call failed, make it again, as `do` does."""
        try:
            return self._sent.result(CALL_SECONDS)
        except HeaplineError:
            return self._calls.do(self._command)

    def cancel(self) -> None:
        self._sent.cancel()
