"""SpineIndex: find the partition with the best candidate, and the best candidate of all others.

Theory of operation. A partition shows up to F candidates, best first. Only the first can be the topic's best, so only
the first is in the heap. When it is taken, the next one replaces it: one `heapreplace`, whatever P and F are. Entries
are tuples (key, id, partition), created once. An entry is valid if it *is* the head of its partition's list. An update,
a throttle or a removal leaves invalid entries in the heap, and they are dropped when they reach the top.

The limit needs the best entry of another partition. In a binary heap the second best is entry 1 or 2, which is checked
first. Only if that entry is stale is the top popped and pushed back.

A partition that showed F candidates may hold more. Once they are used up, the quality of its next message is unknown,
and no other candidate may be called the best. The partition is then `hungry`, and `select` stops. (The seed's sketch
continued, and its bound of K·F fails for that reason.) A partition that showed fewer than F has shown all.

This module does not know the time or the purpose of a selection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise

import msgspec

from heapline.contract.errors import BadRequest

Place = tuple[int, int]
_Entry = tuple[int, int, int]

#: Stale entries allowed per valid one before the heap is rebuilt.
_STALE_FACTOR = 4
_STALE_MIN = 64


class Shown(msgspec.Struct):
    """The candidates that one partition shows. `entries` is best last, so that taking the best pops from the end."""

    entries: list[_Entry] = []
    complete: bool = True
    throttled: str | None = None


class SpineIndex:
    def __init__(self, fan_out: int = 1) -> None:
        if fan_out < 1:
            raise BadRequest(f"fan_out is the number of candidates a partition shows, at least 1, not {fan_out}")
        self.fan_out = fan_out
        #: Available partitions that ran out of candidates and may hold more: refresh them before trusting `best`.
        self.hungry: set[int] = set()
        self._shown: dict[int, Shown] = {}
        self._available: dict[int, list[_Entry]] = {}
        self._heap: list[_Entry] = []

    # --- partitions ---

    def add(self, partition: int) -> None:
        if partition in self._shown:
            raise BadRequest(f"partition {partition} is in the index already")
        shown = self._shown[partition] = Shown()
        self._available[partition] = shown.entries

    def remove(self, partition: int) -> None:
        self._get(partition)
        del self._shown[partition]
        self._available.pop(partition, None)
        self.hungry.discard(partition)

    def set_throttled(self, partition: int, reason: str | None) -> None:
        """Exclude the partition for this reason. None includes it again, with the candidates that it showed last."""
        shown = self._get(partition)
        was, shown.throttled = shown.throttled, reason
        if reason is not None:
            self._available.pop(partition, None)
            self.hungry.discard(partition)
        elif was is not None:
            self._available[partition] = shown.entries
            self._stand(partition, shown)

    def shown(self, partition: int) -> Shown:
        return self._get(partition)

    @property
    def partitions(self) -> Mapping[int, Shown]:
        return self._shown

    @property
    def available(self) -> Sequence[int]:
        return sorted(self._available)

    @property
    def candidate_count(self) -> int:
        return sum(len(shown.entries) for shown in self._shown.values())

    # --- candidates ---

    def update(self, partition: int, candidates: Sequence[Place]) -> None:
        """Set the partition's best candidates, best first, cut to F. Fewer than F means that it has no more."""
        shown = self._get(partition)
        fan_out = self.fan_out
        entries = [(key, id, partition) for key, id in candidates[:fan_out]]
        if any(worse <= better for better, worse in pairwise(entries)):
            raise BadRequest(f"the candidates of partition {partition} are not in order: {list(candidates)}")
        entries.reverse()
        shown.entries, shown.complete = entries, len(entries) < fan_out
        if shown.throttled is None:
            self._available[partition] = entries
            self._stand(partition, shown)

    def clear(self, partition: int) -> None:
        """Remove the partition's candidates: it has nothing to offer."""
        shown = self._get(partition)
        shown.entries, shown.complete = [], True
        self.hungry.discard(partition)
        if shown.throttled is None:
            self._available[partition] = shown.entries

    def best(self) -> tuple[int, int, int] | None:
        """Return (partition, key, id) of the best candidate. It is the topic's best while no partition is `hungry`."""
        heap, available = self._heap, self._available
        while heap:
            entry = heap[0]
            entries = available.get(entry[2])
            if entries and entries[-1] is entry:
                return entry[2], entry[0], entry[1]
            heappop(heap)
        return None

    def advance(self, partition: int) -> None:
        """Remove the partition's head, which was taken, and promote its next candidate."""
        entries = self._available.get(partition)
        if not entries:
            raise BadRequest(f"partition {partition} is throttled, unknown or shows no candidate: nothing to advance")
        taken = entries.pop()
        heap = self._heap
        if not entries:
            if not self._shown[partition].complete:
                self.hungry.add(partition)
            if heap[0] is taken:
                heappop(heap)
        elif heap[0] is taken:
            heapreplace(heap, entries[-1])
        else:
            heappush(heap, entries[-1])

    def select(self, n: int) -> list[tuple[int, int, int]]:
        """Take the n best candidates as `advance` does; return (partition, key, id), best first.

        Returns fewer if a partition that may hold more ran out: `update` the `hungry` ones and select the rest.
        """
        chosen: list[tuple[int, int, int]] = []
        while len(chosen) < n and not self.hungry:
            best = self.best()
            if best is None:
                break
            chosen.append(best)
            self.advance(best[0])
        return chosen

    def limit(self, partition: int) -> Place | None:
        """Return the best candidate among all other available partitions."""
        best = self.best()
        if best is None:
            return None
        if best[0] != partition:
            return best[1], best[2]
        entry = self._second(partition)
        return None if entry is None else (entry[0], entry[1])

    def _second(self, partition: int) -> _Entry | None:
        """Return the best entry of another partition when this partition's own entry is on top."""
        heap = self._heap
        children = heap[1:3]
        if all(self._is_valid(entry) and entry[2] != partition for entry in children):
            return min(children, default=None)
        top = heappop(heap)
        while heap and not (self._is_valid(heap[0]) and heap[0][2] != partition):
            heappop(heap)  # a stale entry, or a duplicate of the top left by a throttle that ended
        second = heap[0] if heap else None
        heappush(heap, top)
        return second

    def _is_valid(self, entry: _Entry) -> bool:
        entries = self._available.get(entry[2])
        return bool(entries) and entries[-1] is entry  # type: ignore[index]  # it is true, hence a list

    def _stand(self, partition: int, shown: Shown) -> None:
        """Push an available partition's head onto the heap. Its older entry becomes stale."""
        self.hungry.discard(partition)
        if not shown.entries:
            if not shown.complete:
                self.hungry.add(partition)
            return
        heap, head = self._heap, shown.entries[-1]
        if heap and heap[0][2] == partition:
            heapreplace(heap, head)
        else:
            heappush(heap, head)
        if len(heap) > _STALE_MIN + _STALE_FACTOR * len(self._available):
            self._heap = [entries[-1] for entries in self._available.values() if entries]
            heapify(self._heap)

    def _get(self, partition: int) -> Shown:
        try:
            return self._shown[partition]
        except KeyError:
            raise BadRequest(f"partition {partition} is not in the index: add it first") from None
