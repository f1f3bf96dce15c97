"""Timers in bounded slices: which partitions are checked, when, and how many rows fire at a time.

Theory of operation. Each partition has a time at which it must be checked, its *wake*. Wakes are in a heap; an entry
whose wake has changed stays there and is skipped later, so a turn costs in proportion to the partitions that changed.
Partitions whose wake has passed are in a *line*. The first one fires a bounded number of rows and moves to the end of
the line, so that many due timers in one partition do not delay the others.

*Smoothing.* An enqueue or an ack waits for the unit that it is written in and for the one before it, so what matters is
how many rows timers add to a unit, not to a turn. So there is an allowance per unit: `fire_slice` rows, or a quarter of
that (but at least ALWAYS_ROWS) while clients are active. Then timers also never start a unit while another is being
written: they are added to units that are written anyway, or use the disk when it is idle.
A pop may exceed the allowance a little, because it should find a message if any is due.

Rows measure effort: fired timers are moved as columns, but ending leases and TTLs are processed one by one.
This module does not know what a tick decides, nor the clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from heapline.core.events import AnyEvent, Fired
from heapline.core.latency import Latency
from heapline.core.now import Now
from heapline.core.partition import ROW_BY_ROW, Partition
from heapline.engine.topic import Topic

INF = float("inf")
IN_LINE = -1.0  # the wake of a partition that is in the line
QUANTUM_ROWS = 1024  # rows that one partition fires before the next one's turn
LOOK_ROWS = 16  # rows that the check of a partition counts as
ALWAYS_ROWS = 256  # few enough to delay no client
POP_ROWS = 512  # rows that may fire for pops beyond the allowance
ASKING_MS = 100  # clients count as active for this long after a call

Emit = Callable[[Partition, AnyEvent, Now], None]


class Wakes:
    """The wake of each partition, and the line of partitions whose wake has passed."""

    def __init__(self, count: int) -> None:
        self.line: deque[int] = deque(range(count))
        self._wakes = [IN_LINE] * count
        self._heap: list[tuple[float, int]] = []

    def grow(self, count: int) -> None:
        """Add partitions up to `count`; new ones go into the line."""
        added = range(len(self._wakes), count)
        self._wakes += [IN_LINE] * len(added)
        self.line.extend(added)

    def plan(self, number: int, wake: float) -> None:
        """Set the wake of a partition. A partition in the line stays there."""
        known = self._wakes[number]
        if known in (IN_LINE, wake):
            return
        self._wakes[number] = wake
        if wake != INF:
            heapq.heappush(self._heap, (wake, number))
            if len(self._heap) > 2 * len(self._wakes) + 64:  # most entries are stale, and may be hours ahead
                self._heap = [(wake, n) for n, wake in enumerate(self._wakes) if wake not in (IN_LINE, INF)]
                heapq.heapify(self._heap)

    def plan_by(self, number: int, wake: float) -> None:
        """Set the wake of a partition unless it has an earlier one."""
        if wake < self._wakes[number]:
            self.plan(number, wake)

    def come(self, now: float) -> None:
        """Move partitions whose wake has passed into the line."""
        while (wake := self.next()) <= now and wake != INF:
            number = heapq.heappop(self._heap)[1]
            self._wakes[number] = IN_LINE
            self.line.append(number)

    def leave(self) -> int:
        """Remove the first partition from the line and return its number; it has no wake until `plan`."""
        number = self.line.popleft()
        self._wakes[number] = INF
        return number

    def next(self) -> float:
        """Return the earliest wake outside the line."""
        heap = self._heap
        while heap and self._wakes[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else INF


class Firing:
    """Fires due timers of a topic, within the allowance of its open unit."""

    def __init__(self, topic: Topic, fire_slice: int, late: Latency | None = None) -> None:
        self.wakes = Wakes(len(topic.partitions))
        self._topic = topic
        self._slice = fire_slice
        self._late = late or Latency()  # time from due to fired
        self._unit = 0
        self._unit_rows = 0  # rows fired into the open unit
        self.asked_at = -ASKING_MS  # steady ms of the last call of a client

    def allowance(self, now: Now, unit: int, is_writing: bool, wanted: int) -> int:
        """Return the rows that may fire in this turn. `unit` is the open one, `wanted` the messages that pops want."""
        if unit != self._unit:
            self._unit, self._unit_rows = unit, 0
        allowed = self._slice
        if now.steady - self.asked_at < ASKING_MS:
            allowed = max(min(allowed, ALWAYS_ROWS), allowed // 4)
            if is_writing and not wanted and not self._topic.open_frames:
                allowed = 0  # a pop starts a unit anyway, and should find due messages
        return max(allowed - self._unit_rows, min(wanted, POP_ROWS, self._slice))

    def fire(self, now: Now, allowance: int, emit: Emit) -> int:
        """Fire about `allowance` rows, partition by partition. Return the rows fired, weighted by effort."""
        line, fired, looks = self.wakes.line, 0, 0
        while line and fired + looks * LOOK_ROWS < allowance:
            partition = self._topic.partitions[line[0]]
            events = partition.decide_tick(now, min(QUANTUM_ROWS, allowance - fired), self._topic.take_seq)
            for event in events:
                if isinstance(event, Fired):
                    fired += event.rows()
                    wall = now.wall if event.wall else now.steady
                    self._late.add_many(wall - partition.fired_dues)
                else:
                    fired += event.rows() * ROW_BY_ROW
                emit(partition, event, now)
            if events or partition.next_wake_in(now) == 0:
                line.rotate(-1)
                looks += 1 if events else 2  # one check skips a bounded number of stale entries
            else:
                self._topic.changed.add(self.wakes.leave())
                looks += 1
        self._unit_rows += fired  # without the checks: a unit with no rows would never end
        return fired
