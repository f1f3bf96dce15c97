"""The native interface: frames over TCP or a Unix socket, as docs/wire.md specifies them.

A connection is authenticated once, when it opens (and again when its client renews its credential). Each of its calls
is a request of its own at the gate, so a revoked key is rejected at the next call. Enqueues, pops and acks need no task
on the log broker: they return a future, and the answer is sent from its callback. Feeds, other calls, and brokers that
answer with coroutines have a task per call. All answers of one turn of the event loop are written together.

Reading never stops because calls are in progress: the frames refuse calls beyond the window (wire/frames). It stops
while a client does not read its own answers.

When a connection breaks, its calls are cancelled, and leases that were not handed to the transport are returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Mapping
from contextvars import Context as RequestContext
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

import heapline
from heapline.contract.call import CALLS, Command
from heapline.contract.errors import (
    BadRequest,
    DeadlineExceeded,
    HeaplineError,
    ResourceExhausted,
    Unauthenticated,
    UnavailableError,
)
from heapline.logs import Log
from heapline.server.auth.principals import ANONYMOUS, Principal
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request, Stopping
from heapline.server.protocols.tls_listener import BACKLOG, PendingClient, TlsListener
from heapline.wire import codec, error_codes
from heapline.wire import frames as wire
from heapline.wire.connection import FrameProtocol

log = Log("heapline.server")
HELLO_SECONDS = 5.0
UNAUTHENTICATED_MAX = 64  # connections of one address that are not authenticated
TIMEOUT_MAX = 365 * 86400.0  # seconds; longer timeouts of clients are cut to this
BACKED_UP_BYTES = 8 << 20  # of answers that a client does not read; then it is not read either
NAME = f"heapline {heapline.__version__}"
WAITING = codec.waiting_commands()
NO_HEADERS: Mapping[str, str] = {}
#: What the headers of a frame are called on the other interfaces.
HEADER_NAMES = {
    "traceparent": "traceparent",
    "tracestate": "tracestate",
    "correlation_id": "x-correlation-id",
    "confirmation": "x-confirmation",
}


class NativeServer:
    """Listens on a port, and on a Unix socket if one is given."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        host: str,
        port: int,
        *,
        request_bytes_max: int,
        unix_socket: Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._dispatcher, self._host, self._port = dispatcher, host, port
        self._unix_socket, self._tls = unix_socket, tls
        waiting = dispatcher.gate.limits.inflight_per_key
        self.windows = wire.Windows(
            waiting=waiting,
            body_bytes=request_bytes_max,
            calls_bytes=2 * request_bytes_max,
            bodies_bytes=2 * request_bytes_max,
        )
        self._listeners: list[asyncio.Server | TlsListener] = []
        self.connections: set[NativeConnection] = set()
        self.unauthenticated: Counter[str] = Counter()  # connections that are not authenticated, by address

    async def start(self) -> int:
        """Listen, and return the port."""
        make = partial(NativeConnection, self, self._dispatcher)
        if self._unix_socket is not None:
            self._listeners.append(await self._listen_on(self._unix_socket, make))
        listener: asyncio.Server | TlsListener
        if self._tls is not None:
            listener = TlsListener.listen(self._host, self._port, self._tls, self.admit, make)
        else:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = await asyncio.get_running_loop().create_server(
                make, self._host, self._port, family=family, backlog=BACKLOG, reuse_port=False
            )
        self._listeners.append(listener)
        port: int = listener.sockets[0].getsockname()[1]
        return port

    def admit(self, address: str) -> PendingClient | None:
        """Count a connection that is not authenticated. Return None if it is one too many of its address."""
        if self.unauthenticated[address] >= UNAUTHENTICATED_MAX:
            return None
        return PendingClient(self.unauthenticated, address, asyncio.get_running_loop().time() + HELLO_SECONDS)

    async def _listen_on(self, path: Path, make: Any) -> asyncio.Server:
        """Listen on a Unix socket that only this user can open."""
        _remove_socket(path)  # left by a server that was killed; a running one holds the data directory's lock
        before = os.umask(0o177)
        try:
            return await asyncio.get_running_loop().create_unix_server(make, str(path), backlog=BACKLOG)
        finally:
            os.umask(before)

    def go_away(self) -> None:
        """Accept no connection, and tell clients to make no further calls on theirs."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.go_away()

    async def stop(self) -> None:
        """Close all connections, after the answers that are ready."""
        for listener in self._listeners:
            if isinstance(listener, TlsListener):
                await listener.end_handshakes()
        for connection in list(self.connections):
            connection.end()
        if self.connections:
            await asyncio.wait([connection.is_lost for connection in self.connections], timeout=1.0)
        for connection in list(self.connections):
            connection.abort()
        if self._unix_socket is not None:
            _remove_socket(self._unix_socket)


class _Call(Struct, eq=False):
    """A call in progress."""

    number: int
    request: Request
    command: Any = None  # until it is decoded
    answer: asyncio.Future[Any] | None = None  # until it was started
    timer: asyncio.TimerHandle | None = None  # of its deadline
    is_late: bool = False  # the deadline has passed
    place: int = 0  # of its answer among the frames that were not written

    def cancel(self) -> None:
        if self.answer is not None:
            self.answer.cancel()


class NativeConnection(FrameProtocol):
    def __init__(self, server: NativeServer, dispatcher: Dispatcher, pending: PendingClient | None = None) -> None:
        self._frames = wire.ServerFrames(server.windows, waiting_commands=WAITING, server=NAME)
        super().__init__(self._frames)
        self._server, self._dispatcher, self._gate = server, dispatcher, dispatcher.gate
        self._caller: Principal = ANONYMOUS
        self._address = ""
        self._pending = pending  # under TLS counted since it was accepted; None once it is authenticated
        self._opening: asyncio.Task[None] | None = None  # authenticates
        self._hello_timer: asyncio.TimerHandle | None = None
        self._calls: dict[int, _Call] = {}
        self._feeds: dict[int, asyncio.Event] = {}  # set when credits come or the client reads again
        self._unsent: list[_Call] = []  # answers with leases that were not handed to the transport
        self._is_reading = True
        self.is_lost: asyncio.Future[None] = self._loop.create_future()

    # -- open and close --------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else "unix"
        super().connection_made(transport)
        self._server.connections.add(self)
        self._pending = self._pending or self._server.admit(self._address)
        if self._pending is None:
            transport.abort()
        else:
            self._hello_timer = self._loop.call_at(self._pending.until, transport.abort)

    def _known(self) -> None:
        """Count the connection no longer as one that is not authenticated."""
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._pending is not None:
            self._pending.leave()
            self._pending = None

    def peer(self) -> str:
        return self._address

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._known()
        self._server.connections.discard(self)
        if self._opening is not None:
            self._opening.cancel()
        for call in list(self._calls.values()):
            call.cancel()
        for call in self._unsent:
            assert call.answer is not None
            self._dispatcher.return_leases(call.command, call.answer.result(), call.request)
        self._unsent.clear()
        if not self.is_lost.done():
            self.is_lost.set_result(None)

    def go_away(self) -> None:
        if self._frames.failure is None and self._caller is not ANONYMOUS:
            self._frames.send_goaway(str(Stopping()))
            self.flush()
            for wake in self._feeds.values():
                wake.set()
        else:
            self.end()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- what arrives ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._frames.buffered > BACKED_UP_BYTES and self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if not self._is_reading:  # PONG cannot be read, but the client reads, so it is alive
            self._frames.note_alive()
        super().resume_writing()

    def on_written(self) -> None:
        if self._frames.buffered:
            self._unsent = [call for call in self._unsent if self._frames.is_queued(call.number, call.place)]
            return
        self._unsent.clear()
        if not self._is_reading and self._transport is not None:
            self._is_reading = True
            self._transport.resume_reading()
        for wake in self._feeds.values():
            wake.set()

    def on_event(self, event: Any) -> None:
        kind = type(event)
        if kind is wire.Request:
            context = copy_context()  # one per request: traces and logs keep theirs in it
            context.run(self._begin, event, context)
        elif kind is wire.Credit:
            if event.request in self._feeds:
                self._feeds[event.request].set()
        elif kind is wire.Cancel:
            if (call := self._calls.get(event.request)) is not None:
                call.cancel()
        elif kind is wire.Hello:
            self._opening = self._loop.create_task(self._open(event.credential))
        elif kind is wire.Auth:
            self._opening = self._loop.create_task(self._renew(event))

    async def _open(self, credential: str | None) -> None:
        try:
            caller = await self._authenticate(credential)
        except Exception as error:
            if self._frames.failure is None:
                self._frames.send_error(0, _describe(error, "Hello", ""))
            self.end()
            return
        if self._frames.failure is not None:  # bytes that are not allowed followed HELLO
            return
        self._caller = caller
        self._known()
        self._frames.send_welcome()
        self.flush()

    async def _renew(self, event: wire.Auth) -> None:
        try:
            caller = await self._authenticate(event.credential)
            if caller.subject != self._caller.subject:
                raise Unauthenticated("AUTH renews the credential of the same caller; open another connection")
        except Exception as error:
            if self._frames.failure is None:
                self._frames.send_error(event.request, _describe(error, "Auth", ""))
        else:
            self._caller = caller
            for call in self._calls.values():  # they last as long as the new credential
                call.request.caller = caller
            if self._frames.failure is None:
                self._frames.send_response(event.request)
        self.flush_soon()

    async def _authenticate(self, credential: str | None) -> Principal:
        if self._gate.stopping.is_set():
            raise Stopping
        return await self._gate.guard.authenticate(credential)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _begin(self, event: wire.Request, context: RequestContext) -> None:
        """Start a call, in its own context."""
        kind = CALLS.get(event.command)
        deadline: float | None = None
        headers = NO_HEADERS
        if (given := event.headers) is not None:
            headers = {
                name: value for field, name in HEADER_NAMES.items() if (value := getattr(given, field)) is not None
            }
            if given.timeout is not None:
                deadline = self._loop.time() + min(given.timeout, TIMEOUT_MAX)
        is_command = kind is None or issubclass(kind, Command)
        rpc = "Unknown" if kind is None else kind.facts.rpc
        request = Request(
            self._gate, "native", rpc, headers, is_stream=not is_command, peer=self.peer, deadline=deadline
        )
        call = _Call(event.request, request)
        try:
            request.begin(self._caller)
        except HeaplineError as error:
            self._send_error(call.number, codec.encode_error(error))
            return
        try:
            if kind is None:
                raise BadRequest(f"this server does not know call {event.command:#x}; its release may be older")
            if given is not None and given.on_behalf_of is not None:
                raise BadRequest("on_behalf_of is for nodes of a cluster; a client calls for itself")
            if given is not None and given.timeout is not None and not given.timeout >= 0:  # NaN neither
                raise BadRequest(f"timeout must be a positive number of seconds, got {given.timeout}")
            call.command = command = codec.decode_call(event.body, kind)
            answer: Any
            if is_command:
                answer = self._dispatcher.start(command, request, headers.get("x-confirmation"))
            else:
                answer = self._send_items(call)
            if not asyncio.isfuture(answer):
                answer = self._loop.create_task(answer, context=context)
        except Exception as error:
            self._answer_error(call, error)
            return
        call.answer = answer
        self._calls[call.number] = call
        if deadline is not None:
            call.timer = self._loop.call_at(deadline, self._out_of_time, call)
        answer.add_done_callback(partial(self._done, call), context=context)

    def _done(self, call: _Call, answer: asyncio.Future[Any]) -> None:
        """Send the answer of a call that has ended."""
        del self._calls[call.number]
        if call.timer is not None:
            call.timer.cancel()
        failure = asyncio.CancelledError() if answer.cancelled() else answer.exception()
        if failure is not None:
            if call.is_late and isinstance(failure, asyncio.CancelledError):
                failure = DeadlineExceeded(call.request.rpc)
            self._answer_error(call, failure)
            return
        if call.request.is_stream:
            call.request.end()
            if self._is_open():
                self._frames.send_end(call.number)
                self.flush_soon()
            return
        result = answer.result()
        leases = type(call.command).facts.leases
        if not self._is_open():
            if leases:
                self._dispatcher.return_leases(call.command, result, call.request)
            call.request.end(asyncio.CancelledError())
            return
        try:
            if call.request.waits:  # no lease reaches a caller whose credential ended meanwhile
                call.request.check_credential()
            body = codec.encode_result(result)
            self._frames.send_response(call.number, body, compress=self._is_compressed(call.request, len(body)))
        except Exception as error:
            if leases:
                self._dispatcher.return_leases(call.command, result, call.request)
            self._answer_error(call, error)
            return
        if leases:
            call.place = self._frames.place
            self._unsent.append(call)
        call.request.end()
        if not self._is_flushing:
            self.flush_soon()

    def _answer_error(self, call: _Call, error: BaseException) -> None:
        body = _describe(error, call.request.rpc, call.request.correlation_id)
        call.request.end(error)
        self._send_error(call.number, body)

    def _send_error(self, number: int, body: bytes) -> None:
        if not self._is_open():
            return
        try:
            self._frames.send_error(number, body)
        except ResourceExhausted as too_large:  # for the window of this client
            self._frames.send_error(number, codec.encode_error(too_large))
        self.flush_soon()

    def _out_of_time(self, call: _Call) -> None:
        call.is_late = True
        call.cancel()

    def _is_open(self) -> bool:
        return self._transport is not None and self._frames.failure is None

    def _is_compressed(self, request: Request, size: int) -> bool:
        return self._frames.may_compress(size) and self._dispatcher.compressed.has(request.topic)

    async def _send_items(self, call: _Call) -> None:
        """Send the items of a feed, each when the client has given a credit and reads."""
        number, wake = call.number, asyncio.Event()
        self._feeds[number] = wake

        async def send(item: Any) -> None:
            while not self._frames.credits(number) or self._frames.buffered > BACKED_UP_BYTES:
                if self._gate.stopping.is_set():
                    raise Stopping
                wake.clear()
                await wake.wait()
            if not self._is_open():
                raise UnavailableError("the connection ended")
            body = codec.encode_result(item)
            self._frames.send_item(number, body, compress=self._is_compressed(call.request, len(body)))
            self.flush_soon()

        try:
            await self._dispatcher.feed(call.command, call.request, send)
        finally:
            del self._feeds[number]


def _remove_socket(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise BadRequest(f"{str(path)!r} is not a socket; remove it, or name another unix_socket")
        path.unlink()


def _describe(error: BaseException, rpc: str, correlation_id: str) -> bytes:
    """Encode an error for the client, which learns of an unexpected one only that there was one."""
    if isinstance(error, HeaplineError):
        return codec.encode_error(error)
    if isinstance(error, asyncio.CancelledError):
        return codec.encode_failure("CANCELLED", "the call was cancelled")
    log.exception("call failed", error, method=rpc, correlation_id=correlation_id)
    return codec.encode_failure("INTERNAL", f"{error_codes.INTERNAL_TEXT} (correlation id {correlation_id})")
