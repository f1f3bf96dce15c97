"""The demo's judge: which messages there are, what order they must come in, and what was seen of each.

It believes nothing that the queue says of itself: payloads, priorities and order are made here from message numbers,
and every delivery and every ack is held against them one by one. No I/O.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

PRIORITIES = 1000
_SEED = 20_240_101


def payload_of(number: int) -> bytes:
    """256 bytes that belong to this number and to no other: a swapped or damaged payload shows."""
    head = number.to_bytes(8, "big")
    return head + blake2b(head, digest_size=62).digest() * 4


def number_of(payload: bytes) -> int:
    """The message's number, or -1 if these are not the bytes that went in."""
    number = int.from_bytes(payload[:8], "big")
    return number if payload == payload_of(number) else -1


def priorities_of(total: int) -> list[int]:
    draw = random.Random(_SEED)
    return [draw.randrange(PRIORITIES) for _ in range(total)]


@dataclass(slots=True)
class Ledger:
    """Message by message: how often it came, and whether its ack was answered."""

    priorities: Sequence[int]
    delivered: list[int] = field(init=False)  # how often each message was handed out, as far as seen
    answered: bytearray = field(init=False)  # 1 = its ack was answered
    gone: bytearray = field(init=False)  # 1 = an ack whose answer was never seen is known to count
    rank: list[int] = field(init=False)  # its place in the order that priorities demand
    out_of_order: int = 0
    after_ack: int = 0  # deliveries of a message whose ack had been answered
    damaged: int = 0  # payloads that are not what went in
    again: int = 0  # deliveries after the first: the lease before was never acked
    _last_first: int = -1
    _last_again: int = -1

    def __post_init__(self) -> None:
        total = len(self.priorities)
        self.delivered = [0] * total
        self.answered, self.gone = bytearray(total), bytearray(total)
        self.rank = [0] * total
        for place, number in enumerate(sorted(range(total), key=lambda n: (self.priorities[n], n))):
            self.rank[number] = place

    @property
    def total(self) -> int:
        return len(self.priorities)

    def popped(self, numbers: Iterable[int], attempts: Iterable[int]) -> None:
        """A batch was handed out, in this order. First deliveries must follow one another in rank, and so must
        those that come back after a lease that nobody acked."""
        for number, attempt in zip(numbers, attempts, strict=True):
            if not 0 <= number < self.total:
                self.damaged += 1
                continue
            self.after_ack += self.answered[number] | self.gone[number]
            self.delivered[number] += 1
            rank = self.rank[number]
            if attempt == 1:
                self.out_of_order += rank <= self._last_first
                self._last_first = rank
            else:
                self.again += 1
                self.out_of_order += rank <= self._last_again
                self._last_again = rank

    def acked(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.answered[number] = 1

    def found_gone(self, number: int) -> None:
        self.gone[number] = 1

    def in_doubt(self) -> list[int]:
        """Handed out, but nobody heard that the ack was carried out."""
        return [n for n, times in enumerate(self.delivered) if times and not self.answered[n]]

    @property
    def acked_count(self) -> int:
        return sum(self.answered)

    @property
    def lost(self) -> int:
        """Messages that went in and of which neither an answered ack nor a recorded one is known."""
        return sum(1 for one, other in zip(self.answered, self.gone, strict=True) if not (one or other))

    def faults(self) -> list[str]:
        """Everything that must not be, in words; empty if the queue kept its promises."""
        named = [
            (self.lost, "lost"),
            (self.out_of_order, "out of order"),
            (self.after_ack, "delivered again after their ack was answered"),
            (self.damaged, "with other bytes than went in"),
        ]
        return [f"{number} message(s) {what}" for number, what in named if number]
