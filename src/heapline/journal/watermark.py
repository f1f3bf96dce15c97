"""The watermark: 64 bytes that say how far the journal is durable, rewritten in place after every commit.

WATERMARK_VERSION 1 (to change it: bump, keep the old reader, add a fixture). It is not synced with each commit, so
after a power cut it may be old, never ahead: it is written only after the unit it names is durable. It has two uses:

- readers of the directory stop at `visible` (segment and byte_end give its position);
- recovery takes `durable` as a lower bound: an invalid unit up to there is damage, never a torn write.

The two differ only under the `os` policy, where nothing is ever known to be durable but readers may still read. A
corrupt watermark counts as absent; recovery then has only the sector tables.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from crc32c import crc32c

from heapline.contract.errors import UnknownFormat
from heapline.journal.disk import Disk

WATERMARK_MAGIC = b"HEAPMARK"
WATERMARK_VERSION = 1
WATERMARK_BYTES = 64
# magic, version, relaxed, segment, durable, visible, byte_end, time, incarnation; then 4 zeros and the crc
_BODY = struct.Struct("<8sBB2xIQQQqQ4x")
_READ_TRIES = 8


@dataclass(frozen=True, slots=True)
class Watermark:
    durable: int
    visible: int
    segment: int  # segment of the visible unit
    byte_end: int  # end of the visible unit in that segment
    time: int
    incarnation: int
    relaxed: bool = False

    def pack(self) -> bytes:
        body = _BODY.pack(
            WATERMARK_MAGIC,
            WATERMARK_VERSION,
            self.relaxed,
            self.segment,
            self.durable,
            self.visible,
            self.byte_end,
            self.time,
            self.incarnation,
        )
        return body + crc32c(body).to_bytes(4, "little")


def watermark_path(directory: str) -> str:
    return f"{directory}/watermark"


def parse_watermark(data: bytes, path: str = "") -> Watermark | None:
    body = data[: _BODY.size]
    if len(data) != WATERMARK_BYTES or crc32c(body).to_bytes(4, "little") != data[_BODY.size :]:
        return None
    magic, version, relaxed, segment, durable, visible, byte_end, time, incarnation = _BODY.unpack(body)
    if magic != WATERMARK_MAGIC:
        return None
    if version != WATERMARK_VERSION:
        raise UnknownFormat(path, version)
    return Watermark(durable, visible, segment, byte_end, time, incarnation, bool(relaxed))


def read_watermark(disk: Disk, directory: str) -> Watermark | None:
    """Return the watermark, or None if it is missing or corrupt. Retries briefly, in case it is being written."""
    path = watermark_path(directory)
    for _ in range(_READ_TRIES):
        try:
            found = parse_watermark(disk.read_file(path), path)
        except FileNotFoundError:
            return None
        if found is not None:
            return found
    return None
