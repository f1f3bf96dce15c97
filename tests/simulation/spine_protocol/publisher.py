"""Publisher: the partition's side of the spine protocol. coordinator.py explains its purpose and why the bound holds.

It decides when the partition's head is published, which messages are held until the spine knows of them, and which
lease requests are still valid. It does not know what a message is, how the queue keeps order, how messages reach the
spine, or the time.

The promise, P1. At any time at most `budget` eligible messages of this partition are better than *any* head that the
spine may rely on: the last head known to be acknowledged, and every head sent since (its acknowledgment may be in
transit). So messages are counted against the worst of these heads, `_worst()`. Four things follow.

- Sending a head can never break it: the head sent is the best of all eligible and held messages.
- Losing a message (lease, cancel, expiry, purge) can never break it. Only messages that become eligible can: `offer`.
- A smaller budget can be confirmed immediately, with a publication. More messages than that may be better than some
  older head. But none is better than the head sent with the confirmation, and the spine receives both together, so it
  stops using older heads. Meanwhile nothing is admitted, because the count is over the budget.
- A message no better than `_worst()` costs nothing. A better one uses one unit of the budget. If the budget is used up,
  the message is *held*: not eligible, not leased, its enqueue (timer, nack, release, …) not answered. The head
  published because of it includes it, so the acknowledgment sets `_worst()` to no worse than it and admits it.

Held messages are not on disk. The queue's owner records the event that makes a message eligible when `add` is called,
not before. So the messages that replay finds eligible after a crash are those that were eligible before it.

`Durable` holds the durable state: the epoch (an older spine stays fenced), the boot count (numbers continue; requests
to an earlier boot are refused, so refusals and empty answers need no record) and the last leases with the request that
they answer (in the engine: fields of the Leased event). Without the last leases the bound would still hold, but a
consumer would have to wait until leases that it never received expire.

Nothing in `outbox` may be sent before everything it depends on is on disk: `Durable` and the queue's own events. If a
crash undid the lease of a better message, a head sent because of that lease would break P1.

Heads sent and acknowledged are *not* durable: after a restart `_worst()` is NOTHING, so nothing becomes eligible until
the first publication of this boot is acknowledged. Eligible messages stay eligible: P1 is about heads that the spine
may have, and no message was added since it last held. The budget is not durable either: it is 0 until the spine sends
it to this boot. Versions only grow, so the budget sent to this boot is no older than the one kept by the last boot.

In one process, publication and acknowledgment happen in the same turn (the outbox is delivered both ways before
anything else runs). So no message is held from one turn to the next, and K = 1 costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from tests.simulation.spine_protocol.messages import (
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
    """The queue of a publisher: the partition's eligible messages, in order."""

    def head(self) -> Place | None: ...
    def count_better_than(self, place: Place) -> int: ...
    def lease(self, n: int, limit: Place) -> Sequence[Place]:
        """Lease the n best messages that are no worse than `limit`, durably before the answer is sent."""
        ...

    def add(self, places: Sequence[Place]) -> None:
        """Make these messages eligible: record it, and answer the callers that wait for it."""
        ...


class Durable(msgspec.Struct, frozen=True):
    epoch: int = 0
    boot: int = 0
    request: int = 0
    leased: tuple[Place, ...] = ()


class Publisher:
    def __init__(self, queue: LocalQueue, durable: Durable, *, resend_ms: int = 200) -> None:
        """Start a new boot. `durable` is the state left by the last one (empty if new) and must be written again."""
        self.queue = queue
        self.durable = msgspec.structs.replace(durable, boot=durable.boot + 1)
        self.outbox: list[ToSpine] = []
        self.refused = 0
        self.published = 0
        self._resend_ms = resend_ms
        self._resend_at: int | None = 0  # a new boot announces itself at its first tick
        self._held: list[Place] = []
        #: The number of the last request that was not refused, and its leases.
        self.request, self._leased = durable.request, durable.leased
        self._number = self._acknowledged = self.durable.boot << BOOT_BITS
        # Heads that the spine may rely on, oldest first. A head that is followed by a later and worse one is omitted,
        # because it can never be the worst again. So the first is the worst.
        self._heads: deque[tuple[int, Place]] = deque([(self._number, NOTHING)])
        self._last_head = NOTHING
        self._version, self._budget = 0, 0

    # --- calls of the partition ---

    def offer(self, places: Iterable[Place], at: int) -> None:
        """Make messages eligible: now or, if the spine must know first, once it does (`queue.add`)."""
        self._held += places
        self._held.sort()
        self._settle(at)

    def withdraw(self, place: Place) -> bool:
        """Cancel a held message. Return False if it is not, or no longer, held."""
        index = bisect_left(self._held, place)
        if index == len(self._held) or self._held[index] != place:
            return False
        del self._held[index]
        return True

    @property
    def held(self) -> Sequence[Place]:
        """The messages that wait for an acknowledgment, best first."""
        return self._held

    def next_deadline(self) -> int | None:
        return self._resend_at

    def tick(self, at: int) -> None:
        if self._resend_at is not None and at >= self._resend_at:
            self._send_head(at)

    # --- messages from the spine ---

    def receive(self, message: ToPartition, at: int) -> None:
        if message.epoch < self.durable.epoch:
            self.refused += 1
            self.outbox.append(Fenced(self.durable.epoch))
        elif isinstance(message, OpenEpoch):
            self._open(message, at)
        elif message.epoch > self.durable.epoch:
            pass  # its OpenEpoch is still in transit; this message will be sent again
        elif isinstance(message, Acknowledge):
            self._receive_acknowledge(message, at)
        elif isinstance(message, Rebudget):
            self._receive_rebudget(message, at)
        else:
            self._receive_request(message, at)

    def _open(self, opened: OpenEpoch, at: int) -> None:
        """Open a new spine's epoch.

        Until the new spine acknowledges something, other partitions may serve the old one, so P1 must hold for both. So
        old heads still count, and the budget may only shrink. A spine acknowledges nothing before all partitions have
        fenced its predecessor. The budget of a repeated OpenEpoch may be outdated and is ignored.
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
        """Execute a request once. Refuse a superseded request; answer a duplicated one with the same answer."""
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
        """Return the worst head that the spine may rely on."""
        return self._heads[0][1]

    def _heed(self, number: int) -> None:
        """Handle the acknowledgment of publication `number`: older heads no longer count."""
        if self._acknowledged < number <= self._number:
            self._acknowledged = number
            while self._heads[0][0] < number:
                self._heads.popleft()

    def _take_budget(self, version: int, budget: int) -> None:
        if version >= self._version:
            self._version, self._budget = version, budget

    def _settle(self, at: int, *, answer: bool = False) -> None:
        """Admit the held messages that may become eligible, and publish a head that improved."""
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
        """Return the best of all messages that are or will be eligible."""
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
        """Whether this boot has published a head."""
        return self._number & ((1 << BOOT_BITS) - 1) > 0

    def _publication(self) -> Publish:
        return Publish(self.durable.epoch, self._number, self._last_head, self._version)

    def _send_head(self, at: int) -> None:
        self._publish_if_moved(at)
        self.outbox.append(self._publication())
