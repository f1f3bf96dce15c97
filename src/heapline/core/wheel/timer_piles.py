"""Containers of chunks: an unordered pile, and the front, which serves its rows in order.

A pile is the content of one slot of the wheel. Small chunks of similar size are merged by eights, so that single
inserts neither leave one array per row nor cost more than a few copies each. The front is a pile plus its head: its
first few thousand rows, drawn and put in final order ahead of need. When the clock has jumped and many chunks become
due together, they wait in `later` and join the pile in turn. The cost of firing then depends on the rows fired, even if
a million rows become due in the same instant or in one jump. Neither container knows why a row is in it or what the
time is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from heapline.core.events import I64
from heapline.core.wheel.timer_chunks import DUE, I64_MAX, Chunk, Mint, Timers, as_timers, draw

#: Takes the live rows of a chunk and returns their replacement: the same array if nothing changes.
Change = Callable[[I64], I64]

_FULL = 64  # the tier of chunks that are no longer merged
NO_ROWS: I64 = np.empty((4, 0), np.int64)
NO_ROWS.flags.writeable = False
NO_TIMERS = as_timers(NO_ROWS)


def changed(chunk: Chunk, change: Change, mint: Mint) -> Chunk | None:
    """Return the chunk after a change of its rows: itself, another, or None if no row is left."""
    live = chunk.live()
    rows = change(live)
    if rows is live:
        return chunk
    return mint.chunk(rows) if rows.shape[1] else None


class Pile:
    """Unordered chunks, in tiers by size."""

    __slots__ = ("_tally", "mint", "tiers")

    def __init__(self, mint: Mint) -> None:
        self.mint = mint
        self.tiers: dict[int, list[Chunk]] = {}
        self._tally: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Chunk]:
        for tier in self.tiers.values():
            yield from tier

    def __bool__(self) -> bool:
        return bool(self.tiers)

    def tally(self) -> tuple[int, int]:
        """Return rows and bytes of a slot, whose chunks are never consumed in place. Recounted after an `add`."""
        if self._tally is None:
            chunks = [chunk for tier in self.tiers.values() for chunk in tier]
            self._tally = sum([c.rows.shape[1] for c in chunks]), sum([c.rows.nbytes for c in chunks])
        return self._tally

    def first(self) -> int:
        return min(chunk.first for chunk in self)

    def add(self, chunk: Chunk) -> None:
        self._tally = None
        _, fan_bits, limit, _, _ = self.mint.sizes
        fan = self.mint.fan
        while 2 * (count := chunk.count) < limit:
            number = (count.bit_length() - 1) // fan_bits
            tier = self.tiers.get(number)
            if tier is None:
                self.tiers[number] = [chunk]
                return
            tier.append(chunk)
            # The second condition keeps a merge, and so one insert, near `chunk_rows`.
            if len(tier) < fan and (count * fan < limit or sum(c.count for c in tier) < limit):
                return
            del self.tiers[number]
            chunk = self.mint.merge(tier)
        self.tiers.setdefault(_FULL, []).append(chunk)

    def pop_only(self) -> Chunk | None:
        """Remove and return the only chunk, if there is just one."""
        if len(self.tiers) != 1:
            return None
        (tier,) = self.tiers.values()
        if len(tier) != 1:
            return None
        self.tiers = {}
        return tier[0]

    def add_unmerged(self, chunk: Chunk) -> None:
        """Add a chunk that is about to be read: a merge would only delay the read."""
        self.tiers.setdefault(_FULL, []).append(chunk)

    def pop_full(self) -> list[Chunk]:
        """Remove and return the chunks that are no longer merged."""
        return self.tiers.pop(_FULL, [])

    def drop_empty(self) -> None:
        tiers = {number: [chunk for chunk in tier if chunk.count] for number, tier in self.tiers.items()}
        self.tiers = {number: tier for number, tier in tiers.items() if tier}

    def rewrite(self, change: Change) -> None:
        kept = [changed(chunk, change, self.mint) for chunk in self]
        self.tiers, self._tally = {}, None
        for chunk in kept:
            if chunk is not None:
                self.add(chunk)


class Front:
    """Rows that have become due. Those in the head are strictly before all others, in (due, id)."""

    __slots__ = ("_head", "_later", "_mint", "_pile", "count")

    def __init__(self, mint: Mint) -> None:
        self._mint = mint
        self._head: Chunk | None = None
        self._pile = Pile(mint)
        self._later: list[Chunk] = []  # by first due time, the earliest last
        self.count = 0

    def __iter__(self) -> Iterator[Chunk]:
        if self._head is not None:
            yield self._head
        yield from self._pile
        yield from self._later

    def first(self) -> int:
        if self._head is not None:
            return self._head.first
        pile = self._pile.first() if self._pile else I64_MAX
        return min(pile, self._later[-1].first) if self._later else pile

    def add(self, chunk: Chunk) -> None:
        if not self.count:
            self._head = chunk
            self.count = chunk.count
            return
        self.count += chunk.count
        self._make_way_for(chunk)
        self._pile.add(chunk)

    def add_all(self, chunks: list[Chunk]) -> None:
        """Add the chunks of a clock jump without merging them, so that the cost is per chunk, not per row."""
        if len(chunks) <= self._mint.fan:
            for chunk in chunks:
                self.add(chunk)
            return
        for chunk in chunks:
            self.count += chunk.count
            self._make_way_for(chunk)
        self._later = sorted(self._later + chunks, key=lambda chunk: -chunk.first)

    def _make_way_for(self, chunk: Chunk) -> None:
        if self._head is not None and chunk.key_at(0) <= self._head.last_key():
            self._pile.add(self._head)
            self._head = None

    def peek(self, limit: int, now: int) -> Timers:
        """Return the first rows due at `now`, at most `limit`."""
        if not self.count or limit <= 0:
            return NO_TIMERS
        head = self._filled(limit, now)
        if head.first > now:
            return NO_TIMERS
        end = min(head.start + limit, head.rows.shape[1])
        if head.rows.item(DUE, end - 1) > now:
            end = int(head.rows[DUE].searchsorted(now, "right"))
        return as_timers(head.rows[:, head.start : end])

    def take(self, limit: int) -> I64:
        """Remove and return the first rows: `limit`, or all if there are fewer."""
        if not self.count:
            return NO_ROWS
        head = self._filled(limit, I64_MAX)
        rows = head.pull(min(limit, head.count))
        self.count -= rows.shape[1]
        if not head.count:
            self._head = None
        return rows

    def _filled(self, want: int, now: int) -> Chunk:
        """Return the head with at least `want` rows, or all that are due at `now`. There must be rows."""
        head = self._head
        if head is not None and (head.count >= want or head.last > now or not (self._pile or self._later)):
            return head
        only = self._next_chunk() if head is None else None
        begun = only or head
        parts = [] if begun is None else [begun.live()]
        have = sum(part.shape[1] for part in parts)
        while have < want and (self._pile or self._later) and (not parts or parts[-1].item(DUE, -1) <= now):
            parts.append(self._draw(max(want, self._mint.sizes.head_rows)))
            have += parts[-1].shape[1]
            only = None
        if only is None:
            only = self._mint.chunk(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))
        self._head = only
        return only

    def _next_chunk(self) -> Chunk | None:
        """Remove and return a chunk that precedes all other rows unchanged, if there is one."""
        if not self._later:
            return self._pile.pop_only()
        later = self._later
        if not self._pile and (len(later) == 1 or later[-1].last < later[-2].first):
            return later.pop()
        return None

    def _draw(self, want: int) -> I64:
        """Remove and return the first rows of pile and later, at least one: about `want`, or up to later's next."""
        chunks, later = list(self._pile), self._later
        have = sum(chunk.count for chunk in chunks)
        first = min((chunk.first for chunk in chunks), default=I64_MAX)
        while later and (have < want or first >= later[-1].first):
            chunk = later.pop()
            self._pile.add_unmerged(chunk)
            chunks.append(chunk)
            have += chunk.count
            first = min(first, chunk.first)
        rows = draw(chunks, want, (later[-1].first - 1, I64_MAX) if later else None)
        self._pile.drop_empty()
        return rows

    def release(self) -> list[Chunk]:
        """Remove and return all chunks."""
        chunks = list(self)
        self._head, self._pile, self._later, self.count = None, Pile(self._mint), [], 0
        return chunks

    def rewrite(self, change: Change) -> None:
        if self._head is not None:
            self._head = changed(self._head, change, self._mint)
        self._pile.rewrite(change)
        later = (changed(chunk, change, self._mint) for chunk in self._later)
        self._later = sorted((chunk for chunk in later if chunk is not None), key=lambda chunk: -chunk.first)
        self.count = sum(chunk.count for chunk in self)
