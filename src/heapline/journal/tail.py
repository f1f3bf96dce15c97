"""Tell a torn write from damage: the judgment on the bytes after the last valid unit.

Theory of operation. A commit is one write into zero-filled space, then a sync; the next write starts only after it. So
if power failed during the last write, each of its sectors is either as written or still zeros, nothing follows it, and
nothing in it was acknowledged: it may be cut. Any other invalid bytes were once valid, or were never written by
Heapline, and cutting them could lose acknowledged data: that is corruption, and it is refused with file and byte.

A unit is torn only if all of these hold:

1. its number is above every unit known to be durable: by the watermark, the snapshot, and the `durable_end` in the
   header of any later valid unit;
2. each of its sectors matches the unit's sector table or is all zeros, and at least one was lost. Sectors whose table
   entry was itself lost (its sector is all zeros) cannot be judged and are accepted;
3. if its header's sector was lost, the table is searched for at the end of the data. If that was lost, too, rule 2 does
   not apply, and the data must only be small enough for one unit;
4. after it there are only zeros. Under the relaxed policies (`interval`, `os`) several units can be in flight, so more
   may follow there, within rule 1.

Not detectable: a complete sector of the last unit replaced by zeros, or the complete last unit, while the watermark is
lost as well (not merely one bit of it). That looks exactly like a write that never happened.
"""

from __future__ import annotations

import msgspec
import numpy as np

from heapline.contract.errors import JournalCorrupt
from heapline.core.events import Mask
from heapline.journal.disk import SECTOR
from heapline.journal.sectors import as_words, live_sectors, sector_sums
from heapline.journal.unit import (
    FLAG_RELAXED,
    HEADER_BYTES,
    UNIT_BYTES_MAX,
    UNIT_MAGIC,
    UnitHeader,
    parse_header,
    split_table,
    table_crc,
)

_WORDS = SECTOR // 4


class Tail(msgspec.Struct, frozen=True):
    """The bytes from where the next unit would start to the end of the file, and what is known about it."""

    path: str
    base: int  # byte offset in the file where `data` starts
    data: bytes
    seed: int
    number: int  # number of the unit expected here
    chain: int
    known_durable: int
    relaxed: bool
    header_lost: bool = False  # the segment's header was in the same write and is all zeros

    def corrupt(self, sector: int, detail: str) -> JournalCorrupt:
        return JournalCorrupt(self.path, self.base + sector * SECTOR, detail)


def is_torn(tail: Tail) -> bool:
    """Return False if there is nothing here, True for a torn write, which has to be cut.

    Raise JournalCorrupt for anything else.
    """
    live = live_sectors(tail.data)
    if not live.any():
        return False
    if tail.number <= tail.known_durable:
        raise tail.corrupt(0, f"unit {tail.number} is corrupt, though it was durable")
    relaxed = _later_units_allow(tail) or tail.relaxed
    if live[0]:
        header = _sound_header(tail)
        relaxed = relaxed or bool(header.flags & FLAG_RELAXED)
        extent = header.sectors
        _judge_sectors(tail, live, header.table_at, extent)
    else:
        extent = _judge_headless(tail, live, relaxed)
    if not relaxed and live[extent:].any():
        after = extent + int(np.argmax(live[extent:]))
        raise tail.corrupt(after, f"there are bytes after unit {tail.number}, which is incomplete")
    return True


def _later_units_allow(tail: Tail) -> bool:
    """Raise if a later unit proves this one durable. Return whether a later unit has a relaxed policy."""
    relaxed = False
    magic = as_words(tail.data)[:, 0] & np.uint64(0xFFFFFFFF)
    for sector in np.flatnonzero(magic == UNIT_MAGIC).tolist():
        header = parse_header(tail.data, sector * SECTOR, tail.seed, tail.path) if sector else None
        if header is None or not tail.number < header.number <= tail.number + sector:
            continue
        if header.durable_end >= tail.number:
            raise tail.corrupt(0, f"unit {tail.number} is corrupt, though unit {header.number} follows it")
        relaxed = relaxed or bool(header.flags & FLAG_RELAXED)
    return relaxed


def _sound_header(tail: Tail) -> UnitHeader:
    header = parse_header(tail.data, 0, tail.seed, tail.path)
    if header is None:
        raise tail.corrupt(0, f"the header of unit {tail.number} is corrupt")
    if header.number != tail.number or header.prev_crc != tail.chain:
        raise tail.corrupt(0, f"unit {header.number} is here, which does not follow from unit {tail.number - 1}")
    if not header.sane or header.nbytes > len(tail.data):
        raise tail.corrupt(0, f"unit {header.number} reaches past the end of the file")
    return header


def _judge_headless(tail: Tail, live: Mask, relaxed: bool) -> int:
    """Judge the sectors of a unit whose header was lost. Its end is found by its table, whose last word is never 0."""
    words = np.frombuffer(tail.data, "<u4")
    last = int(np.flatnonzero(words)[-1])
    extent = last // _WORDS + 1
    if relaxed:
        return len(live)
    if extent * SECTOR > UNIT_BYTES_MAX:
        raise tail.corrupt(0, f"the header of unit {tail.number} is missing, and more follows than one unit can hold")
    table_at = 4 * (last - extent)
    if table_at >= HEADER_BYTES:
        entries, crc = split_table(tail.data, table_at, extent)
        if table_crc(entries.tobytes()) == crc:
            _judge_sectors(tail, live, table_at, extent)
    return extent


def _judge_sectors(tail: Tail, live: Mask, table_at: int, sectors: int) -> None:
    """Raise unless each sector matches the table or was lost, and at least one was lost."""
    unit = bytearray(tail.data[: sectors * SECTOR])
    live = live[:sectors]
    entries, crc = split_table(bytes(unit), table_at, sectors)
    table_end = table_at + 4 * sectors + 4
    unit[:HEADER_BYTES] = bytes(HEADER_BYTES)
    unit[table_at:table_end] = bytes(table_end - table_at)

    holders = (table_at + 4 * np.arange(sectors + 1)) // SECTOR
    unwritten = np.append(entries, np.uint32(crc)) == 0
    wrong = unwritten & live[holders]
    if wrong.any():
        raise tail.corrupt(int(holders[np.argmax(wrong)]), f"the sector table of unit {tail.number} is corrupt")
    if not unwritten.any() and table_crc(entries.tobytes()) != crc:
        raise tail.corrupt(int(holders[0]), f"the sector table of unit {tail.number} is corrupt")

    missed = (entries != 0) & (sector_sums(unit) != entries)
    damaged = missed & live
    if damaged.any():
        raise tail.corrupt(int(np.argmax(damaged)), f"unit {tail.number} does not match its checksums")
    if not (missed.any() or unwritten.any() or not live[0] or tail.header_lost):
        raise tail.corrupt(0, f"unit {tail.number} does not match its checksum, though every sector does")
