"""Looking at one topic's files as a whole: does every byte check, what is in them, what state do they lead to?

Only reads. Beside a running engine it stops where that engine is durable, and holds a reader lease so that nothing is
reclaimed under it. What is found is plain data; how it is shown is journal.py's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from heapline.cli.places import Place
from heapline.core.events import KIND_NAMES, decode_events
from heapline.engine.freeze import thaw
from heapline.engine.topic import Topic
from heapline.errors import CorruptionError, HeaplineError, JournalCorrupt, SnapshotCorrupt
from heapline.journal import (
    Damage,
    Disk,
    File,
    LogReader,
    ReaderLease,
    Report,
    SnapshotStore,
    Unit,
    end_lease,
    scan,
    verify,
    write_lease,
)
from heapline.journal.index import parse_index
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import index_path, numbered, segment_path
from heapline.journal.verify import record_damage
from heapline.journal.watermark import read_watermark, watermark_path
from heapline.model import Now

READER_LEASE_MS = 10 * 60 * 1000
RECORD_ADVICE = "this message is never delivered, the others are served; restore a backup to have it back"
JOURNAL_ADVICE = "restore a backup, or give up what lies behind the damage with: heapline journal repair"
SNAPSHOT_ADVICE = "an older snapshot or the journal itself is used instead; the next snapshots replace it"
INDEX_ADVICE = "it is rebuilt from the segment when needed; the file can be deleted"
WATERMARK_ADVICE = "opening the topic writes it anew"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not check."""

    path: str
    offset: int
    detail: str
    advice: str


@dataclass(slots=True)
class Examined:
    topic: str
    folder: str
    running: bool  # examined up to the watermark only, beside an engine that has it open
    report: Report
    snapshots: int = 0
    indexes: int = 0
    findings: list[Finding] = field(default_factory=list)
    state: dict[str, int] | None = None  # messages by state, if the topic could be rebuilt


class CountingDisk:
    """A disk that tells how many bytes were read from its files, for a progress bar."""

    def __init__(self, disk: Disk, told: Callable[[int], None]) -> None:
        self._disk, self._told = disk, told

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    def open(self, path: str, *, write: bool = False) -> File:
        file = self._disk.open(path, write=write)
        read = file.pread

        def pread(n: int, off: int) -> bytes:
            data = read(n, off)
            self._told(len(data))
            return data

        file.pread = pread  # type: ignore[method-assign]
        return file


def journal_bytes(disk: Disk, folder: str) -> int:
    return sum(size for _, size in segment_sizes(disk, folder))


def segment_sizes(disk: Disk, folder: str) -> Iterator[tuple[int, int]]:
    for number in numbered(disk.listdir(folder), ".seg"):
        file = disk.open(segment_path(folder, number))
        try:
            yield number, file.size()
        finally:
            file.close()


@contextlib.contextmanager
def held_for_reading(disk: Disk, folder: str, running: bool) -> Iterator[None]:
    """Beside a running engine: nothing is reclaimed meanwhile. A directory that cannot be written to is read anyway."""
    name = f"cli-{os.getpid()}"
    taken = False
    if running:
        with contextlib.suppress(OSError):
            until = time.time_ns() // 1_000_000 + READER_LEASE_MS
            write_lease(disk, folder, ReaderLease(name, os.getpid(), numbered(disk.listdir(folder), ".seg")[0], until))
            taken = True
    try:
        yield
    finally:
        if taken:
            end_lease(disk, folder, name)


def units_of(disk: Disk, folder: str, running: bool, after_unit: int = 0) -> Iterator[Unit]:
    """The units that count: all whole ones of a closed journal, the durable ones of a running one."""
    if running:
        yield from LogReader(disk, folder).read_units(start_unit=after_unit + 1)
    else:
        yield from scan(disk, folder, after_unit=after_unit)


def examine(disk: Disk, place: Place, *, running: bool, rebuild_state: bool = True) -> Examined:
    """Check everything of one topic."""
    with held_for_reading(disk, place.folder, running):
        report = _verify_running(disk, place.folder) if running else verify(disk, place.folder)
        found = Examined(place.topic, place.folder, running, report)
        found.findings += [_of_damage(d) for d in report.damage]
        _check_watermark(disk, found)
        _check_indexes(disk, found)
        newest = _check_snapshots(disk, place, found)
        if rebuild_state and place.config is not None and all(d.is_record for d in report.damage):
            try:
                found.state = state_of(rebuild(disk, place, running, newest))
            except CorruptionError as error:
                path, offset = getattr(error, "path", place.folder), getattr(error, "offset", 0)
                found.findings.append(Finding(path, offset, f"the journal does not replay: {error}", JOURNAL_ADVICE))
    return found


def _of_damage(damage: Damage) -> Finding:
    return Finding(damage.path, damage.offset, damage.detail, RECORD_ADVICE if damage.is_record else JOURNAL_ADVICE)


def _verify_running(disk: Disk, folder: str) -> Report:
    report = Report(folder)
    try:
        report.segments = len(list_segments(disk, folder))
        for unit in units_of(disk, folder, running=True):
            report.count(unit)
            report.damage.extend(record_damage(unit, segment_path(folder, unit.segment)))
    except JournalCorrupt as error:
        report.damage.append(Damage(error.path, error.offset, report.last_unit + 1, error.detail))
    return report


def _check_watermark(disk: Disk, found: Examined) -> None:
    if read_watermark(disk, found.folder) is None:
        path = watermark_path(found.folder)
        detail = "it does not check" if disk.exists(path) else "it is missing"
        if not any(f.path == path for f in found.findings):
            found.findings.append(Finding(path, 0, detail, WATERMARK_ADVICE))


def _check_indexes(disk: Disk, found: Examined) -> None:
    present = set(numbered(disk.listdir(found.folder), ".seg"))
    for number in numbered(disk.listdir(found.folder), ".idx"):
        path = index_path(found.folder, number)
        try:
            header = read_header(disk, found.folder, number) if number in present else None
            data = disk.read_file(path)
        except FileNotFoundError:
            continue  # reclaimed just now
        except JournalCorrupt:
            continue  # the segment itself is damaged, which has been said
        if header is None or parse_index(data, number, header.incarnation) is not None:
            found.indexes += header is not None  # one whose segment is gone is removed at the next open
            continue
        found.findings.append(Finding(path, 0, "the index does not check", INDEX_ADVICE))


def _check_snapshots(disk: Disk, place: Place, found: Examined) -> int:
    """Load every snapshot; the unit of the newest good one, 0 if there is none."""
    directory = f"{place.folder}/snapshots"
    if not disk.exists(directory):
        return 0
    store, newest = SnapshotStore(disk, directory), 0
    for unit in store.units():
        try:
            snapshot = store.load(unit)
            if place.config is not None:
                wall = _wall_ms()
                topic = _fresh(place)
                thaw(topic, snapshot.state, snapshot.blobs, wall, wall, f"{directory}/{unit:016d}.snap")
        except SnapshotCorrupt as error:
            if disk.exists(f"{directory}/{unit:016d}.snap"):  # a running engine may have pruned it just now
                found.findings.append(Finding(error.path, 0, error.detail, SNAPSHOT_ADVICE))
        else:
            found.snapshots += 1
            newest = unit
    return newest


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _fresh(place: Place) -> Topic:
    assert place.config is not None
    wall = _wall_ms()
    return Topic(place.topic, place.config, Now(wall, wall), lambda: 0.5)  # back-off is drawn only by a live engine


def newest_snapshot(disk: Disk, folder: str) -> int:
    """The unit of the newest snapshot that checks; 0 if there is none."""
    if not disk.exists(f"{folder}/snapshots"):
        return 0
    found = SnapshotStore(disk, f"{folder}/snapshots").load_newest()
    return found.unit if found is not None else 0


def rebuild(disk: Disk, place: Place, running: bool, snapshot_unit: int) -> Topic:
    """The topic's state as opening would build it: a snapshot, then the journal's tail."""
    topic = _fresh(place)
    if snapshot_unit:
        found = SnapshotStore(disk, f"{place.folder}/snapshots").load(snapshot_unit)
        wall = _wall_ms()
        thaw(topic, found.state, found.blobs, wall, wall, f"{place.folder}/snapshots of unit {snapshot_unit}")
    for unit in units_of(disk, place.folder, running, snapshot_unit):
        topic.replay(unit, place.folder)
    return topic


def state_of(topic: Topic) -> dict[str, int]:
    return {
        "ready": topic.ready,
        "delayed": sum(p.delayed for p in topic.partitions),
        "leased": topic.leased,
        "dead": sum(len(p.dead) for p in topic.partitions),
    }


@dataclass(slots=True)
class Figures:
    """What a journal holds, in numbers."""

    topic: str
    folder: str
    running: bool
    segments: dict[int, int] = field(default_factory=dict)  # number -> bytes of its file
    live_bytes: dict[int, int] | None = None  # number -> bytes of messages that are not gone
    units: int = 0
    unit_bytes: int = 0
    first_unit: int = 0
    last_unit: int = 0
    rows: Counter[str] = field(default_factory=Counter)  # by kind of event
    events: Counter[str] = field(default_factory=Counter)
    from_ms: int = 0
    to_ms: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)  # unit -> bytes, blobs included
    state: dict[str, int] | None = None


def figures(disk: Disk, place: Place, *, running: bool) -> Figures:
    found = Figures(place.topic, place.folder, running)
    with held_for_reading(disk, place.folder, running):
        found.segments = dict(segment_sizes(disk, place.folder))
        for unit in units_of(disk, place.folder, running):
            _count(found, unit)
        found.snapshots = _snapshot_sizes(disk, f"{place.folder}/snapshots")
        if place.config is not None:
            with contextlib.suppress(HeaplineError):  # shares that cannot be known are left out
                topic = rebuild(disk, place, running, newest_snapshot(disk, place.folder))
                found.state = state_of(topic)
                found.live_bytes = {n: topic.live.bytes(n) if topic.live.count(n) else 0 for n in found.segments}
    return found


def _count(found: Figures, unit: Unit) -> None:
    found.units += 1
    found.unit_bytes += unit.header.nbytes
    found.first_unit = found.first_unit or unit.number
    found.last_unit = unit.number
    found.from_ms = found.from_ms or unit.wall
    found.to_ms = unit.wall
    for frame in unit.frames:
        for event in decode_events(frame.events, f"unit {unit.number}"):
            kind = KIND_NAMES[type(event)]
            found.events[kind] += 1
            found.rows[kind] += event.rows()


def _snapshot_sizes(disk: Disk, directory: str) -> dict[int, int]:
    sizes: dict[int, int] = {}
    if not disk.exists(directory):
        return sizes
    store = SnapshotStore(disk, directory)
    for unit in store.units():
        with contextlib.suppress(SnapshotCorrupt):
            snapshot = store.load(unit)
            sizes[unit] = len(snapshot.state) + sum(blob.nbytes for blob in snapshot.blobs.values())
    return sizes
