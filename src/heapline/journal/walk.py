"""Read the units of one segment one after the other, in large reads.

It decides whether the next bytes are the expected next unit: header crc, number, chain, body crc. It stops at the first
sector that is not, and records why. Its callers decide what that means: the end, a torn write, or damage.
"""

from __future__ import annotations

from collections.abc import Iterator

from heapline.journal.disk import SECTOR, Disk, File
from heapline.journal.sectors import all_zeros
from heapline.journal.segment import FIRST_UNIT_AT, SegmentHeader, segment_path
from heapline.journal.unit import BadUnit, Unit, crc_seed, decode, parse_header

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
    opened once more before that is reported.
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
