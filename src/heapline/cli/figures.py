"""`journal stats` of one topic: what its files hold, in numbers. Only reads; how they are shown is journal.py's."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

from heapline.cli.holders import Holders, holders
from heapline.cli.places import Place
from heapline.cli.reading import held_for_reading, rebuild, segment_sizes, state_of, units_of
from heapline.core.events import KIND_NAMES, decode_events
from heapline.errors import CorruptionError, SnapshotCorrupt
from heapline.journal import Disk, SnapshotStore, Unit


@dataclass(slots=True)
class Figures:
    topic: str
    folder: str
    running: bool
    segments: dict[int, int] = field(default_factory=dict)  # number -> bytes of its file
    live: dict[int, tuple[int, int]] | None = None  # number -> messages that are not gone, and at most how many bytes
    units: int = 0
    unit_bytes: int = 0
    first_unit: int = 0
    last_unit: int = 0
    events: Counter[str] = field(default_factory=Counter)  # by kind
    rows: Counter[str] = field(default_factory=Counter)
    from_ms: int = 0
    to_ms: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)  # unit -> bytes, blobs included
    state: dict[str, int] | None = None  # messages by state
    holders: Holders | None = None  # for whom segments are kept
    segment_bytes: int = 0

    @property
    def given_back(self) -> int:
        """Segments that have gone since the topic was made: they are numbered from 1 on, and go in that order."""
        return min(self.segments, default=1) - 1

    @property
    def live_bytes(self) -> int | None:
        return None if self.live is None else sum(nbytes for _, nbytes in self.live.values())


def figures(disk: Disk, place: Place, *, running: bool) -> Figures:
    found = Figures(place.topic, place.folder, running)
    with held_for_reading(disk, place.folder, running):
        found.segments = segment_sizes(disk, place.folder)
        for unit in units_of(disk, place, running):
            _count(found, unit)
        found.snapshots = _snapshot_sizes(disk, f"{place.folder}/snapshots")
        if place.config is not None:
            with contextlib.suppress(CorruptionError):  # what cannot be known is left out; verify says why
                topic = rebuild(disk, place, running)
                found.state = state_of(topic)
                found.live = {n: (topic.live.count(n), topic.live.bytes(n)) for n in found.segments}
                found.segment_bytes = topic.config.segment_bytes
                found.holders = holders(disk, place, topic, list(found.snapshots))
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
