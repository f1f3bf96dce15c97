"""Timers beyond the wheel's upper level: runs sorted by due time, merged incrementally.

A lane is a long run, cut into consecutive chunks. New chunks of full size become their own lanes. `merge` turns eight
lanes of similar size into one, from their fronts: a step moves the first rows of the eight to the end of the new lane.
At any time each row is in exactly one lane and all lanes are in order. So a merge may stop anywhere, needs no swap at
its end, and takes little memory beyond the rows themselves. Rows leave by due time, in draws of bounded size, or as
complete chunks when the clock has jumped over them. This module does not know the time or where the rows go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from heapline.core.wheel.timer_chunks import I64, I64_MAX, Chunk, Key, Mint, draw
from heapline.core.wheel.timer_piles import Change, Pile, changed

#: Below this, the consumed part of an array is not worth a copy to free it.
_TRIM_ROWS = 1024


class Lane:
    """Chunks in order: each is strictly after the one before."""

    __slots__ = ("chunks",)

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self.chunks = deque(chunks)

    def count(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    def append(self, rows: I64, mint: Mint) -> None:
        if self.chunks and self.chunks[-1].count + rows.shape[1] <= mint.sizes.chunk_rows:
            rows = np.concatenate((self.chunks.pop().live(), rows), axis=1)
        self.chunks.append(mint.chunk(rows))

    def settle(self, mint: Mint) -> None:
        """Clean up after rows were pulled from the first chunk: drop it if empty, free its consumed part if large."""
        while self.chunks and not self.chunks[0].count:
            self.chunks.popleft()
        if self.chunks:
            head = self.chunks[0]
            if head.start > max(_TRIM_ROWS, head.count):
                self.chunks[0] = mint.chunk(head.live())


class Far:
    __slots__ = ("_inputs", "_lanes", "_mint", "_output", "_small", "first")

    def __init__(self, mint: Mint) -> None:
        self._mint = mint
        self._small = Pile(mint)
        self._lanes: list[Lane] = []
        # A merge in progress; these lanes are also in `_lanes`.
        self._inputs: list[Lane] = []
        self._output = Lane()
        #: The earliest due time; I64_MAX if there are no rows (or if that is the due time).
        self.first = I64_MAX

    def __iter__(self) -> Iterator[Chunk]:
        yield from self._small
        for lane in self._lanes:
            yield from lane.chunks

    def __bool__(self) -> bool:
        return bool(self._small) or bool(self._lanes)

    def add(self, chunk: Chunk) -> None:
        self.first = min(self.first, chunk.first)
        self._small.add(chunk)
        self._lanes.extend(Lane([full]) for full in self._small.pop_full())

    def restore(self, chunks: Iterable[Chunk]) -> None:
        """Load chunks of a snapshot, placing consecutive ones into as few lanes as they came from."""
        for chunk in sorted(chunks, key=lambda chunk: chunk.first):
            if 2 * chunk.count < self._mint.sizes.chunk_rows:
                self._small.add(chunk)
                continue
            lane = next((lane for lane in self._lanes if lane.chunks[-1].last < chunk.first), None)
            if lane is None:
                self._lanes.append(lane := Lane())
            lane.chunks.append(chunk)
        self._lanes.extend(Lane([full]) for full in self._small.pop_full())
        self._settle()

    def cut(self, reach: int) -> list[Chunk]:
        """Remove and return all rows due at or before `reach`; complete chunks are returned unchanged."""
        pieces = []
        for chunk in self._small:
            if chunk.first <= reach:
                pieces.append(self._mint.cut(chunk, reach))
        for lane in self._lanes:
            while lane.chunks and lane.chunks[0].last <= reach:
                pieces.append(lane.chunks.popleft())
            if lane.chunks and lane.chunks[0].first <= reach:
                pieces.append(self._mint.cut(lane.chunks[0], reach))
        self._settle()
        return pieces

    def draw(self, want: int, reach: int) -> I64:
        """Remove and return the first rows due at or before `reach`, about `want`; at least one must exist."""
        heads = [chunk for chunk in self._small if chunk.first <= reach]
        rows = _draw_lanes(self._lanes, heads, want, (reach, I64_MAX))
        self._settle()
        return rows

    def merge(self, budget: int) -> bool:
        """Merge about `budget` rows of lanes; return True if more is left."""
        while budget > 0 and (self._inputs or self._choose()):
            rows = _draw_lanes(self._inputs, [], min(budget, self._mint.sizes.chunk_rows), None)
            budget -= rows.shape[1]
            self._output.append(rows, self._mint)
            for lane in self._inputs:
                lane.settle(self._mint)
            self._prune()
        return bool(self._inputs) or self._choose()

    def _choose(self) -> bool:
        """Start a merge of the smallest lanes of similar size, if there are enough of them."""
        by_size: dict[int, list[Lane]] = {}
        for lane in self._lanes:
            by_size.setdefault(lane.count().bit_length() // self._mint.sizes.fan_bits, []).append(lane)
        enough = [size for size, lanes in by_size.items() if len(lanes) >= self._mint.fan]
        if not enough:
            return False
        self._inputs = by_size[min(enough)]
        self._output = Lane()
        self._lanes.append(self._output)
        return True

    def rewrite(self, change: Change) -> None:
        self._small.rewrite(change)
        for lane in self._lanes:
            kept = (changed(chunk, change, self._mint) for chunk in lane.chunks)
            lane.chunks = deque(chunk for chunk in kept if chunk is not None)
        self._lanes.extend(Lane([full]) for full in self._small.pop_full())
        self._settle()

    def _settle(self) -> None:
        self._small.drop_empty()
        for lane in self._lanes:
            lane.settle(self._mint)
        self._prune()
        firsts = [lane.chunks[0].first for lane in self._lanes if lane.chunks]
        self.first = min(firsts + [chunk.first for chunk in self._small], default=I64_MAX)

    def _prune(self) -> None:
        """Drop empty lanes, except one that a merge is about to fill."""
        self._inputs = [lane for lane in self._inputs if lane.chunks]
        filling = self._output if self._inputs else None
        self._lanes = [lane for lane in self._lanes if lane.chunks or lane is filling]


def _draw_lanes(lanes: list[Lane], heads: list[Chunk], want: int, ceiling: Key | None) -> I64:
    """Draw from the first chunks of lanes (and from `heads`), never past a chunk that another one follows."""
    heads = list(heads)
    for lane in lanes:
        if not lane.chunks or (ceiling is not None and lane.chunks[0].first > ceiling[0]):
            continue
        heads.append(lane.chunks[0])
        if len(lane.chunks) > 1:
            last = lane.chunks[0].last_key()
            ceiling = last if ceiling is None else min(ceiling, last)
    return draw(heads, want, ceiling)
