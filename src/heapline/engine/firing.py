"""What time brings about, in bounded slices: which partitions are looked at, when, and how much of it at a time.

Theory of operation. Each partition has a time at which it wants to be looked at, its *wake*. Wakes stand in a heap
whose entries are not removed when a wake changes, only passed over, so a turn costs by the partitions that changed.
Partitions whose time has come stand in a *line*; the first one fires a bounded piece and goes to the line's end, so
that a herd in one of them does not keep the others waiting.

*Smoothing.* An enqueue or an ack waits for the unit that it goes into and for the one before it, so what counts is how
much a herd adds to a unit, not how much it does in a turn. So there is an allowance per unit: `fire_slice` rows, and
a quarter of that (but not fewer than delay nobody) while somebody is asking. Then the herd also never makes a unit of
its own behind one that is being written: it rides on units that are written anyway, or takes the disk when that has
nothing else to do.
A pop may have a little more than the allowance, for it should find something if anything is due.

Rows stand for effort: fired timers are moved in columns, but leases and lives that end are gone through one by one.
This file does not know what a tick decides, nor the clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from heapline.core.events import AnyEvent, Fired, FiredCount, FiredInTurn
from heapline.core.partition import ROW_BY_ROW, Partition
from heapline.engine.latency import Latency
from heapline.engine.topic import Topic
from heapline.model import Now

INF = float("inf")
IN_LINE = -1.0  # the wake of a partition whose time has come
QUANTUM_ROWS = 1024  # what one partition fires before the next one's turn
LOOK_ROWS = 16  # what a look at a partition counts as
ALWAYS_ROWS = 256  # so few of them delay nobody
POP_ROWS = 512  # what pops may have fired for them beyond the allowance
ASKING_MS = 100  # after a call somebody counts as asking for so long: clients come back

Emit = Callable[[Partition, AnyEvent, Now], None]


class Wakes:
    """When each partition wants to be looked at, and the line of those whose time has come."""

    def __init__(self, count: int) -> None:
        self.line: deque[int] = deque(range(count))
        self._wakes = [IN_LINE] * count
        self._heap: list[tuple[float, int]] = []

    def grow(self, count: int) -> None:
        """There are so many partitions now; new ones are looked at first."""
        added = range(len(self._wakes), count)
        self._wakes += [IN_LINE] * len(added)
        self.line.extend(added)

    def plan(self, number: int, wake: float) -> None:
        """Look at a partition then, and not when it was planned before; one in the line stays there."""
        known = self._wakes[number]
        if known in (IN_LINE, wake):
            return
        self._wakes[number] = wake
        if wake != INF:
            heapq.heappush(self._heap, (wake, number))
            if len(self._heap) > 2 * len(self._wakes) + 64:  # most are out of date: they may lie hours ahead
                self._heap = [(wake, n) for n, wake in enumerate(self._wakes) if wake not in (IN_LINE, INF)]
                heapq.heapify(self._heap)

    def come(self, now: float) -> None:
        """Let those whose time has come join the line."""
        while (wake := self.next()) <= now and wake != INF:
            number = heapq.heappop(self._heap)[1]
            self._wakes[number] = IN_LINE
            self.line.append(number)

    def leave(self) -> int:
        """The first of the line has nothing more to do: it waits to be planned again."""
        number = self.line.popleft()
        self._wakes[number] = INF
        return number

    def next(self) -> float:
        """The earliest wake outside the line."""
        heap = self._heap
        while heap and self._wakes[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else INF


class Firing:
    """Fires what is due in a topic, within the allowance of its open unit."""

    def __init__(self, topic: Topic, fire_slice: int, late: Latency | None = None) -> None:
        self.wakes = Wakes(len(topic.partitions))
        self._topic = topic
        self._slice = fire_slice
        self._late = late or Latency()  # from being due to firing
        self._unit = 0
        self._unit_rows = 0  # that the open unit has had
        self._asked_at = -ASKING_MS

    def is_due(self, now: Now) -> bool:
        self.wakes.come(now.steady)
        return bool(self.wakes.line)

    def note_asking(self, now: Now) -> None:
        self._asked_at = now.steady

    def allowance(self, now: Now, unit: int, is_writing: bool, wanted: int) -> int:
        """Rows that may be fired in this turn; `unit` is the open one, `wanted` the messages that pops ask for."""
        if unit != self._unit:
            self._unit, self._unit_rows = unit, 0
        allowed = self._slice
        if now.steady - self._asked_at < ASKING_MS:
            allowed = max(min(allowed, ALWAYS_ROWS), allowed // 4)
            if is_writing and not wanted and not self._topic.has_open_unit:
                allowed = 0  # with a pop there will be a unit anyway, and it should see what is due
        return max(allowed - self._unit_rows, min(wanted, POP_ROWS, self._slice))

    def fire(self, now: Now, allowance: int, emit: Emit) -> int:
        """Fire about so many rows, the partitions in turn; rows fired, by effort."""
        line, fired, looks = self.wakes.line, 0, 0
        while line and fired + looks * LOOK_ROWS < allowance:
            partition = self._topic.partitions[line[0]]
            events = partition.decide_tick(now, min(QUANTUM_ROWS, allowance - fired), self._topic.take_seq)
            for event in events:
                if isinstance(event, Fired | FiredInTurn | FiredCount):
                    fired += event.rows()
                    wall = now.wall if event.wall else now.steady
                    self._late.add_many(wall - partition.fired_dues)
                else:
                    fired += event.rows() * ROW_BY_ROW
                emit(partition, event, now)
            if events or partition.next_wake_in(now) == 0:
                line.rotate(-1)
                looks += 1 if events else 2  # left-over entries were passed over, as many as one look may
            else:
                self._topic.changed.add(self.wakes.leave())
                looks += 1
        self._unit_rows += fired  # not the looks: a unit that nothing goes into would never end
        return fired
