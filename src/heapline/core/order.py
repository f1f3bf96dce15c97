"""Convert priorities to heap keys: the smallest key is served first.

Strict order: the key is the priority, inverted bit by bit on MAX topics (negation would overflow at -2^63).

Aging: a waiting message becomes more urgent by `rate` priority units per second. On a MIN topic its effective priority
is `priority - rate * (now - at)`; `now` is the same for all, so `priority + rate * at` gives the same order and never
changes while the message waits. Keys count in 1/1024 of a priority unit, with time since 2024, so that sums fit in 63
bits: priorities saturate at 2^52 and rates over 2^20 units per second are refused. A key is within half a 1/1024 unit
(and a 2^-10 part of one) of the exact value, hence keys order any two messages whose effective priorities differ by
more than one unit of 1/1024 as exact arithmetic would, at any later time.

Turns (fairness between keys, turns.py): the key holds a priority of 22 bits above a turn of 42, so within a priority
the lower turn goes first, also on MAX topics. On topics with turns, the rank of a message counts priorities only.

Mode and rate are fixed when a topic is created. This module does not handle ties: those are ordered by id.
"""

from __future__ import annotations

import math

import numpy as np

from heapline.contract.errors import BadRequest
from heapline.contract.ids import EPOCH_2024_MS, MS_BITS
from heapline.core.events import I64
from heapline.core.record import IntOrArray

UNIT = 1024
RATE_MAX = float(1 << 20)
PRIORITY_LIMIT = (1 << 52) - 1
_ELAPSED_LIMIT = 1 << MS_BITS
TURN_BITS = 42
TURN_MAX = (1 << TURN_BITS) - 1
_KEY_MAX = (1 << 63) - 1
TURN_PRIORITY_MIN, TURN_PRIORITY_MAX = -(1 << 21), (1 << 21) - 1


class Ordering:
    """Conversion of one topic's priorities to keys, by its mode, its aging rate and whether keys take turns.

    On a topic with turns, `keys` and `key` return the upper part of the key; `with_turns` adds the turns below it.
    """

    def __init__(self, mode: str, aging: float | None = None, turns: bool = False) -> None:
        if mode not in ("min", "max"):
            raise BadRequest(f"mode is 'min' or 'max', not {mode!r}")
        if aging is not None and not (math.isfinite(aging) and 0 <= aging <= RATE_MAX):
            raise BadRequest(f"aging is a rate of 0 to {RATE_MAX:.0f} priority units a second, not {aging!r}")
        if turns and aging is not None:
            raise BadRequest("a topic has either fairness keys or aging, not both")
        self.mode, self.aging, self.has_turns = mode, aging, turns
        self._invert = mode == "max"
        # The rate in key units per millisecond, split: the integer part is multiplied in integers, and only the
        # fraction in floating point, where 41 bits of milliseconds leave it exact to 2^-11 units.
        numerator, denominator = (aging or 0).as_integer_ratio()
        self._whole, rest = divmod(numerator * UNIT, denominator * 1000)
        self._part = rest / (denominator * 1000)

    def keys(self, priorities: I64, enqueued_at_ms: I64) -> I64:
        if self.aging is None:
            return ~priorities if self._invert else priorities
        elapsed = np.clip(enqueued_at_ms - EPOCH_2024_MS, -_ELAPSED_LIMIT, _ELAPSED_LIMIT)
        aged = elapsed * self._whole + np.rint(elapsed * self._part).astype(np.int64)
        scaled = np.clip(priorities, -PRIORITY_LIMIT, PRIORITY_LIMIT) * UNIT
        keys: I64 = ~(scaled - aged) if self._invert else scaled + aged
        return keys

    def key(self, priority: int, at_ms: int) -> int:
        if self.aging is None:
            return ~priority if self._invert else priority
        elapsed = min(max(at_ms - EPOCH_2024_MS, -_ELAPSED_LIMIT), _ELAPSED_LIMIT)
        aged = elapsed * self._whole + round(elapsed * self._part)
        scaled = min(max(priority, -PRIORITY_LIMIT), PRIORITY_LIMIT) * UNIT
        return ~(scaled - aged) if self._invert else scaled + aged

    def cuts(self, priorities: I64, now_ms: int) -> I64:
        """Return the keys that divide the heap at these priorities, which ascend.

        On a MIN topic, the keys below a cut are those of lower priorities. On a MAX topic, they are those of this
        priority and higher ones, so the cuts descend. With aging, the cuts divide effective priorities as of `now_ms`,
        to 1/1024 of a unit.
        """
        keys = self.keys(priorities, np.full(len(priorities), now_ms, dtype=np.int64))
        cuts = keys + 1 if self._invert else keys
        if not self.has_turns:
            return cuts
        low: I64 = np.clip(cuts, TURN_PRIORITY_MIN, TURN_PRIORITY_MAX) << TURN_BITS
        return np.where(cuts > TURN_PRIORITY_MAX, _KEY_MAX, low)  # there is nothing above all priorities

    @staticmethod
    def with_turns(priority_keys: IntOrArray, turns: IntOrArray) -> IntOrArray:
        return (priority_keys << TURN_BITS) | turns

    def rank_key(self, key: IntOrArray) -> IntOrArray:
        """Return the part of a key that a rank counts: messages with a smaller one are strictly better."""
        return key >> TURN_BITS if self.has_turns else key

    def priority(self, key: IntOrArray) -> IntOrArray:
        """Return the priority of a strict key. An aged key includes time, so its priority cannot be recovered."""
        if self.aging is not None:
            raise BadRequest("the key of an aging topic does not contain the priority; read the message's record")
        key = self.rank_key(key)
        return ~key if self._invert else key
