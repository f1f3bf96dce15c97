"""Rebuild a topic's state from its directory: the newest intact snapshot, then the units after it.

The loader, readers of a stored state and `heapline journal verify` use these functions, so they agree on which topics
can be opened. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from heapline.contract.errors import HeaplineError, JournalCorrupt, SnapshotCorrupt
from heapline.engine.snapshot_state import thaw
from heapline.engine.topic import Topic
from heapline.journal.disk import Disk
from heapline.journal.recovery import check_beginning, list_segments
from heapline.journal.segment import segment_path
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.unit import Unit

MAINTAIN_UNITS = 64  # units between two rounds of maintenance of heaps and timers


def newest_state(
    disk: Disk,
    directory: str,
    store: SnapshotStore | None,
    fresh: Callable[[], Topic],
    wall: int,
    on_damage: Callable[[SnapshotCorrupt], object] = lambda error: None,
) -> tuple[Topic, int]:
    """Return the topic of the newest intact snapshot, and the snapshot's unit: an empty topic and 0 without one.

    A corrupt snapshot is reported to `on_damage`, and an older one is used. Raise JournalCorrupt if none is intact
    although the journal's first units were reclaimed.
    """
    before = [-1]
    while store is not None and before != (before := store.units()):  # pruned meanwhile: then there are newer ones
        for unit in reversed(before):
            topic = fresh()
            try:
                thaw_unit(topic, store, unit, wall)
            except SnapshotCorrupt as error:
                on_damage(error)
                continue
            return topic, unit
    check_beginning(disk, directory)
    return fresh(), 0


def stored_snapshots(disk: Disk, directory: str) -> SnapshotStore | None:
    """Return a topic's snapshots for reading, or None without their directory, which SnapshotStore would create."""
    path = f"{directory}/snapshots"
    return SnapshotStore(disk, path) if disk.exists(path) else None


def thaw_unit(topic: Topic, store: SnapshotStore, unit: int, wall: int) -> None:
    """Give an empty topic the state of a snapshot. Raise SnapshotCorrupt if it is corrupt."""
    found = store.load(unit)
    thaw(topic, found.state, found.blobs, wall, wall, f"{store.directory}/{unit:016d}.snap")


def apply_units(topic: Topic, units: Iterable[Unit], directory: str, after_unit: int) -> int:
    """Apply the units after a snapshot, and return their number. Raise JournalCorrupt if they contradict the state."""
    count = 0
    try:
        for unit in units:
            topic.replay(unit, directory)
            count += 1
            if count % MAINTAIN_UNITS == 0:
                for partition in topic.partitions:
                    partition.entries.heap.maintain()
                    partition.entries.delays.maintain()
                    partition.entries.calendar.maintain()
        topic.settle()
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        if isinstance(error, HeaplineError):
            raise
        detail = f"it does not replay after unit {after_unit + count}: {error!r}"
        raise JournalCorrupt(directory, 0, detail) from error
    return count


def check_records(topic: Topic, disk: Disk, directory: str) -> None:
    """Raise JournalCorrupt if a segment with live records is missing, even below the snapshot."""
    present = set(list_segments(disk, directory))
    for segment in topic.live.segments():
        if topic.live.count(segment) and segment not in present:
            detail = f"the file is missing, with the records of {topic.live.count(segment)} messages"
            raise JournalCorrupt(segment_path(directory, segment), 0, detail)
