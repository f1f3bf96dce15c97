"""The partitions of the spine's small world: a local queue that survives crashes, and a publisher that does not.

They know nothing of the network, of other partitions or of what the oracle makes of their leases.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence

from heapline.core.publisher import Durable, Publisher
from heapline.core.spine_messages import Place

RESEND_MS = 10

Judge = Callable[["SimPartition", Place], None]


class SimQueue:
    """The local queue of one partition; what it holds survives crashes, as replay of a journal would bring it back."""

    def __init__(self, on_lease: Callable[[Place], None]) -> None:
        self.ready: list[Place] = []
        self.leased: set[Place] = set()
        self.unanswered: set[Place] = set()  # enqueues that the producer would repeat after a crash
        self._on_lease = on_lease

    def head(self) -> Place | None:
        return self.ready[0] if self.ready else None

    def count_better_than(self, place: Place) -> int:
        return bisect_left(self.ready, place)

    def lease(self, n: int, limit: Place) -> Sequence[Place]:
        places = self.ready[: min(n, bisect_right(self.ready, limit))]
        for place in places:
            self._on_lease(place)
            self.ready.remove(place)
            self.leased.add(place)
        return places

    def add(self, places: Sequence[Place]) -> None:
        for place in places:
            self.leased.discard(place)
            self.unanswered.discard(place)
            insort(self.ready, place)


class SimPartition:
    """A partition that can crash: what its queue holds and what its publisher calls durable is all that is left."""

    def __init__(self, number: int, publisher_class: type[Publisher], judge: Judge) -> None:
        self.number, self._publisher_class = number, publisher_class
        self.queue = SimQueue(lambda place: judge(self, place))
        self.publisher = publisher_class(self.queue, Durable(), resend_ms=RESEND_MS)
        self.is_up = True
        self.enqueued: set[Place] = set()

    def enqueue(self, place: Place, now: int) -> None:
        self.enqueued.add(place)
        self.queue.unanswered.add(place)
        self.publisher.offer([place], now)

    def restart(self, now: int) -> None:
        self.publisher = self._publisher_class(self.queue, self.publisher.durable, resend_ms=RESEND_MS)
        self.is_up = True
        self.publisher.tick(now)
        self.publisher.offer(sorted(self.queue.unanswered), now)
