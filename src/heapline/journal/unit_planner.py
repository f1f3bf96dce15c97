"""The open unit: collects blocks and frames, and decides their position in which segment. Pure memory, no I/O.

Positions are handed out before anything is written, so a unit's start is fixed when it is opened and never moves. A
unit that would exceed its segment or 16 MiB is sealed as it is, and the next one is opened, in the next segment if
necessary. Sealed units are queued until the committer takes them, in order. Used by one thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from heapline.journal.block import Block
from heapline.journal.segment import FIRST_UNIT_AT
from heapline.journal.unit import (
    HEADER_BYTES,
    UNIT_BYTES_MAX,
    UNIT_VERSION,
    BlockRef,
    Frame,
    SealedUnit,
    encode_meta,
    unit_nbytes,
)

# Upper bounds of msgpack sizes: the meta array itself, a block's entry, a frame's entry without its events.
META_BASE_BYTES = 16
BLOCK_ENTRY_BYTES = 24
FRAME_ENTRY_BYTES = 48


class UnitPlanner:
    """Places blocks and frames in units, and units in segments."""

    def __init__(self, capacity: int, segment: int, offset: int, number: int, time: int) -> None:
        self.capacity = capacity
        self.segment = segment
        self.offset = offset
        self.open_unit_number = number
        self.time = time
        self.sealed: list[SealedUnit] = []  # units that the journal has not taken yet, in the order of their numbers
        self._clear()

    def _clear(self) -> None:
        self._blocks: list[Block] = []
        self._refs: list[BlockRef] = []
        self._frames: list[Frame] = []
        self._blocks_len = 0
        self._meta_bound = META_BASE_BYTES

    @property
    def open_bytes(self) -> int:
        """Largest size in bytes of the open unit if it were sealed now; 0 if it is empty."""
        return unit_nbytes(self._blocks_len + self._meta_bound) if self._blocks or self._frames else 0

    def fits(self, nbytes: int) -> bool:
        """Return whether the open unit can take this many more bytes, including the entries for blocks and frames."""
        limit = min(UNIT_BYTES_MAX, self.capacity - self.offset)
        return unit_nbytes(self._blocks_len + self._meta_bound + nbytes) <= limit

    def room(self, nbytes: int, *, blocks: int = 1, frames: int = 1, time: int = 0, wall: int = 0) -> None:
        """Ensure that blocks and events of this many bytes go into one unit: the open one, or a new one.

        Raise ValueError if no unit can take them. If the open unit has to be sealed, it gets `time` and `wall`.
        """
        more = nbytes + blocks * BLOCK_ENTRY_BYTES + frames * FRAME_ENTRY_BYTES
        largest = min(UNIT_BYTES_MAX, self.capacity - FIRST_UNIT_AT)
        if unit_nbytes(META_BASE_BYTES + more) > largest:
            raise ValueError(f"{nbytes} bytes do not fit into one unit; a unit has at most {largest} bytes")
        if self.fits(more):
            return
        self.seal(time, wall)
        if not self.fits(more):
            self.segment += 1
            self.offset = FIRST_UNIT_AT

    def add_block(self, block: Block) -> tuple[int, int]:
        """Place a block in the open unit and return segment and byte offset of its first row."""
        if not self.fits(block.nbytes + BLOCK_ENTRY_BYTES):
            raise ValueError(f"the open unit has no room for a block of {block.nbytes} bytes; call room first")
        at = HEADER_BYTES + self._blocks_len
        self._blocks.append(block)
        self._refs.append(BlockRef(at, block.count, block.smalls_len, block.payloads_len))
        self._blocks_len += block.nbytes
        self._meta_bound += BLOCK_ENTRY_BYTES
        return self.segment, self.offset + at

    def add_frames(self, frames: Sequence[Frame]) -> None:
        nbytes = sum([len(frame.events) for frame in frames])
        more = nbytes + len(frames) * FRAME_ENTRY_BYTES
        if not self.fits(more):
            raise ValueError(f"the open unit has no room for frames of {nbytes} bytes; call room first")
        self._frames += frames
        self._meta_bound += more

    def seal(self, time: int = 0, wall: int = 0) -> SealedUnit | None:
        """Fix and queue the open unit, or return None if it is empty. Journal time never goes back."""
        if not self._blocks and not self._frames:
            return None
        self.time = max(self.time, time)
        meta = encode_meta((UNIT_VERSION, self._refs, self._frames))
        size = unit_nbytes(self._blocks_len + len(meta))
        unit = SealedUnit(
            self.open_unit_number,
            self.segment,
            self.offset,
            size,
            self.time,
            wall,
            self._blocks,
            self._blocks_len,
            self._frames,
            meta,
        )
        self.sealed.append(unit)
        self.open_unit_number += 1
        self.offset += size
        self._clear()
        return unit
