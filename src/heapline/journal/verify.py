"""Inspect a complete journal directory: its content (`stats`), and whether every byte is valid (`verify`).

Both only read and never stop at the first fault: after damage they search for the next valid unit, so that a report
says how much follows it. repair.py acts on the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from crc32c import crc32c

from heapline.contract.errors import JournalCorrupt
from heapline.journal.block import ROW_BYTES, row_checks
from heapline.journal.disk import SECTOR, Disk, File
from heapline.journal.recovery import Scan, list_segments
from heapline.journal.sectors import as_words
from heapline.journal.segment import FIRST_UNIT_AT, SegmentHeader, numbered, parse_segment_header, segment_path
from heapline.journal.unit import UNIT_MAGIC, Unit, crc_seed, parse_header
from heapline.journal.walk import SegmentWalk


@dataclass(frozen=True, slots=True)
class Damage:
    """One corrupt unit or record."""

    path: str
    offset: int
    unit: int  # the damaged unit, or the first missing one; 0 if unknown
    detail: str
    is_record: bool = False  # one record in an otherwise valid unit


@dataclass(slots=True)
class Report:
    """The findings. `damage` is empty for a valid journal. A torn last unit is not damage: opening cuts it."""

    path: str
    segments: int = 0
    first_unit: int = 0
    last_unit: int = 0
    units: int = 0
    frames: int = 0
    rows: int = 0
    bytes: int = 0  # of valid units
    torn_unit: int = 0
    damage: list[Damage] = field(default_factory=list)
    # Set by repair only.
    repaired: bool = False
    refused: str = ""  # why repair did nothing
    cut_from_unit: int = 0
    lost_units: list[int] = field(default_factory=list)  # still readable after the cut, in the files set aside
    lost_frames: int = 0
    lost_rows: int = 0
    set_aside: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.damage

    def count(self, unit: Unit) -> None:
        self.first_unit = self.first_unit or unit.number
        self.last_unit = unit.number
        self.units += 1
        self.frames += len(unit.frames)
        self.rows += unit.row_count()
        self.bytes += unit.header.nbytes


def stats(disk: Disk, directory: str) -> Report:
    """Count the content of a valid journal. Raise JournalCorrupt otherwise."""
    report = Report(directory, segments=len(list_segments(disk, directory)))
    scan = Scan(disk, directory)
    for unit in scan:
        report.count(unit)
    report.torn_unit = scan.torn.unit if scan.torn else 0
    return report


def verify(disk: Disk, directory: str) -> Report:
    """Check every unit and every record. `damage` lists what is corrupt, in the order found.

    The judgment of recovery comes first, so that a journal that opens also verifies. Only if recovery refuses it, the
    rest is searched for readable units.
    """
    report = Report(directory)
    try:
        report.segments = len(list_segments(disk, directory))
        scan = Scan(disk, directory)
        for unit in scan:
            report.count(unit)
            report.damage.extend(record_damage(unit, segment_path(directory, unit.segment)))
        report.torn_unit = scan.torn.unit if scan.torn else 0
    except JournalCorrupt as error:
        report.damage.append(Damage(error.path, error.offset, report.last_unit + 1, error.detail))
        for unit in salvage(disk, directory, report.last_unit + 1):
            report.count(unit)
    return report


def record_damage(unit: Unit, path: str) -> Iterator[Damage]:
    """Return the records of a unit that do not match their own checksums."""
    for block in unit.blocks:
        rows = unit.rows(block)
        for index, row in enumerate(rows):
            at = block.offset + index * ROW_BYTES
            small_at, payload_at = at + int(row["small_at"]), at + int(row["payload_at"])
            small = bytes(unit.data[small_at : small_at + int(row["small_len"])])
            payload = unit.data[payload_at : payload_at + int(row["payload_len"])]
            if not row_checks(bytes(unit.data[at : at + ROW_BYTES]), small) or crc32c(payload) != row["payload_crc"]:
                detail = f"the record of message {int(row['id'])} fails its checksum"
                yield Damage(path, unit.offset + at, unit.number, detail, is_record=True)


def salvage(disk: Disk, directory: str, from_unit: int) -> Iterator[Unit]:
    """Yield all units from a number on that are valid by themselves, whatever is between them."""
    incarnation = None
    for number in numbered(disk.listdir(directory), ".seg"):
        file = disk.open(segment_path(directory, number))
        try:
            header = _header_or_none(file)
            if incarnation is None and header is not None:
                incarnation = header.incarnation
            if incarnation is not None:
                yield from (u for u in _salvage_segment(file, number, incarnation) if u.number >= from_unit)
        finally:
            file.close()


def _header_or_none(file: File) -> SegmentHeader | None:
    try:
        return parse_segment_header(file.pread(SECTOR, 0), file.path)
    except JournalCorrupt:
        return None


def _salvage_segment(file: File, number: int, incarnation: int) -> Iterator[Unit]:
    data = file.pread(file.size(), 0)
    data = data[: len(data) - len(data) % SECTOR]
    seed = crc_seed(incarnation, number)
    starts = np.flatnonzero(as_words(data)[:, 0] & np.uint64(0xFFFFFFFF) == UNIT_MAGIC) * SECTOR
    done = FIRST_UNIT_AT
    for at in starts.tolist():
        if at < done or parse_header(data, at, seed, file.path) is None:
            continue
        walk = SegmentWalk(file, incarnation, number, at=at)
        yield from walk
        done = max(done, walk.at)
