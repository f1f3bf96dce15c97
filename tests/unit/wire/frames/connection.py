"""Two sides of a native connection without a network, and a compression that every Python has."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from heapline.wire.frames import ClientFrames, Hello, ServerFrames, Windows

POP, ENQUEUE = 0x20, 0x10
HEADER = struct.Struct("<IBBHI")


class Zlib:
    def compress(self, data: Any) -> bytes:
        return zlib.compress(data)

    def unpacked_size(self, data: Any) -> int | None:
        return None

    def decompress(self, data: Any, size_max: int) -> bytes:
        worker = zlib.decompressobj()
        try:
            plain = worker.decompress(data, size_max + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if len(plain) > size_max or not worker.eof or worker.unused_data:
            raise ValueError("too large, or not exactly one stream")
        return plain


ZLIB = {"zlib": Zlib()}


def drain(side: Any, size: int = 1 << 20) -> bytes:
    """Return everything that a side wants to send."""
    parts = []
    while buffers := side.take(size):
        parts += buffers
    return b"".join(parts)


def frame(kind: int, request: int = 0, body: bytes = b"", *, flags: int = 0, command: int = 0) -> bytes:
    return HEADER.pack(len(body), kind, flags, command, request) + body


def frames_in(data: bytes) -> list[tuple[int, int, int, int, bytes]]:
    """Return kind, flags, command, request and body of each frame."""
    found, at = [], 0
    while at < len(data):
        length, kind, flags, command, request = HEADER.unpack_from(data, at)
        found.append((kind, flags, command, request, data[at + 12 : at + 12 + length]))
        at += 12 + length
    assert at == len(data), "the last frame is cut off"
    return found


def connected(
    windows: Windows | None = None, client_windows: Windows | None = None, compressions: Any = None
) -> tuple[ClientFrames, ServerFrames]:
    """Return both sides after the handshake."""
    compressions = compressions or {}
    client = ClientFrames("key", windows=client_windows or Windows(), compressions=compressions)
    server = ServerFrames(windows, waiting_commands=frozenset({POP}), compressions=compressions)
    assert isinstance(server.receive(drain(client))[0], Hello)
    server.send_welcome()
    client.receive(drain(server))
    return client, server
