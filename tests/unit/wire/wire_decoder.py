"""A decoder of the native wire that was written from docs/wire.md and shares no code with Heapline.

It also has its own msgpack reader. Binary values become "bin:…" in hex and instants "time:…", so that a decoded frame
can be compared with the page's JSON.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from typing import Any

#: Numbered from 1.
KINDS = [
    "HELLO", "WELCOME", "REQUEST", "RESPONSE", "ERROR", "ITEM", "END", "CREDIT", "CANCEL", "PING", "PONG", "GOAWAY",
    "AUTH",
]  # fmt: skip
HEADERS, MORE, COMPRESSED = 1, 2, 4


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        part = self.data[self.at : self.at + size]
        if len(part) < size:
            raise ValueError("the data is cut off")
        self.at += size
        return part

    def number(self, layout: str) -> Any:
        return struct.unpack(">" + layout, self.take(struct.calcsize(layout)))[0]

    def value(self) -> Any:
        first = self.number("B")
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first < 0x90:
            return self.map(first & 0x0F)
        if first < 0xA0:
            return [self.value() for _ in range(first & 0x0F)]
        if first < 0xC0:
            return self.take(first & 0x1F).decode()
        return self.long_value(first)

    def long_value(self, first: int) -> Any:
        if first in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[first]
        if first in range(0xC4, 0xC7):
            return "bin:" + self.take(self.number("BHI"[first - 0xC4])).hex()
        if first in (0xCA, 0xCB):
            return self.number("fd"[first - 0xCA])
        if first in range(0xCC, 0xD4):
            return self.number("BHIQbhiq"[first - 0xCC])
        if first in (0xD6, 0xD7, 0xC7):
            return self.time({0xD6: 4, 0xD7: 8}.get(first) or self.number("B"))
        if first in range(0xD9, 0xDC):
            return self.take(self.number("BHI"[first - 0xD9])).decode()
        if first in (0xDC, 0xDD):
            return [self.value() for _ in range(self.number("HI"[first - 0xDC]))]
        if first in (0xDE, 0xDF):
            return self.map(self.number("HI"[first - 0xDE]))
        raise ValueError(f"{first:#x} is not used by the protocol")

    def map(self, count: int) -> dict[str, Any]:
        return {self.value(): self.value() for _ in range(count)}

    def time(self, size: int) -> str:
        if self.number("b") != -1:
            raise ValueError("an extension that is not a timestamp")
        if size == 12:
            nanoseconds, seconds = self.number("I"), self.number("q")
        else:
            number = self.number("I" if size == 4 else "Q")
            nanoseconds, seconds = (0, number) if size == 4 else (number >> 34, number & (1 << 34) - 1)
        instant = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds, microseconds=nanoseconds // 1000)
        return "time:" + instant.isoformat()


def decode_map(data: bytes) -> Any:
    """Decode a body: one map, or an empty body."""
    if not data:
        return None
    reader = Reader(data)
    value = reader.value()
    if reader.at != len(data) or not isinstance(value, dict):
        raise ValueError("a body is one map")
    return value


def split(data: bytes) -> list[tuple[str, int, int, int, bytes]]:
    """Return kind, flags, command, request and the rest of each frame."""
    frames, at = [], 0
    while at < len(data):
        length, kind, flags, command, request = struct.unpack_from("<IBBHI", data, at)
        frames.append((KINDS[kind - 1], flags, command, request, data[at + 12 : at + 12 + length]))
        at += 12 + length
    if at != len(data):
        raise ValueError("the last frame is cut off")
    return frames


def decode_frame(data: bytes) -> dict[str, Any]:
    """Decode one frame. The body of a piece or a compressed one stays as it is, in hex."""
    ((kind, flags, command, request, rest),) = split(data)
    headers = None
    if flags & HEADERS:
        (length,) = struct.unpack_from("<H", rest)
        headers, rest = decode_map(rest[2 : 2 + length]), rest[2 + length :]
    try:
        body = decode_map(rest) if not flags & (MORE | COMPRESSED) else "bin:" + rest.hex()
    except (ValueError, UnicodeDecodeError):
        body = "bin:" + rest.hex()  # a later piece
    return {"kind": kind, "flags": flags, "command": command, "request": request, "headers": headers, "body": body}
