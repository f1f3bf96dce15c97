"""A journal of any size that takes hardly any disk space: its payloads are zeros, and zeros are holes in the files.

Headers, rows, events, tables and indexes are real and in their usual places; a reader works as usual. Only
the bytes between them are holes, which read as fast as memory. So this measures how much is read and
decided, not how fast the disk is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from heapline.journal import File, Journal, RealDisk, make_block, new_rows
from heapline.journal.disk import Buffer, RealFile
from heapline.journal.unit import Frame

PAGE = 4096


class HoledFile(RealFile):
    """Does not write pages of zeros. Only for files that are written once, in order."""

    def pwritev(self, parts: Sequence[Buffer], off: int) -> None:
        data = b"".join(parts)
        ahead = -off % PAGE
        if len(data) < ahead + 4 * PAGE:
            super().pwritev([data], off)
            return
        pages = (len(data) - ahead) // PAGE
        end = ahead + pages * PAGE
        live = np.frombuffer(data, np.uint64, pages * PAGE // 8, ahead).reshape(pages, -1).any(axis=1)
        super().pwritev([data[:ahead]], off)
        for page in np.flatnonzero(live).tolist():
            at = ahead + page * PAGE
            super().pwritev([data[at : at + PAGE]], off + at)
        super().pwritev([data[end:]], off + end)

    def zero(self, off: int, n: int) -> None:
        if off + n > self.size():
            self.truncate(off + n)

    def fallocate(self, off: int, n: int) -> None:
        self.zero(off, n)

    def fdatasync(self) -> None:
        pass


class HoledDisk(RealDisk):
    def open(self, path: str, *, write: bool = False) -> File:
        plain = super().open(path, write=write)
        assert isinstance(plain, RealFile)
        return HoledFile(path, plain._fd)

    def create(self, path: str) -> File:
        plain = super().create(path)
        assert isinstance(plain, RealFile)
        return HoledFile(path, plain._fd)


def holed_journal(
    path: str, nbytes: int, *, unit_bytes: int, rows: int, segment_bytes: int, start_ms: int, step_ms: int,
    quiet_every: int,
) -> int:  # fmt: skip
    """Write units of about this many bytes with this many rows of partition 0, one per `step_ms`; the last of each
    `quiet_every` also has a row of partition 1. Return the number of units."""
    disk = HoledDisk()
    Journal.create(disk, path, incarnation=1, segment_bytes=segment_bytes)
    journal, units = Journal.open(disk, path, policy="os")
    assert not list(units)
    payloads = [bytes(unit_bytes // rows - 100)] * rows
    count = nbytes // unit_bytes
    for number in range(count):
        records = new_rows(rows)
        records["id"] = np.arange(number * rows, (number + 1) * rows) + 1
        block = make_block(records, None, payloads)
        journal.room(block.nbytes + 200, frames=2)
        journal.add_block(block)
        journal.add_frames([Frame(0, number * rows, rows, b"events", number * rows + 1)])
        if number % quiet_every == quiet_every - 1:
            journal.add_frames([Frame(1, number // quiet_every, 1, b"events", -1)])
        now = start_ms + number * step_ms
        journal.seal(now, now)
        if journal.wants_prepare:
            journal.prepare()
        for unit in journal.take_sealed():
            journal.commit(unit)
        journal.cache.clear()
    journal.close()
    for entry in os.scandir(path):
        if entry.is_file():
            fd = os.open(entry.path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    return count
