"""The unit: the bytes that one commit writes. This module encodes and decodes them and knows nothing of files.

UNIT_VERSION 1. To change the layout after a release: bump UNIT_VERSION, keep `decode` for the old number, add a fixture
of the old version to tests/fixtures. Whatever changes, the first 64 bytes keep magic, version byte and the
checksum in their last four bytes, so that an older Heapline can say "unknown version" rather than "damaged".

    header (64) | blocks, each 16-aligned | meta (msgpack) | zeros to 4 | sector table | table crc | zeros to 512

- header: see _HEADER. Its crc is seeded with topic incarnation and segment number, so that bytes of another topic or
  file never pass for a unit here, even inside a payload. `prev_crc` is the previous unit's body_crc: the chain.
  `durable_end` is the last unit known durable when this one was written: under the `commit` policy always its
  predecessor. Recovery needs it to know that a damaged unit had once been acknowledged.
- meta: [1, [[offset in unit, rows, smalls_len, payloads_len], …],
         [[partition, first_offset, row_count, events, first_id], …]]; `events` are bytes that only the core can read;
  first_id is the first message id enqueued in the frame or -1 (for the index).
- sector table: one entry per sector (sectors.py), summed with the header's and the table's own bytes as zeros; then
  the crc32c of the table. body_crc covers everything from the blocks to the table crc.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from heapline.checksum import crc32c
from heapline.contract.errors import UnknownFormat
from heapline.core.record import ROW
from heapline.journal.block import ROW_BYTES, Block, Rows, block_nbytes
from heapline.journal.disk import SECTOR, Buffer
from heapline.journal.sectors import U32, all_zeros, sector_table

UNIT_MAGIC = 0x55504148  # "HAPU" in the file
UNIT_VERSION = 1
UNIT_BYTES_MAX = 16 << 20
HEADER_BYTES = 64
#: Written under a policy that does not sync each commit.
FLAG_RELAXED = 1
#: Blocks of at least this many bytes are written in place; smaller ones are cheaper to copy together.
WHOLE_PART_BYTES = 64 << 10

# magic, version, flags, reserved, number, durable_end, time, wall,
# prev_crc, sectors, blocks_len, meta_len, body_crc; then the header's own crc
_HEADER = struct.Struct("<IBBHQQqqIIIII")
_U32 = struct.Struct("<I")


class BlockRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The position of a block in its unit."""

    offset: int
    count: int
    smalls_len: int
    payloads_len: int


class Frame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The events of one partition in one unit."""

    partition: int
    first_offset: int
    row_count: int
    events: bytes
    first_id: int = -1


class Meta(msgspec.Struct, array_like=True, frozen=True):
    version: int
    blocks: list[BlockRef]
    frames: list[Frame]


#: Encodes (version, blocks, frames), the fields of Meta, without creating one.
encode_meta = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(Meta).decode


class UnitHeader(NamedTuple):
    flags: int
    number: int
    durable_end: int
    time: int
    wall: int
    prev_crc: int
    sectors: int
    blocks_len: int
    meta_len: int
    body_crc: int

    @property
    def nbytes(self) -> int:
        return self.sectors * SECTOR

    @property
    def table_at(self) -> int:
        return _table_at(self.blocks_len + self.meta_len)

    @property
    def sane(self) -> bool:
        """Whether the lengths are consistent."""
        return self.nbytes == unit_nbytes(self.blocks_len + self.meta_len) and self.nbytes <= UNIT_BYTES_MAX


def _table_at(content: int) -> int:
    return (HEADER_BYTES + content + 3) & ~3


def unit_nbytes(content: int) -> int:
    """Return the size of a unit with this many bytes of blocks and meta: n sectors, with n + 1 table words."""
    return -(-(((HEADER_BYTES + content + 3) & ~3) + 4) // (SECTOR - 4)) * SECTOR


def crc_seed(incarnation: int, segment: int) -> int:
    """Return the value that binds a unit's header to its topic and file."""
    return crc32c(struct.pack("<QQ", incarnation, segment))


def table_crc(table: Buffer) -> int:
    return crc32c(table) or 1


def parse_header(data: Buffer, at: int, seed: int, path: str = "") -> UnitHeader | None:
    """Return the valid unit header at a byte, or None. Raise UnknownFormat if it has a newer version."""
    fields = _HEADER.unpack_from(data, at)
    if fields[0] != UNIT_MAGIC:
        return None
    raw = bytes(memoryview(data)[at : at + HEADER_BYTES])
    if crc32c(raw[:-4], seed) != _U32.unpack_from(raw, HEADER_BYTES - 4)[0]:
        return None
    if fields[1] != UNIT_VERSION:
        raise UnknownFormat(path, fields[1])
    return UnitHeader(fields[2], *fields[4:])


class SealedUnit(msgspec.Struct, frozen=True):
    """A unit whose position and content are fixed; its checksums are computed when it is written."""

    number: int
    segment: int
    offset: int
    nbytes: int
    time: int
    wall: int
    blocks: Sequence[Block]
    blocks_len: int
    frames: Sequence[Frame]
    meta: bytes

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def encode(self, *, prev_crc: int, durable_end: int, flags: int, seed: int) -> tuple[list[Buffer], int]:
        """Return the bytes to write, in parts, and the body crc for the next unit's chain. Copies no large blocks."""
        sectors, blocks_end = self.nbytes // SECTOR, HEADER_BYTES + self.blocks_len
        tail = self.meta + bytes(self.nbytes - blocks_end - len(self.meta))
        parts = _merge_small([bytes(HEADER_BYTES), *(block.data for block in self.blocks), tail])
        first, last = memoryview(parts[0]), memoryview(parts[-1])
        table = sector_table(parts, sectors)
        # The table is in the last part, which ends where the unit ends.
        table_at = _table_at(self.blocks_len + len(self.meta)) - (self.nbytes - len(last))
        table_end = table_at + len(table)
        last[table_at:table_end] = table
        _U32.pack_into(last, table_end, table_crc(table))
        body_crc = self._body_crc(parts, table_end + 4)
        # fmt: off
        _HEADER.pack_into(first, 0, UNIT_MAGIC, UNIT_VERSION, flags, 0, self.number, durable_end, self.time, self.wall,
                          prev_crc, sectors, self.blocks_len, len(self.meta), body_crc)
        # fmt: on
        _U32.pack_into(first, HEADER_BYTES - 4, crc32c(first[: HEADER_BYTES - 4], seed))
        return parts, body_crc

    @staticmethod
    def _body_crc(parts: list[Buffer], end_in_last: int) -> int:
        crc, start = 0, HEADER_BYTES
        for part in parts[:-1]:
            crc = crc32c(memoryview(part)[start:], crc)
            start = 0
        return crc32c(memoryview(parts[-1])[start:end_in_last], crc)


def _merge_small(parts: list[bytes]) -> list[Buffer]:
    """Return the same bytes in fewer parts: small parts joined into bytearrays, large ones left in place.

    The first and the last part are bytearrays, because header and table have yet to be written into them.
    """
    merged: list[Buffer] = []
    run: list[bytes] = []
    for part in parts:
        if len(part) >= WHOLE_PART_BYTES and run and part is not parts[-1]:
            merged += [bytearray().join(run), part]
            run = []
        else:
            run.append(part)
    merged.append(bytearray().join(run))
    return merged


class Unit(msgspec.Struct, frozen=True):
    """A unit that was read back. `data` is a view of the read buffer: copy what you keep."""

    segment: int
    offset: int
    header: UnitHeader
    blocks: list[BlockRef]
    frames: list[Frame]
    data: memoryview

    @property
    def number(self) -> int:
        return self.header.number

    @property
    def time(self) -> int:
        return self.header.time

    @property
    def wall(self) -> int:
        return self.header.wall

    @property
    def end(self) -> int:
        return self.offset + self.header.nbytes

    def place(self, block: BlockRef) -> int:
        """Return the byte offset in the segment of a block's first row."""
        return self.offset + block.offset

    def rows(self, block: BlockRef) -> Rows:
        return np.frombuffer(self.data, ROW, block.count, block.offset)

    def smalls(self, block: BlockRef) -> memoryview:
        start = block.offset + block.count * ROW_BYTES
        return self.data[start : start + block.smalls_len]

    def payloads(self, block: BlockRef) -> memoryview:
        """Return all payloads of a block as one buffer; `rows(block)["payload_len"]` splits it."""
        start = block.offset + block.count * ROW_BYTES + block.smalls_len
        return self.data[start : start + block.payloads_len]

    def row_count(self) -> int:
        return sum(b.count for b in self.blocks)

    def __iter__(self) -> Iterator[Frame]:
        return iter(self.frames)


class BadUnit(ValueError):
    """The bytes after a valid header are not what was written; the message says which part is invalid."""


def decode(data: memoryview, header: UnitHeader, segment: int, offset: int, path: str = "") -> Unit:
    """Decode the unit with a parsed header from exactly its bytes `data`. Raise BadUnit if they are invalid."""
    table_end = header.table_at + 4 * header.sectors + 4
    if crc32c(data[HEADER_BYTES:table_end]) != header.body_crc:
        raise BadUnit(f"unit {header.number} does not match its checksum")
    if not all_zeros(data[table_end:]):
        raise BadUnit(f"the padding of unit {header.number} is not zero")
    meta_at = HEADER_BYTES + header.blocks_len
    try:
        meta = _decode_meta(data[meta_at : meta_at + header.meta_len])
    except msgspec.MsgspecError as error:
        raise BadUnit(f"cannot read the meta part of unit {header.number}: {error}") from None
    if meta.version != UNIT_VERSION:
        raise UnknownFormat(path, meta.version)
    for block in meta.blocks:
        if block.offset + block_nbytes(block.count, block.smalls_len, block.payloads_len) > meta_at:
            raise BadUnit(f"a block of unit {header.number} reaches past its blocks")
    return Unit(segment, offset, header, meta.blocks, meta.frames, data)


def split_table(data: Buffer, header_table_at: int, sectors: int) -> tuple[U32, int]:
    """Return the table's entries and its crc as stored in the bytes of a unit."""
    words = np.frombuffer(data, "<u4", sectors + 1, header_table_at)
    return words[:-1], int(words[-1])
