"""Load a topic from its directory: the newest valid snapshot, then the rest of the journal.

Blocking; runs in an I/O thread. A topic is opened, and reloaded after a failed write, in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

from heapline.clock import Clock
from heapline.contract.config import REOPENING_FIELDS, TopicConfig
from heapline.contract.errors import HeaplineError, JournalCorrupt, SnapshotCorrupt
from heapline.core.now import Now
from heapline.core.partition import Draw
from heapline.engine.snapshot_state import thaw
from heapline.engine.topic import Topic
from heapline.journal.disk import Disk
from heapline.journal.journal import Journal
from heapline.journal.records import CacheBudget
from heapline.journal.recovery import list_segments, read_header
from heapline.journal.segment import segment_path
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.spares import SparePool
from heapline.logs import Log

log = Log("heapline.engine")


class Recovered(NamedTuple):
    """A topic as read from its directory; loaded_topic.py makes it able to serve."""

    topic: Topic
    journal: Journal
    snapshots: SnapshotStore
    time: int  # journal time of the last unit
    wall: int | None  # and its wall time
    snapshot_unit: int  # of the snapshot it was loaded from, 0 if none
    units: int  # applied after the snapshot


class Loader:
    def __init__(
        self, disk: Disk, directory: str, name: str, incarnation: int, config: TopicConfig, *, id_suffix: int,
        floor_ms: int, clock: Clock, draw: Draw, spares: SparePool | None, budget: CacheBudget,
    ) -> None:  # fmt: skip
        self.disk = disk
        self.directory = directory
        self.name = name
        self.incarnation = incarnation
        self.config = config
        self.id_suffix = id_suffix
        self._floor_ms = floor_ms
        self._clock = clock
        self.draw = draw
        self._spares = spares
        self._budget = budget

    def create(self) -> None:
        """Create the journal's directory, completely or not at all."""
        Journal.create(
            self.disk, self.directory, incarnation=self.incarnation, segment_bytes=self.config.segment_bytes,
            created_at=self._clock.wall_ms(),
        )  # fmt: skip

    def load(self) -> Recovered:
        recovered = self._load()
        settled = recovered.topic.config
        if settled.partitions > self.config.partitions:  # the catalog does not have the growth yet; see growth.py
            before, self.config = self.config, settled
            if any(getattr(settled, f) != getattr(before, f) for f in REOPENING_FIELDS):
                recovered.journal.close()
                return self._load()
        return recovered

    def _load(self) -> Recovered:
        snapshots = SnapshotStore(self.disk, f"{self.directory}/snapshots")
        for unit in reversed(snapshots.units()):
            topic = self._fresh()
            try:
                found = snapshots.load(unit)
                wall = self._clock.wall_ms()
                thaw(topic, found.state, found.blobs, wall, wall, f"{snapshots.directory} of unit {unit}")
            except SnapshotCorrupt as error:
                log.warning("snapshot damaged, not used", topic=self.name, error=str(error))
                continue
            return self._replay(topic, snapshots, unit)
        self._check_beginning()
        return self._replay(self._fresh(), snapshots, 0)

    def _check_beginning(self) -> None:
        """Raise JournalCorrupt if the journal's first units are missing, since there is no snapshot."""
        first = list_segments(self.disk, self.directory)[0]
        header = read_header(self.disk, self.directory, first)
        if header is not None and header.first_unit > 1:
            detail = f"units 1 to {header.first_unit - 1} are missing, and no intact snapshot covers them"
            raise JournalCorrupt(segment_path(self.directory, first), 0, detail)

    def _check_records(self, topic: Topic) -> None:
        """Raise JournalCorrupt if a segment with live records is missing, even below the snapshot."""
        present = set(list_segments(self.disk, self.directory))
        for segment in topic.live.segments():
            if topic.live.count(segment) and segment not in present:
                detail = f"the file is missing, with the records of {topic.live.count(segment)} messages"
                raise JournalCorrupt(segment_path(self.directory, segment), 0, detail)

    def _fresh(self) -> Topic:
        wall = self._clock.wall_ms()
        return Topic(self.name, self.config, Now(wall, wall), self.draw, self.id_suffix)

    def _replay(self, topic: Topic, snapshots: SnapshotStore, after_unit: int) -> Recovered:
        journal, units = Journal.open(
            self.disk, self.directory, incarnation=self.incarnation, segment_bytes=self.config.segment_bytes,
            after_unit=after_unit, policy=self.config.fsync, spares=self._spares, cache_budget=self._budget,
            name=self.name,
        )  # fmt: skip
        count = 0
        try:
            for unit in units:
                topic.replay(unit, self.directory)
                count += 1
                if count % 64 == 0:
                    for partition in topic.partitions:
                        partition.heap.maintain()
                        partition.delays.maintain()
                        partition.calendar.maintain()
            topic.settle()
            journal.prepare()
            self._check_records(topic)
        except (LookupError, ValueError, TypeError, ArithmeticError) as error:
            journal.close()
            if isinstance(error, HeaplineError):
                raise
            detail = f"it does not replay after unit {after_unit + count}: {error!r}"
            raise JournalCorrupt(self.directory, 0, detail) from error
        except BaseException:  # a reload is retried often and must not use up file descriptors
            journal.close()
            raise
        time = max(journal.last_time, self._floor_ms)
        return Recovered(topic, journal, snapshots, time, journal.last_wall, after_unit, count)
