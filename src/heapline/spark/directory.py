"""Read logs directly from a data directory, with or without a running engine beside the reader.

Only units below the watermark are read, so every row was acknowledged. To follow the end of a log, the reader walks the
headers and frames of new units and skips their payloads. For older segments the stored indexes are sufficient.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from heapline.contract.config import NAME
from heapline.contract.errors import BadRequest, JournalCorrupt
from heapline.core.events import I64
from heapline.core.record import PositionLayout
from heapline.engine.catalog import FILE as CATALOG
from heapline.engine.catalog import Catalog
from heapline.engine.state_rows import StateRows, stored
from heapline.journal.disk import Disk, File, RealDisk
from heapline.journal.index import ENTRY_EVERY_BYTES, SegmentIndex
from heapline.journal.log_bounds import Watermark
from heapline.journal.reader import LogReader
from heapline.journal.reclaim import end_lease, hold_segments
from heapline.journal.records import RecordReader, Records
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import FIRST_UNIT_AT, SegmentHeader, numbered, segment_path
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.unit import HEADER_BYTES, Frame, Meta, Unit, UnitHeader, crc_seed, parse_header
from heapline.spark.topic_log import (
    DataLost,
    JournalHold,
    LogIndex,
    TopicRef,
    UnitPosition,
    first_position,
    lost_after_planning,
)

CHUNK_BYTES = 64 << 10


class Head(NamedTuple):
    """The header and frames of a unit, without its payloads."""

    number: int
    time: int
    wall: int
    segment: int
    at: int
    end: int
    frames: list[Frame]


_decode = msgspec.msgpack.Decoder(Meta).decode


def heads(disk: Disk, directory: str, header: SegmentHeader, at: int, stop: int | None) -> Iterator[Head]:
    """Yield the units of a segment from byte `at`, where a unit begins, to byte `stop`, where one ends.

    Headers are checked; bodies are checked when they are read (journal/segment.py). Without `stop`, the walk continues
    to the last unit, for segments that are followed by another. Raises FileNotFoundError if the segment was reclaimed.
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
            raise JournalCorrupt(file.path, at, "durable units are missing")
        meta_at = at + HEADER_BYTES + found.blocks_len
        if meta_at + found.meta_len > base + len(chunk):
            # The next header follows the frames, so one read fetches both.
            rest = found.nbytes - HEADER_BYTES - found.blocks_len
            chunk, base = file.pread(max(CHUNK_BYTES, rest + HEADER_BYTES), meta_at), meta_at
        yield _head(chunk, meta_at - base, found, segment, at, file.path)
        at += found.nbytes


def _head(chunk: bytes, at: int, header: UnitHeader, segment: int, unit_at: int, path: str) -> Head:
    try:
        meta = _decode(memoryview(chunk)[at : at + header.meta_len])
    except msgspec.MsgspecError as error:
        raise JournalCorrupt(path, unit_at, f"cannot decode the frames of unit {header.number}: {error}") from None
    return Head(header.number, header.time, header.wall, segment, unit_at, unit_at + header.nbytes, meta.frames)


REFRESH_TRIES = 5  # if segments are reclaimed during a refresh
_FOLDER = re.compile(r"(?P<name>.+)\.(?P<incarnation>\d+)")


@dataclass(frozen=True)
class DirectorySource:
    """A broker's data directory, or the directory of one of its topics."""

    path: str
    lease_seconds: float = 600.0
    disk: Disk = field(default_factory=RealDisk, compare=False)

    def topics(self) -> list[TopicRef]:
        disk, path = self.disk, os.path.abspath(self.path)
        if not disk.exists(path):
            raise BadRequest(
                f"directory {self.path!r} does not exist; path must be a data directory or the directory of a topic"
            )
        if disk.exists(f"{path}/{CATALOG}"):
            return _catalogued(disk, path)
        if not numbered(disk.listdir(path), ".seg"):
            raise BadRequest(
                f"{self.path!r} contains no queue; path must be a data directory or the directory of a topic"
            )
        root = _root(path)
        if disk.exists(f"{root}/{CATALOG}"):
            return [ref for ref in _catalogued(disk, root) if ref.folder == path]
        return [_lone(disk, path)]

    def open(self, topic: TopicRef) -> DirectoryLog:
        return DirectoryLog(topic, self.lease_seconds, self.disk)


def _root(folder: str) -> str:
    """Return the data directory that contains a topic's directory, if there is one."""
    return os.path.dirname(os.path.dirname(os.path.dirname(folder)))


def _catalogued(disk: Disk, root: str) -> list[TopicRef]:
    # The broker's own journal is not a topic; users cannot create topics with its name.
    entries = [e for e in Catalog(disk, root).entries.values() if NAME.match(e.namespace)]
    return [TopicRef(e.topic, e.incarnation, e.config.partitions, f"{root}/{e.folder}", e.id_suffix) for e in entries]


def _lone(disk: Disk, folder: str) -> TopicRef:
    """Describe a topic's directory that has no catalog."""
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
        self._at = FIRST_UNIT_AT  # how far the last segment was walked
        self._hold = JournalHold(self._write_hold, lease_seconds)
        self._records: RecordReader | None = None

    # -- the end of the log ----------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        if not self._disk.exists(self._folder):
            raise DataLost(f"topic {self.ref.topic!r} was deleted")
        mark, before = self._reader.watermark(), self._mark
        if before is not None and (mark.segment, mark.byte_end) == (before.segment, before.byte_end):
            return False
        if mark.incarnation != self.ref.incarnation:
            raise DataLost(f"topic {self.ref.topic!r} was deleted and created again; start a new query on it")
        for _ in range(REFRESH_TRIES):
            try:
                self._refresh_to(mark)
                return True
            except FileNotFoundError:  # reclaimed during or before this refresh: start again
                self._mark = None
                mark = self._reader.watermark()
        raise DataLost(f"the journal of topic {self.ref.topic!r} is reclaimed faster than it can be indexed")

    def _refresh_to(self, mark: Watermark) -> None:
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
        """Index the new units of a segment. Without `stop`, another segment follows and the walk continues there."""
        index = self._indexes.setdefault(segment, SegmentIndex(segment))
        last = None
        for head in heads(self._disk, self._folder, self._header(segment), self._at, stop):
            last = head
            index.add(head.number, head.at, head.time, head.wall, head.frames)
            for frame in head.frames:
                self._ends[frame.partition] = frame.first_offset + frame.row_count
        if stop is None and last is not None and self._header(segment + 1).first_unit != last.number + 1:
            raise JournalCorrupt(segment_path(self._folder, segment), last.end, "durable units are missing")
        self._at = FIRST_UNIT_AT if stop is None else stop

    def _header(self, segment: int) -> SegmentHeader:
        header = self._headers.get(segment) or read_header(self._disk, self._folder, segment)
        if header is None:
            raise JournalCorrupt(segment_path(self._folder, segment), 0, "the segment header is missing")
        self._headers[segment] = header
        return header

    def _find_silent(self) -> None:
        """Find the ends of partitions that have no rows in the last segment."""
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
        """Yield the units after an index entry that can contain its partition's frames before the next entry."""
        is_last = self._mark is not None and segment == self._mark.segment
        stop = self._mark.byte_end if is_last and self._mark is not None else None
        for head in heads(self._disk, self._folder, self._header(segment), at, stop):
            if head.at - at >= ENTRY_EVERY_BYTES:
                return
            yield head

    def _frozen_ends(self, partitions: set[int]) -> dict[int, int]:
        """Read from the newest snapshot the ends of partitions that have no rows left in the journal."""
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
        index, raised = self.index(), self._reader.log_start()
        starts = {}
        for partition, end in self.ends().items():
            first = index.first_offset(partition)
            starts[partition] = end if first is None else min(end, max(first, raised.get(partition, 0)))
        return starts

    def last_unit(self) -> int:
        return self._mark.visible if self._mark is not None else 0

    def index(self) -> LogIndex:
        present = set(list_segments(self._disk, self._folder))
        for gone in [segment for segment in self._indexes if segment not in present]:
            del self._indexes[gone]
        capacity = self._header(min(self._indexes)).capacity if self._indexes else 1
        return LogIndex(((n, self._indexes[n].entries()) for n in sorted(self._indexes)), capacity)

    def offset_at(self, partition: int, time_ms: int) -> int | None:
        return self.index().offset_at(partition, time_ms, lambda position: self._near(position.segment, position.at))

    # -- reading ---------------------------------------------------------------------------------------------------

    def units(self, start: UnitPosition | None, end: int, hold_from: float = math.inf) -> Iterator[Unit]:
        hold = JournalHold(self._write_hold, self._lease_seconds)
        try:
            if start is None:
                first = list_segments(self._disk, self._folder)[0]
                start = first_position(self._header(first).first_unit, first)
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
                raise lost_after_planning(error) from None
        finally:
            hold.end()
        if expected < end:
            raise JournalCorrupt(segment_path(self._folder, start.segment), start.at, f"unit {expected} is missing")

    def hold(self, start: UnitPosition | None) -> float:
        return self._hold.keep(min(self._indexes) if start is None else start.segment)

    def _write_hold(self, name: str, segment: int, seconds: float) -> None:
        """Write a reader lease.

        A directory that cannot be written to is read without one. If rows are reclaimed meanwhile, the read fails.
        """
        with contextlib.suppress(OSError):
            if not seconds:
                end_lease(self._disk, self._folder, name)
                return
            hold_segments(self._disk, self._folder, name, segment, int((time.time() + seconds) * 1000))

    # -- the state of the queue -----------------------------------------------------------------------------------

    def first_segment(self) -> int:
        return list_segments(self._disk, self._folder)[0]

    def state_rows(self, dead: bool) -> StateRows:
        ref, root = self.ref, _root(self._folder)
        found = Catalog(self._disk, root).entries.values() if self._disk.exists(f"{root}/{CATALOG}") else ()
        for entry in found:
            if (entry.topic, entry.incarnation) == (ref.topic, ref.incarnation):
                return stored(self._disk, self._folder, ref.topic, ref.incarnation, entry.config, dead)
        raise BadRequest(
            f"{self._folder!r} has no catalog; waiting messages can only be read from a complete data directory"
        )

    def records(self, positions: I64, segment_bytes: int) -> Records:
        if self._records is None:
            self._records = RecordReader(self._disk, self._folder, PositionLayout(segment_bytes))
        return self._records.load(positions)

    def close(self, *, release: bool = True) -> None:
        if self._records is not None:
            self._records.close()
        if release:
            self._hold.end()
