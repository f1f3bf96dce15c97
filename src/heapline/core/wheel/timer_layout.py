"""Layout of waiting timers: where each row is stored and how it becomes due.

Theory of operation. A row goes by its absolute due time to one of five places:

    front     due within the current tick or before: ready, served in (due, id) order
    level 0   slots of one tick              this block of 60 ticks and the next
    level 1   slots of 60 ticks              this block of 3600 ticks and the next
    level 2   slots of 3600 ticks            about 60 of them
    far       runs sorted by due time        all other rows

Slots are sparse dictionaries by absolute number, so the cost of a jump over years depends on the rows skipped, not on
the ticks. Every chunk is sorted when it is created, so a slot that becomes due moves to the front without a sort.

An upper slot is *opened* one block before its time: its chunks go to `_opened` and from there to the slots below, one
slice per tick and more in `work_ahead`. Rows of far are drawn in the same slices. None of this has a deadline: whenever
the front's reach grows, rows within it are cut from whatever is still opened or far. So the one invariant is that **all
rows due within the reach are in the front**, and order never depends on the layout.

*Far.* A lane is a long run, cut into consecutive chunks. New chunks of full size become their own lanes. `merge` turns
eight lanes of similar size into one, from their fronts: a step moves the first rows of the eight to the end of the new
lane. At any time each row is in exactly one lane and all lanes are in order. So a merge may stop anywhere, needs no
swap at its end, and takes little memory beyond the rows themselves. Rows leave by due time, in draws of bounded size,
or as complete chunks when the clock has jumped over them.

The layout does not know the time. The caller passes the tick up to which rows become due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from heapline.core.events import I64
from heapline.core.wheel.timer_chunks import DUE, I64_MAX, Chunk, Key, Mint, draw, in_order, sort_rows
from heapline.core.wheel.timer_piles import Change, Front, Pile, changed

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


_LEVELS = 3


class TimerLayout:
    def __init__(self, mint: Mint, tick_ms: int, tick: int) -> None:
        self._mint = mint
        self._slots = mint.sizes.slots
        self._widths = [tick_ms * self._slots**level for level in range(_LEVELS)]
        self._levels: list[dict[int, Pile]] = [{} for _ in range(_LEVELS)]
        self._opened: list[Chunk] = []
        self._far = Far(mint)
        self.front = Front(mint)
        self._turn_to(tick)

    def _turn_to(self, tick: int) -> None:
        """Set the front's reach to just before `tick`, and the last due time that each level accepts."""
        block, long_block = tick // self._slots, tick // self._slots**2
        self.tick = tick
        self._limits = (
            min(tick * self._widths[0] - 1, I64_MAX),
            min((block + 2) * self._widths[1] - 1, I64_MAX),
            min((long_block + 2) * self._widths[2] - 1, I64_MAX),
            min((long_block + self._slots) * self._widths[2] - 1, I64_MAX),
        )

    def __iter__(self) -> Iterator[Chunk]:
        yield from self.front
        for slots in self._levels:
            for pile in slots.values():
                yield from pile
        yield from self._opened
        yield from self._far

    def slots(self) -> Iterator[tuple[int, int, Pile]]:
        """Yield the slots in use, with the first and last due time that each accepts."""
        for width, slots in zip(self._widths, self._levels, strict=True):
            for number, pile in slots.items():
                yield number * width, (number + 1) * width - 1, pile

    def loose(self) -> Iterator[Chunk]:
        """Yield the chunks that are not in a slot."""
        yield from self.front
        yield from self._opened
        yield from self._far

    def first(self) -> int:
        """Return the earliest due time; there must be rows."""
        if self.front.count:
            return self.front.first()
        firsts = [chunk.first for chunk in self._opened]
        firsts.extend(slots[min(slots)].first() for slots in self._levels if slots)
        if self._far:
            firsts.append(self._far.first)
        return min(firsts)

    # -- insertion

    def place(self, rows: I64) -> None:
        """Insert sorted rows according to their due times."""
        first, last = rows.item(DUE, 0), rows.item(DUE, -1)
        if last <= self._limits[0]:
            self.front.add(self._mint.chunk(rows))
        elif first > self._limits[-1]:
            self._far.add(self._mint.chunk(rows))
        elif not self._place_in_one_slot(rows, first, last):
            cuts = rows[DUE].searchsorted(np.array(self._limits, np.int64), "right").tolist()
            if cuts[0]:
                self.front.add(self._mint.chunk(rows[:, : cuts[0]]))
            for level in range(_LEVELS):
                if cuts[level] < cuts[level + 1]:
                    self._scatter(level, rows[:, cuts[level] : cuts[level + 1]])
            if cuts[-1] < rows.shape[1]:
                self._far.add(self._mint.chunk(rows[:, cuts[-1] :]))

    def _place_in_one_slot(self, rows: I64, first: int, last: int) -> bool:
        """Insert single rows and narrow batches quickly; return False if the rows are not in one slot."""
        if first > self._limits[0]:
            for level in range(_LEVELS):
                if first <= self._limits[level + 1]:
                    number = first // self._widths[level]
                    if last // self._widths[level] != number:
                        return False
                    self._slot(level, number).add(self._mint.chunk(rows))
                    return True
        return False

    def _slot(self, level: int, number: int) -> Pile:
        pile = self._levels[level].get(number)
        if pile is None:
            pile = self._levels[level][number] = Pile(self._mint)
        return pile

    def _scatter(self, level: int, rows: I64) -> None:
        """Insert sorted rows into the slots of a level."""
        numbers = rows[DUE] // self._widths[level]
        begin = 0
        for end in [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]:
            self._slot(level, numbers.item(begin)).add(self._mint.chunk(rows[:, begin:end]))
            begin = end

    def restore(self, chunks: Iterable[Chunk]) -> None:
        """Load the chunks of a snapshot unchanged; they leave far like other rows, when their due time is near."""
        given = list(chunks)
        whole = [chunk if in_order(chunk.live()) else self._mint.chunk(sort_rows(chunk.live())) for chunk in given]
        self._far.restore(whole)
        self._bring_up()

    # -- time

    def advance(self, tick: int) -> None:
        """Move all rows due before `tick` to the front, and do a slice of the cascade."""
        before = self.tick
        self._turn_to(tick)
        self.front.add_all([chunk for pile in _pop_upto(self._levels[0], before, tick - 1) for chunk in pile])
        # The upper level first: `_cascade` works from the end, and rows due sooner must not wait.
        for level in (2, 1):
            block = self._slots**level
            if tick // block != before // block:
                for pile in _pop_upto(self._levels[level], before // block + 2, tick // block + 1):
                    self._opened.extend(pile)
        self._bring_up()
        self._cascade(self._mint.sizes.slice_rows)

    def go_back(self, tick: int) -> None:
        """Follow a clock that was set back by more than the lower level spans.

        Rows in the front wait again, so that the front stays small. For a smaller step nothing needs to be done.
        """
        if tick < self.tick - 2 * self._slots:
            self._turn_to(tick)
            self._opened.extend(self.front.release())
            self._bring_up()

    def _bring_up(self) -> None:
        """Move the rows within reach from opened slots and far to the front."""
        reach = self._limits[0]
        if any(chunk.first <= reach for chunk in self._opened):
            waiting, risen = [], []
            for chunk in self._opened:
                if chunk.first <= reach:
                    risen.append(chunk if chunk.last <= reach else self._mint.cut(chunk, reach))
                if chunk.last > reach:
                    waiting.append(chunk)
            self._opened = waiting
            self.front.add_all(risen)
        if self._far.first <= reach:
            self.front.add_all(self._far.cut(reach))

    def _cascade(self, budget: int) -> int:
        """Move rows from opened slots and from far to the slots below; return how many were moved."""
        moved = 0
        while self._opened and moved < budget:
            chunk = self._opened[-1]
            rows = chunk.pull(min(chunk.count, budget - moved))
            if not chunk.count:
                self._opened.pop()
            moved += rows.shape[1]
            self.place(rows)
        while moved < budget and self._far_is_near():
            rows = self._far.draw(min(self._mint.sizes.slice_rows, budget - moved), self._limits[2])
            moved += rows.shape[1]
            self.place(rows)
        return moved

    def _far_is_near(self) -> bool:
        return bool(self._far) and self._far.first <= self._limits[2]

    def work_ahead(self, budget: int) -> bool:
        """Cascade, then merge far runs, about `budget` rows; return True if more is left."""
        budget -= self._cascade(budget)
        if self._opened or self._far_is_near():
            return True
        return self._far.merge(budget)

    # -- changes

    def rewrite(self, change: Change) -> None:
        """Apply `change` to the rows of every chunk."""
        self.front.rewrite(change)
        for level, slots in enumerate(self._levels):
            for pile in slots.values():
                pile.rewrite(change)
            self._levels[level] = {number: pile for number, pile in slots.items() if pile}
        opened = (changed(chunk, change, self._mint) for chunk in self._opened)
        self._opened = [chunk for chunk in opened if chunk is not None]
        self._far.rewrite(change)


def _pop_upto(slots: dict[int, Pile], begin: int, end: int) -> list[Pile]:
    """Remove the slots numbered `begin` to `end`. None has a lower number. Walks the shorter of range and dict."""
    if end - begin <= len(slots):
        numbers = [number for number in range(begin, end + 1) if number in slots]
    else:
        numbers = sorted(number for number in slots if number <= end)
    return [slots.pop(number) for number in numbers]
