"""Message ids: how they are created, and what they contain. Their text forms are in contract/ids.py.

    ms since 2024-01-01T00:00:00Z (41 bits) | partition (10) | sequence (12)

A partition's milliseconds and sequences together are one counter that only ever rises: it starts at max(now, last) and
a full sequence carries into the next millisecond, so neither a clock set back, nor a burst, nor a restart (given the
last id) repeats an id. Id 0 is never created; it means "none yet".

The layout is stored on disk: changing it needs a new version of everything that stores ids. Time is passed in.
"""

from __future__ import annotations

import numpy as np

from heapline.contract.errors import BadRequest, ResourceExhausted
from heapline.contract.ids import EPOCH_2024_MS, ID_MAX, MS_BITS, PARTITION_BITS, SEQUENCE_BITS
from heapline.core.events import I64
from heapline.core.record import IntOrArray

PARTITIONS_MAX = 1 << PARTITION_BITS

_SEQUENCES = 1 << SEQUENCE_BITS
_MS_SHIFT = PARTITION_BITS + SEQUENCE_BITS
_COUNTER_END = 1 << (MS_BITS + SEQUENCE_BITS)


def partition_of(message_id: IntOrArray) -> IntOrArray:
    return (message_id >> SEQUENCE_BITS) & (PARTITIONS_MAX - 1)


def unix_ms_of(message_id: IntOrArray) -> IntOrArray:
    return (message_id >> _MS_SHIFT) + EPOCH_2024_MS


class IdMaker:
    """Generator of one partition's ids, which strictly increase forever."""

    def __init__(self, partition: int, last: int = 0) -> None:
        if not 0 <= partition < PARTITIONS_MAX:
            raise BadRequest(f"partition {partition} is outside 0..{PARTITIONS_MAX - 1}")
        self.partition = partition
        self._counter = 0
        if last:
            self.observe(last)

    @property
    def last(self) -> int:
        """The highest id created or observed, 0 if none; pass it to a new IdMaker after a restart."""
        if not self._counter:
            return 0
        ms, sequence = divmod(self._counter, _SEQUENCES)
        return ms << _MS_SHIFT | self.partition << SEQUENCE_BITS | sequence

    def observe(self, message_id: int) -> None:
        """Register an existing id of this partition: all ids created from now on are above it."""
        partition = (message_id >> SEQUENCE_BITS) & (PARTITIONS_MAX - 1)
        if not 0 < message_id <= ID_MAX or partition != self.partition:
            raise BadRequest(f"{message_id} is not an id of partition {self.partition}")
        counter = (message_id >> _MS_SHIFT) << SEQUENCE_BITS | (message_id & (_SEQUENCES - 1))
        self._counter = max(self._counter, counter)

    def take(self, n: int, now_ms: int) -> I64:
        """Return the next `n` ids, ascending; `now_ms` is Unix time."""
        if n < 0:
            raise BadRequest(f"cannot take {n} ids")
        first = max((now_ms - EPOCH_2024_MS) << SEQUENCE_BITS, self._counter + 1)
        if first + n > _COUNTER_END:
            raise ResourceExhausted("the 41 bits of milliseconds in message ids (is the clock right?)", 1 << MS_BITS)
        if n:
            self._counter = first + n - 1
        counters = np.arange(first, first + n, dtype=np.int64)
        high = (counters >> SEQUENCE_BITS << _MS_SHIFT) | (self.partition << SEQUENCE_BITS)
        return high | (counters & (_SEQUENCES - 1))
