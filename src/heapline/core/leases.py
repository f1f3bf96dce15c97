"""Leases: who holds which message, until when.

A lease is a plain tuple (token, position, key, deadline, started, holder), because hundreds of thousands are created
per second. In C (`LeaseMap`) it is 64 bytes and becomes a tuple only when it is read. The token is the offset of the
row that granted the lease, so no two leases of a partition ever share one.
Deadlines are in a small heap with one entry per grant, not per message. An entry whose leases have ended or were
extended is skipped when it becomes due.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, Final

import numpy as np

from heapline.accelerator import accelerated
from heapline.core.events import I64, Grant
from heapline.core.record import attempts_of

TOKEN: Final = 0
POSITION: Final = 1
KEY: Final = 2
DEADLINE: Final = 3
STARTED: Final = 4
HOLDER: Final = 5
Lease = tuple[int, int, int, int, int, str | None]

#: Number of pops remembered by request id, so that a repeated pop returns the same leases.
REQUESTS_MAX = 4096


@accelerated
class LeaseMap(dict[int, Lease]):
    """Leases by message id, in the order of their grants.

    The version in C has only the methods here, `get`, `values`, `[]`, `in`, `len` and `iter`.
    """

    def grant(
        self,
        ids: list[int],
        token: int,
        positions: list[int],
        keys: list[int],
        deadline: int,
        started: int,
        holder: str | None,
    ) -> None:
        """Add leases, or replace those of the same ids. `token` is that of the first; the others follow."""
        if not len(ids) == len(positions) == len(keys):
            raise ValueError("columns must have the same length")
        tokens = range(token, token + len(ids))
        rows = zip(tokens, positions, keys, repeat(deadline), repeat(started), repeat(holder))
        self.update(zip(ids, rows, strict=True))

    def held(self, ids: list[int], tokens: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Return (held ids, their tokens, ids that are not held). A repeated id counts once."""
        if len(ids) != len(tokens):
            raise ValueError("columns must have the same length")
        good: dict[int, int] = {}
        lost: list[int] = []
        get = self.get
        for id, token in zip(ids, tokens, strict=True):
            lease = get(id)
            if lease is not None and lease[TOKEN] == token:
                good[id] = token
            else:
                lost.append(id)
        return list(good), list(good.values()), lost

    def end(self, ids: list[int]) -> tuple[bytes, list[tuple[str | None, int]]]:
        """Remove leases. Return their positions as packed int64, and (holder, count) pairs that may repeat a holder.

        Raise KeyError at the first id that has no lease; those before it are removed.
        """
        leases = list(map(self.pop, ids))
        positions = np.array([lease[POSITION] for lease in leases], np.int64)
        return positions.tobytes(), list(Counter(map(itemgetter(HOLDER), leases)).items())

    def first_current(self, ids: list[int], start: int, deadline: int) -> int:
        """Return the first index from `start` on whose id has a lease that ends by the deadline; -1 if none has."""
        if start < 0:
            raise ValueError("start must not be negative")
        for at in range(start, len(ids)):
            lease = self.get(ids[at])
            if lease is not None and lease[DEADLINE] <= deadline:
                return at
        return -1


class LeaseTable:
    def __init__(self) -> None:
        self.by_id = LeaseMap()
        self.held: dict[str, int] = {}  # leases per named holder; a holder without leases is absent
        self._deadlines: list[tuple[int, int, list[int], int]] = []  # deadline, token, ids, number of skipped ids
        self._requests: dict[str, tuple[int, list[int]]] = {}  # request id -> (first token, ids)

    def __len__(self) -> int:
        return len(self.by_id)

    def grant(self, ids: list[int], token: int, positions: list[int], keys: list[int], grant: Grant, now: int) -> None:
        """Lease messages. `token` is that of the first; the others follow."""
        deadline, holder, request_id = grant.deadline, grant.holder, grant.request_id
        self.by_id.grant(ids, token, positions, keys, deadline, now, holder)
        if holder is not None:
            self.held[holder] = self.held.get(holder, 0) + len(ids)
        heapq.heappush(self._deadlines, (deadline, token, ids, 0))
        if request_id is not None:
            self._requests.pop(request_id, None)  # the oldest are dropped first, and this one is new
            self._requests[request_id] = (token, ids)
            if len(self._requests) > REQUESTS_MAX:
                del self._requests[next(iter(self._requests))]

    def holds(self, id: int, token: int) -> bool:
        lease = self.by_id.get(id)
        return lease is not None and lease[TOKEN] == token

    def extend(self, ids: Sequence[int], deadlines: Sequence[int]) -> None:
        for id, deadline in zip(ids, deadlines, strict=True):
            token, position, key, _, started, holder = self.by_id[id]
            self.by_id.grant([id], token, [position], [key], deadline, started, holder)
            heapq.heappush(self._deadlines, (deadline, token, [id], 0))

    def take(self, ids: Iterable[int]) -> list[Lease]:
        """End these leases and return them; they must be held."""
        listed = list(ids)
        leases = [self.by_id[id] for id in listed]
        self.end(listed)
        return leases

    def end(self, ids: list[int]) -> I64:
        """End these leases and return their positions; they must be held. Faster than `take`."""
        positions, holders = self.by_id.end(ids)
        for holder, count in holders if self.held else ():
            if holder is not None:
                left = self.held[holder] - count
                if left:
                    self.held[holder] = left
                else:
                    del self.held[holder]
        return np.frombuffer(positions, np.int64)

    def request(self, request_id: str) -> list[int]:
        """Return the ids that an earlier pop with this request id leased and that are still under those leases."""
        token, ids = self._requests.get(request_id, (0, []))
        return [id for i, id in enumerate(ids) if self.holds(id, token + i)]

    def next_deadline(self) -> int | None:
        """Return when the first deadline may pass. Outdated entries are dropped on the way."""
        heap = self._deadlines
        while heap:
            deadline, token, ids, start = heap[0]
            at = self.by_id.first_current(ids, start, deadline)
            if at >= 0:
                if at > start + 16:  # remember, so that a long grant is not scanned repeatedly
                    heapq.heapreplace(heap, (deadline, token, ids, at))
                return deadline
            heapq.heappop(heap)
        return None

    def overdue(self, now: int, limit: int) -> list[int]:
        """Return ids whose deadline has passed, at most `limit`, earliest grants first. Changes nothing."""
        found: dict[int, None] = {}
        heap, by_id = self._deadlines, self.by_id
        seen: list[tuple[int, int, list[int], int]] = []
        while heap and heap[0][0] <= now and len(found) < limit:
            deadline, token, ids, start = heapq.heappop(heap)
            first = -1
            # A slice of a herd must not scan a complete grant of thousands, nor rescan what earlier slices took from
            # it.
            for at in range(start, len(ids)):
                lease = by_id.get(ids[at])
                if lease is not None and lease[DEADLINE] <= now:
                    first = at if first < 0 else first
                    found[ids[at]] = None
                    if len(found) >= limit:
                        break
            if first >= 0:
                seen.append((deadline, token, ids, first))
        for entry in seen:
            heapq.heappush(heap, entry)
        return list(found)

    def replace_positions(self, moved: dict[int, int]) -> None:
        for id, position in moved.items():
            lease = self.by_id.get(id)
            if lease is not None:
                token, old, key, deadline, started, holder = lease
                self.by_id.grant([id], token, [position | attempts_of(old)], [key], deadline, started, holder)

    def to_state(self) -> list[Any]:
        leases = zip(self.by_id, self.by_id.values(), strict=True)
        return [[(id, *lease) for id, lease in leases], [(k, *v) for k, v in self._requests.items()]]

    @classmethod
    def from_state(cls, state: list[Any]) -> LeaseTable:
        table = cls()
        for id, token, position, key, deadline, started, holder in state[0]:
            table.by_id.grant([id], token, [position], [key], deadline, started, holder)
            table._deadlines.append((deadline, token, [id], 0))
        heapq.heapify(table._deadlines)
        named = (lease[HOLDER] for lease in table.by_id.values() if lease[HOLDER] is not None)
        table.held = dict(Counter(named))
        table._requests = {name: (token, list(ids)) for name, token, ids in state[1]}
        return table
