"""The bounds of a topic's log, in two small files: how far it is durable, and the first offset that can be read.

*Watermark*: 64 bytes, rewritten in place after every commit. WATERMARK_VERSION 1 (to change it: bump, keep the old
reader, add a fixture). It is not synced with each commit, so after a power cut it may be old, never ahead: it is
written only after the unit it names is durable. It has two uses:

- readers of the directory stop at `visible` (segment and byte_end give its position);
- recovery takes `durable` as a lower bound: an invalid unit up to there is damage, never a torn write.

The two differ only under the `os` policy, where nothing is ever known to be durable but readers may still read. For
recovery a single flipped bit is corrected by the checksum (`watermark_or_closest`); otherwise a corrupt watermark
counts as absent, and recovery has only the sector tables.

*Log start*: the first offset of each partition whose log can be read completely. The file is absent for most topics. A
partition's log starts with the first row of its first segment, with one exception. A prepared message is in the log at
the row of its commit, but its record is where it was prepared, possibly in an earlier segment. When that segment is
deleted, the commit's row remains but can no longer be read. The log then starts after that row.

LOG_START_VERSION 1: magic, version, number of partitions, an offset for each, crc32c. To change it after a release,
bump the version, keep the old reader, add a fixture. The file is written atomically and durably before the segment is
deleted; offsets only rise. After a kill in between, readers see a start that is later than necessary, never too early.
A corrupt file counts as absent; then a reader meets such rows without warning and reports them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from heapline.checksum import crc32c
from heapline.contract.errors import UnknownFormat
from heapline.journal.disk import Disk

WATERMARK_MAGIC = b"HEAPMARK"
WATERMARK_VERSION = 1
WATERMARK_BYTES = 64
# magic, version, relaxed, segment, durable, visible, byte_end, time, incarnation; then 4 zeros and the crc
_BODY = struct.Struct("<8sBB2xIQQQqQ4x")
_READ_TRIES = 8


class Watermark(msgspec.Struct, frozen=True):
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


def watermark_or_closest(disk: Disk, directory: str) -> Watermark | None:
    """Return the watermark; if it is corrupt, the one that differs in a single bit, or None.

    No two watermarks of this size with valid checksums differ in fewer than three bits, so there is at most one.
    """
    mark, path = read_watermark(disk, directory), watermark_path(directory)
    if mark is not None or not disk.exists(path):
        return mark
    data = disk.read_file(path)
    for bit in range(8 * len(data) if len(data) == WATERMARK_BYTES else 0):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        if (mark := parse_watermark(bytes(flipped), path)) is not None:
            return mark
    return None


LOG_START_MAGIC = b"HEAPLOG0"
LOG_START_VERSION = 1
_HEAD = struct.Struct("<8sBxxxI")


def log_start_path(directory: str) -> str:
    return f"{directory}/log_start"


def read_log_start(disk: Disk, directory: str) -> list[int]:
    """Return the first offset per partition; 0 or a missing entry means no restriction."""
    path = log_start_path(directory)
    try:
        data = disk.read_file(path)
    except FileNotFoundError:
        return []
    body = data[:-4]
    if len(body) < _HEAD.size or crc32c(body).to_bytes(4, "little") != data[-4:]:
        return []
    magic, version, count = _HEAD.unpack_from(body)
    if magic != LOG_START_MAGIC or len(body) != _HEAD.size + 8 * count:
        return []
    if version != LOG_START_VERSION:
        raise UnknownFormat(path, version)
    return list(struct.unpack_from(f"<{count}q", body, _HEAD.size))


def raise_log_start(disk: Disk, directory: str, starts: Sequence[int]) -> None:
    """Raise the start of the log to these offsets. Durable on return."""
    before = read_log_start(disk, directory)
    offsets = [max(pair) for pair in zip_longest(before, starts, fillvalue=0)]
    if offsets == before:
        return
    body = _HEAD.pack(LOG_START_MAGIC, LOG_START_VERSION, len(offsets)) + struct.pack(f"<{len(offsets)}q", *offsets)
    disk.write_file_atomic(log_start_path(directory), body + crc32c(body).to_bytes(4, "little"))
