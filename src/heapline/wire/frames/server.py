"""A server's side of a native connection."""

from __future__ import annotations

from collections.abc import Mapping

from heapline.contract.errors import ResourceExhausted
from heapline.wire import codec
from heapline.wire.frames.buffers import ABANDONED, PACKED_REQUEST
from heapline.wire.frames.compression import Compression
from heapline.wire.frames.events import Auth, Cancel, Credit, Request
from heapline.wire.frames.format import (
    AUTH,
    CANCEL,
    CREDIT,
    CREDITS_MAX,
    END,
    ERROR,
    GOAWAY,
    HELLO,
    ITEM,
    LENGTH_MAX,
    LENGTH_MAX_BEFORE_WELCOME,
    MAGIC,
    PING,
    PONG,
    REQUEST,
    RESPONSE,
    VERSION_MAX,
    VERSION_MIN,
    WELCOME,
    Body,
    Credential,
    Credits,
    Headers,
    Hello,
    ProtocolError,
    Welcome,
    Windows,
    decode_body,
    encode,
)
from heapline.wire.frames.peer import Peer

CANCELLED = codec.encode_failure("CANCELLED", "the caller cancelled this request")


class ServerFrames(Peer):
    """A server's side. `windows` is what it accepts, `server` its name and version.

    `waiting_commands` are the numbers of commands that may wait, and of feeds (`codec.waiting_commands`). They have a
    window of their own, because a pop may wait for an enqueue that is sent after it.
    The first event is Hello. Answer it with `send_welcome`, or with `send_error(0, …)` and close the connection.
    A call over a window is refused here and does not become an event.
    """

    def __init__(
        self,
        windows: Windows | None = None,
        *,
        waiting_commands: frozenset[int] = frozenset(),
        server: str = "",
        compressions: Mapping[str, Compression] | None = None,
    ) -> None:
        super().__init__(compressions)
        self.windows, self._server = windows or Windows(), server
        self._waiting_commands = waiting_commands
        self._features: list[str] = []  # of the client
        self._auth = 0  # the request number of AUTH, while it is not answered
        self._version = 0  # that was chosen, while HELLO is not answered
        self._handlers = {HELLO: self._on_hello}

    def send_welcome(self) -> None:
        """Accept the client. Requests can follow."""
        self._check_usable()
        if self._version == 0:
            raise RuntimeError("send_welcome: HELLO has not arrived, or was answered")
        features = self._agree(self._features)
        welcome = Welcome(self._version, features, self.windows, sorted(self._waiting_commands), self._server)
        self._writer.put_first(WELCOME, 0, encode(welcome))
        self._version = 0
        self._reader.open(self.windows, self._compression)
        self._writer.open(self._peer_windows)
        self._handlers = {
            REQUEST: self._on_request,
            PACKED_REQUEST: self._on_packed_request,
            CREDIT: self._on_credit,
            CANCEL: self._on_cancel,
            ABANDONED: self._on_abandoned,
            AUTH: self._on_auth,
            PING: self._on_ping,
            PONG: self._on_pong,
            GOAWAY: self._on_goaway,
        }

    def send_response(self, request: int, body: Body = b"", *, compress: bool = False) -> None:
        """Answer a command, or AUTH with an empty body."""
        if self.failure is not None or len(body) > LENGTH_MAX:
            self._check_body(body)
        if not self._close(request):
            raise RuntimeError(f"send_response: request {request} is not open")
        if request == self._auth:
            self._auth = 0
        flags = 0
        if compress:
            body, flags = self._compressed(body)
        self._writer.put(RESPONSE, 0, request, body, flags)

    def send_error(self, request: int, body: Body) -> None:
        """Answer a request with an error, as `codec.encode_error` describes it. Request 0 refuses HELLO."""
        self._check_body(body)
        if request == 0 and self._version:
            self._writer.put_first(ERROR, 0, bytes(body))
            self.failure = "the client was refused"
            return
        if not self._close(request):
            raise RuntimeError(f"send_error: request {request} is not open")
        if request == self._auth:
            self._auth = 0
        self._writer.put(ERROR, 0, request, body)

    def send_item(self, request: int, body: Body, *, credits: int = 1, compress: bool = False) -> None:
        """Send an item of a feed. It uses credits, of which there must be enough."""
        self._check_body(body)
        left = self._credits.get(request, 0) - credits
        if request not in self._open or credits < 1 or credits > 0xFFFF or left < 0:
            raise RuntimeError(f"send_item: request {request} is not open, or has fewer than {credits} credits")
        self._credits[request] = left
        flags = 0
        if compress:
            body, flags = self._compressed(body)
        self._writer.put(ITEM, credits, request, body, flags)

    def send_end(self, request: int) -> None:
        """End a feed."""
        self._check_usable()
        if not self._close(request):
            raise RuntimeError(f"send_end: request {request} is not open")
        self._writer.put(END, 0, request)

    def _check_body(self, body: Body) -> None:
        self._check_usable()
        limit = LENGTH_MAX_BEFORE_WELCOME if self._version else self._peer_windows.body_bytes
        if len(body) > limit:
            raise ResourceExhausted("bytes of an answer that this client accepts", limit)

    # -- frames of the client --------------------------------------------------------------------------------------

    def _on_hello(self, command: int, request: int, headers: Headers | None, body: Body) -> Hello:
        hello: Hello = decode_body(body, Hello, "HELLO")
        if hello.magic != MAGIC or request:
            raise ProtocolError("HELLO lacks the magic word, or has a request number; this is not a Heapline client")
        lowest, highest = hello.versions
        version = min(highest, VERSION_MAX)
        if version < max(lowest, VERSION_MIN):
            raise ProtocolError(
                f"the client speaks versions {lowest} to {highest} of the protocol, this server {VERSION_MIN} to "
                f"{VERSION_MAX}; use a client and a server of releases that are closer"
            )
        if hello.windows.bodies_bytes < hello.windows.body_bytes:
            raise ProtocolError("HELLO accepts larger bodies than incomplete bodies")
        self._features, self._peer_windows, self._version = hello.features, hello.windows, version
        self._handlers = {PING: self._on_early_ping, PONG: self._on_pong}  # nothing else until WELCOME was sent
        return hello

    def _on_early_ping(self, command: int, request: int, headers: Headers | None, body: Body) -> None:
        if self.buffered >= LENGTH_MAX_BEFORE_WELCOME:
            raise ProtocolError("too many PINGs before WELCOME")
        self._on_ping(command, request, headers, body)

    def _on_request(self, command: int, request: int, headers: Headers | None, body: Body) -> Request | None:
        opened, size = self._open, len(body)
        if request in opened or not request:
            raise _in_progress(request)
        may_wait = command in self._waiting_commands
        if self._is_refused(request, may_wait, size):
            return None
        opened[request] = size
        self._open_bytes += size
        if may_wait:
            self._waiting.add(request)
            body = bytes(body)  # a view would keep its whole chunk while the call waits
        return Request(request, command, headers, body)

    def _on_packed_request(self, command: int, request: int, headers: Headers | None, body: Body) -> Request | None:
        if request in self._open or not request:
            raise _in_progress(request)
        if self._is_refused(request, command in self._waiting_commands, self._reader.unpacked_size(body)):
            return None
        return self._on_request(command, request, headers, self._reader.unpack(body))

    def _is_refused(self, request: int, may_wait: bool, size: int) -> bool:
        """Refuse a request if a window has no room for it."""
        opened, waiting, windows = len(self._open), len(self._waiting), self.windows
        if may_wait and waiting >= windows.waiting:
            window = ResourceExhausted("waiting calls on one connection", windows.waiting)
        elif not may_wait and opened - waiting >= windows.calls:
            window = ResourceExhausted("calls in progress on one connection", windows.calls)
        elif opened and self._open_bytes + size > windows.calls_bytes:
            window = ResourceExhausted("bytes of calls in progress on one connection", windows.calls_bytes)
        else:
            return False
        self._writer.put(ERROR, 0, request, codec.encode_error(window))
        return True

    def _on_credit(self, command: int, request: int, headers: Headers | None, body: Body) -> Credit | None:
        items = decode_body(body, Credits, "CREDIT").items
        if request not in self._open:
            return None  # the feed has ended meanwhile
        total = self._credits.get(request, 0) + items
        if total > CREDITS_MAX:
            raise ProtocolError(f"request {request} has more than {CREDITS_MAX} credits")
        self._credits[request] = total
        return Credit(request, items)

    def _on_cancel(self, command: int, request: int, headers: Headers | None, body: Body) -> Cancel | None:
        return Cancel(request) if request in self._open else None  # it may have been answered meanwhile

    def _on_abandoned(self, command: int, request: int, headers: Headers | None, body: Body) -> None:
        if request in self._open or not request:
            raise _in_progress(request)
        self._writer.put(ERROR, 0, request, CANCELLED)

    def _on_auth(self, command: int, request: int, headers: Headers | None, body: Body) -> Auth:
        credential = decode_body(body, Credential, "AUTH").credential
        if request in self._open or not request or self._auth:
            raise ProtocolError(f"AUTH {request} is a number in progress, or another AUTH is not answered yet")
        self._open[request] = 0
        self._auth = request
        return Auth(request, credential)


def _in_progress(request: int) -> ProtocolError:
    return ProtocolError(f"request {request} is in progress; number each request differently, from 1")
