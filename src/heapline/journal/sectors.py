"""The sector table: one 32-bit sum per 512-byte sector of a unit, to tell a torn write from damage.

An interrupted write leaves complete sectors as they were before, which in a zero-filled segment means zeros. Damage
changes bytes inside sectors. A checksum over the whole unit cannot distinguish the two; a sum per sector can: in a torn
unit each sector either matches its sum or is all zeros.

The sum is a dot product of the sector's 64 words with odd constants, folded to 32 bits. It is not a strong checksum
(the unit has crc32c for that) but as fast as memory. An entry is never 0, so an entry that reads 0 was never written.
The content of the sectors is not known here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heapline.accelerator import accelerated
from heapline.core.events import Mask
from heapline.journal.disk import SECTOR, Buffer

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_WORDS = SECTOR // 8
#: A unit has far fewer: small parts are joined.
PARTS_MAX = 4096


def _odd_constants() -> U64:
    """Return 64 odd words from a fixed multiplicative sequence. They are part of the format and must never change."""
    word, found = 0x9E3779B97F4A7C15, []
    for _ in range(_WORDS):
        word = (word * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        found.append((word ^ (word >> 29)) % (1 << 64) | 1)
    return np.array(found, np.uint64)


_CONSTANTS = _odd_constants()


def as_words(data: Buffer) -> U64:
    """Return the data as rows of 64 words, one row per sector. Its length must be a multiple of 512."""
    return np.frombuffer(data, "<u8").reshape(-1, _WORDS)


def sector_sums(data: Buffer) -> U32:
    """Return the table entry of each sector."""
    dots: U64 = np.einsum("ij,j->i", as_words(data), _CONSTANTS)
    folded = (dots ^ (dots >> np.uint64(32))).astype(np.uint32)
    return np.maximum(folded, np.uint32(1))


@accelerated
def sector_table(parts: list[Buffer], sectors: int) -> bytes:
    """Return the table of data in several parts. Only sectors that span parts are copied.

    Raise ValueError if the parts are not exactly as long as the sectors.
    """
    if len(parts) > PARTS_MAX:
        raise ValueError(f"at most {PARTS_MAX} parts can be summed, not {len(parts)}")
    if sum(map(len, parts)) != sectors * SECTOR:
        raise ValueError("the parts must be as long as the sectors")
    if len(parts) == 1:
        return sector_sums(parts[0]).astype("<u4", copy=False).tobytes()
    table = np.empty(sectors, "<u4")
    edges, edge_at = bytearray(), []
    at = 0  # bytes before this part
    for part in parts:
        view = memoryview(part)
        lead = min(-at % SECTOR, len(view))
        edges += view[:lead]
        whole = (len(view) - lead) // SECTOR * SECTOR
        if whole:
            begin = (at + lead) // SECTOR
            table[begin : begin + whole // SECTOR] = sector_sums(view[lead : lead + whole])
        if lead + whole < len(view):
            edge_at.append((at + lead + whole) // SECTOR)
            edges += view[lead + whole :]
        at += len(view)
    if edge_at:
        table[edge_at] = sector_sums(edges)
    return table.tobytes()


def live_sectors(data: Buffer) -> Mask:
    """Return which sectors contain anything but zeros."""
    return np.asarray(as_words(data).any(axis=1), np.bool_)


def all_zeros(data: Buffer) -> bool:
    """Return whether every byte is 0, for any length."""
    whole = len(data) & ~7
    view = memoryview(data)
    return not np.frombuffer(view[:whole], "<u8").any() and not any(view[whole:])
