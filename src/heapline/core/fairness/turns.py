"""Fairness between keys: turns within a priority, and the number of leases per key.

*Turns.* Every message of a fair topic gets a turn number when it becomes ready, and within a priority the lowest turn
goes first. Virtual time V is the highest turn leased at that priority so far. A key's next message gets max(V, last) +
1, where `last` is the last turn given to the key at that priority. So keys with waiting messages advance together, one
message per turn each, and a new key starts at the current turn, not behind the other keys' queues. Messages without a
fairness key count together as one key. Turns are recorded with the messages, so this state only decides future turns;
it may be pruned wherever that changes no max(V, last). A message becomes ready when it is enqueued without a delay,
fires, is committed with its batch, or is replayed from the dead letters. A turn given earlier would already be passed
by V at that time, and a million messages scheduled for tomorrow would delay everything that other keys send tomorrow. A
message that is released or retried keeps its turn.

*Memory.* One entry per key and priority that has turns ahead of V, about 90 bytes. Entries that V has passed are
dropped whenever a priority's table has doubled. V of a priority without messages is dropped in the same way.

*Limit.* At most `limit` leases per key at a time, across all partitions; messages without a key are not limited. A
partition parks waiting messages of a key that is at its limit (keys.py). This object records which partitions
have parked messages, so that the end of a lease returns as many as are allowed. No limit is in force before `settle`:
during replay the events state what was leased, and the settings may have been different.

There is one object per topic, shared by its partitions. It does not know a clock or how messages are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from heapline.core.events import I64, Mask
from heapline.core.fairness.keys import NO_KEY
from heapline.core.order import TURN_BITS, TURN_MAX

_TABLE_MIN = 1024  # tables below this size are not worth pruning
_FREE = 1 << 40


class Member(Protocol):
    """The interface of a partition that this module uses."""

    def unpark(self, wants: Iterable[tuple[int, int]]) -> None: ...

    def unpark_all(self) -> None: ...

    def leased_keys(self) -> I64: ...

    def priorities_in_use(self) -> set[int]: ...


class FairShare:
    def __init__(self) -> None:
        self._times: dict[int, int] = {}  # V by priority, as the upper part of a heap key
        self._last: dict[int, dict[int, int]] = {}  # priority -> hash of a key -> last turn given
        self._prune_at: dict[int, int] = {}  # priority -> size of its table at which it is pruned
        self._sweep_at = _TABLE_MIN
        self.limit = 0  # leases per key; 0 = no limit, and leases are not counted
        self._leases: dict[int, int] = {}  # hash -> current leases, while there is a limit
        self._parked: dict[int, set[Member]] = {}  # hash -> partitions with parked messages of that key
        self._members: Sequence[Member] = ()
        self.is_loading = True

    def settle(self, limit: int, members: Sequence[Member]) -> None:
        """Unpark everything and count leases again, after the stored state is applied or the limit has changed."""
        self.is_loading = False
        self.limit = limit
        self._members = members
        for member in members:
            member.unpark_all()
        self._leases = {}
        if limit:
            for member in members:
                self.leased(member.leased_keys())

    # -- turns -----------------------------------------------------------------------------------------------------

    def take(self, priorities: I64, hashes: I64) -> I64:
        """Assign turns to messages that become ready in this order. `priorities` are the upper parts of heap keys."""
        order, starts, pairs = _groups(priorities, hashes)
        counts = np.diff(starts, append=len(order))
        bases: list[int] = []
        for (priority, line), count in zip(pairs, counts.tolist(), strict=True):
            last = self._last.setdefault(priority, {})
            bases.append(max(self._times.get(priority, 0), last.get(line, 0)))
            last[line] = min(bases[-1] + count, TURN_MAX)
        turns = np.empty(len(order), dtype=np.int64)
        turns[order] = np.repeat(np.array(bases, dtype=np.int64) - starts, counts) + np.arange(1, len(order) + 1)
        return np.minimum(turns, TURN_MAX)

    def ahead(self, key: int) -> int:
        """Return how many turns of its priority come before the one in this heap key."""
        return max(0, (key & TURN_MAX) - self._times.get(key >> TURN_BITS, 0) - 1)

    def observe(self, keys: I64, hashes: I64) -> None:
        """Replay the effect of `take` for heap keys recorded in the journal."""
        order, starts, pairs = _groups(keys >> TURN_BITS, hashes)
        highest = np.maximum.reduceat((keys & TURN_MAX)[order], starts)
        for (priority, line), turn in zip(pairs, highest.tolist(), strict=True):
            last = self._last.setdefault(priority, {})
            last[line] = max(last.get(line, 0), turn)

    def forget(self, hashes: I64) -> None:
        """Forget keys that have no waiting messages: their next ones start at the current turn."""
        gone = set(hashes.tolist())
        for priority, table in self._last.items():
            self._last[priority] = {hash: turn for hash, turn in table.items() if hash not in gone}

    def advance(self, keys: I64) -> None:
        """Advance V for leased messages with these heap keys, in ascending order."""
        priorities = keys >> TURN_BITS
        ends = np.flatnonzero(np.append(priorities[1:] != priorities[:-1], True))
        times = self._times
        for priority, key in zip(priorities[ends].tolist(), keys[ends].tolist(), strict=True):
            times[priority] = max(times.get(priority, 0), key & TURN_MAX)
            table = self._last.get(priority)
            if table is not None and len(table) > self._prune_at.get(priority, _TABLE_MIN):
                self._prune(priority, table)

    def _prune(self, priority: int, table: dict[int, int]) -> None:
        time = self._times[priority]
        self._last[priority] = kept = {hash: turn for hash, turn in table.items() if turn > time}
        self._prune_at[priority] = max(_TABLE_MIN, 2 * len(kept))

    def sweep(self) -> None:
        """Drop priorities without messages, once there are twice as many as were in use last time."""
        if self.is_loading or max(len(self._times), len(self._last)) < self._sweep_at:
            return
        used = set().union(*(member.priorities_in_use() for member in self._members))
        self._times = {p: time for p, time in self._times.items() if p in used}
        self._last = {p: table for p, table in self._last.items() if p in used}
        self._prune_at = {p: size for p, size in self._prune_at.items() if p in used}
        self._sweep_at = max(_TABLE_MIN, 2 * len(used))

    @property
    def entries(self) -> int:
        """The number of (priority, key) pairs that are remembered."""
        return sum(map(len, self._last.values()))

    # -- leases ----------------------------------------------------------------------------------------------------

    def leases_of(self, key: int) -> int:
        return self._leases.get(key, 0)

    def free(self, key: int) -> int:
        """Return how many more leases the key may have."""
        if key == NO_KEY or not self.limit:
            return _FREE
        return max(0, self.limit - self._leases.get(key, 0))

    def beyond(self, hashes: I64) -> Mask:
        """Return which of these messages, in this order, exceed the limits of their keys."""
        keys, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        free = np.array([self.free(key) for key in keys.tolist()], dtype=np.int64)
        if (counts <= free).all():
            return np.zeros(len(hashes), dtype=np.bool_)
        order = np.argsort(inverse, kind="stable")
        rank = np.empty(len(hashes), dtype=np.int64)
        rank[order] = np.arange(len(hashes)) - np.repeat(np.cumsum(counts) - counts, counts)
        mask: Mask = rank >= free[inverse]
        return mask

    def leased(self, hashes: I64) -> None:
        """Count leases that have begun for messages with these keys."""
        leases = self._leases
        for key in hashes.tolist():
            if key != NO_KEY:
                leases[key] = leases.get(key, 0) + 1

    def ended(self, hashes: I64) -> None:
        """Count leases that have ended, and unpark as many waiting messages of each key as slots became free."""
        leases = self._leases
        freed: dict[int, int] = {}
        for key in hashes.tolist():
            if key != NO_KEY:
                leases[key] -= 1
                freed[key] = freed.get(key, 0) + 1
        wants: dict[Member, list[tuple[int, int]]] = {}
        for key, count in freed.items():
            if not leases[key]:
                del leases[key]
            for member in self._parked.get(key, ()):
                wants.setdefault(member, []).append((key, min(count, self.free(key))))
        for member, pairs in wants.items():
            member.unpark(pairs)

    def note_parked(self, key: int, member: Member, has: bool) -> None:
        """Record whether that partition has parked messages of the key."""
        if has:
            self._parked.setdefault(key, set()).add(member)
        elif key in self._parked:
            self._parked[key].discard(member)
            if not self._parked[key]:
                del self._parked[key]

    # -- snapshots -------------------------------------------------------------------------------------------------

    def to_state(self) -> list[Any]:
        last = [(p, list(table), list(table.values())) for p, table in self._last.items()]
        return [list(self._times.items()), last]

    def load_state(self, state: list[Any]) -> None:
        self._times = dict(state[0])
        self._last = {p: dict(zip(hashes, turns, strict=True)) for p, hashes, turns in state[1]}


def _groups(priorities: I64, lines: I64) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], list[tuple[int, int]]]:
    """Return (rows ordered by priority and line, the start of each such pair among them, the pairs)."""
    order = np.lexsort((lines, priorities))  # stable: rows of a pair stay in order
    p, h = priorities[order], lines[order]
    starts = np.flatnonzero(np.append(True, (p[1:] != p[:-1]) | (h[1:] != h[:-1])))
    return order, starts, list(zip(p[starts].tolist(), h[starts].tolist(), strict=True))
