"""Publisher: the partition's side of the spine protocol. `spine.py` says what it is for and why the bound holds.

What it decides: when the partition's head is published, which messages are held back until the spine knows better,
and which requests for leases are still good. What it does not know: what a message is, how the queue keeps order,
where messages to the spine travel, and what time it is.

The promise, P1. At every moment at most `budget` eligible messages of this partition are better than *any* head that
the spine may be reckoning with: the last one it is known to have acknowledged, and every one sent since (its
acknowledgement may be on the way). So they are counted against the worst of these, `_worst()`. Four things follow.

- Sending a head can never break it. What is sent is the best of all eligible and held messages: nothing is better.
- Losing a message (lease, cancel, expiry, purge) can never break it. Only what becomes eligible can: `offer`.
- A smaller budget can be confirmed at once, with a publication. Perhaps more than that many messages are better than
  some older head; but none is better than the head that goes with the confirmation, and the spine, which has the one
  with the other, has no use for older heads from then on. Meanwhile nothing is let in: the full count is over.
- A message no better than `_worst()` costs nothing. A better one costs one of the budget; if that is used up it is
  *held*: not eligible, not leased, its enqueue (timer, nack, release, …) not answered. The head that was published
  for its sake counts it in, so that the acknowledgement sets `_worst()` to no worse than it, and lets it in.

Held messages are nowhere on disk. Whoever owns the queue records the event that makes a message eligible when `add`
is called, not before; so what replay finds eligible after a crash is what was eligible before it.

What is durable is `Durable`: the epoch (an older spine stays fenced), the boot count (numbers go on; requests that
were made to an earlier boot are refused, which is why refusals and empty answers need no record) and the last leases
with the request they answer (in the engine: fields of the Leased event). Without those the bound would hold too, but
a consumer would have to wait until leases that it never heard of expire.

Nothing in `outbox` may be sent before all that it rests on is on disk: `Durable`, and the queue's own events. A head
that was sent because a better message had been leased, when a crash undoes that lease, would break P1.

Heads sent and acknowledged are *not* durable: after a restart `_worst()` is NOTHING, so nothing
becomes eligible until the first publication of this boot is acknowledged. What was eligible stays so: P1 speaks of
heads that the spine may have, and no message was added since it last held. Nor is the budget: until the spine has
said it to this boot it is 0; versions only grow, so what it says to this boot is no older than what the last one kept.

In one process, publication and acknowledgement happen in the same turn (the outbox is carried over and back before
anything else runs), so nothing is ever held from one turn to the next, and K = 1 costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from heapline.core.spine_messages import (
    BOOT_BITS,
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


class LocalQueue(Protocol):
    """What stands behind a publisher: the partition's eligible messages, in order."""

    def head(self) -> Place | None: ...
    def count_better_than(self, place: Place) -> int: ...
    def lease(self, n: int, limit: Place) -> Sequence[Place]:
        """Its n best that are no worse than `limit`; they are leased, durably before the answer goes out."""
        ...

    def add(self, places: Sequence[Place]) -> None:
        """These become eligible now: record it, and answer whoever waits for it."""
        ...


class Durable(msgspec.Struct, frozen=True):
    epoch: int = 0
    boot: int = 0
    request: int = 0
    leased: tuple[Place, ...] = ()


class Publisher:
    def __init__(self, queue: LocalQueue, durable: Durable, *, resend_ms: int = 200) -> None:
        """A new boot: `durable` is what the last one left (a new partition has none), and must be written again."""
        self.queue = queue
        self.durable = msgspec.structs.replace(durable, boot=durable.boot + 1)
        self.outbox: list[ToSpine] = []
        self.refused = 0
        self.published = 0
        self._resend_ms = resend_ms
        self._resend_at: int | None = 0  # a new boot announces itself at its first tick
        self._held: list[Place] = []
        #: The number of the last request that was not refused, and what it got.
        self.request, self._leased = durable.request, durable.leased
        self._number = self._acknowledged = self.durable.boot << BOOT_BITS
        # Heads that the spine may reckon with, oldest first. One that a later and worse head follows is left out: it
        # can never be the worst again. So the first is the worst.
        self._heads: deque[tuple[int, Place]] = deque([(self._number, NOTHING)])
        self._last_head = NOTHING
        self._version, self._budget = 0, 0

    # --- what the partition does ---

    def offer(self, places: Iterable[Place], at: int) -> None:
        """These are to become eligible: now, or, if the spine has to know first, when it does (`queue.add`)."""
        self._held += places
        self._held.sort()
        self._settle(at)

    def withdraw(self, place: Place) -> bool:
        """A held message is cancelled; False if it is not held (any more)."""
        index = bisect_left(self._held, place)
        if index == len(self._held) or self._held[index] != place:
            return False
        del self._held[index]
        return True

    @property
    def held(self) -> Sequence[Place]:
        """What waits for an acknowledgement, best first."""
        return self._held

    def next_deadline(self) -> int | None:
        return self._resend_at

    def tick(self, at: int) -> None:
        if self._resend_at is not None and at >= self._resend_at:
            self._send_head(at)

    # --- what the spine says ---

    def receive(self, message: ToPartition, at: int) -> None:
        if message.epoch < self.durable.epoch:
            self.refused += 1
            self.outbox.append(Fenced(self.durable.epoch))
        elif isinstance(message, OpenEpoch):
            self._open(message, at)
        elif message.epoch > self.durable.epoch:
            pass  # its OpenEpoch is still on the way; whatever this is will be sent again
        elif isinstance(message, Acknowledge):
            self._receive_acknowledge(message, at)
        elif isinstance(message, Rebudget):
            self._receive_rebudget(message, at)
        else:
            self._receive_request(message, at)

    def _open(self, opened: OpenEpoch, at: int) -> None:
        """A new spine. Until it acknowledges something, others may still serve the old one: P1 must hold for both.

        So old heads stay in the reckoning, and the budget may only shrink. A spine acknowledges nothing before all
        partitions have fenced its predecessor. The budget of a repeated OpenEpoch may be outdated, and is not taken.
        """
        if opened.epoch > self.durable.epoch:
            self.durable = Durable(epoch=opened.epoch, boot=self.durable.boot)
            self.request, self._leased = 0, ()
            self._version, self._budget = opened.version, min(self._budget, opened.budget)
        self._settle(at, answer=True)

    def _receive_acknowledge(self, message: Acknowledge, at: int) -> None:
        if message.number >> BOOT_BITS == self.durable.boot:
            self._heed(message.number)
            is_news = message.version > self._version
            self._take_budget(message.version, message.budget)
            self._settle(at, answer=is_news)

    def _receive_rebudget(self, message: Rebudget, at: int) -> None:
        if message.boot == self.durable.boot:
            self._take_budget(message.version, message.budget)
        self._settle(at, answer=True)

    def _receive_request(self, message: LeaseRequest | Cancel, at: int) -> None:
        """Carry a request out once. One that was superseded is refused; one that is doubled gets the same answer."""
        if self._is_outdated(message):
            self.refused += 1
            return
        if message.number > self.request:
            self.request, self._leased = message.number, ()
            if isinstance(message, LeaseRequest) and self._is_for_this_boot(message):
                self._heed(message.acknowledged)
                self._settle(at)
                self._lease(message)
        self._publish_if_moved(at)
        self.outbox.append(LeaseAnswer(message.number, self._leased, self._publication()))

    def _lease(self, message: LeaseRequest) -> None:
        self._leased = tuple(self.queue.lease(message.n, message.limit))
        if self._leased:
            self.durable = msgspec.structs.replace(self.durable, request=message.number, leased=self._leased)

    def _is_outdated(self, message: LeaseRequest | Cancel) -> bool:
        return message.number < self.request

    def _is_for_this_boot(self, message: LeaseRequest) -> bool:
        return message.boot == self.durable.boot

    # --- the budget ---

    def _worst(self) -> Place:
        """The worst head that the spine may be reckoning with."""
        return self._heads[0][1]

    def _heed(self, number: int) -> None:
        """Publication `number` was acknowledged: older ones are out of the reckoning."""
        if self._acknowledged < number <= self._number:
            self._acknowledged = number
            while self._heads[0][0] < number:
                self._heads.popleft()

    def _take_budget(self, version: int, budget: int) -> None:
        if version >= self._version:
            self._version, self._budget = version, budget

    def _settle(self, at: int, *, answer: bool = False) -> None:
        """Let in what may be let in, and publish a head that got better."""
        self._admit()
        if answer or self._target() < self._last_head:
            self._send_head(at)
        elif self._has_published() and self._acknowledged == self._number:
            self._resend_at = None

    def _admit(self) -> None:
        held = self._held
        if not held:
            return
        worst = self._worst()
        first_free = bisect_left(held, worst)
        free = held[first_free:]
        room = max(0, self._budget - self.queue.count_better_than(worst)) if first_free else 0
        room = min(room, first_free)
        admitted = held[:room] + free
        if admitted:
            del held[first_free:]
            del held[:room]
            self.queue.add(admitted)

    # --- publications ---

    def _target(self) -> Place:
        """The best of all that is or will be eligible."""
        head = self.queue.head() or NOTHING
        return min(head, self._held[0]) if self._held else head

    def _publish_if_moved(self, at: int) -> None:
        target = self._target()
        if target != self._last_head or not self._has_published():
            self._number += 1
            self._last_head = target
            heads = self._heads
            while heads and heads[-1][1] <= target:
                heads.pop()
            heads.append((self._number, target))
            self.published += 1
        self._resend_at = at + self._resend_ms if self._acknowledged < self._number else None

    def _has_published(self) -> bool:
        """In this boot."""
        return self._number & ((1 << BOOT_BITS) - 1) > 0

    def _publication(self) -> Publish:
        return Publish(self.durable.epoch, self._number, self._last_head, self._version)

    def _send_head(self, at: int) -> None:
        self._publish_if_moved(at)
        self.outbox.append(self._publication())
