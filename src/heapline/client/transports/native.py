"""A broker over the native wire: one connection for all commands, and one for each feed.

The first call connects. If the connection breaks, calls in flight fail, and the next call connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

from heapline.client.target import ClientTls, Target, parse_target
from heapline.client.transports.transport import NO_KEY, Transport, closed
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.errors import Closed, Unauthenticated
from heapline.contract.topics import GetTopic
from heapline.wire.compressed_topics import CompressedTopics
from heapline.wire.connection import ClientConnection, unreached, with_alpn
from heapline.wire.frames import Headers

R = TypeVar("R")


class NativeBroker(Transport):
    """`async with NativeBroker("heapline+tls://queue:7400", credential="…", tls=ClientTls(ca="ca.crt")) as broker: …`

    Without a scheme and without `tls` the connection is not encrypted, which suits loopback only. `timeout` is in
    seconds, for calls without a deadline.
    """

    def __init__(
        self,
        target: str,
        *,
        credential: str | None = None,
        timeout: float | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__()
        self._target: Target = parse_target(target, tls)
        self._tls = None if self._target.tls is None else with_alpn(self._target.tls.context())
        self._credential, self._timeout = credential, timeout
        self._connection: ClientConnection | None = None
        self._connecting: asyncio.Task[ClientConnection] | None = None
        self._feeds: set[ClientConnection] = set()
        self._is_closed = True
        self._compressed = CompressedTopics(lambda topic: self.do(GetTopic(topic)))

    def open(self) -> None:
        self._is_closed = False

    async def close(self) -> None:
        await self._leases.wait()
        await self._compressed.close()
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        connection, self._connection = self._connection, None
        for opened in (connection, *self._feeds):
            if opened is not None:
                await opened.close()

    async def _connect(self, until: float | None) -> ClientConnection:
        """Connect, once for all callers that wait for it; each waits until its own deadline."""
        if self._is_closed:
            raise closed()
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._open_connection())
            self._connecting.add_done_callback(self._connected)
        connecting = self._connecting
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(connecting)
        except TimeoutError as error:
            raise unreached(self._target.address, error) from None
        except asyncio.CancelledError:
            if connecting.cancelled():
                raise closed() from None
            raise

    def _connected(self, connecting: asyncio.Task[ClientConnection]) -> None:
        self._connecting = None
        if not connecting.cancelled() and connecting.exception() is None:
            self._connection = connecting.result()

    async def _open_connection(self) -> ClientConnection:
        try:
            connection = await ClientConnection.open(self._target.address, self._credential, self._tls)
            connection.compressed = self._compressed
            return connection
        except Unauthenticated:
            if self._credential is None:
                raise Unauthenticated(NO_KEY) from None
            raise

    async def renew(self, credential: str) -> None:
        for connection in (self._connection, *self._feeds):
            if connection is not None and connection.is_usable:
                await connection.renew(credential)
        self._credential = credential

    # -- calls -----------------------------------------------------------------------------------------------------

    async def _request(self, command: Command[R], context: Context) -> R:
        connection, until = self._connection, context.deadline
        if until is None and self._timeout is not None:
            until = asyncio.get_running_loop().time() + self._timeout
        if connection is None or not connection.is_usable:
            connection = await self._connect(until)
        headers = None
        if context.trace is not None or context.confirmation is not None:
            headers = Headers(traceparent=context.trace, confirmation=context.confirmation)
        try:
            result: R = await connection.call(command, headers, until)
        except Closed:
            if self._is_closed:
                raise closed() from None
            raise
        return result

    async def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        """Items of a feed, over a connection of its own: large items must not delay the answers of commands."""
        if self._is_closed:
            raise closed()
        connection = await self._open_connection()
        if self._is_closed:
            await connection.close()
            raise closed()
        self._feeds.add(connection)
        headers = None if context.trace is None else Headers(traceparent=context.trace)
        try:
            async with contextlib.aclosing(connection.feed(feed, headers)) as items:  # type: ignore[type-var]
                async for item in items:
                    yield item
        finally:
            self._feeds.discard(connection)
            await connection.close()
