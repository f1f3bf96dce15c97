"""A native connection for code without an event loop, such as Spark's workers.

    with connect(("localhost", 7400), api_key) as connection:
        connection.call(GetTopic("jobs"))
        for units in connection.feed(ReadUnits("jobs", 0, 10)):
            ...

Several calls and feeds can be in progress on one connection (`begin`, `feed`). Threads may share it; one of them at a
time waits for the server, the others wait for that one. Nothing is repeated here: a broken connection raises
UnavailableError, and it is not known whether its calls were executed.
"""

from __future__ import annotations

import copy
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from msgspec.structs import replace

from heapline.contract.call import Command, Feed
from heapline.contract.errors import Closed, DeadlineExceeded, HeaplineError, UnavailableError
from heapline.contract.leases import LeaseKeys, Release
from heapline.contract.topics import GetTopic
from heapline.wire import codec, error_codes
from heapline.wire.compressed_topics import CompressionSettings
from heapline.wire.connection import other_protocol, unreached
from heapline.wire.frames import Body, ClientFrames, End, Error, GoAway, Headers, Item, ProtocolError, Response

R = TypeVar("R")
Address = tuple[str, int] | str  # host and port, or the path of a Unix socket
CONNECT_SECONDS = 10.0
CREDITS = 8  # items of a feed that the server may send ahead
READ_BYTES = 256 << 10
TICK_SECONDS = 5.0
RETURN_SECONDS = 1.0  # after which leases are returned again, if the server was too busy
_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def connect(
    address: Address,
    credential: str | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    server_name: str | None = None,
    client: str = "heapline-python",
    timeout: float = CONNECT_SECONDS,
) -> BlockingConnection:
    """Connect and introduce this client. Raise the server's error if it refuses, or UnavailableError.

    `server_name` is the name in the server's certificate, if it is not the host.
    """
    until = time.monotonic() + timeout
    try:
        sock = _open_socket(address, tls, server_name, timeout)
    except OSError as error:
        raise unreached(address, error) from None
    connection = BlockingConnection(sock, ClientFrames(credential, client=client), address)
    try:
        connection._await_welcome(until)
    except BaseException:
        connection.close()
        raise
    return connection


class _Slot:
    """A request in progress."""

    __slots__ = ("kind", "command", "items", "answer", "error", "is_abandoned")

    def __init__(self, kind: Any, command: Any = None) -> None:
        self.kind = kind
        self.command = command  # of a request that this connection makes for itself
        self.items: deque[Item] = deque()
        self.answer: Response | End | None = None
        self.error: HeaplineError | None = None
        self.is_abandoned = False  # its caller no longer waits

    @property
    def is_done(self) -> bool:
        return self.answer is not None or self.error is not None


class BlockingConnection:
    """Created by `connect`. Close it with `close` or `with`."""

    def __init__(self, sock: socket.socket, frames: ClientFrames, address: Address) -> None:
        sock.setblocking(False)
        self._sock, self._frames, self._address = sock, frames, address
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        weakref.finalize(self, sock.close)  # of a connection that is forgotten instead of closed
        self._out: deque[Body] = deque()  # taken from `frames`, not written
        self._slots: dict[int, _Slot] = {}
        self._refusal: HeaplineError | None = None  # of the handshake
        self._broken: HeaplineError | None = None  # why no call can be made
        self._settings = CompressionSettings()
        self._returns: deque[Release] = deque()  # leases that no caller waits for
        self._return_at = 0.0  # when the next may be sent
        self._lock = threading.RLock()
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, command: Command[R], headers: Headers | None = None, timeout: float | None = None) -> R:
        """Run a command and return its result. After `timeout` seconds, cancel it and raise DeadlineExceeded."""
        if timeout is not None:
            headers = Headers(timeout=timeout) if headers is None else replace(headers, timeout=timeout)
        return self.begin(command, headers).result(timeout)

    def begin(self, command: Command[R], headers: Headers | None = None) -> Started[R]:
        """Send a command without waiting for its result. Wait only while the server's windows are full."""
        with self._lock:
            return Started(self, *self._send(command, headers))

    def feed(
        self, feed: Feed[R], headers: Headers | None = None, *, credits: int = CREDITS, timeout: float | None = None
    ) -> Iterator[R]:
        """Yield the items of a feed. Cancel it when the iterator is closed.

        The server sends up to `credits` items ahead. `timeout` is for each item, in seconds.
        """
        with self._lock:
            number, slot = self._send(feed, headers)
            self._frames.send_credit(number, credits)
        used = 0
        try:
            while True:
                with self._lock:
                    self._wait(slot, timeout, or_item=True)
                    item = slot.items.popleft() if slot.items else None
                    if item is not None and (used := used + item.credits) * 2 >= credits and self._broken is None:
                        self._frames.send_credit(number, used)
                        used = 0
                if item is None:
                    break
                yield codec.decode_result(item.body, type(feed))
            if slot.error is not None:
                raise slot.error
        finally:
            self._abandon(number, slot)

    def renew(self, credential: str, timeout: float | None = CONNECT_SECONDS) -> None:
        """Replace the credential of this connection. Raise the server's error if it is not valid."""
        with self._lock:
            self._check_usable()
            slot = _Slot(None)
            self._slots[self._frames.send_auth(credential)] = slot
            self._wait(slot, timeout)
        if slot.error is not None:
            raise slot.error

    def close(self) -> None:
        """Close the connection. Calls in progress fail; the server cancels them."""
        self._closing.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for the server
        with self._lock:
            self._break(_closed())
            self._selector.close()
            self._sock.close()

    # -- sending and waiting, with the lock ------------------------------------------------------------------------

    def _send(self, command: Any, headers: Headers | None) -> tuple[int, _Slot]:
        self._check_usable()
        kind = type(command)
        body = codec.encode(command)
        while not self._frames.has_room(kind.facts.id, len(body)):
            self._step(None)
            self._check_usable()
        topic = getattr(command, "topic", "") if self._frames.may_compress(len(body)) else ""
        number = self._frames.send_request(kind.facts.id, body, headers, compress=self._settings.has(topic))
        slot = self._slots[number] = _Slot(kind)
        if self._settings.is_due(topic, time.monotonic()) and self._send_own(GetTopic(topic)):
            self._settings.begin(topic)
        self._write()
        return number, slot

    def _send_own(self, command: GetTopic | Release) -> bool:
        """Send a request that no caller waits for. Return False if the server's window has no room for it."""
        kind, body = type(command), codec.encode(command)
        if self._frames.goaway is not None or not self._frames.has_room(kind.facts.id, len(body)):
            return False
        slot = self._slots[self._frames.send_request(kind.facts.id, body)] = _Slot(kind, command)
        slot.is_abandoned = True
        return True

    def _wait(self, slot: _Slot, timeout: float | None, *, or_item: bool = False) -> None:
        """Wait for the answer, or for an item. Raise DeadlineExceeded after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not slot.is_done and not (or_item and slot.items):
            if until is not None and time.monotonic() >= until:
                raise DeadlineExceeded("AUTH" if slot.kind is None else slot.kind.facts.rpc)
            self._step(until)

    def _abandon(self, number: int, slot: _Slot) -> None:
        """Cancel a request that no caller waits for. Its answer is dropped when it arrives."""
        with self._lock:
            if slot.is_done or slot.is_abandoned or self._broken is not None:
                return
            slot.is_abandoned = True
            slot.error = error_codes.of_code("CANCELLED", "this call was cancelled")
            if not self._frames.send_cancel(number):
                del self._slots[number]
            self._write()

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise copy.copy(self._broken)

    def _await_welcome(self, until: float) -> None:
        with self._lock:
            while self._frames.welcome is None:
                if self._refusal is not None:
                    raise self._refusal
                if self._frames.is_other_protocol:
                    raise other_protocol(self._address, self._frames.failure)
                self._check_usable()
                if time.monotonic() >= until:
                    raise unreached(self._address, TimeoutError())
                self._step(until)
        threading.Thread(target=_keep_alive, args=(weakref.ref(self), self._closing), daemon=True).start()

    # -- I/O, with the lock ------------------------------------------------------------------------------------------

    def _step(self, until: float | None) -> None:
        """Write and read once. If neither is possible, wait until one is, but not past `until`."""
        try:
            next_tick = self._frames.tick(time.monotonic())
        except ProtocolError as error:
            return self._break(UnavailableError(f"the connection was lost: {error}; retry"))
        self._send_returns()
        self._write()
        if self._broken is not None or self._read():
            return None
        now = time.monotonic()
        end = next_tick if until is None else min(next_tick, until)
        self._selector.modify(self._sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0))
        self._selector.select(max(0.0, end - now))
        return None

    def _write(self) -> None:
        """Write what the socket accepts now."""
        try:
            while self._out or self._refill():
                sent = self._sock.send(self._out[0])
                if sent < len(self._out[0]):
                    self._out[0] = memoryview(self._out[0])[sent:]
                else:
                    self._out.popleft()
        except _WOULD_BLOCK:
            pass
        except OSError as error:
            self._break(UnavailableError(f"the connection was lost: {error}; retry"))

    def _refill(self) -> bool:
        self._out.extend(self._frames.take())
        return bool(self._out)

    def _read(self) -> bool:
        """Read what has arrived. Return whether anything happened."""
        try:
            data = self._sock.recv(READ_BYTES)
        except _WOULD_BLOCK:
            return False
        except OSError as error:
            self._break(UnavailableError(f"the connection was lost: {error}; retry"))
            return True
        try:
            events = self._frames.receive(data) if data else []
        except ProtocolError as error:
            self._dispatch(error.events)
            self._write()
            self._break(UnavailableError(f"the server violated the protocol: {error}"))
            return True
        self._dispatch(events)
        if not data:
            reason = "" if self._frames.goaway is None else f" ({self._frames.goaway.text})"
            self._break(UnavailableError(f"the server closed the connection{reason}; retry"))
        return True

    def _dispatch(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, GoAway):
                if self._frames.welcome is None:
                    self._refusal = error_codes.of_code(event.code, event.text)
            elif isinstance(event, Error) and event.request == 0:
                self._refusal = event.error
            elif isinstance(event, Item):
                slot = self._slots[event.request]
                if not slot.is_abandoned:
                    slot.items.append(event)
            elif isinstance(event, Response | End | Error):
                self._finish(self._slots.pop(event.request), event)
        self._send_returns()

    def _finish(self, slot: _Slot, event: Response | End | Error) -> None:
        if isinstance(event, Error):
            slot.error = event.error
        else:
            slot.answer = event
        if not slot.is_abandoned or (slot.command is None and not (slot.kind is not None and slot.kind.facts.leases)):
            return
        result = None
        if isinstance(event, Response):
            try:
                result = codec.decode_result(event.body, slot.kind)
            except UnavailableError as error:
                slot.error = error
        if isinstance(slot.command, GetTopic):
            self._settings.learn(slot.command.topic, result, time.monotonic())
        elif isinstance(slot.command, Release):
            if isinstance(slot.error, UnavailableError):  # other errors will not go away
                self._returns.append(slot.command)
                self._return_at = time.monotonic() + RETURN_SECONDS
        elif slot.kind.facts.leases and result is not None and result.messages is not None:
            self._returns.append(Release(result.topic, LeaseKeys(result.messages.ids, result.messages.tokens)))

    def _send_returns(self) -> None:
        """Release the leases of calls whose callers no longer wait, as many as the server's window has room for."""
        while self._returns and self._broken is None and self._frames.failure is None:
            if time.monotonic() < self._return_at or not self._send_own(self._returns[0]):
                return
            self._returns.popleft()

    def _break(self, error: HeaplineError) -> None:
        """Fail all calls in progress, and all later ones."""
        if self._broken is None:
            self._broken = error
        for slot in self._slots.values():
            slot.error = copy.copy(self._broken)
        self._slots.clear()

    def _keep_alive(self) -> None:
        """Answer PING and send what is queued, unless another thread does so already."""
        if self._lock.acquire(blocking=False):
            try:
                if self._broken is None:
                    self._step(0.0)
            finally:
                self._lock.release()


class Started(Generic[R]):
    """A command that was sent."""

    def __init__(self, connection: BlockingConnection, number: int, slot: _Slot) -> None:
        self._connection, self._number, self._slot = connection, number, slot

    def result(self, timeout: float | None = None) -> R:
        """Wait for the result. After `timeout` seconds, cancel the command and raise DeadlineExceeded."""
        try:
            with self._connection._lock:
                self._connection._wait(self._slot, timeout)
        except BaseException:
            self.cancel()
            raise
        if self._slot.error is not None:
            raise self._slot.error
        assert isinstance(self._slot.answer, Response)
        result: R = codec.decode_result(self._slot.answer.body, self._slot.kind)
        return result

    def cancel(self) -> None:
        """Stop the command if it is still in progress."""
        self._connection._abandon(self._number, self._slot)


def _keep_alive(connection: weakref.ref[BlockingConnection], closing: threading.Event) -> None:
    """Serve a connection while its owner makes no calls, until it is closed or forgotten."""
    while not closing.wait(TICK_SECONDS):
        alive = connection()
        if alive is None:
            return
        alive._keep_alive()
        del alive


def _open_socket(
    address: Address, tls: ssl.SSLContext | None, server_name: str | None, timeout: float
) -> socket.socket:
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        sock = socket.create_connection(address, timeout)
    try:
        sock.settimeout(timeout)
        if isinstance(address, str):
            sock.connect(address)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            name = server_name or (None if isinstance(address, str) else address[0])
            sock = tls.wrap_socket(sock, server_hostname=name)
    except BaseException:
        sock.close()
        raise
    return sock


def _closed() -> Closed:
    error = Closed()
    error.args = ("this connection is closed; connect again",)
    return error
