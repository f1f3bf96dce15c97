"""A segment: one journal file. This module decides its header, name and growth, and reads its units one by one.

SEGMENT_VERSION 1. To change the layout after a release: bump SEGMENT_VERSION, keep the reader of the old number, add a
fixture to tests/fixtures. Whatever changes, the first sector keeps magic, version byte and, in its last four
bytes, the crc32c of what is before.

    sector 0: header (see _HEADER) | units, each aligned to 512 bytes | zeros to the end of the file

A file appears under its name only when it is zero-filled and its name is durable. Its header is written together with
its first unit, in one write, so rolling over costs nothing extra. A file that is all zeros is a prepared segment. When
one is prepared, the header of the segment before it is rewritten with `is_followed`. So before it holds a unit, its
removal would be noticed, even without a watermark.

Space. A file grows in steps of 1, 2, 4, 8, 8 … MiB, ahead of need. Growing sets the size first (atomically, as far as a
crash can tell), writes zeros, and syncs; only then may a unit rely on it. So a size that is not a multiple of 1 MiB (or
the capacity) means that another program truncated the file, and a unit that reaches past the end is damage, never a
torn write.

Reading. A walk decides whether the next bytes are the expected next unit: header crc, number, chain, body crc. It stops
at the first sector that is not, and records why. Its callers decide what that means: the end, a torn write, or damage.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from heapline.checksum import crc32c
from heapline.contract.errors import JournalCorrupt, UnknownFormat
from heapline.journal.disk import SECTOR, Disk, File
from heapline.journal.sectors import all_zeros
from heapline.journal.unit import BadUnit, Unit, crc_seed, decode, parse_header

SEGMENT_MAGIC = b"HEAPSEG\0"
SEGMENT_VERSION = 1
FILL_STEP_FIRST = 1 << 20
FILL_STEP_MAX = 8 << 20
FIRST_UNIT_AT = SECTOR
SEGMENT_BYTES_MIN = 4096

# magic, version, is_followed (0 in files written before it existed), number, capacity, incarnation, first_unit,
# created_at, chain
_HEADER = struct.Struct("<8sB?6xQQQQqI")
_U32 = struct.Struct("<I")


class SegmentHeader(msgspec.Struct, frozen=True):
    number: int
    capacity: int  # the file's largest size in bytes, header included
    incarnation: int
    first_unit: int
    chain: int  # body_crc of the unit before the first; 0 before unit 1
    created_at: int  # wall ms
    is_followed: bool = False  # the next segment's file exists

    def pack(self) -> bytes:
        sector = bytearray(SECTOR)
        _HEADER.pack_into(
            sector,
            0,
            SEGMENT_MAGIC,
            SEGMENT_VERSION,
            self.is_followed,
            self.number,
            self.capacity,
            self.incarnation,
            self.first_unit,
            self.created_at,
            self.chain,
        )
        _U32.pack_into(sector, SECTOR - 4, crc32c(bytes(sector[:-4])))
        return bytes(sector)


def parse_segment_header(sector: bytes, path: str) -> SegmentHeader | None:
    """Return the header, or None if the sector is all zeros (a prepared segment, or a lost header)."""
    if len(sector) < SECTOR:
        raise JournalCorrupt(path, len(sector), "the file ends inside the segment header")
    if all_zeros(sector):
        return None
    if sector[:8] != SEGMENT_MAGIC or crc32c(sector[:-4]) != _U32.unpack_from(sector, SECTOR - 4)[0]:
        raise JournalCorrupt(path, 0, "the segment header does not match its checksum")
    _, version, is_followed, number, capacity, incarnation, first_unit, created_at, chain = _HEADER.unpack_from(sector)
    if version != SEGMENT_VERSION:
        raise UnknownFormat(path, version)
    return SegmentHeader(number, capacity, incarnation, first_unit, chain, created_at, is_followed)


def set_followed(file: File, is_followed: bool) -> bool:
    """Rewrite a segment's header, unsynced, if it says otherwise. A power cut leaves its one sector whole.

    Return whether it was rewritten.
    """
    header = parse_segment_header(file.pread(SECTOR, 0), file.path)
    if header is None or header.is_followed == is_followed:
        return False
    file.pwritev([replace(header, is_followed=is_followed).pack()], 0)
    return True


def segment_path(directory: str, number: int) -> str:
    return f"{directory}/{number:010d}.seg"


def index_path(directory: str, number: int) -> str:
    return f"{directory}/{number:010d}.idx"


def numbered(names: list[str], suffix: str) -> list[int]:
    """Return the numbers of the files with this suffix, ascending."""
    stems = (n[: -len(suffix)] for n in names if n.endswith(suffix))
    return sorted(int(s) for s in stems if len(s) == 10 and s.isdigit())


def size_is_legal(size: int, capacity: int) -> bool:
    return size == capacity or (FILL_STEP_FIRST <= size < capacity and size % FILL_STEP_FIRST == 0)


def next_size(size: int, need: int, capacity: int) -> int:
    """Return the size to grow to: by the next step, or by as many steps as `need` requires."""
    while size < min(need, capacity):
        size = min(capacity, size + min(FILL_STEP_MAX, max(FILL_STEP_FIRST, size + FILL_STEP_FIRST)))
    return size


def check_capacity(capacity: int) -> None:
    if capacity < SEGMENT_BYTES_MIN or capacity % SECTOR:
        raise ValueError(f"a segment has at least {SEGMENT_BYTES_MIN} bytes, in steps of {SECTOR}; not {capacity}")


class SegmentFile:
    """One segment open for writing: the file, and up to where units may be written."""

    def __init__(self, file: File, number: int, capacity: int, filled: int) -> None:
        self.file = file
        self.number = number
        self.capacity = capacity
        self.filled = filled

    @classmethod
    def create(cls, disk: Disk, directory: str, number: int, capacity: int, header: bytes | None = None) -> SegmentFile:
        """Create a zero-filled file of the first step, durable under its name. On error nothing remains."""
        path = segment_path(directory, number)
        temporary = path + ".tmp"
        file = disk.create(temporary)
        made = cls(file, number, capacity, 0)
        try:
            made.grow(1)
            if header is not None:
                file.pwritev([header], 0)
                file.fdatasync()
            disk.rename(temporary, path)
            disk.fsync_dir(directory)
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                disk.unlink(temporary)
            raise
        file.path = path
        return made

    def grow(self, need: int) -> None:
        """Zero-fill and sync to at least `need`. If out of space, restore the size and raise the error."""
        size = next_size(self.filled, need, self.capacity)
        before = self.file.size()
        if size > before:
            self.file.truncate(size)
        try:
            self.file.zero(self.filled, size - self.filled)
            self.file.fdatasync()
        except OSError:
            if size > before:
                with contextlib.suppress(OSError):
                    self.file.truncate(before)
            raise
        self.filled = size

    def close(self) -> None:
        self.file.close()


CHUNK_BYTES = 8 << 20
NO_CHAIN = -1


class SegmentWalk:
    """Iterates over the units. Afterwards `at` is where it stopped, and `broken` why (None: at zeros or at `stop`).

    `number` and `chain` are what the unit at `at` must have. To start in the middle, use number=0 and chain=-1: then
    the first unit found there is accepted. Iterate again to continue after more has been written.
    """

    def __init__(
        self,
        file: File,
        incarnation: int,
        segment: int,
        *,
        number: int = 0,
        chain: int = NO_CHAIN,
        at: int = FIRST_UNIT_AT,
        stop: int | None = None,
        chunk: int = CHUNK_BYTES,
    ) -> None:
        self.chunk = chunk
        self.file = file
        self.segment = segment
        self.seed = crc_seed(incarnation, segment)
        self.number = number
        self.chain = chain
        self.at = at
        self.stop = stop
        self.broken: str | None = None

    def __iter__(self) -> Iterator[Unit]:
        self.broken = None
        end = self.file.size() if self.stop is None else self.stop
        buffer, base = memoryview(b""), self.at
        while self.at + SECTOR <= end:
            inside = self.at - base
            if inside + SECTOR > len(buffer):
                buffer, base, inside = self._read(self.at, end), self.at, 0
                if len(buffer) < SECTOR:
                    return
            header = parse_header(buffer, inside, self.seed, self.file.path)
            if header is None:
                if not all_zeros(buffer[inside : inside + SECTOR]):
                    self.broken = "no valid unit header is here"
                return
            if self.number and header.number != self.number:
                self.broken = f"expected unit {self.number} here, found unit {header.number}"
            elif self.chain != NO_CHAIN and header.prev_crc != self.chain:
                self.broken = f"unit {header.number} does not follow from the unit before it"
            elif not header.sane:
                self.broken = f"the lengths of unit {header.number} contradict one another"
            elif self.at + header.nbytes > end:
                self.broken = f"unit {header.number} reaches past the end of the file"
            if self.broken:
                return
            if inside + header.nbytes > len(buffer):
                buffer, base, inside = self._read(self.at, end, header.nbytes), self.at, 0
                if len(buffer) < header.nbytes:
                    self.broken = f"unit {header.number} reaches past the end of the file"
                    return
            try:
                unit = decode(buffer[inside : inside + header.nbytes], header, self.segment, self.at, self.file.path)
            except BadUnit as error:
                self.broken = str(error)
                return
            self.at += header.nbytes
            self.number = header.number + 1
            self.chain = header.body_crc
            yield unit

    def _read(self, at: int, end: int, least: int = 0) -> memoryview:
        return memoryview(self.file.pread(min(max(self.chunk, least), end - at), at))


class OpenWalk:
    """A SegmentWalk that opens its file when iterated and closes it at the end.

    The writer may replace a segment's file by a copy when space runs out, so if units seem to be missing, the file is
    opened again before that is reported.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        header: SegmentHeader,
        at: int,
        stop: int | None,
        previous: tuple[int, int] | None,
        chunk: int,
    ) -> None:
        self._disk, self._path, self._header, self._stop = disk, segment_path(directory, header.number), header, stop
        self._chunk = chunk
        self.at = at
        self.number, self.chain = previous if previous is not None else (0, -1)
        self.broken: str | None = None

    def __iter__(self) -> Iterator[Unit]:
        for _ in range(2):
            file = self._disk.open(self._path)
            try:
                walk = SegmentWalk(
                    file,
                    self._header.incarnation,
                    self._header.number,
                    number=self.number,
                    chain=self.chain,
                    at=self.at,
                    stop=self._stop,
                    chunk=self._chunk,
                )
                for unit in walk:
                    self.at, self.number, self.chain = walk.at, walk.number, walk.chain
                    yield unit
                self.broken = walk.broken
            finally:
                file.close()
            if self._stop is None or self.at >= self._stop:
                return
