"""What a topic's consumer groups need of its log, kept up as events are applied, live and in recovery alike.

Its groups; for each partition how many rows its stream has had, which segments hold records of rows further on, and
the last rows themselves. The tails alone are in no snapshot: they begin anew when the topic is opened. A topic without
groups has none, and pays for a count and, when timers fire, for a note of which segment their records lie in.
For readers of the log it is also kept, of every topic, which segments hold records of what commits made visible.
Who reads, and what is given to whom, is decided in engine/streams; what may go is decided in engine/upkeep.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from heapline.core.events import (
    EMPTY,
    I64,
    AnyEvent,
    BatchCommitted,
    BatchPlaced,
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
from heapline.core.groups import Groups
from heapline.core.pins import SegmentPins
from heapline.core.position import PositionLayout, attempts_of
from heapline.core.prepared import Prepared
from heapline.core.stream import STREAM_KINDS, StreamCount, stream_of
from heapline.core.stream_tail import StreamTail

GROUP_KINDS = frozenset(
    (
        GroupCreated, GroupAcked, GroupFailed, GroupDead, GroupReset, GroupDeleted, GroupMembers, GroupDeadDeleted,
        GroupDeadReplayed,
    )
)  # fmt: skip
#: Events that `Following.follow` must be told of.
FOLLOWED = STREAM_KINDS | GROUP_KINDS | {Moved}
TAIL_ROWS_MAX, TAIL_ROWS_MIN = 1 << 16, 1 << 10  # of a partition; 24 bytes each
TAIL_ROWS_OF_TOPIC = 1 << 19  # unless it has so many partitions that each gets the least


class Following:
    def __init__(self, layout: PositionLayout, partitions: int) -> None:
        self.groups = Groups()
        self.counts: list[StreamCount] = []
        self.pins: list[SegmentPins] = []
        self.commits: list[SegmentPins] = []  # the same of all rows of commits: also of those that are not due yet
        self.tails: list[StreamTail | None] = []
        self.floors: list[int] = []  # the journal starts there, or will when what is being deleted is gone; at least
        self._layout = layout
        self.extend(partitions)

    def extend(self, partitions: int) -> None:
        """The topic has so many partitions now."""
        for _ in range(len(self.counts), partitions):
            self.counts.append(StreamCount())
            self.pins.append(SegmentPins())
            self.commits.append(SegmentPins())
            self.tails.append(None)
            self.floors.append(0)

    def follow(self, partition: int, offset: int, event: AnyEvent, rows: Any, positions: I64 | None) -> None:
        """One of FOLLOWED is applied to a partition; `offset` is that of its first row."""
        kind = type(event)
        if kind in GROUP_KINDS:
            self._apply(partition, offset, event)
        elif kind is Moved:
            if self.groups and positions is not None:
                self.groups.moved(partition, np.ascontiguousarray(rows["id"]), positions)
        else:
            self._add(partition, offset, event, rows, positions)

    def committed(self, partition: int, offset: int, event: BatchCommitted, prepared: Prepared) -> None:
        """Prepared messages are about to become visible; on a topic without streams this must be told of, too."""
        if isinstance(event, BatchPlaced):
            positions = event.positions
        else:
            shares = prepared.batches.get(event.batch_id, {})
            positions = np.concatenate([EMPTY, *(shares[part].positions for part in event.parts)])
        last = offset + event.rows() - 1
        for segment in np.unique(self._layout.segment(positions)).tolist():
            self.commits[partition].add_all(last, segment)

    def needed(self, partition: int, segment: int, start: int) -> bool:
        """Whether a row at or above this offset has its record in the segment, and not beside it."""
        return self.pins[partition].needed(segment, start) or self.commits[partition].needed(segment, start)

    def dropped(self, segment: int) -> None:
        """The segment is gone."""
        for pins in (*self.pins, *self.commits):
            pins.drop(segment)

    def _add(self, partition: int, offset: int, event: AnyEvent, rows: Any, positions: I64 | None) -> None:
        tail, count = self.tails[partition], self.counts[partition]
        kind = type(event)
        if tail is None:  # nobody follows: which rows they are does not matter
            if kind is Enqueued:
                count.add(offset, len(rows) - int(np.count_nonzero(rows["due"])))
                return
            if kind is Fired and (segment := self._only_segment(event.positions)) is not None:  # type: ignore[union-attr]
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

    def _only_segment(self, positions: I64) -> int | None:
        """Where all these records lie; None if not in one segment, or if a worker's retry is among them."""
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
        """A unit is complete; the partition's rows in it end there."""
        tail = self.tails[partition]
        if tail is not None:
            tail.sealed(unit, end, durable_unit)

    def opened(self, ends: list[int], now: int) -> None:
        """Snapshot and journal have been applied: before anything is decided. `ends` are the partitions' offsets."""
        self.groups.opened(now)
        for partition, end in enumerate(ends):
            tail = self.tails[partition]
            if tail is not None:
                tail.sealed(0, end)  # what was read from the journal is durable
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
        """`state` None: the snapshot is from before there were groups; its stream is counted from there on."""
        if state is None:
            self.counts[partition] = StreamCount(offset)
        else:
            self.counts[partition], self.pins[partition] = (
                StreamCount.from_state(state[0]), SegmentPins.from_state(state[1])
            )  # fmt: skip
