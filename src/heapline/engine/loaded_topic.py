"""What exists only while a topic is loaded: its state, its log, and the parts that work on both.

Every load creates another one. After a failed write the runner drops it and loads the topic again. Totals, the clock
and the waiting calls belong to the runner, because they outlive a load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heapline.core.events import AnyEvent
from heapline.core.now import Now
from heapline.core.partition import Decision, Partition
from heapline.core.rate import TokenBucket
from heapline.engine.admission import Admission
from heapline.engine.committer import GroupCommitter
from heapline.engine.counters import Counters
from heapline.engine.delivery import Delivery
from heapline.engine.io import Io
from heapline.engine.loader import Recovered
from heapline.engine.timers import Firing


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
        self.snapshots = recovered.snapshots
        self._counters = counters
        self.topic.opened(now())
        self.committer = GroupCommitter(self.topic, self.journal, io, now, failed, counters.commit)
        self.admission = Admission(self.topic, self.journal)
        self.delivery = Delivery(self.topic, self.journal, rate)
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
        self._bytes_at_snapshot = self.committer.bytes_written

    @property
    def bytes_since_snapshot(self) -> int:
        return self.committer.bytes_written - self._bytes_at_snapshot

    def add_totals(self) -> None:
        """Add what this load counted to the topic's totals. Called once, when another load replaces it."""
        counters = self._counters
        counters.commits += self.committer.commits
        counters.bytes_written += self.committer.bytes_written
        counters.enqueued += self.admission.enqueued
        counters.duplicates += self.admission.duplicates
        counters.leased += self.delivery.leased
