"""The frames of the native protocol: header, kinds, flags, and the bodies that the protocol itself reads.

docs/wire.md is the specification. A frame is a header of 12 bytes and `length` more bytes. No frame is longer than
`LENGTH_MAX`; a larger body is sent in pieces. All numbers are little-endian.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from struct import Struct as Layout
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from heapline.contract.errors import BadRequest

MAGIC = "heapline"
VERSION_MIN = VERSION_MAX = 1  # the versions of the protocol that this side speaks
ALPN = "heapline/1"  # the protocol's name under TLS

HEADER = Layout("<IBBHI")  # length, kind, flags, command, request
HEADER_SIZE = HEADER.size
HEADERS_LENGTH = Layout("<H")  # at the start of a headers block, without itself
LENGTH_MAX = 256 << 10  # of one frame without its header
LENGTH_MAX_BEFORE_WELCOME = (4 << 10) - HEADER_SIZE
HEADERS_MAX = 8 << 10  # bytes of a headers block
CREDITS_MAX = 1 << 31  # of one feed
REQUEST_MAX = 0xFFFFFFFF  # the highest request number; 0 is the connection itself
COMPRESS_MIN = 4 << 10  # smaller bodies are never compressed
COMPRESS_MAX = 4 << 20  # larger bodies are not compressed, and not accepted: that would keep an event loop busy

Body = bytes | memoryview


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    RESPONSE = 4
    ERROR = 5
    ITEM = 6
    END = 7
    CREDIT = 8
    CANCEL = 9
    PING = 10
    PONG = 11
    GOAWAY = 12
    AUTH = 13


class Flag(IntFlag):
    HEADERS = 1  # a headers block precedes the body; only in a REQUEST
    MORE = 2  # the body continues in another frame
    COMPRESSED = 4  # the whole body is one zstd frame; set in its first piece


# Plain integers, because members of an enum are slow to pack and to compare.
HELLO, WELCOME, REQUEST, RESPONSE, ERROR, ITEM, END, CREDIT, CANCEL, PING, PONG, GOAWAY, AUTH = map(int, Kind)
HEADERS, MORE, COMPRESSED = map(int, Flag)


def name_of(kind: int) -> str:
    return Kind(kind).name if kind in Kind._value2member_map_ else f"kind {kind}"


class ProtocolError(Exception):
    """The peer violates the protocol or has stopped answering. Send what `take` returns, then close the connection.

    `events` are those that the same bytes completed before the violation.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.events: list[Any] = []


Bytes = Annotated[int, Meta(ge=1 << 20, le=1 << 40)]
Number = Annotated[int, Meta(ge=1, le=1 << 31)]


class Windows(Struct, frozen=True, kw_only=True):
    """Limits that one side accepts. A client announces the last three; the first three are a server's."""

    calls: Number = 1024  # calls in progress, without waiting ones; further ones are refused
    waiting: Number = 4096  # calls in progress of commands that may wait; further ones are refused
    calls_bytes: Bytes = 128 << 20  # bodies of all calls in progress; further calls are refused
    body_bytes: Bytes = 64 << 20  # one body, after decompression
    bodies: Number = 16  # bodies in pieces that may be incomplete at a time
    bodies_bytes: Bytes = 128 << 20  # the pieces of incomplete bodies


class Hello(Struct, frozen=True, omit_defaults=True):
    """The first frame of a client."""

    magic: str = ""
    versions: tuple[int, int] = (0, 0)  # lowest and highest
    features: list[str] = []
    windows: Windows = Windows()
    credential: str | None = None
    client: str = ""  # name and version, for logs

    def __repr__(self) -> str:
        """Return a text without the credential."""
        return f"Hello(versions={self.versions}, features={self.features}, client={self.client!r})"


class Welcome(Struct, frozen=True, omit_defaults=True):
    """The answer to Hello."""

    version: int = 0
    features: list[str] = []  # those of the client's that the connection uses
    windows: Windows = Windows()
    waiting_commands: list[int] = []  # that count against the window `waiting`
    server: str = ""  # name and version


class Headers(Struct, frozen=True, omit_defaults=True, gc=False):
    """Facts about a request that are not part of its command."""

    timeout: float | None = None  # seconds that are left
    traceparent: str | None = None
    tracestate: str | None = None
    correlation_id: str | None = None
    confirmation: str | None = None
    on_behalf_of: str | None = None


class Notice(Struct, frozen=True):
    """The body of GOAWAY."""

    code: str = "UNAVAILABLE"  # INVALID_ARGUMENT after a violation of the protocol
    text: str = ""


class Credits(Struct, frozen=True):
    """The body of CREDIT."""

    items: Number


class Credential(Struct, frozen=True):
    """The body of AUTH."""

    credential: str


encode = msgspec.msgpack.Encoder().encode
decode_headers = msgspec.msgpack.Decoder(Headers).decode
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in (Hello, Welcome, Notice, Credits, Credential)}


def pack_headers(headers: Headers) -> bytes:
    """Return a headers block."""
    block = encode(headers)
    if len(block) > HEADERS_MAX:
        raise BadRequest(f"the headers of a request have {len(block)} bytes; the limit is {HEADERS_MAX}")
    return HEADERS_LENGTH.pack(len(block)) + block


def decode_body(body: bytes | memoryview, kind: Any, name: str) -> Any:
    """Decode a body that the protocol itself reads. Unknown fields are ignored."""
    try:
        return _decoders[kind].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the body of {name} is not valid: {error}") from None
