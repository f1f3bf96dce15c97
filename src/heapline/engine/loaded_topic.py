"""A loaded topic: how it is read from its directory, and what exists only while it is loaded.

`Loader` reads the newest valid snapshot, then the rest of the journal. It blocks and runs in an I/O thread. A topic is
opened, and reloaded after a failed write, in the same way.

`LoadedTopic` has the topic's state, its log, and the parts that work on both. Every load creates another one; after a
failed write the runner drops it and loads the topic again. Totals, the clock and the waiting calls belong to the
runner, because they outlive a load.

`RunningTopic` is the runner as its parts see it: turns, pop replies, maintenance and groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from heapline.clock import Clock, SteadyClock
from heapline.contract.config import REOPENING_FIELDS, BrokerConfig, TopicConfig
from heapline.contract.errors import HeaplineError, SnapshotCorrupt
from heapline.contract.message import TopicAudit
from heapline.core.events import I64, AnyEvent
from heapline.core.now import Now
from heapline.core.partition import Decision, Draw, Partition
from heapline.core.rate import TokenBucket
from heapline.engine.admission import Admission
from heapline.engine.committer import GroupCommitter
from heapline.engine.counters import Counters
from heapline.engine.delivery import Delivery, PopCall
from heapline.engine.io import Io
from heapline.engine.last_audit import read_audit
from heapline.engine.recovery import apply_units, check_records, newest_state
from heapline.engine.timers import Firing
from heapline.engine.topic import Topic
from heapline.journal.disk import Disk
from heapline.journal.journal import Journal
from heapline.journal.log import TopicLog
from heapline.journal.records import CacheBudget, Records
from heapline.journal.snapshot import SnapshotStore
from heapline.journal.spares import SparePool
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks

log = Log("heapline.engine")
T = TypeVar("T")


class Recovered(NamedTuple):
    """A topic as read from its directory; loaded_topic.py makes it able to serve."""

    topic: Topic
    journal: TopicLog
    time: int  # journal time of the last unit
    wall: int | None  # and its wall time
    snapshot_unit: int  # of the snapshot it was loaded from, 0 if none
    units: int  # applied after the snapshot
    audit: TopicAudit | None


class Loader(msgspec.Struct, eq=False):
    disk: Disk
    directory: str
    name: str
    incarnation: int
    config: TopicConfig
    id_suffix: int
    floor_ms: int
    clock: Clock
    draw: Draw
    spares: SparePool | None
    budget: CacheBudget

    def create(self) -> None:
        """Create the journal's directory, completely or not at all."""
        Journal.create(
            self.disk,
            self.directory,
            incarnation=self.incarnation,
            segment_bytes=self.config.segment_bytes,
            created_at=self.clock.wall_ms(),
        )

    def load(self) -> Recovered:
        recovered = self._load()
        settled = recovered.topic.config
        if settled.partitions > self.config.partitions:  # the catalog does not have the growth yet; see topic_growth.py
            before, self.config = self.config, settled
            if any(getattr(settled, f) != getattr(before, f) for f in REOPENING_FIELDS):
                recovered.journal.close()
                return self._load()
        return recovered

    def _load(self) -> Recovered:
        def warn(error: SnapshotCorrupt) -> None:
            log.warning("snapshot damaged, not used", topic=self.name, error=str(error))

        snapshots = SnapshotStore(self.disk, f"{self.directory}/snapshots")
        topic, unit = newest_state(self.disk, self.directory, snapshots, self._fresh, self.clock.wall_ms(), warn)
        return self._replay(topic, snapshots, unit)

    def _fresh(self) -> Topic:
        wall = self.clock.wall_ms()
        return Topic(self.name, self.config, Now(wall, wall), self.draw, self.id_suffix)

    def _replay(self, topic: Topic, snapshots: SnapshotStore, after_unit: int) -> Recovered:
        journal, units = Journal.open(
            self.disk,
            self.directory,
            incarnation=self.incarnation,
            segment_bytes=self.config.segment_bytes,
            after_unit=after_unit,
            snapshots=snapshots,
            policy=self.config.fsync,
            spares=self.spares,
            cache_budget=self.budget,
            name=self.name,
        )
        try:
            count = apply_units(topic, units, self.directory, after_unit)
            journal.prepare()
            check_records(topic, self.disk, self.directory)
        except BaseException:  # a reload is retried often and must not use up file descriptors
            journal.close()
            raise
        time = max(journal.last_time, self.floor_ms)
        audit = read_audit(self.disk, self.directory)
        return Recovered(topic, journal, time, journal.last_wall, after_unit, count, audit)


class LoadedTopic:
    def __init__(
        self,
        recovered: Recovered,
        io: Io,
        counters: Counters,
        now: Callable[[], Now],
        failed: Callable[[BaseException], None],
        *,
        fire_slice: int,
        rate: TokenBucket | None,
    ) -> None:
        self.topic = recovered.topic
        self.journal = recovered.journal
        self._counters = counters
        self.topic.opened(now())
        self.committer = GroupCommitter(self.topic, self.journal, io, now, failed, counters)
        self.admission = Admission(self.topic, self.journal, counters)
        self.delivery = Delivery(self.topic, self.journal, counters, rate)
        self.delivery.retune(now())
        self.firing = Firing(self.topic, fire_slice, counters.fired)
        self.note_snapshot(recovered.snapshot_unit)

    def emit(self, partition: Partition, event: AnyEvent, now: Now) -> None:
        """Apply an event, add it to the open unit, and count it."""
        self.topic.emit(self.journal, partition, event, now)
        self._counters.count(event)

    def emit_decision(self, partition: Partition, decision: Decision, now: Now) -> Sequence[int]:
        """Emit the events of a decision. Return the ids whose lease was lost."""
        for event in decision.events:
            self.emit(partition, event, now)
        return decision.lost

    def complete_groups(self, now: Now) -> None:
        """Record the missing parts of groups, after the topic grew or a crash interrupted their creation."""
        if self.topic.groups:
            for number, event in self.topic.groups.decide_rest(len(self.topic.partitions), now.steady):
                self.emit(self.topic.partitions[number], event, now)

    def grew(self) -> None:
        """Adjust to a topic that got more partitions."""
        self.firing.wakes.grow(len(self.topic.partitions))
        self.admission.measure()

    def note_snapshot(self, unit: int) -> None:
        self.snapshot_unit = unit
        self._bytes_at_snapshot = self._counters.bytes_written

    @property
    def bytes_since_snapshot(self) -> int:
        return self._counters.bytes_written - self._bytes_at_snapshot


class RunningTopic(Protocol):
    """A topic that serves calls. `TopicRunner` implements and documents it."""

    name: str
    loader: Loader
    io: Io
    config: BrokerConfig
    counters: Counters
    steady: SteadyClock
    tasks: OwnedTasks
    loaded: LoadedTopic
    failure: HeaplineError | None
    is_closed: bool
    is_suspended: bool
    plan: Callable[[], None]  # schedules a turn

    @property
    def is_serving(self) -> bool: ...
    def wall_ms(self) -> int: ...
    def check(self) -> None: ...
    def poison(self, cause: BaseException) -> None: ...
    async def call(self, decide: Callable[[Now], T]) -> T: ...
    def later(self, decide: Callable[[Now], None]) -> None: ...
    def pop_again(self, call: PopCall) -> None: ...
    def load(self, positions: I64) -> asyncio.Future[Records]: ...
    def read(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]: ...
    async def reads_done(self) -> None: ...
