"""The partitions of the spine's simulated world: a local queue that survives crashes, and a publisher that does not.

They do not know the network, other partitions, or the oracle.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence

from tests.simulation.spine_protocol.messages import Place, ToSpine
from tests.simulation.spine_protocol.publisher import Durable, Publisher

RESEND_MS = 10

Judge = Callable[["SimPartition", Place], None]


class SimQueue:
    """The local queue of one partition; its content survives crashes, as after the replay of a journal."""

    def __init__(self, on_lease: Callable[[Place], None]) -> None:
        self.ready: list[Place] = []
        self.leased: set[Place] = set()
        self.gone: set[Place] = set()
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
            insort(self.ready, place)


class SimPartition:
    """A partition that can crash: only its queue's content and its publisher's durable state survive."""

    def __init__(self, number: int, publisher_class: type[Publisher], judge: Judge) -> None:
        self.number, self._publisher_class = number, publisher_class
        self.queue = SimQueue(lambda place: judge(self, place))
        self.publisher = publisher_class(self.queue, Durable(), resend_ms=RESEND_MS)
        self.is_up = True
        self.enqueued: set[Place] = set()
        self.sync()

    def enqueue(self, place: Place, now: int) -> None:
        self.enqueued.add(place)
        self.publisher.offer([place], now)

    def sync(self) -> list[ToSpine]:
        """Write everything so far to disk; return what may be sent now."""
        queue = self.queue
        self._disk = (queue.ready[:], set(queue.leased), set(queue.gone), self.publisher.durable)
        outbox = self.publisher.outbox[:]
        self.publisher.outbox.clear()
        return outbox

    def crash(self) -> None:
        ready, leased, gone, self._durable = self._disk
        self.queue.ready, self.queue.leased, self.queue.gone = ready[:], set(leased), set(gone)
        self.publisher.outbox.clear()
        self.is_up = False

    def restart(self, now: int) -> None:
        """Make the new boot durable before sending anything. Producers repeat the unanswered enqueues."""
        self.publisher = self._publisher_class(self.queue, self._durable, resend_ms=RESEND_MS)
        self.is_up = True
        self.sync()
        self.publisher.tick(now)
        self.publisher.offer(
            sorted(self.enqueued.difference(self.queue.ready, self.queue.leased, self.queue.gone)), now
        )
