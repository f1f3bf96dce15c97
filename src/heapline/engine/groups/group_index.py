"""The parts of a topic's log that its consumer groups need, updated as events are applied, live and in recovery.

Holds the topic's groups and, per partition, the number of stream rows so far, the segments with records of later rows,
and the last rows themselves (the tail). Tails are not in snapshots: they start empty when the topic is opened. A topic
without groups has no tails; it pays for a count and, when timers fire, for noting the segment of their records. For log
readers, every topic also records which segments hold records of rows that commits made visible. Delivery is decided in
engine/groups; what can be deleted is decided in engine/maintenance.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from heapline.core.events import (
    EMPTY,
    I64,
    AnyEvent,
    BatchCommitted,
    Enqueued,
    Fired,
    GroupAcked,
    GroupCreated,
    GroupDead,
    GroupDeadDeleted,
    GroupDeadReplayed,
    GroupDeleted,
    GroupFailed,
    GroupMembers,
    GroupReset,
    Moved,
)
from heapline.core.groups.group import Groups
from heapline.core.groups.stream import STREAM_KINDS, StreamCount, StreamTail, stream_of
from heapline.core.live_map import SegmentPins
from heapline.core.prepared import Prepared
from heapline.core.record import PositionLayout, attempts_of

GROUP_KINDS = frozenset(
    (
        GroupCreated, GroupAcked, GroupFailed, GroupDead, GroupReset, GroupDeleted, GroupMembers, GroupDeadDeleted,
        GroupDeadReplayed,
    )
)  # fmt: skip
#: Events to pass to `Following.follow`.
FOLLOWED = STREAM_KINDS | GROUP_KINDS | {Moved}
TAIL_ROWS_MAX, TAIL_ROWS_MIN = 1 << 16, 1 << 10  # per partition; 24 bytes each
TAIL_ROWS_OF_TOPIC = 1 << 19  # unless the topic has so many partitions that each gets the minimum


class Following:
    def __init__(self, layout: PositionLayout, partitions: int) -> None:
        self.groups = Groups()
        self.counts: list[StreamCount] = []
        self.pins: list[SegmentPins] = []
        self.commits: list[SegmentPins] = []  # like `pins`, for all rows of commits, even those not due yet
        self.tails: list[StreamTail | None] = []
        self.floors: list[int] = []  # lower bound of where the journal starts, or will start after the running deletion
        self._layout = layout
        self.extend(partitions)

    def extend(self, partitions: int) -> None:
        """Grow to `partitions` partitions."""
        for _ in range(len(self.counts), partitions):
            self.counts.append(StreamCount())
            self.pins.append(SegmentPins())
            self.commits.append(SegmentPins())
            self.tails.append(None)
            self.floors.append(0)

    def follow(self, partition: int, offset: int, event: AnyEvent, rows: Any, positions: I64 | None) -> None:
        """Apply one of FOLLOWED to a partition; `offset` is the offset of its first row."""
        kind = type(event)
        if kind in GROUP_KINDS:
            self._apply(partition, offset, event)
            return
        if kind is Moved:
            if self.groups and positions is not None:
                self.groups.moved(partition, np.ascontiguousarray(rows["id"]), positions)
            return
        tail, count = self.tails[partition], self.counts[partition]
        if tail is None:  # no group reads it, so the rows themselves do not matter
            if kind is Enqueued:
                count.add(offset, len(rows) - int(np.count_nonzero(rows["due"])))
                return
            if isinstance(event, Fired) and (segment := self._only_segment(event)) is not None:
                count.add(offset, event.rows())
                self.pins[partition].add_all(offset + event.rows() - 1, segment)
                return
        found = stream_of(event, offset, rows, positions)
        if len(found.offsets):
            count.add(offset, len(found.offsets))
            if kind is not Enqueued:
                self.pins[partition].add(found.offsets, self._layout.segment(found.positions))
            if tail is not None:
                tail.append(found)

    def committed(self, partition: int, offset: int, event: BatchCommitted, prepared: Prepared) -> None:
        """Record prepared messages that are about to become visible. Call this for topics without streams, too."""
        positions = event.positions
        if positions is None:
            shares = prepared.batches.get(event.batch_id, {})
            positions = np.concatenate([EMPTY, *(shares[part].positions for part in event.parts)])
        last = offset + event.rows() - 1
        for segment in np.unique(self._layout.segment(positions)).tolist():
            self.commits[partition].add_all(last, segment)

    def needed(self, partition: int, segment: int, start: int) -> bool:
        """Return whether a row at or above `start` has its record in the segment, and not beside the row."""
        return self.pins[partition].needed(segment, start) or self.commits[partition].needed(segment, start)

    def dropped(self, segment: int) -> None:
        """Forget a deleted segment."""
        for pins in (*self.pins, *self.commits):
            pins.drop(segment)

    def _only_segment(self, event: Fired) -> int | None:
        """Return the segment of all these records if each is a new stream row and they share one segment; else None."""
        positions = event.positions
        if positions is None or event.again is not None:
            return None
        low, high = int(np.minimum.reduce(positions)), int(np.maximum.reduce(positions))  # half the cost of min()
        segment = self._layout.segment(low)
        if segment != self._layout.segment(high) or attempts_of(int(np.bitwise_or.reduce(positions))):
            return None
        return segment

    def _apply(self, partition: int, offset: int, event: AnyEvent) -> None:
        self.groups.apply(partition, event)
        if isinstance(event, GroupCreated):
            self._begin(partition, offset)
        elif not self.groups:
            self.tails = [None] * len(self.tails)

    def _begin(self, partition: int, offset: int) -> None:
        if self.tails[partition] is None:
            rows = max(TAIL_ROWS_MIN, min(TAIL_ROWS_MAX, TAIL_ROWS_OF_TOPIC // len(self.tails)))
            self.tails[partition] = StreamTail(offset, rows)

    def sealed(self, unit: int, partition: int, end: int, durable_unit: int) -> None:
        """Record that a unit is complete; the partition's rows in it end at `end`."""
        tail = self.tails[partition]
        if tail is not None:
            tail.sealed(unit, end, durable_unit)

    def opened(self, ends: list[int], now: int) -> None:
        """Finish loading, after snapshot and journal are applied, before any decision. `ends`: partitions' offsets."""
        self.groups.opened(now)
        for partition, end in enumerate(ends):
            tail = self.tails[partition]
            if tail is not None:
                tail.sealed(0, end)  # rows read from the journal are durable
            elif self.groups:
                self._begin(partition, end)

    # -- snapshots -------------------------------------------------------------------------------------------------

    def to_state(self, partition: int) -> list[Any]:
        return [self.counts[partition].to_state(), self.pins[partition].to_state()]

    def load_groups(self, state: dict[str, Any], ends: list[int]) -> None:
        self.groups = Groups.from_state(state)
        for partition, end in enumerate(ends):
            self._begin(partition, end)

    def load_state(self, partition: int, state: list[Any] | None, offset: int) -> None:
        """Load a partition's counts. If `state` is None, the topic had no streams then; count from `offset` on."""
        if state is None:
            self.counts[partition] = StreamCount(offset)
        else:
            self.counts[partition], self.pins[partition] = (
                StreamCount.from_state(state[0]),
                SegmentPins.from_state(state[1]),
            )
