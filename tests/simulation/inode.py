"""The bytes of one file on a fake disk, in sectors: what a reader sees now, and what may survive a power cut.

A write is visible immediately and durable only after a sync. Until then each sector is on disk in its old or new form,
and the size is one of those that the file has had since; `crashed` draws which. After a failed sync some sectors
are *lost*: still shown from the cache, marked clean, and never written, as Linux does. A bad sector answers EIO
until it is written again. Names and directories are not known here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

SECTOR = 512
BLOCK = 4096  # space is taken in these
REWRITTEN_EARLY = 0.25  # probability that the system writes a dirty sector back before it is changed again
_LOSS = (0.0, 0.1, 0.5, 0.9, 1.0)


class Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.blocks: set[int] = set()
        self.bad: set[int] = set()
        self._old: dict[int, bytes] = {}  # sector -> its bytes on disk, if they differ from the visible ones
        self._dirty: set[int] = set()  # of those, which the next sync will write
        self._fresh: set[int] = set()  # blocks that were taken since the last sync
        self._sizes: list[int] = [0]  # sizes that may survive a power cut; the first is the synced one
        self._cut: dict[int, bytes] | None = None  # sectors that a truncation since the last sync removed

    # -- what a reader and a writer see ----------------------------------------------------------------------------

    def read(self, n: int, off: int) -> bytes:
        return bytes(self.data[off : off + n])

    def is_bad(self, n: int, off: int) -> bool:
        return bool(self.bad) and any(s in self.bad for s in _sectors(off, off + n))

    def blocks_wanted(self, off: int, end: int) -> set[int]:
        """Return the blocks that writing there needs."""
        return set(range(off // BLOCK, -(-end // BLOCK))) - self.blocks

    def take_blocks(self, blocks: set[int]) -> None:
        self._fresh |= blocks
        self.blocks |= blocks

    def grow(self, size: int) -> None:
        if size > len(self.data):
            self.data.extend(bytes(size - len(self.data)))
            self._sizes.append(size)

    def write(self, data: bytes, off: int, rng: random.Random) -> None:
        end = off + len(data)
        if end > len(self.data):
            middle = -(-rng.randint(len(self.data), end) // SECTOR) * SECTOR
            self.grow(min(middle, end))
            self.grow(end)
        elif not self._old and self.data[off:end] == data:
            self.bad -= set(_sectors(off, end)) if self.bad else set()
            return  # the same bytes over clean ones: no change
        for sector in _sectors(off, end):
            if sector not in self._old or (sector in self._dirty and rng.random() < REWRITTEN_EARLY):
                self._old[sector] = self._sector(sector)
            self._dirty.add(sector)
        self.data[off:end] = data
        if self.bad:
            self.bad -= set(_sectors(off, end))

    def _sector(self, number: int) -> bytes:
        return bytes(self.data[number * SECTOR : (number + 1) * SECTOR]).ljust(SECTOR, b"\0")

    def truncate(self, size: int) -> None:
        if size >= len(self.data):
            self.grow(size)
            return
        self._cut = self._cut or {}
        for sector in _sectors(size, len(self.data)):
            self._cut.setdefault(sector, self._old.pop(sector, b"") or self._sector(sector))
            self._dirty.discard(sector)
        del self.data[size:]
        self.blocks = {b for b in self.blocks if b * BLOCK < size}
        self._sizes = [self._sizes[0], size]

    # -- durability ------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        for sector in self._dirty:
            del self._old[sector]
        self._dirty.clear()
        self._fresh.clear()
        self._sizes = [len(self.data)]
        self._cut = None

    def fail_sync(self, rng: random.Random) -> None:
        """The disk refused: some sectors were written, some are still dirty, and some are silently lost."""
        fates = rng.choice((("dirty",), ("lost",), ("lost", "gone"), ("lost", "dirty", "written", "gone")))
        for sector in sorted(self._dirty):
            fate = rng.choice(fates)
            if fate == "written":
                del self._old[sector]
            elif fate == "gone":  # dropped from the cache too: readers see the old bytes again
                self._show(sector, self._old.pop(sector))
            if fate != "dirty":
                self._dirty.discard(sector)

    def _show(self, sector: int, content: bytes) -> None:
        start = sector * SECTOR
        keep = max(0, min(SECTOR, len(self.data) - start))
        self.data[start : start + keep] = content[:keep]

    def crashed(self, rng: random.Random) -> Inode:
        """Return the file after a power cut. Draws; changes nothing here."""
        new = Inode()
        new.data = bytearray(self.data)
        loss = rng.choice(_LOSS)
        for sector, content in self._old.items():
            if sector not in self._dirty or rng.random() < loss:
                new._show(sector, content)
        size = rng.choice(self._sizes if self._cut is None else self._sizes[1:])
        if self._cut is not None and rng.random() < 0.5:  # the truncation did not happen, nor anything after it
            size = self._sizes[0]
            new.data.extend(bytes(max(0, size - len(new.data))))
            for sector, content in self._cut.items():
                new._show(sector, content)
        new.data = new.data[:size].ljust(size, b"\0")
        new.bad = set(self.bad)
        new.blocks = {b for b in self.blocks if b * BLOCK < size}
        for block in sorted(self._fresh & new.blocks):
            if not any(new.data[block * BLOCK : (block + 1) * BLOCK]) and rng.random() < 0.5:
                new.blocks.discard(block)  # allocated but not recorded: a hole
        new._sizes = [size]
        return new

    def damage(self, sector: int, how: str, rng: random.Random) -> None:
        """Damage a durable sector: `eio`, `garbage`, `zeros` or `flip` (one bit)."""
        if how == "eio":
            self.bad.add(sector)
            return
        content = bytearray(self._old.get(sector) or self._sector(sector))
        if how == "garbage":
            content[:] = rng.randbytes(SECTOR)
        elif how == "zeros":
            content[:] = bytes(SECTOR)
        elif how == "flip":
            content[rng.randrange(SECTOR)] ^= 1 << rng.randrange(8)
        else:
            raise ValueError(f"a sector goes bad by eio, garbage, zeros or flip; not {how!r}")
        self._old.pop(sector, None)
        self._dirty.discard(sector)
        self._show(sector, bytes(content))


def _sectors(off: int, end: int) -> Iterable[int]:
    return range(off // SECTOR, -(-end // SECTOR))
