"""Spine: the coordinator that decides which partition serves a pop, so that order holds across the topic.

The promise. A topic has a bound K and P partitions. Whenever a message is leased, fewer than K eligible messages of the
topic are better than it at that time; K = 1 is exact order. The publishers decide what is eligible (a held message is
not eligible yet), and throttled partitions are excluded. Messages between spine and partitions may be lost, duplicated,
late and out of order; spine and partitions may crash.

Theory of operation. For each partition q the spine keeps pub(q), the head in q's last acknowledged publication. For a
pop it chooses the partition p with the best pub and requests a lease of p's best messages *no worse than the limit L*,
the best pub among the others. One request is in flight at a time. Why the bound holds when p leases m:

1. Nothing eligible in p is better than m: p leases its own best.
2. The request is still in flight at the spine. p executes a request at most once, and refuses one when it has seen a
   later one (or when it has restarted since, or serves a newer spine). The spine starts a new one only when the last
   was answered. An answer without leases confirms a cancellation. No clock ends a request, because p might be about to
   lease.
3. So L ≤ pub(q) for every other q. This was true when L was computed, and while the request is in flight the spine
   acknowledges nothing better than L from another partition (`_may_acknowledge`); later publications wait in `seen`.
4. pub(q) is q's last acknowledged head or one that q sent since. By the publisher's promise P1 (publisher.py) at most b
   eligible messages of q are better than the worst of these, hence better than pub(q), than L, than m.
5. So the rank of m is at most 1 + (P − 1)·b, and b = (K − 1) // (P − 1) makes that at most K.

The following rules keep these five statements true while things change.

- *A new spine* (a higher epoch; the shell draws it from something durable) opens its epoch at every partition,
  throttled or not, and acknowledges nothing until all have answered. From then on no request of an older spine can be
  executed (2). Before that, the old spine may still be served, and an acknowledgment would move heads that it relies on
  (4). For the same reason a publisher accepts a *larger* budget only with an acknowledgment.
- *More partitions* (growth, the end of a throttle) mean a smaller b. The new budget has a version, and a publication
  states which version its sender keeps. The new partition counts (in ranks, limits and selections: it is *serving*)
  once all keep the new version and no request is in flight, because L was computed without it. Until then the others
  continue to serve: a smaller budget does no harm.
- *Fewer partitions* (a throttle) mean a larger b. First the partition stops serving, when no request is in flight (a
  request at that partition would see P others with a budget for P − 1). Then the budget is raised.
- *Another K* is another b: a smaller K is in force (`bound`) once all keep its budget, a larger K immediately.
- *Strategies other than best_first* take partitions in turn and set no limit: the bound does not hold, and stats say
  so.
- *An unreachable partition* is treated as slow: if its head is the best, or it has the request, pops wait. The only
  safe alternative is to fence it, which is up to the owner of the partitions.
- *A partition that restarts* continues its numbering; publisher.py describes what it must keep on disk.
- *The spine keeps nothing on disk*: after a crash a new one starts. Messages that the old one leased and did not
  deliver are redelivered when those leases expire.

In one process, publication and acknowledgment are memory writes in the same turn. This module does not know how
messages travel, the time, or what a message holds. Answers name places; the shell fetches the records by id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from heapline.contract.errors import BadRequest
from heapline.core.spine.index import SpineIndex
from heapline.core.spine.strategy import Strategy, rotation
from tests.simulation.spine_protocol.messages import (
    NOTHING,
    Acknowledge,
    Cancel,
    Fenced,
    LeaseAnswer,
    LeaseRequest,
    OpenEpoch,
    Place,
    Publish,
    Rebudget,
    ToPartition,
    ToSpine,
)


class PartitionStats(NamedTuple):
    candidates: int
    updates: int
    selections: int
    serving: bool
    throttled: str | None


class SpineStats(NamedTuple):
    """Spine counters. `refusals` are requests that leased nothing; `bound` is the K in force, or None."""

    partitions: int
    available: int
    candidates: int
    updates: int
    selections: int
    refusals: int
    bound: int | None
    per_partition: dict[int, PartitionStats]


def budget_for(k: int, partitions: int) -> int:
    """Return how many messages better than its head a partition may hold if ranks must stay within K."""
    return (k - 1) // (partitions - 1) if partitions > 1 else k - 1


def _check_bound(k: int) -> None:
    if k < 1:
        raise BadRequest(f"the bound K is at least 1, which is exact order, not {k}")


class Delivery(NamedTuple):
    """The result of a pop. A pop that was withdrawn too late still gets it: release the leases."""

    pop: int
    partition: int
    request: int
    leased: tuple[Place, ...]


@dataclass(slots=True)
class _Member:
    throttled: str | None = None
    serving: bool = False
    #: The newest publication; `acknowledged` is the number of the publication that supplied pub(q).
    seen: Publish | None = None
    acknowledged: int = 0
    kept: int = 0
    updates: int = 0
    selections: int = 0


@dataclass(slots=True)
class _Asked:
    """The request in flight."""

    pop: int
    partition: int
    message: LeaseRequest
    asked_at: int
    cancelled: bool = False


class Spine:
    def __init__(
        self,
        epoch: int,
        partitions: Iterable[int],
        k: int,
        *,
        at: int,
        throttled: Mapping[int, str] | None = None,
        strategy: Strategy = "best_first",
        weights: Mapping[int, float] | None = None,
        resend_ms: int = 200,
        cancel_ms: int = 2000,
    ) -> None:
        """Create a spine. `partitions` includes throttled ones, because each may still serve an older spine."""
        if epoch < 1:
            raise BadRequest(f"an epoch is at least 1, not {epoch}")
        _check_bound(k)
        self.epoch, self._k = epoch, k
        #: The K in force. A larger K is in force immediately, a smaller one when all partitions keep its budget.
        self.bound = k
        self._rotation = rotation(strategy, weights)
        self.outbox: list[tuple[int, ToPartition]] = []
        self.deliveries: list[Delivery] = []
        #: The epoch of the spine that replaced this one, which is then inactive.
        self.deposed_by: int | None = None
        self._resend_ms, self._cancel_ms, self._resend_at = resend_ms, cancel_ms, at + resend_ms
        reasons = throttled or {}
        self._members = {partition: _Member(reasons.get(partition)) for partition in partitions}
        self._index = SpineIndex()
        self._unfenced = set(self._members)
        self._unacknowledged = dict[int, _Member]()
        self._is_settled = False  # whether exactly the partitions that should serve do
        self._version, self._budget, self._announced, self._announced_k = 0, 0, frozenset[int](), k
        self._asked: _Asked | None = None
        self._request = self._pop = 0
        self._pops: deque[tuple[int, int]] = deque()
        self._refusals = 0
        self._announce()
        for partition in self._members:
            self._index.add(partition)
            self._index.set_throttled(partition, "not serving yet")
            self._send_open(partition)

    # --- calls of consumers and operators ---

    def pop(self, n: int, at: int) -> int:
        """Queue a pop for up to n messages and return its number, which its Delivery repeats."""
        if n < 1:
            raise BadRequest(f"a pop must ask for at least one message, got {n}")
        self._pop += 1
        self._pops.append((self._pop, n))
        self._pump(at)
        return self._pop

    def withdraw(self, pop: int, at: int) -> None:
        """Withdraw a pop whose caller no longer waits. If it was already requested, cancel the request."""
        self._pops = deque(waiting for waiting in self._pops if waiting[0] != pop)
        if self._asked is not None and self._asked.pop == pop:
            self._cancel()
        self._pump(at)

    def add(self, partition: int, at: int) -> None:
        if partition in self._members:
            raise BadRequest(f"partition {partition} is known already")
        self._members[partition] = _Member()
        self._index.add(partition)
        self._index.set_throttled(partition, "not serving yet")
        self._send_open(partition)
        self._is_settled = False
        self._pump(at)

    def throttle(self, partition: int, reason: str, at: int) -> None:
        """Exclude a partition from the next request on. No call fails; enqueues to it continue."""
        self._member(partition).throttled = reason
        self._is_settled = False
        self._pump(at)

    def unthrottle(self, partition: int, at: int) -> None:
        """Include a partition again, once all partitions keep the budget for one partition more."""
        self._member(partition).throttled = None
        self._is_settled = False
        self._pump(at)

    def set_bound(self, k: int, at: int) -> None:
        _check_bound(k)
        self._k, self.bound = k, max(k, self.bound)
        self._is_settled = False
        self._pump(at)

    def _member(self, partition: int) -> _Member:
        if partition not in self._members:
            raise BadRequest(f"partition {partition} is not one of this topic's {len(self._members)}")
        return self._members[partition]

    @property
    def serving(self) -> frozenset[int]:
        """The partitions that count in ranks, limits and selections."""
        return frozenset(partition for partition, member in self._members.items() if member.serving)

    @property
    def waiting(self) -> int:
        return len(self._pops)

    def stats(self) -> SpineStats:
        index = self._index.partitions
        per_partition = {
            p: PartitionStats(len(index[p].entries), m.updates, m.selections, m.serving, m.throttled)
            for p, m in self._members.items()
        }
        return SpineStats(
            len(self._members),
            len(self.serving),
            self._index.candidate_count,
            sum(member.updates for member in self._members.values()),
            sum(member.selections for member in self._members.values()),
            self._refusals,
            self.bound if self._rotation is None else None,
            per_partition,
        )

    # --- time ---

    def next_deadline(self) -> int:
        return self._resend_at

    def tick(self, at: int) -> None:
        """Resend everything that has not been answered."""
        if at < self._resend_at or self.deposed_by is not None:
            return
        self._resend_at = at + self._resend_ms
        for partition, member in self._members.items():
            if member.seen is None:
                self._send_open(partition)
            elif self._awaits_budget(member):
                self._send_budget(partition, member)
        if self._asked is not None:
            self._ask_again(self._asked, at)

    def _ask_again(self, asked: _Asked, at: int) -> None:
        if asked.cancelled or at >= asked.asked_at + self._cancel_ms:
            self._cancel()
        else:
            self.outbox.append((asked.partition, asked.message))

    def _cancel(self) -> None:
        if self._asked is not None:
            self._asked.cancelled = True
            self.outbox.append((self._asked.partition, Cancel(self.epoch, self._asked.message.number)))

    # --- messages from partitions ---

    def receive(self, partition: int, message: ToSpine, at: int) -> None:
        if isinstance(message, Fenced):
            if message.epoch > self.epoch:
                self.deposed_by, self._asked = message.epoch, None
                self._pops.clear()
            return
        publication = message.publication if isinstance(message, LeaseAnswer) else message
        if publication.epoch != self.epoch or self.deposed_by is not None or partition not in self._members:
            return
        if isinstance(message, LeaseAnswer):
            self._receive_answer(partition, message)
        self._note(partition, publication)
        self._pump(at)

    def _receive_answer(self, partition: int, answer: LeaseAnswer) -> None:
        asked = self._asked
        if asked is None or (asked.partition, asked.message.number) != (partition, answer.request):
            return  # duplicate: it was received before
        self._asked = None
        if not answer.leased:
            self._refusals += 1
            return
        self._members[partition].selections += len(answer.leased)
        if self._pops and self._pops[0][0] == asked.pop:
            self._pops.popleft()
        self.deliveries.append(Delivery(asked.pop, partition, answer.request, answer.leased))

    def _note(self, partition: int, publication: Publish) -> None:
        member = self._members[partition]
        self._unfenced.discard(partition)
        member.kept = max(member.kept, publication.version)
        if member.seen is None or publication.number > member.seen.number:
            member.seen = publication
            member.updates += 1
            self._unacknowledged[partition] = member
        elif publication.number == member.acknowledged:
            self._send_acknowledge(partition, member)  # the last acknowledgment was lost, or is late

    # --- protocol steps ---

    def _pump(self, at: int) -> None:
        """Do everything that the rules allow now: acknowledge, change which partitions serve, send a request."""
        if self.deposed_by is not None or not self._is_fenced():
            return
        for partition, member in list(self._unacknowledged.items()):
            assert member.seen is not None
            if self._may_acknowledge(partition, member.seen.head):
                self._acknowledge(partition, member, member.seen)
        if self._asked is None:
            if not self._is_settled:
                self._reform()
            self._ask(at)

    def _is_fenced(self) -> bool:
        """Whether every partition has opened this epoch, so that an older spine cannot be served."""
        return not self._unfenced

    def _may_acknowledge(self, partition: int, head: Place) -> bool:
        asked = self._asked
        return (
            asked is None
            or self._rotation is not None
            or partition == asked.partition
            or not self._members[partition].serving
            or head >= asked.message.limit
        )

    def _acknowledge(self, partition: int, member: _Member, seen: Publish) -> None:
        del self._unacknowledged[partition]
        member.acknowledged = seen.number
        self._index.update(partition, [seen.head] if seen.head != NOTHING else [])
        self._send_acknowledge(partition, member)

    def _ask(self, at: int) -> None:
        partition = self._choose() if self._pops else None
        if partition is None:
            return
        pop, n = self._pops[0]
        member = self._members[partition]
        assert member.seen is not None
        self._request += 1
        limit = self._limit(partition)
        message = LeaseRequest(self.epoch, member.seen.boot, self._request, n, limit, member.acknowledged)
        self._asked = _Asked(pop, partition, message, at)
        self.outbox.append((partition, message))

    def _choose(self) -> int | None:
        """Choose the partition to request from: the best head or, if the strategy has no bound, the next in turn."""
        if self._rotation is None:
            best = self._index.best()
            return None if best is None else best[0]
        showing = {partition: 1 for partition in self._index.available if self._index.shown(partition).entries}
        turn = self._rotation.plan(showing, 1).order
        return turn[0] if turn else None

    def _limit(self, partition: int) -> Place:
        return self._index.limit(partition) or NOTHING if self._rotation is None else NOTHING

    # --- which partitions serve, and under which budget ---

    def _reform(self) -> None:
        """Change which partitions serve. Only called when no request is in flight."""
        for partition, member in self._members.items():
            if member.serving and member.throttled is not None:
                self._set_serving(partition, member, False)
        if self._wanted() != self._announced or self._k != self._announced_k:
            self._announce()
            for partition, member in self._members.items():
                if member.seen is not None:
                    self._send_budget(partition, member)
        if self._all_keep_budget():
            for partition in self._announced:
                if not self._members[partition].serving:
                    self._set_serving(partition, self._members[partition], True)
            self.bound, self._is_settled = self._k, True

    def _wanted(self) -> frozenset[int]:
        return frozenset(partition for partition, member in self._members.items() if member.throttled is None)

    def _announce(self) -> None:
        self._announced, self._announced_k = self._wanted(), self._k
        self._version += 1
        self._budget = budget_for(self._k, len(self._announced))

    def _all_keep_budget(self) -> bool:
        return all(self._members[partition].kept >= self._version for partition in self._announced)

    def _awaits_budget(self, member: _Member) -> bool:
        return self._is_fenced() and member.kept < self._version

    def _set_serving(self, partition: int, member: _Member, serving: bool) -> None:
        member.serving = serving
        self._index.set_throttled(partition, None if serving else member.throttled)

    # --- messages ---

    def _send_open(self, partition: int) -> None:
        self.outbox.append((partition, OpenEpoch(self.epoch, self._version, self._budget)))

    def _send_acknowledge(self, partition: int, member: _Member) -> None:
        message = Acknowledge(self.epoch, member.acknowledged, self._version, self._budget)
        self.outbox.append((partition, message))

    def _send_budget(self, partition: int, member: _Member) -> None:
        assert member.seen is not None
        message = Rebudget(self.epoch, member.seen.boot, self._version, self._budget)
        self.outbox.append((partition, message))
