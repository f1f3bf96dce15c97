"""A client's side of a native connection."""

from __future__ import annotations

from collections.abc import Mapping

from heapline.contract.errors import BadRequest, UnavailableError
from heapline.wire.frames.compression import Compression
from heapline.wire.frames.events import End, Error, Event, GoAway, Item, Response
from heapline.wire.frames.format import (
    AUTH,
    CANCEL,
    CREDIT,
    CREDITS_MAX,
    END,
    ERROR,
    GOAWAY,
    HEADERS,
    HELLO,
    ITEM,
    LENGTH_MAX,
    LENGTH_MAX_BEFORE_WELCOME,
    MAGIC,
    REQUEST,
    REQUEST_MAX,
    RESPONSE,
    VERSION_MAX,
    VERSION_MIN,
    WELCOME,
    Body,
    Credential,
    Credits,
    Headers,
    Hello,
    Notice,
    ProtocolError,
    Welcome,
    Windows,
    decode_body,
    encode,
    pack_headers,
)
from heapline.wire.frames.peer import Peer

WINDOWS = Windows(body_bytes=256 << 20, bodies=64, bodies_bytes=512 << 20)


class ClientFrames(Peer):
    """A client's side. It begins with HELLO; requests can follow when the event Welcome has arrived.

    Every request gets a Response or an Error, or Items and then End or Error, even if it is cancelled.
    """

    def __init__(
        self,
        credential: str | None = None,
        *,
        client: str = "",
        windows: Windows = WINDOWS,
        compressions: Mapping[str, Compression] | None = None,
    ) -> None:
        super().__init__(compressions)
        self.welcome: Welcome | None = None
        self.goaway: GoAway | None = None  # the server accepts no further requests
        self._windows = windows
        self._next = 0
        self._fed: set[int] = set()  # requests that received items
        self._handlers |= {WELCOME: self._on_welcome, ERROR: self._on_error}
        versions = (VERSION_MIN, VERSION_MAX)
        hello = Hello(MAGIC, versions, list(self._compressions), windows, credential, client)
        body = encode(hello)
        if len(body) > LENGTH_MAX_BEFORE_WELCOME:
            raise BadRequest(f"HELLO has {len(body)} bytes; the limit is {LENGTH_MAX_BEFORE_WELCOME}")
        self._writer.put_first(HELLO, 0, body)

    @property
    def is_other_protocol(self) -> bool:
        """Whether the peer has answered HELLO with something else than Heapline's native protocol."""
        return self.welcome is None and self.failure is not None

    def may_wait(self, command: int) -> bool:
        """Return whether a command counts against the window of waiting calls."""
        return command in self._waiting_commands

    def has_room(self, command: int, size: int = 0) -> bool:
        """Return whether the server's windows have room for another request, with a body of `size` bytes."""
        opened, waiting, windows = len(self._open), len(self._waiting), self._peer_windows
        if opened and self._open_bytes + size > windows.calls_bytes:
            return False
        return waiting < windows.waiting if command in self._waiting_commands else opened - waiting < windows.calls

    def send_request(
        self,
        command: int,
        body: Body,
        headers: Headers | None = None,
        *,
        compress: bool = False,
    ) -> int:
        """Send a request and return its number."""
        size = len(body)
        if self.failure is not None or self.welcome is None or self.goaway is not None or size > LENGTH_MAX:
            self._check_request(size)
        flags, block = 0, b""
        if compress:
            body, flags = self._compressed(body)
        if headers is not None:
            flags, block = flags | HEADERS, pack_headers(headers)
        request = self._number()
        self._open[request] = size
        self._open_bytes += size
        if command in self._waiting_commands:
            self._waiting.add(request)
        self._writer.put(REQUEST, command, request, body, flags, block)
        return request

    def send_credit(self, request: int, items: int) -> None:
        """Allow a feed to send more items."""
        self._check_usable()
        total = self._credits.get(request, 0) + items
        if items < 1 or total > CREDITS_MAX:
            raise RuntimeError(f"send_credit: {items} credits for request {request}")
        if request in self._open:  # otherwise it has ended
            self._credits[request] = total
            self._writer.put(CREDIT, 0, request, encode(Credits(items)))

    def send_cancel(self, request: int) -> bool:
        """Cancel a request. Return whether its answer will still arrive: not if the request was never sent."""
        self._check_usable()
        if request not in self._open:
            return False
        was_begun = self._writer.abandon(request)
        if was_begun is False:
            self._close(request)
            return False
        if was_begun:
            self._writer.put_cancel(CANCEL, request)
        else:
            self._writer.put(CANCEL, 0, request)
        return True

    def send_auth(self, credential: str) -> int:
        """Renew the credential. Return a request number, which gets a Response or an Error."""
        self._check_request(0)
        request = self._number()
        self._open[request] = 0
        self._writer.put(AUTH, 0, request, encode(Credential(credential)))
        return request

    def _number(self) -> int:
        request = self._next + 1
        while request in self._open or request > REQUEST_MAX:
            request = request + 1 if request < REQUEST_MAX else 1
        self._next = request
        return request

    def _check_request(self, size: int) -> None:
        self._check_usable()
        if self.welcome is None:
            raise RuntimeError("send_request: WELCOME has not arrived")
        if self.goaway is not None:
            gone = UnavailableError(f"the server closes this connection ({self.goaway.text}); connect again")
            gone.reached = False
            raise gone
        if size > self._peer_windows.body_bytes:
            limit = self._peer_windows.body_bytes
            raise BadRequest(f"a request of {size} bytes is over the server's limit of {limit}; send less at once")

    # -- frames of the server --------------------------------------------------------------------------------------

    def _on_welcome(self, command: int, request: int, headers: Headers | None, body: Body) -> Welcome:
        welcome: Welcome = decode_body(body, Welcome, "WELCOME")
        if not VERSION_MIN <= welcome.version <= VERSION_MAX:
            raise ProtocolError(f"the server chose version {welcome.version} of the protocol, which was not offered")
        if self._agree(welcome.features) != welcome.features:
            raise ProtocolError(f"the server chose features that were not offered: {welcome.features}")
        self.welcome, self._peer_windows = welcome, welcome.windows
        self._waiting_commands = frozenset(welcome.waiting_commands)
        self._reader.open(self._windows, self._compression)
        self._writer.open(welcome.windows)
        del self._handlers[WELCOME]
        self._handlers |= {RESPONSE: self._on_response, ITEM: self._on_item, END: self._on_end}
        return welcome

    def _on_response(self, command: int, request: int, headers: Headers | None, body: Body) -> Response:
        if self._fed and request in self._fed:
            raise ProtocolError(f"RESPONSE to request {request}, which received items")
        if not self._close(request):
            raise ProtocolError(f"RESPONSE to request {request}, which is not in progress")
        return Response(request, body)

    def _on_error(self, command: int, request: int, headers: Headers | None, body: Body) -> Error:
        if request == 0 and self.welcome is None:
            self._handlers = {GOAWAY: self._on_goaway}  # refused; the server closes the connection
            return Error(0, body)
        if not self._close(request):
            raise ProtocolError(f"ERROR of request {request}, which is not in progress")
        self._fed.discard(request)
        return Error(request, body)

    def _on_item(self, command: int, request: int, headers: Headers | None, body: Body) -> Item:
        left = self._credits.get(request, 0) - command
        if request not in self._open or command < 1 or left < 0:
            raise ProtocolError(f"ITEM of request {request}, which is not in progress or has too few credits")
        self._credits[request] = left
        self._fed.add(request)
        return Item(request, body, command)

    def _on_end(self, command: int, request: int, headers: Headers | None, body: Body) -> End:
        if not self._close(request):
            raise ProtocolError(f"END of request {request}, which is not in progress")
        self._fed.discard(request)
        return End(request)

    def _on_goaway(self, command: int, request: int, headers: Headers | None, body: Body) -> Event | None:
        notice: Notice = decode_body(body, Notice, "GOAWAY")
        self.goaway = GoAway(notice.code, notice.text)
        return self.goaway
