"""Leases: who holds which message, until when.

A lease is a plain tuple (token, position, key, deadline, started, holder), because hundreds of thousands are created
per second. The token is the offset of the row that granted the lease, so no two leases of a partition ever share one.
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

from heapline.core.events import Grant
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


class LeaseTable:
    def __init__(self) -> None:
        self.by_id: dict[int, Lease] = {}
        self.held: dict[str, int] = {}  # leases per named holder; a holder without leases is absent
        self._deadlines: list[tuple[int, int, list[int], int]] = []  # deadline, token, ids, number of skipped ids
        self._requests: dict[str, tuple[int, list[int]]] = {}  # request id -> (first token, ids)

    def __len__(self) -> int:
        return len(self.by_id)

    def grant(self, ids: list[int], token: int, positions: list[int], keys: list[int], grant: Grant, now: int) -> None:
        """Lease messages. `token` is that of the first; the others follow."""
        count, deadline, holder, request_id = len(ids), grant.deadline, grant.holder, grant.request_id
        rows = zip(range(token, token + count), positions, keys, repeat(deadline), repeat(now), repeat(holder))
        self.by_id.update(zip(ids, rows, strict=False))
        if holder is not None:
            self.held[holder] = self.held.get(holder, 0) + count
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
            self.by_id[id] = (token, position, key, deadline, started, holder)
            heapq.heappush(self._deadlines, (deadline, token, [id], 0))

    def take(self, ids: Iterable[int]) -> list[Lease]:
        """End these leases; they must be held."""
        leases = [self.by_id.pop(id) for id in ids]
        if self.held:
            self._count_off(leases)
        return leases

    def _count_off(self, leases: list[Lease]) -> None:
        for holder, count in Counter(map(itemgetter(HOLDER), leases)).items():
            if holder is not None:
                left = self.held[holder] - count
                if left:
                    self.held[holder] = left
                else:
                    del self.held[holder]

    def request(self, request_id: str) -> list[int]:
        """Return the ids that an earlier pop with this request id leased and that are still under those leases."""
        token, ids = self._requests.get(request_id, (0, []))
        return [id for i, id in enumerate(ids) if self.holds(id, token + i)]

    def next_deadline(self) -> int | None:
        """Return when the first deadline may pass. Outdated entries are dropped on the way."""
        heap, by_id = self._deadlines, self.by_id
        while heap:
            deadline, token, ids, start = heap[0]
            for at in range(start, len(ids)):
                lease = by_id.get(ids[at])
                if lease is not None and lease[DEADLINE] <= deadline:
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
                self.by_id[id] = (token, position | attempts_of(old), key, deadline, started, holder)

    def to_state(self) -> list[Any]:
        return [[(id, *lease) for id, lease in self.by_id.items()], [(k, *v) for k, v in self._requests.items()]]

    @classmethod
    def from_state(cls, state: list[Any]) -> LeaseTable:
        table = cls()
        for id, *lease in state[0]:
            table.by_id[id] = tuple(lease)
            table._deadlines.append((lease[DEADLINE], lease[TOKEN], [id], 0))
        heapq.heapify(table._deadlines)
        named = (lease[HOLDER] for lease in table.by_id.values() if lease[HOLDER] is not None)
        table.held = dict(Counter(named))
        table._requests = {name: (token, list(ids)) for name, token, ids in state[1]}
        return table
