"""A block: the records of n messages as stored in a unit, each with its own checksums.

Format version 1 (the version of the unit that holds the block; to change it: bump UNIT_VERSION in unit.py, keep this
reader for the old number, add a fixture file of the old version to the tests):

    n rows of 80 bytes (ROW) | small parts, contiguous | payloads, contiguous | zeros to a multiple of 16

A row holds the distances from its own first byte to its small part (key, fairness key and headers) and its payload. So
a position, which points to a row, is enough to read the message with one or two preads. `crc` covers the rest of the
row and the small part; `payload_crc` covers the payload. The payloads are contiguous so that a columnar reader can take
them as one buffer. The meaning of id, priority and due time is not known here.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.accelerator import accelerated
from heapline.checksum import crc32c
from heapline.core.record import ALIGN, DEFAULT_RETRIES, ROW

ROW_BYTES = ROW.itemsize
if ROW_BYTES % ALIGN:
    raise TypeError("rows must be a multiple of 16 bytes, because positions count in steps of 16")

#: Distances are 32-bit.
BLOCK_BYTES_MAX = 0xFFFF_FFFF

Rows = npt.NDArray[Any]
_CHECKED = struct.Struct("<4x76s")


class Block(msgspec.Struct, frozen=True):
    """n records, ready to be added to a unit."""

    data: bytes
    count: int
    smalls_len: int
    payloads_len: int
    nbytes: int  # of data


def new_rows(count: int) -> Rows:
    """Return zeroed rows for the caller to fill.

    The fields to fill are id, priority, enqueued_at, due, ttl_ms, flags, max_retries and key_len.
    """
    rows = np.zeros(count, ROW)
    rows["max_retries"] = DEFAULT_RETRIES
    return rows


def make_block(rows: Rows, smalls: list[bytes] | None, payloads: list[bytes]) -> Block:
    """Lay out the records. Fills lengths, distances and checksums into `rows`, which is modified."""
    data, smalls_len, payloads_len = lay_out(rows, smalls, payloads)
    return Block(data, len(rows), smalls_len, payloads_len, len(data))


@accelerated
def lay_out(rows: Rows, smalls: list[bytes] | None, payloads: list[bytes]) -> tuple[bytes, int, int]:
    """Return the bytes of a block, and how many of them are small parts and payloads. Complete `rows` in place.

    Per message, only the checksum calls and the join run in a Python loop; the rest is vectorized. Refused input leaves
    the rows as they were.
    """
    n = len(rows)
    if not (rows.flags.c_contiguous and rows.flags.writeable):
        raise ValueError("rows must be contiguous and writable")
    for parts in (payloads,) if smalls is None else (payloads, smalls):
        if type(parts) is not list:
            raise TypeError("small parts and payloads must be lists")
        if len(parts) != n:
            raise ValueError("the numbers of rows, small parts and payloads must be equal")
    starts = np.arange(0, n * ROW_BYTES, ROW_BYTES, dtype=np.int64)
    place = n * ROW_BYTES
    small_lens = np.zeros(n, np.int64) if smalls is None else np.fromiter(map(len, smalls), np.int64, n)
    payload_lens = np.fromiter(map(len, payloads), np.int64, n)
    smalls_len, payloads_len = int(small_lens.sum()), int(payload_lens.sum())
    if block_nbytes(n, smalls_len, payloads_len) > BLOCK_BYTES_MAX:
        raise ValueError("a block must be smaller than 4 GiB")
    joined_smalls = b"".join(smalls) if smalls else b""
    payload_crcs = np.fromiter(map(crc32c, payloads), np.uint32, n)
    ends = np.cumsum(small_lens)
    rows["small_at"] = place + ends - small_lens - starts
    rows["small_len"] = small_lens
    ends = np.cumsum(payload_lens)
    rows["payload_at"] = place + smalls_len + ends - payload_lens - starts
    rows["payload_len"] = payload_lens
    rows["payload_crc"] = payload_crcs
    rows["crc"] = _row_checksums(rows, smalls)
    pad = bytes(-(smalls_len + payloads_len) % ALIGN)
    return b"".join((rows.tobytes(), joined_smalls, *payloads, pad)), smalls_len, payloads_len


def _row_checksums(rows: Rows, smalls: list[bytes] | None) -> npt.NDArray[np.uint32]:
    checked = _CHECKED.iter_unpack(rows.tobytes())
    if smalls is None:
        found = [crc32c(row) for (row,) in checked]
    else:
        found = [crc32c(small, crc32c(row)) for (row,), small in zip(checked, smalls, strict=True)]
    return np.array(found, np.uint32)


def block_nbytes(count: int, smalls_len: int, payloads_len: int) -> int:
    """Return the size of a block in bytes, padding included."""
    content = count * ROW_BYTES + smalls_len + payloads_len
    return content + -content % ALIGN


def row_checks(row: bytes, small: bytes) -> bool:
    """Return whether the 80 bytes of a row and its small part match their checksum."""
    return len(row) == ROW_BYTES and crc32c(small, crc32c(row[4:])) == int.from_bytes(row[:4], "little")
