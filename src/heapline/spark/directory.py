"""Logs read straight from a data directory, beside a running engine or without one.

Only what the watermark covers is read, so every row was answered for. How far a log goes is kept up by walking the
heads of the units that are new (heads.py); of older segments the stored indexes tell enough.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from heapline.config import NAME
from heapline.core.events import I64
from heapline.core.position import PositionLayout
from heapline.engine.catalog import FILE as CATALOG
from heapline.engine.catalog import Catalog
from heapline.engine.state_rows import StateRows, stored
from heapline.errors import BadRequest, JournalCorrupt
from heapline.journal.disk import Disk, RealDisk
from heapline.journal.index import ENTRY_EVERY_BYTES, SegmentIndex
from heapline.journal.reader import LogReader
from heapline.journal.record_reader import RecordReader
from heapline.journal.records import Records
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import FIRST_UNIT_AT, SegmentHeader, numbered, segment_path
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.unit import Unit
from heapline.journal.watermark import Watermark
from heapline.spark.heads import Head, heads
from heapline.spark.holding import Hold
from heapline.spark.log import DataLost, TopicRef, lost_since_planned
from heapline.spark.marks import Marks, Place, first_place

_LOOKS = 5  # tries, should segments go while they are looked at
_FOLDER = re.compile(r"(?P<name>.+)\.(?P<incarnation>\d+)")


@dataclass(frozen=True)
class DirectorySource:
    """A broker's data directory, or the folder of one of its topics."""

    path: str
    lease_seconds: float = 600.0
    disk: Disk = field(default_factory=RealDisk, compare=False)

    def topics(self) -> list[TopicRef]:
        disk, path = self.disk, os.path.abspath(self.path)
        if not disk.exists(path):
            raise BadRequest(f"there is no directory {self.path!r}: path is a data directory or the folder of a topic")
        if disk.exists(f"{path}/{CATALOG}"):
            return _catalogued(disk, path)
        if not numbered(disk.listdir(path), ".seg"):
            raise BadRequest(f"{self.path!r} holds no queue: path is a data directory or the folder of a topic")
        root = _root(path)
        if disk.exists(f"{root}/{CATALOG}"):
            return [ref for ref in _catalogued(disk, root) if ref.folder == path]
        return [_lone(disk, path)]

    def open(self, topic: TopicRef) -> DirectoryLog:
        return DirectoryLog(topic, self.lease_seconds, self.disk)


def _root(folder: str) -> str:
    """The data directory in which a topic's folder lies, if it lies in one."""
    return os.path.dirname(os.path.dirname(os.path.dirname(folder)))


def _catalogued(disk: Disk, root: str) -> list[TopicRef]:
    # The broker's own journal is nobody's topic, and has a name that no user can give.
    entries = [e for e in Catalog(disk, root).entries.values() if NAME.match(e.namespace)]
    return [TopicRef(e.topic, e.incarnation, e.config.partitions, f"{root}/{e.folder}") for e in entries]


def _lone(disk: Disk, folder: str) -> TopicRef:
    """A topic's folder without its catalog: it speaks for itself."""
    name = os.path.basename(folder)
    match = _FOLDER.fullmatch(name)
    header = read_header(disk, folder, list_segments(disk, folder)[0])
    return TopicRef(match["name"] if match else name, header.incarnation if header is not None else 0, 1, folder)


class DirectoryLog:
    def __init__(self, ref: TopicRef, lease_seconds: float, disk: Disk) -> None:
        self.ref = ref
        self._disk, self._folder = disk, ref.folder
        self._lease_seconds = lease_seconds
        self._reader = LogReader(disk, ref.folder)
        self._headers: dict[int, SegmentHeader] = {}
        self._indexes: dict[int, SegmentIndex] = {}
        self._ends: dict[int, int] = {}
        self._mark: Watermark | None = None
        self._at = FIRST_UNIT_AT  # up to where the mark's segment was walked
        self._hold: Hold | None = None
        self._records: RecordReader | None = None

    # -- how far it goes -------------------------------------------------------------------------------------------

    def look(self) -> bool:
        if not self._disk.exists(self._folder):
            raise DataLost(f"topic {self.ref.topic!r} was deleted")
        mark, before = self._reader.watermark(), self._mark
        if before is not None and (mark.segment, mark.byte_end) == (before.segment, before.byte_end):
            return False
        if mark.incarnation != self.ref.incarnation:
            raise DataLost(f"topic {self.ref.topic!r} was deleted and made again: start a new query on it")
        for _ in range(_LOOKS):
            try:
                self._look_up_to(mark)
                return True
            except FileNotFoundError:  # reclaimed under our eyes, or since we last looked: start over
                self._mark = None
                mark = self._reader.watermark()
        raise DataLost(f"the journal of topic {self.ref.topic!r} is reclaimed faster than it can be looked at")

    def _look_up_to(self, mark: Watermark) -> None:
        before = self._mark
        if before is None:
            self._load(mark)
        else:
            for segment in range(before.segment, mark.segment):
                self._walk(segment, None)
        self._walk(mark.segment, mark.byte_end)
        self._mark = mark
        if before is None:
            self._find_silent()

    def _load(self, mark: Watermark) -> None:
        self._ends, self._headers, self._at = {}, {}, FIRST_UNIT_AT
        closed = [n for n in list_segments(self._disk, self._folder) if n < mark.segment]
        self._indexes = {segment: self._reader.index(segment) for segment in closed}

    def _walk(self, segment: int, stop: int | None) -> None:
        """Note the units of a segment that are new. Without `stop` another segment follows, where the walk goes on."""
        index = self._indexes.setdefault(segment, SegmentIndex(segment))
        last = None
        for head in heads(self._disk, self._folder, self._header(segment), self._at, stop):
            last = head
            index.add(head.number, head.at, head.time, head.wall, head.frames)  # type: ignore[arg-type]  # as frames go
            for frame in head.frames:
                self._ends[frame.partition] = frame.first_offset + frame.row_count
        if stop is None and last is not None and self._header(segment + 1).first_unit != last.number + 1:
            raise JournalCorrupt(segment_path(self._folder, segment), last.end, "durable units are missing here")
        self._at = FIRST_UNIT_AT if stop is None else stop

    def _header(self, segment: int) -> SegmentHeader:
        header = self._headers.get(segment) or read_header(self._disk, self._folder, segment)
        if header is None:
            raise JournalCorrupt(segment_path(self._folder, segment), 0, "the segment header is missing")
        self._headers[segment] = header
        return header

    def _find_silent(self) -> None:
        """The ends of partitions of which the last segment has nothing."""
        for segment in sorted(self._indexes, reverse=True):
            entries = self._indexes[segment].entries()
            for partition in sorted(set(entries["partition"].tolist()) - self._ends.keys()):
                at = int(self._indexes[segment].of(partition)["at"][-1])
                for head in self._near(segment, at):
                    for frame in head.frames:
                        if frame.partition == partition:
                            self._ends[partition] = frame.first_offset + frame.row_count
        missing = set(range(self.ref.partitions)) - self._ends.keys()
        if missing and self._header(min(self._indexes)).first_unit > 1:
            self._ends.update(self._frozen_ends(missing))

    def _near(self, segment: int, at: int) -> Iterator[Head]:
        """The units from a mark on among which all frames of its partition are, up to its next mark."""
        is_last = self._mark is not None and segment == self._mark.segment
        stop = self._mark.byte_end if is_last and self._mark is not None else None
        for head in heads(self._disk, self._folder, self._header(segment), at, stop):
            if head.at - at >= ENTRY_EVERY_BYTES:
                return
            yield head

    def _frozen_ends(self, partitions: set[int]) -> dict[int, int]:
        """Ends of partitions that the journal has nothing of any more: the newest snapshot knows them."""
        if not self._disk.exists(f"{self._folder}/snapshots"):
            return {}
        snapshot = SnapshotStore(self._disk, f"{self._folder}/snapshots").load_newest()
        if snapshot is None:
            return {}
        saved = msgspec.msgpack.decode(snapshot.state)[5]
        return {p: int(saved[p]["offset"]) for p in partitions if p < len(saved)}

    def ends(self) -> dict[int, int]:
        count = max([self.ref.partitions, *(p + 1 for p in self._ends)])
        return {p: self._ends.get(p, 0) for p in range(count)}

    def starts(self) -> dict[int, int]:
        marks, raised = self.marks(), self._reader.log_start()
        starts = {}
        for partition, end in self.ends().items():
            first = marks.first_offset(partition)
            starts[partition] = end if first is None else min(end, max(first, raised.get(partition, 0)))
        return starts

    def last_unit(self) -> int:
        return self._mark.visible if self._mark is not None else 0

    def marks(self) -> Marks:
        present = set(list_segments(self._disk, self._folder))
        for gone in [segment for segment in self._indexes if segment not in present]:
            del self._indexes[gone]
        capacity = self._header(min(self._indexes)).capacity if self._indexes else 1
        return Marks(((n, self._indexes[n].entries()) for n in sorted(self._indexes)), capacity)

    def offset_at(self, partition: int, time_ms: int) -> int | None:
        marks = self.marks()
        mine, near = marks.of(partition), marks.before(partition, "time", time_ms, strictly=True)
        if near >= 0:
            for head in self._near(int(mine["segment"][near]), int(mine["at"][near])):
                for frame in head.frames:
                    if frame.partition == partition and head.time >= time_ms:
                        return frame.first_offset
        return int(mine["first_offset"][near + 1]) if near + 1 < len(mine) else None

    # -- reading ---------------------------------------------------------------------------------------------------

    def units(self, start: Place | None, end: int, hold_from: float = math.inf) -> Iterator[Unit]:
        with Hold(self._disk, self._folder, self._lease_seconds) as hold:
            if start is None:
                first = list_segments(self._disk, self._folder)[0]
                start = first_place(self._header(first).first_unit, first)
            if time.time() >= hold_from:
                hold.keep(start.segment)
            expected = start.unit
            try:
                for unit in self._reader.read_units(place=(start.segment, start.at)):
                    if unit.number >= end:
                        return
                    if time.time() >= hold_from:
                        hold.keep(unit.segment)
                    expected = unit.number + 1
                    yield unit
            except BadRequest as error:
                raise lost_since_planned(error) from None
        if expected < end:
            raise JournalCorrupt(segment_path(self._folder, start.segment), start.at, f"unit {expected} is missing")

    def hold(self, start: Place | None) -> float:
        if self._hold is None:
            self._hold = Hold(self._disk, self._folder, self._lease_seconds)
        return self._hold.keep(min(self._indexes) if start is None else start.segment)

    # -- the state of a moment -------------------------------------------------------------------------------------

    def first_segment(self) -> int:
        return list_segments(self._disk, self._folder)[0]

    def pin(self, dead: bool) -> StateRows:
        ref, root = self.ref, _root(self._folder)
        found = Catalog(self._disk, root).entries.values() if self._disk.exists(f"{root}/{CATALOG}") else ()
        for entry in found:
            if (entry.topic, entry.incarnation) == (ref.topic, ref.incarnation):
                return stored(self._disk, self._folder, ref.topic, ref.incarnation, entry.config, dead)
        raise BadRequest(f"{self._folder!r} has no catalog: what waits is read from a whole data directory")

    def records(self, positions: I64, segment_bytes: int) -> Records:
        if self._records is None:
            self._records = RecordReader(self._disk, self._folder, PositionLayout(segment_bytes))
        return self._records.load(positions)

    def close(self, *, let_go: bool = True) -> None:
        if self._records is not None:
            self._records.close()
        if self._hold is not None and let_go:
            self._hold.end()
