"""Inspect a journal directory: count its content (`stats`), check every byte (`verify`), cut damage off (`repair`).

`stats` and `verify` only read. They never stop at the first fault: after damage they search for the next valid unit, so
that a report says how much follows it.

`repair` gives up data that cannot be trusted, explicitly, so that the rest can be served again. The journal is cut at
its first damaged unit. Everything after it is lost to the topic, and the report says exactly what could still be read
of it. The files are first copied or moved to `damaged/`, which nothing reads. A snapshot above the cut describes units
that are lost, so it is moved there, too. Nothing is done if the journal is intact, if only single records are damaged
(they are not delivered, the rest is served), or if the cut would leave no state to build on: when the beginning of the
journal was reclaimed and no valid snapshot is below the cut. After a kill in between, repair can be run again.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from heapline.checksum import crc32c
from heapline.contract.errors import JournalCorrupt, SnapshotCorrupt
from heapline.journal.block import ROW_BYTES, row_checks
from heapline.journal.disk import SECTOR, Disk, File
from heapline.journal.log_bounds import Watermark, watermark_path
from heapline.journal.recovery import Scan, list_segments, read_header
from heapline.journal.sectors import as_words
from heapline.journal.segment import (
    CHUNK_BYTES,
    FIRST_UNIT_AT,
    SegmentHeader,
    SegmentWalk,
    index_path,
    numbered,
    parse_segment_header,
    segment_path,
    set_followed,
    size_is_legal,
)
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.unit import UNIT_MAGIC, Unit, crc_seed, parse_header


class Damage(msgspec.Struct, frozen=True):
    """One corrupt unit or record."""

    path: str
    offset: int
    unit: int  # the damaged unit, or the first missing one; 0 if unknown
    detail: str
    is_record: bool = False  # one record in an otherwise valid unit


class Report(msgspec.Struct):
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
    damage: list[Damage] = []
    # Set by repair only.
    repaired: bool = False
    refused: str = ""  # why repair did nothing
    cut_from_unit: int = 0
    lost_units: list[int] = []  # still readable after the cut, in the files set aside
    lost_frames: int = 0
    lost_rows: int = 0
    set_aside: list[str] = []

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


class GoodPart(msgspec.Struct):
    """The consecutive valid units from the first segment on, and where they end."""

    first: SegmentHeader
    segment: int
    at: int
    next_unit: int
    chain: int
    time: int = 0


def find_good_part(disk: Disk, directory: str) -> GoodPart | None:
    """Return None if not even the first segment's header can be read."""
    good = None
    for number in numbered(disk.listdir(directory), ".seg"):
        try:
            header = read_header(disk, directory, number)
        except JournalCorrupt:
            break
        if header is None:
            break
        if good is None:
            good = GoodPart(header, number, FIRST_UNIT_AT, header.first_unit, header.chain)
        elif (number, header.first_unit, header.chain) != (good.segment + 1, good.next_unit, good.chain):
            break
        if header.incarnation != good.first.incarnation or not _extend(disk, directory, number, good):
            break
    return good


def _extend(disk: Disk, directory: str, number: int, good: GoodPart) -> bool:
    """Add the units of one more segment. Return whether they end at zeros, so that the next segment may follow."""
    file = disk.open(segment_path(directory, number))
    try:
        walk = SegmentWalk(file, good.first.incarnation, number, number=good.next_unit, chain=good.chain)
        for unit in walk:
            good.time = max(good.time, unit.time)
        good.segment, good.at, good.next_unit, good.chain = number, walk.at, walk.number, walk.chain
        return walk.broken is None
    finally:
        file.close()


def repair(disk: Disk, directory: str) -> Report:
    """Cut the journal at its first damaged unit and report what was lost. The topic must be closed."""
    report = verify(disk, directory)
    if report.ok:
        return report
    good = find_good_part(disk, directory)
    if good is None:
        report.refused = "the first segment's header is corrupt; restore a backup"
    elif all(d.unit < good.next_unit and d.is_record for d in report.damage):
        report.refused = "only single records are damaged; they are not delivered, and the rest of the topic is served"
    else:
        cut = Cut(disk, directory, good, report)
        report.refused = cut.obstacle()
        if not report.refused:
            cut.carry_out()
    return report


class Cut:
    """The steps that make the end of the good part the end of the journal."""

    def __init__(self, disk: Disk, directory: str, good: GoodPart, report: Report) -> None:
        self.disk, self.directory, self.good, self.report = disk, directory, good, report
        self.snapshots = SnapshotStore(disk, f"{directory}/snapshots")
        self.present = numbered(disk.listdir(directory), ".seg")

    def obstacle(self) -> str:
        """Return why the cut would leave nothing to build on; empty if it would not."""
        before = self.good.first.first_unit - 1
        if before == 0 or any(self._checks(u) for u in self.snapshots.units() if before <= u < self.good.next_unit):
            return ""
        return f"no valid snapshot between units {before} and {self.good.next_unit - 1}; restore a backup"

    def _checks(self, unit: int) -> bool:
        try:
            self.snapshots.load(unit)
        except SnapshotCorrupt:
            return False
        return True

    def carry_out(self) -> None:
        good, report = self.good, self.report
        for unit in salvage(self.disk, self.directory, good.next_unit):
            report.lost_units.append(unit.number)
            report.lost_frames += len(unit.frames)
            report.lost_rows += unit.row_count()
        self.disk.mkdir(f"{self.directory}/damaged")
        self.disk.fsync_dir(self.directory)
        for unit_number in self.snapshots.units():
            if unit_number >= good.next_unit:
                self._move_aside(f"{self.snapshots.directory}/{unit_number:016d}.snap")
        # From the last backwards, so that a kill in between leaves no gap.
        for number in sorted((n for n in self.present if n > good.segment), reverse=True):
            self._move_aside(segment_path(self.directory, number))
        self._copy_aside(segment_path(self.directory, good.segment))
        last = good.next_unit - 1
        mark = Watermark(last, last, good.segment, good.at, good.time, good.first.incarnation)
        self.disk.write_file_atomic(watermark_path(self.directory), mark.pack())
        self._zero_rest()
        for number in self.present:
            if number >= good.segment and self.disk.exists(path := index_path(self.directory, number)):
                self.disk.unlink(path)
        self.disk.fsync_dir(self.directory)
        report.cut_from_unit, report.repaired = good.next_unit, True

    def _zero_rest(self) -> None:
        """Write zeros from the cut to the end, and set a size that the format allows."""
        file = self.disk.open(segment_path(self.directory, self.good.segment), write=True)
        try:
            size, capacity = file.size(), self.good.first.capacity
            file.zero(self.good.at, size - self.good.at)
            set_followed(file, False)
            if not size_is_legal(size, capacity):
                file.truncate(capacity)
            file.fdatasync()
        finally:
            file.close()

    def _aside(self, path: str) -> str:
        name, serial = path.rpartition("/")[2], 0
        while self.disk.exists(target := f"{self.directory}/damaged/{name}" + (f".{serial}" if serial else "")):
            serial += 1
        self.report.set_aside.append(target)
        return target

    def _move_aside(self, path: str) -> None:
        self.disk.rename(path, self._aside(path))
        self.disk.fsync_dir(f"{self.directory}/damaged")
        self.disk.fsync_dir(path.rpartition("/")[0])

    def _copy_aside(self, path: str) -> None:
        source, copy = self.disk.open(path), self.disk.create(self._aside(path))
        try:
            for at in range(0, source.size(), CHUNK_BYTES):
                copy.pwritev([source.pread(CHUNK_BYTES, at)], at)
            copy.fdatasync()
        finally:
            source.close()
            copy.close()
        self.disk.fsync_dir(f"{self.directory}/damaged")
