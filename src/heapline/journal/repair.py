"""Repair: give up data that cannot be trusted, explicitly, so that the rest can be served again.

The journal is cut at its first damaged unit. Everything after it is lost to the topic, and the report says exactly what
could still be read of it. The files are first copied or moved to `damaged/`, which nothing reads. A snapshot above the
cut describes units that are lost, so it is moved there, too.

Nothing is done if the journal is intact, if only single records are damaged (they are not delivered, the rest is
served), or if the cut would leave no state to build on: when the beginning of the journal was reclaimed and no valid
snapshot is below the cut. After a kill in between, repair can be run again.
"""

from __future__ import annotations

from dataclasses import dataclass

from heapline.contract.errors import JournalCorrupt, SnapshotCorrupt
from heapline.journal.disk import Disk
from heapline.journal.recovery import read_header
from heapline.journal.segment import FIRST_UNIT_AT, SegmentHeader, index_path, numbered, segment_path, size_is_legal
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.verify import Report, salvage, verify
from heapline.journal.walk import CHUNK_BYTES, SegmentWalk
from heapline.journal.watermark import Watermark, watermark_path


@dataclass(slots=True)
class GoodPart:
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
