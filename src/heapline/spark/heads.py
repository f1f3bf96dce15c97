"""Walking a journal without its payloads: of each unit only its head and its frames, in as few reads as that takes.

For whoever must know up to where a log goes, often, and not what is in it. Headers are checked, bodies are not: that is
done when they are read (journal/walk.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from heapline.errors import JournalCorrupt
from heapline.journal.disk import Disk, File
from heapline.journal.segment import SegmentHeader, segment_path
from heapline.journal.unit import HEADER_BYTES, UnitHeader, crc_seed, parse_header

CHUNK_BYTES = 64 << 10


class FrameHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A frame whose events stay undecoded."""

    partition: int
    first_offset: int
    row_count: int
    events: msgspec.Raw
    first_id: int = -1


class _Meta(msgspec.Struct, array_like=True, frozen=True):
    version: int
    blocks: msgspec.Raw
    frames: list[FrameHead]


class Head(NamedTuple):
    number: int
    time: int
    wall: int
    segment: int
    at: int
    end: int
    frames: list[FrameHead]


_decode = msgspec.msgpack.Decoder(_Meta).decode


def heads(disk: Disk, directory: str, header: SegmentHeader, at: int, stop: int | None) -> Iterator[Head]:
    """The units of a segment from byte `at`, where one begins, up to byte `stop`, where one ends.

    Without `stop` up to where units end: for segments that another follows. FileNotFoundError if it was reclaimed.
    """
    file = disk.open(segment_path(directory, header.number))
    try:
        yield from _walk(file, header, at, stop)
    finally:
        file.close()


def _walk(file: File, header: SegmentHeader, at: int, stop: int | None) -> Iterator[Head]:
    seed, segment = crc_seed(header.incarnation, header.number), header.number
    chunk, base = b"", at
    end = file.size() if stop is None else stop
    while at < end:
        if at + HEADER_BYTES > base + len(chunk):
            chunk, base = file.pread(CHUNK_BYTES, at), at
        found = parse_header(chunk, at - base, seed, file.path) if len(chunk) >= HEADER_BYTES else None
        if found is None and stop is None:
            return
        if found is None:
            raise JournalCorrupt(file.path, at, "durable units are missing here")
        meta_at = at + HEADER_BYTES + found.blocks_len
        if meta_at + found.meta_len > base + len(chunk):
            # Beyond the frames lies the next unit's head: one read brings both.
            rest = found.nbytes - HEADER_BYTES - found.blocks_len
            chunk, base = file.pread(max(CHUNK_BYTES, rest + HEADER_BYTES), meta_at), meta_at
        yield _head(chunk, meta_at - base, found, segment, at, file.path)
        at += found.nbytes


def _head(chunk: bytes, at: int, header: UnitHeader, segment: int, unit_at: int, path: str) -> Head:
    try:
        meta = _decode(memoryview(chunk)[at : at + header.meta_len])
    except msgspec.MsgspecError as error:
        raise JournalCorrupt(path, unit_at, f"the frames of unit {header.number} cannot be read: {error}") from None
    return Head(header.number, header.time, header.wall, segment, unit_at, unit_at + header.nbytes, meta.frames)
