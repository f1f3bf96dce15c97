"""A native connection on an event loop: frames over a transport of asyncio or uvloop, and a client's calls on it.

`FrameProtocol` is shared by both sides. All frames that are sent in one turn of the loop are written together: one
system call then carries many calls or many answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct

import heapline
from heapline.contract.errors import BadRequest, Closed, DeadlineExceeded, HeaplineError, UnavailableError
from heapline.wire import codec
from heapline.wire.compressed_topics import CompressedTopics
from heapline.wire.frames import (
    ALPN,
    ClientFrames,
    End,
    Error,
    GoAway,
    Headers,
    Item,
    ProtocolError,
    Response,
    ServerFrames,
    Welcome,
)

CONNECT_SECONDS = 10.0
FEED_CREDITS = 4  # items of a feed on their way; one may have several megabytes
NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")  # OpenSSL's words for a peer without TLS
CLIENT = f"heapline {heapline.__version__}"


class FrameProtocol(asyncio.Protocol):
    """Reads and writes the frames of one connection. A subclass handles the events."""

    def __init__(self, frames: ClientFrames | ServerFrames) -> None:
        self._peer = frames
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._is_flushing = False  # a write is planned
        self._is_paused = False  # the peer does not read
        self._timer: asyncio.TimerHandle | None = None

    def on_event(self, event: Any) -> None:
        raise NotImplementedError

    def on_written(self) -> None:
        """Frames were handed to the transport: all, if nothing is buffered."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._tick()
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None

    def data_received(self, data: bytes) -> None:
        try:
            events = self._peer.receive(data)
        except ProtocolError as violation:
            for event in violation.events:
                self.on_event(event)
            self.end()
            return
        for event in events:
            self.on_event(event)
        if self._peer.buffered:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Write at the end of this turn of the loop, together with what else is sent in it."""
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._is_flushing = False
        transport = self._transport
        if transport is None or transport.is_closing():  # it would drop them
            return
        while not self._is_paused and (buffers := self._peer.take()):
            if len(buffers) == 1:
                transport.write(buffers[0])
            else:
                transport.writelines(buffers)
        self.on_written()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.flush()

    def end(self) -> None:
        """Send what is left and close."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def _tick(self) -> None:
        try:
            at = self._peer.tick(self._loop.time())
        except ProtocolError:  # the peer is dead, or was refused
            if self._transport is not None:
                self._transport.abort()
            return
        self.flush()
        self._timer = self._loop.call_at(at, self._tick)


# -- a client's side ---------------------------------------------------------------------------------------------------


class _Call(Struct, eq=False):
    """A request."""

    future: asyncio.Future[Any]
    kind: Any
    until: float | None
    compress: bool = False
    number: int = 0  # until it was sent


#: Calls that wait for the server's window, in order, with their bodies and headers.
_Queue = dict[_Call, tuple[bytes, Headers | None]]


class ClientConnection(FrameProtocol):
    """One connection of a client; `open` creates it. When it breaks, all calls on it fail: it is not known which of
    them were executed. Nothing is repeated here."""

    def __init__(self, credential: str | None) -> None:
        self._frames = ClientFrames(credential, client=CLIENT)
        super().__init__(self._frames)
        self.error: HeaplineError | None = None  # why no call can be made
        self._welcomed: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._calls: dict[int, _Call] = {}
        self._feeds: dict[int, _FeedItems] = {}
        self._queued: _Queue = {}
        self._queued_waiting: _Queue = {}  # of commands that have the window of waiting calls
        self.compressed: CompressedTopics | None = None  # of which requests are compressed
        self._auth: asyncio.Future[None] | None = None  # the answer to the last AUTH
        self._deadline: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls, address: tuple[str, int] | str, credential: str | None = None, tls: ssl.SSLContext | None = None
    ) -> ClientConnection:
        """Connect to (host, port), or to the path of a Unix socket. Raise UnavailableError if that fails."""
        loop = asyncio.get_running_loop()
        connection = cls(credential)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if isinstance(address, str):
                    await loop.create_unix_connection(lambda: connection, address, ssl=tls, server_hostname=None)
                else:
                    name = address[0] if tls is not None else None
                    await loop.create_connection(lambda: connection, *address, ssl=tls, server_hostname=name)
                await connection._welcomed
        except (OSError, TimeoutError) as error:
            connection.abort()
            raise unreached(address, error) from None
        except BaseException:
            connection.abort()
            if connection._frames.is_other_protocol:
                raise other_protocol(address, connection._frames.failure) from None
            raise
        return connection

    @property
    def is_usable(self) -> bool:
        return self.error is None and self._frames.goaway is None and self._frames.failure is None

    def _check_usable(self) -> None:
        if self.error is None and self._frames.failure is not None:  # the transport has not noticed yet
            self._break(UnavailableError(f"the connection broke: {self._frames.failure}"))
        if self.error is not None:
            raise copy.copy(self.error)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def call(self, command: Any, headers: Headers | None = None, until: float | None = None) -> Any:
        """Make a call and return its result. `until` is its deadline, in the loop's time."""
        kind: Any = type(command)
        number = kind.facts.id
        body = codec.encode(command)
        self._check_usable()
        compress = self.compressed is not None and self._frames.may_compress(len(body)) and self._is_compressed(command)
        call = _Call(self._loop.create_future(), kind, until, compress)
        queue = self._queued_waiting if self._frames.may_wait(number) else self._queued
        if queue or not self._frames.has_room(number, len(body)):
            queue[call] = body, headers
        else:
            self._send(call, body, headers)
        if until is not None and (self._deadline is None or until < self._deadline.when()):
            self._watch(until)
        try:
            return await call.future
        except asyncio.CancelledError:
            if not call.future.cancelled():
                call.future.exception()  # both came at once; asyncio would report an error that no one retrieved
            self._cancel(call)
            raise

    def _is_compressed(self, command: Any) -> bool:
        return self.compressed is not None and self.compressed.has(getattr(command, "topic", ""))

    def _send(self, call: _Call, body: bytes, headers: Headers | None) -> None:
        call.number = self._frames.send_request(call.kind.facts.id, body, headers, compress=call.compress)
        self._calls[call.number] = call
        if not self._is_flushing:
            self.flush_soon()

    def _make_room(self) -> None:
        """Send calls that waited for the window, as many as it has room for, in the order in which they came."""
        for queue in (self._queued, self._queued_waiting):
            while queue and self._frames.failure is None:
                call, (body, headers) = next(iter(queue.items()))
                if not call.future.done():
                    if not self._frames.has_room(call.kind.facts.id, len(body)):
                        break
                    try:
                        self._send(call, body, headers)
                    except HeaplineError as error:
                        call.future.set_exception(error)
                del queue[call]

    async def renew(self, credential: str) -> None:
        """Replace the credential of the connection, before the old one expires."""
        while self._auth is not None and not self._auth.done():  # the server accepts one AUTH at a time
            await asyncio.wait({self._auth})
        self._check_usable()
        number = self._frames.send_auth(credential)
        self._auth = self._loop.create_future()
        self._auth.add_done_callback(lambda answer: answer.exception())  # the caller may be gone
        self._calls[number] = _Call(self._auth, None, None)
        self.flush_soon()
        await asyncio.shield(self._auth)

    def _cancel(self, call: _Call) -> None:
        """Cancel a call. If it was sent, its answer still arrives and is dropped."""
        if not call.number:
            self._queued.pop(call, None)
            self._queued_waiting.pop(call, None)
        else:
            self._cancel_request(call.number)

    def _cancel_request(self, number: int) -> None:
        if self.error is None and self._frames.failure is None:
            if not self._frames.send_cancel(number):
                self._calls.pop(number, None)
                self._make_room()
            self.flush_soon()

    # -- deadlines -------------------------------------------------------------------------------------------------

    def _watch(self, until: float) -> None:
        """One timer serves all calls: it runs at the earliest deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_at(until, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._deadline, now = None, self._loop.time()
        earliest: float | None = None
        for call in [*self._calls.values(), *self._queued, *self._queued_waiting]:
            if call.until is None or call.future.done():
                continue
            if call.until <= now:
                call.future.set_exception(DeadlineExceeded(call.kind.facts.rpc))
                self._cancel(call)
            elif earliest is None or call.until < earliest:
                earliest = call.until
        if earliest is not None:
            self._watch(earliest)

    # -- feeds -----------------------------------------------------------------------------------------------------

    async def feed(self, command: Any, headers: Headers | None = None) -> AsyncIterator[Any]:
        """Yield the items of a feed as they are requested."""
        kind: Any = type(command)
        self._check_usable()
        number = self._frames.send_request(kind.facts.id, codec.encode(command), headers)
        self._feeds[number] = items = _FeedItems(self._loop)
        self._frames.send_credit(number, FEED_CREDITS)
        self.flush_soon()
        try:
            while True:
                while items.arrived:
                    item = items.arrived.popleft()
                    if self._frames.failure is None:
                        self._frames.send_credit(number, 1)
                        self.flush_soon()
                    yield codec.decode_result(item, kind)
                if items.has_ended:
                    if items.error is not None:
                        raise items.error
                    return
                await items.wait()
        finally:
            if self._feeds.pop(number, None) is not None and not items.has_ended:
                self._cancel_request(number)

    # -- what arrives ----------------------------------------------------------------------------------------------

    def on_event(self, event: Any) -> None:
        kind = type(event)
        if kind is Response:
            call = self._calls.pop(event.request, None)  # None if they have failed together
            if call is not None and not call.future.done():
                self._give(call, event.body)
            if self._queued or self._queued_waiting:
                self._make_room()
        elif kind is Error:
            self._on_error(event)
        elif kind is Item:
            items = self._feeds.get(event.request)
            if items is not None:
                items.put(event.body)
        elif kind is End:
            self._end_feed(event.request, None)
            self._make_room()
        elif kind is Welcome:
            if not self._welcomed.done():
                self._welcomed.set_result(None)
        elif kind is GoAway:
            self._on_goaway(event)

    def _on_goaway(self, event: GoAway) -> None:
        error = UnavailableError(f"the server closed the connection: {event.text}")
        if event.code != "UNAVAILABLE":
            self._break(error)
            self.end()
        else:  # calls in flight are still answered
            error.reached = False
            self._fail_queued(error)

    def _give(self, call: _Call, body: Any) -> None:
        try:
            result = None if call.kind is None else codec.decode_result(body, call.kind)
        except UnavailableError as error:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)

    def _on_error(self, event: Error) -> None:
        error = event.error
        if event.request == 0:
            if isinstance(error, UnavailableError):
                error.reached = False
            self.error = error
            if not self._welcomed.done():
                self._welcomed.set_exception(error)
            return
        call = self._calls.pop(event.request, None)
        if call is None:
            self._end_feed(event.request, error)
        elif not call.future.done():
            call.future.set_exception(error)
        self._make_room()

    def _end_feed(self, number: int, error: HeaplineError | None) -> None:
        items = self._feeds.get(number)
        if items is not None:
            items.end(error)

    # -- the end ---------------------------------------------------------------------------------------------------

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        because = self._frames.failure or (str(error) if error is not None else "the server closed it")
        self._break(UnavailableError(f"the connection broke: {because}"))
        if not self._lost.done():
            self._lost.set_result(None)

    def _break(self, error: HeaplineError) -> None:
        """Fail all calls in flight. It is not known whether they were executed."""
        if self.error is None:
            self.error = copy.copy(error)
            self.error.reached = False  # type: ignore[attr-defined]  # of calls that are made from now on
        if not self._welcomed.done():
            error.reached = False  # type: ignore[attr-defined]
            self._welcomed.set_exception(error)
            self._welcomed.exception()  # `open` may have given up already
        error.repeated = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(copy.copy(error))
        for items in self._feeds.values():
            items.end(copy.copy(error))
        self._fail_queued(self.error)
        if self._deadline is not None:
            self._deadline.cancel()

    def _fail_queued(self, error: HeaplineError) -> None:
        """Fail the calls that were not sent."""
        for queue in (self._queued, self._queued_waiting):
            for call in queue:
                if not call.future.done():
                    call.future.set_exception(copy.copy(error))
            queue.clear()

    def abort(self) -> None:
        """Close immediately, without raising an error in callers."""
        if self._transport is not None:
            self._transport.abort()
        elif not self._lost.done():
            self._lost.set_result(None)

    async def close(self) -> None:
        """Close. Calls in flight raise Closed."""
        self._break(Closed())
        if self._transport is not None:
            self.end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.shield(self._lost)
            self.abort()


class _FeedItems:
    """Items of a feed that have arrived."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.arrived: deque[Any] = deque()
        self.has_ended = False
        self.error: HeaplineError | None = None
        self._news: asyncio.Future[None] | None = None

    def put(self, body: Any) -> None:
        self.arrived.append(body)
        self._wake()

    def end(self, error: HeaplineError | None) -> None:
        if not self.has_ended:
            self.has_ended, self.error = True, error
            self._wake()

    async def wait(self) -> None:
        self._news = self._loop.create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def unreached(address: Any, error: BaseException) -> HeaplineError:
    """The error of a server that no call has reached."""
    if isinstance(error, ssl.SSLError) and error.reason in NO_TLS:
        return other_protocol(address, "the peer does not use TLS")
    where = _shown(address)
    why = "no answer" if isinstance(error, TimeoutError) else str(error)
    found = UnavailableError(f"cannot connect to {where}: {why}; check the address, and retry")
    found.reached = False
    return found


def other_protocol(address: Any, why: object) -> BadRequest:
    """The error of a port that is not a native one. Trying again would not help."""
    return BadRequest(
        f"{_shown(address)} is not a native port of Heapline: {why}; give the port of `heapline serve --port` (7400 by "
        "default), as heapline+tls://host:port if the server has TLS, or its HTTP port as http://host:port"
    )


def _shown(address: Any) -> str:
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def with_alpn(context: ssl.SSLContext) -> ssl.SSLContext:
    """Name the protocol in the TLS handshake."""
    context.set_alpn_protocols([ALPN])
    return context
