"""Reading one topic's files beside or without an engine: which units count, and the state they lead to.

Only reads, except for a small reader lease beside a running engine, so that nothing is reclaimed under it. A closed
journal counts up to its last whole unit, as opening would take it; a running one up to where it is durable.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from heapline.cli.places import Place
from heapline.engine.freeze import thaw
from heapline.engine.topic import Topic
from heapline.errors import JournalCorrupt
from heapline.journal import Disk, File, LogReader, ReaderLease, Snapshot, SnapshotStore, Unit, end_lease, write_lease
from heapline.journal.recovery import Scan, read_header
from heapline.journal.segment import numbered, segment_path
from heapline.model import Now

READER_LEASE_MS = 10 * 60 * 1000


class CountingDisk:
    """A disk that tells how many bytes are read from its files, for a progress bar."""

    def __init__(self, disk: Disk, told: Callable[[int], None]) -> None:
        self._disk, self._told = disk, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def open(self, path: str, *, write: bool = False) -> File:
        return cast(File, _CountingFile(self._disk.open(path, write=write), self._told))


class _CountingFile:
    def __init__(self, file: File, told: Callable[[int], None]) -> None:
        self._file, self._told = file, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def pread(self, n: int, off: int) -> bytes:
        data = self._file.pread(n, off)
        self._told(len(data))
        return data


def counting(disk: Disk, told: Callable[[int], None]) -> Disk:
    return cast(Disk, CountingDisk(disk, told))


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def segment_sizes(disk: Disk, folder: str) -> dict[int, int]:
    """Segment number -> bytes of its file."""
    sizes = {}
    for number in numbered(disk.listdir(folder), ".seg"):
        with contextlib.suppress(FileNotFoundError):  # reclaimed just now
            file = disk.open(segment_path(folder, number))
            sizes[number] = file.size()
            file.close()
    return sizes


@contextlib.contextmanager
def held_for_reading(disk: Disk, folder: str, running: bool) -> Iterator[None]:
    """Beside a running engine: nothing is reclaimed meanwhile. A directory that cannot be written to is read anyway."""
    name = f"cli-{os.getpid()}"
    taken = False
    if running:
        with contextlib.suppress(OSError, IndexError):
            first = numbered(disk.listdir(folder), ".seg")[0]
            write_lease(disk, folder, ReaderLease(name, os.getpid(), first, wall_ms() + READER_LEASE_MS))
            taken = True
    try:
        yield
    finally:
        if taken:
            end_lease(disk, folder, name)


def units_of(disk: Disk, place: Place, running: bool, after_unit: int = 0) -> Iterator[Unit]:
    """The units that count, above the one of the snapshot that they are to be applied to."""
    if running:
        reader = LogReader(disk, place.folder)
        if after_unit < reader.watermark().visible:
            yield from reader.read_units(start_unit=after_unit + 1 if after_unit else 0)
    else:
        yield from Scan(
            disk, place.folder, after_unit=after_unit, known_durable=after_unit, incarnation=place.incarnation
        )  # fmt: skip


def fresh_topic(place: Place) -> Topic:
    assert place.config is not None
    wall = wall_ms()
    return Topic(place.topic, place.config, Now(wall, wall), np.zeros)  # only a live engine draws back-off


def thawed(place: Place, snapshot: Snapshot) -> Topic:
    """A topic as a snapshot tells it. SnapshotCorrupt if it cannot be."""
    topic, wall = fresh_topic(place), wall_ms()
    thaw(topic, snapshot.state, snapshot.blobs, wall, wall, f"{place.folder}/snapshots/{snapshot.unit:016d}.snap")
    return topic


def newest_snapshot(disk: Disk, place: Place) -> Snapshot | None:
    """The newest snapshot that checks."""
    if not disk.exists(f"{place.folder}/snapshots"):  # SnapshotStore would make it
        return None
    return SnapshotStore(disk, f"{place.folder}/snapshots").load_newest()


def rebuild(disk: Disk, place: Place, running: bool) -> Topic:
    """The topic's state as opening would build it: the newest good snapshot, then the journal's tail."""
    assert place.config is not None
    first = numbered(disk.listdir(place.folder), ".seg")[0]
    header = read_header(disk, place.folder, first)
    path = segment_path(place.folder, first)
    if header is not None and header.capacity != place.config.segment_bytes:
        detail = f"its segments have {header.capacity} bytes, the topic's config says {place.config.segment_bytes}"
        raise JournalCorrupt(path, 0, detail)
    snapshot = newest_snapshot(disk, place)
    if snapshot is None and header is not None and header.first_unit > 1:
        raise JournalCorrupt(path, 0, f"units 1 to {header.first_unit - 1} were reclaimed, and no snapshot checks")
    topic = fresh_topic(place) if snapshot is None else thawed(place, snapshot)
    for unit in units_of(disk, place, running, snapshot.unit if snapshot is not None else 0):
        topic.replay(unit, place.folder)
    return topic


def state_of(topic: Topic) -> dict[str, int]:
    return {
        "ready": topic.ready,
        "delayed": sum(p.delayed for p in topic.partitions),
        "leased": topic.leased,
        "dead": sum(len(p.dead) for p in topic.partitions),
    }
