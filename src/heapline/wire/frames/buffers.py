"""The two halves of a native connection that know frames and nothing about calls: a reader and a writer.

The reader cuts received bytes into frames, joins the pieces of large bodies and decompresses them. Its memory is
bounded by one frame and the window of incomplete bodies. The writer joins small frames into one buffer and sends large
bodies in pieces, in turns. Small frames go first, so they wait only for what `take` has returned before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from heapline.wire.frames.compression import Compression
from heapline.wire.frames.format import (
    CANCEL,
    COMPRESS_MAX,
    COMPRESSED,
    ERROR,
    GOAWAY,
    HEADER,
    HEADER_SIZE,
    HEADERS,
    HEADERS_LENGTH,
    HEADERS_MAX,
    HELLO,
    ITEM,
    LENGTH_MAX,
    LENGTH_MAX_BEFORE_WELCOME,
    MORE,
    PING,
    PONG,
    REQUEST,
    RESPONSE,
    WELCOME,
    Body,
    Headers,
    ProtocolError,
    Windows,
    decode_headers,
    name_of,
)

#: Kind, command, request, headers and body of a complete frame.
Frame = tuple[int, int, int, Headers | None, Body]
# Kinds that only the reader reports; they are not bytes.
ABANDONED = 256  # CANCEL arrived amid the pieces of its request
PACKED_REQUEST = 257  # a compressed REQUEST; `unpack` its body once there is room for it
VIEW_MIN = 16 << 10  # shorter bodies are copied, which is as fast; a view keeps the whole chunk that was received
#: First bytes of peers that are on the wrong port.
OTHER_PROTOCOLS = {
    "HTTP or gRPC": (b"GET ", b"PUT ", b"POST", b"HEAD", b"OPTI", b"DELE", b"PRI ", b"HTTP", b"\0\0"),
    "TLS": (b"\x16\x03", b"\x15\x03"),
}
TAKE_BYTES = 512 << 10  # that `take` returns, about

_FLAGS = HEADERS | MORE | COMPRESSED
_IN_PIECES = frozenset((REQUEST, RESPONSE, ERROR, ITEM))
_OF_CONNECTION = frozenset((PING, PONG, GOAWAY, HELLO, WELCOME))
_unpack_from, _pack = HEADER.unpack_from, HEADER.pack


class _Incomplete(NamedTuple):
    kind: int
    command: int
    flags: int
    headers: Headers | None
    body: bytearray


class FrameReader:
    """`bodies` is 0 until the handshake is done: before it, no body may be in pieces."""

    def __init__(self) -> None:
        self.length_max = LENGTH_MAX_BEFORE_WELCOME
        self.violation: ProtocolError | None = None  # after which no frame is read
        self._windows, self._bodies = Windows(), 0
        self._compression: Compression | None = None
        self._chunks: list[bytes] = []  # of a frame that is not complete
        self._have, self._need = 0, HEADER_SIZE
        self._incomplete: dict[int, _Incomplete] = {}
        self._incomplete_bytes = 0

    def open(self, windows: Windows, compression: Compression | None) -> None:
        """Accept frames of full length, pieces and compressed bodies."""
        self.length_max, self._windows, self._bodies = LENGTH_MAX, windows, windows.bodies
        self._compression = compression

    @property
    def buffered(self) -> int:
        """Bytes of incomplete frames and bodies."""
        return self._have + self._incomplete_bytes

    def receive(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes, up to the first one that violates the format."""
        if self._have:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._chunks)
            self._chunks, self._have = [], 0
        at, size, length_max, need = 0, len(data), self.length_max, HEADER_SIZE
        while size - at >= HEADER_SIZE:
            length, kind, flags, command, request = _unpack_from(data, at)
            start = at + HEADER_SIZE
            end = start + length
            if length > length_max:
                self.violation = self._too_long(data[at:end], length)
                return
            if end > size:
                need = HEADER_SIZE + length
                break
            body: Body = data[start:end] if length < VIEW_MIN else memoryview(data)[start:end]
            if flags or self._incomplete:
                try:
                    frame = self._special(kind, flags, command, request, body)
                except ProtocolError as violation:
                    self.violation = violation
                    return
                if frame is not None:
                    yield frame
            else:
                yield kind, command, request, None, body
            at = end
        if not self._bodies and size - at >= 4 and (length := int.from_bytes(data[at : at + 4], "little")) > length_max:
            self.violation = self._too_long(data[at:], length)  # less than a header, as in an alert of TLS
            return
        if at < size:
            self._chunks, self._have, self._need = [data[at:] if at else data], size - at, need

    def _too_long(self, start: bytes, length: int) -> ProtocolError:
        if not self._bodies:  # before the handshake: the peer may have confused ports
            for protocol, signs in OTHER_PROTOCOLS.items():
                if start.startswith(signs):
                    return ProtocolError(f"the peer speaks {protocol}, not Heapline's native protocol")
        return ProtocolError(f"a frame of {length} bytes is over the limit of {self.length_max}")

    def _special(self, kind: int, flags: int, command: int, request: int, body: Body) -> Frame | None:
        """Read a frame that has flags, or that arrives amid the pieces of bodies."""
        if request in self._incomplete and kind not in _OF_CONNECTION:
            return self._continue(kind, flags, command, request, body)
        if flags & ~_FLAGS:
            raise ProtocolError(f"{name_of(kind)} has unknown flags {flags:#x}")
        if flags and kind not in _IN_PIECES:
            raise ProtocolError(f"{name_of(kind)} has flags {flags:#x}; it cannot have any")
        headers = None
        if flags & HEADERS:
            headers, body = _cut_headers(kind, body)
        if flags & COMPRESSED and self._compression is None:
            raise ProtocolError("a body is compressed, but the handshake did not agree on that")
        if flags & MORE:
            if len(self._incomplete) >= self._bodies:
                raise ProtocolError(f"more than {self._bodies} incomplete bodies at a time")
            self._incomplete[request] = _Incomplete(kind, command, flags, headers, bytearray())
            self._add(request, body)
            return None
        if flags & COMPRESSED:
            return self._packed(kind, command, request, headers, body)
        return kind, command, request, headers, body

    def _continue(self, kind: int, flags: int, command: int, request: int, body: Body) -> Frame | None:
        first = self._incomplete[request]
        if kind == CANCEL and first.kind == REQUEST:
            self._drop(request)
            return ABANDONED, command, request, None, b""
        if kind != first.kind or command != first.command or flags & ~MORE:
            raise ProtocolError(f"{name_of(kind)} of request {request} amid the pieces of a {name_of(first.kind)}")
        self._add(request, body)
        if flags & MORE:
            return None
        self._drop(request)
        whole: Body = memoryview(first.body).toreadonly()
        if first.flags & COMPRESSED:
            return self._packed(kind, command, request, first.headers, whole)
        return kind, command, request, first.headers, whole

    def _packed(self, kind: int, command: int, request: int, headers: Headers | None, body: Body) -> Frame:
        """Leave a request packed: 150 bytes can become 4 MiB, and one chunk can have a thousand of them."""
        if kind == REQUEST:
            return PACKED_REQUEST, command, request, headers, body
        return kind, command, request, headers, self.unpack(body)

    def _add(self, request: int, piece: Body) -> None:
        """Copy a piece. A view would keep the whole chunk in which it arrived."""
        body, size = self._incomplete[request].body, len(piece)
        if len(body) + size > self._windows.body_bytes:
            raise ProtocolError(f"the body of request {request} is over the limit of {self._windows.body_bytes} bytes")
        if self._incomplete_bytes + size > self._windows.bodies_bytes:
            raise ProtocolError(f"incomplete bodies are over the limit of {self._windows.bodies_bytes} bytes")
        body += piece
        self._incomplete_bytes += size

    def _drop(self, request: int) -> None:
        self._incomplete_bytes -= len(self._incomplete.pop(request).body)

    def unpacked_size(self, body: Body) -> int:
        """Return how large a compressed body becomes, at most."""
        assert self._compression is not None
        size = self._compression.unpacked_size(body)
        return COMPRESS_MAX if size is None else size

    def unpack(self, body: Body) -> Body:
        """Decompress a body."""
        assert self._compression is not None
        try:
            return self._compression.decompress(body, min(self._windows.body_bytes, COMPRESS_MAX))
        except ValueError as error:
            raise ProtocolError(f"cannot decompress a body: {error}") from None

    def clear(self) -> None:
        """Free all memory, because nothing more is read."""
        self._chunks, self._have = [], 0
        self._incomplete, self._incomplete_bytes = {}, 0


def _cut_headers(kind: int, body: Body) -> tuple[Headers, Body]:
    if kind != REQUEST:
        raise ProtocolError(f"{name_of(kind)} has headers; only REQUEST can")
    if len(body) < HEADERS_LENGTH.size:
        raise ProtocolError("the headers of a request are cut off")
    (length,) = HEADERS_LENGTH.unpack_from(body)
    end = HEADERS_LENGTH.size + length
    if length > HEADERS_MAX or end > len(body):
        raise ProtocolError(f"headers of {length} bytes are over the limit of {HEADERS_MAX} or longer than their frame")
    try:
        return decode_headers(body[HEADERS_LENGTH.size : end]), body[end:]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the headers of a request are not valid: {error}") from None


class _Outgoing:
    """One frame, or a body to be sent in pieces."""

    __slots__ = ("kind", "command", "flags", "headers", "body", "at")

    def __init__(self, kind: int, command: int, flags: int, headers: bytes, body: Body) -> None:
        self.kind, self.command, self.flags, self.headers = kind, command, flags, headers
        self.body = memoryview(body)
        self.at = 0  # bytes of the body that were sent

    @property
    def is_small(self) -> bool:
        return len(self.headers) + len(self.body) <= LENGTH_MAX

    @property
    def left(self) -> int:
        """Bytes that were not sent, without the headers of later pieces."""
        return len(self.body) - self.at + (0 if self.at else HEADER_SIZE + len(self.headers))

    def next_piece(self, request: int) -> tuple[list[Body], bool]:
        """Return the next frame, and whether it is the last one."""
        headers, flags = (self.headers, self.flags) if not self.at else (b"", 0)
        end = min(self.at + LENGTH_MAX - len(headers), len(self.body))
        piece, is_last = self.body[self.at : end], end == len(self.body)
        self.at = end
        if not is_last:
            flags |= MORE
        header = _pack(len(headers) + len(piece), self.kind, flags, self.command, request) + headers
        return [header, piece] if piece else [header], is_last


class FrameWriter:
    """Frames of one request keep their order. Frames of different requests may overtake each other."""

    def __init__(self) -> None:
        self.buffered = 0  # bytes that `take` has not returned, without the headers of later pieces
        self._small: list[bytes] = []  # whole frames
        self._cancels = 0  # of these, the first ones, which cancel bodies of which pieces were sent
        self._small_taken = 0  # whole frames that `take` has returned
        self._large: dict[int, deque[_Outgoing]] = {}  # by request, in order
        self._turns: deque[int] = deque()  # requests whose first body was begun
        self._queue: deque[int] = deque()  # requests whose first body was not begun
        self._begun_bytes = 0
        self._windows = Windows()  # the peer's

    def open(self, windows: Windows) -> None:
        self._windows = windows

    def put(
        self, kind: int, command: int, request: int, body: Body = b"", flags: int = 0, headers: bytes = b""
    ) -> None:
        """Queue a frame of a request."""
        length = len(headers) + len(body)
        self.buffered += HEADER_SIZE + length
        if length > LENGTH_MAX or request in self._large:
            self._put_large(request, _Outgoing(kind, command, flags, headers, body))
        elif headers:
            self._small.append(b"".join((_pack(length, kind, flags, command, request), headers, body)))
        else:
            self._small.append(_pack(length, kind, flags, command, request) + body)

    def put_first(self, kind: int, request: int, body: bytes = b"") -> None:
        """Queue a frame of the connection itself. It waits for no large body."""
        self.buffered += HEADER_SIZE + len(body)
        self._small.append(_pack(len(body), kind, 0, 0, request) + body)

    def put_cancel(self, kind: int, request: int) -> None:
        """Queue the end of a body that was abandoned. The next piece waits for it: the peer still counts that body."""
        self.buffered += HEADER_SIZE
        self._small.insert(self._cancels, _pack(0, kind, 0, 0, request))
        self._cancels += 1

    def _put_large(self, request: int, outgoing: _Outgoing) -> None:
        if request in self._large:
            self._large[request].append(outgoing)
        else:
            self._large[request] = deque((outgoing,))
            self._queue.append(request)

    @property
    def place(self) -> int:
        """The position of the last small frame, among all that were ever queued."""
        return self._small_taken + len(self._small)

    def is_queued(self, request: int, place: int) -> bool:
        """Return whether `take` has not returned all of an answer. `place` is its position when it was queued."""
        return place > self._small_taken or request in self._large

    def abandon(self, request: int) -> bool | None:
        """Drop what is queued of a large request. Return whether a piece was sent, or None if nothing is queued."""
        queued = self._large.pop(request, None)
        if queued is None:
            return None
        self.buffered -= sum(outgoing.left for outgoing in queued)
        if request in self._turns:
            self._turns.remove(request)
            self._begun_bytes -= len(queued[0].body)
        else:
            self._queue.remove(request)
        return queued[0].at > 0

    def take(self, size: int = TAKE_BYTES) -> list[Body]:
        """Return buffers to write now, in order; about `size` bytes, and nothing if nothing is queued."""
        small = self._small
        if not small and not self._large:
            return []
        if self.buffered <= size and not self._large:  # the usual case
            self._small, self._cancels, self.buffered = [], 0, 0
            self._small_taken += len(small)
            return [b"".join(small)]
        taken, room = self._take_small(size)
        while self._large:
            piece = self._next_piece()
            taken += piece
            room -= sum(map(len, piece))
            if room <= 0:
                break
        return taken

    def _take_small(self, size: int) -> tuple[list[Body], int]:
        count, room = 0, size
        while count < len(self._small) and (room > 0 or count < self._cancels):
            room -= len(self._small[count])
            count += 1
        if not count:
            return [], room
        self._cancels = max(0, self._cancels - count)
        joined = b"".join(self._small[:count])
        del self._small[:count]
        self._small_taken += count
        self.buffered -= len(joined)
        return [joined], room

    def _next_piece(self) -> list[Body]:
        self._begin_bodies()
        request = self._turns.popleft()
        queued = self._large[request]
        first = queued[0]
        left = first.left
        piece, is_last = first.next_piece(request)
        self.buffered -= left - first.left if not is_last else left
        if not is_last:
            self._turns.append(request)
            return piece
        queued.popleft()
        self._begun_bytes -= len(first.body)
        while queued and queued[0].is_small:
            small = queued.popleft()
            self.buffered -= small.left
            piece += small.next_piece(request)[0]
        if queued:
            self._queue.append(request)
        else:
            del self._large[request]
        return piece

    def _begin_bodies(self) -> None:
        """Begin as many bodies as the peer's windows allow, and at least one."""
        while self._queue and len(self._turns) < self._windows.bodies:
            size = len(self._large[self._queue[0]][0].body)
            if self._turns and self._begun_bytes + size > self._windows.bodies_bytes:
                break
            self._begun_bytes += size
            self._turns.append(self._queue.popleft())

    def clear_large(self) -> None:
        """Drop all bodies in pieces, because the connection ends."""
        for request in list(self._large):
            self.abandon(request)
