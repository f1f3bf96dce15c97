"""Read records from disk: the rows, small parts and payloads at given positions, each checked.

Reads close to each other are merged: a batch enqueued together costs two preads, a single message one. A corrupt or
unreadable record is reported individually (`Records.bad`); the others are returned nevertheless. The calls block and
may run in any number of threads. The cache is not known here.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from heapline.core.position import PositionLayout, size_bound
from heapline.core.record import ROW
from heapline.journal.block import ROW_BYTES, Rows, row_checks
from heapline.journal.disk import Disk, File
from heapline.journal.records import BadRecord, Records, empty_records
from heapline.journal.segment import segment_path
from heapline.journal.unit import UNIT_BYTES_MAX

I64 = npt.NDArray[np.int64]
OPEN_FILES_MAX = 16
#: Reads closer together than this are merged: a seek costs more than the bytes between.
MERGE_GAP_BYTES = 16 << 10
#: A row's small part and payload are read along with it if the position says that they are at most this large.
READ_ALONG_BYTES = 16 << 10
#: Errors that say nothing about the file: too many open files, or too little memory.
_NOT_ITS_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class _Handle:
    __slots__ = ("file", "stale", "users")

    def __init__(self, file: File) -> None:
        self.file, self.users, self.stale = file, 0, False


class RecordReader:
    """Reads records of one journal directory by position."""

    def __init__(self, disk: Disk, directory: str, layout: PositionLayout) -> None:
        self.disk, self.directory, self.layout = disk, directory, layout
        self._mutex = threading.Lock()
        self._handles: OrderedDict[int, _Handle] = OrderedDict()

    def load(self, positions: I64) -> Records:
        """Return the records at these positions, in their order; corrupt ones are in `Records.bad`."""
        records = empty_records(len(positions))
        segments = self.layout.segment(positions)
        for segment in np.unique(segments).tolist():
            chosen = np.flatnonzero(segments == segment)
            records.fill(chosen, self._load_segment(segment, positions[chosen]))
        return records

    def _load_segment(self, segment: int, positions: I64) -> Records:
        path = segment_path(self.directory, segment)
        offsets = self.layout.byte_offset(positions)
        records = empty_records(len(positions))
        try:
            with self._open(segment) as file:
                self._load_from(file, offsets, size_bound(positions), records)
        except OSError as error:
            if error.errno in _NOT_ITS_FAULT:
                raise
            for index, offset in enumerate(offsets.tolist()):
                records.bad[index] = BadRecord(0, path, offset, f"cannot open the segment: {error}")
        return records

    def _load_from(self, file: File, offsets: I64, bounds: I64, records: Records) -> None:
        along = np.where(bounds <= READ_ALONG_BYTES, bounds, 0)
        heads = read_ranges(file, offsets, offsets + ROW_BYTES + along, ROW_BYTES)
        raw = [head[:ROW_BYTES] for head in heads]
        rows = np.frombuffer(bytearray().join(r.ljust(ROW_BYTES, b"\0") for r in raw), ROW)
        smalls = _parts(file, offsets, rows, "small", heads)
        payloads = _parts(file, offsets, rows, "payload", heads)
        good = [
            row_checks(row, small) and crc32c(payload) == crc
            for row, small, payload, crc in zip(raw, smalls, payloads, rows["payload_crc"].tolist(), strict=True)
        ]
        if all(good):
            records.rows, records.payloads, records.smalls = rows, payloads, smalls
            return
        chosen = np.flatnonzero(good)
        records.rows[chosen] = rows[chosen]
        for index, is_good in enumerate(good):
            if is_good:
                records.payloads[index], records.smalls[index] = payloads[index], smalls[index]
            else:
                detail = "its payload" if row_checks(raw[index], smalls[index]) else "its row"
                message_id, offset = int(rows["id"][index]), int(offsets[index])
                records.bad[index] = BadRecord(message_id, file.path, offset, f"{detail} fails its checksum")

    # Open files: a few are kept; a file in use is never closed.

    @contextlib.contextmanager
    def _open(self, segment: int) -> Iterator[File]:
        with self._mutex:
            handle = self._handles.get(segment)
            if handle is None:
                handle = _Handle(self.disk.open(segment_path(self.directory, segment)))
                self._handles[segment] = handle
            self._handles.move_to_end(segment)
            handle.users += 1
            self._trim()
        try:
            yield handle.file
        finally:
            with self._mutex:
                handle.users -= 1
                if handle.stale and not handle.users:
                    handle.file.close()

    def _trim(self) -> None:
        while len(self._handles) > OPEN_FILES_MAX:
            self._retire(next(iter(self._handles)))

    def _retire(self, segment: int) -> None:
        handle = self._handles.pop(segment, None)
        if handle is not None:
            handle.stale = True
            if not handle.users:
                handle.file.close()

    def forget(self, segment: int) -> None:
        """Open the segment's file again next time, because it was replaced or deleted."""
        with self._mutex:
            self._retire(segment)

    def close(self) -> None:
        with self._mutex:
            for segment in list(self._handles):
                self._retire(segment)


def _parts(file: File, offsets: I64, rows: Rows, part: str, heads: list[bytes]) -> list[bytes]:
    """Return the small parts or payloads of rows that are not checked yet, so their lengths may be nonsense.

    They are taken from the bytes read along with the row if present, else read; b"" if that is not possible.
    """
    starts, lengths = rows[f"{part}_at"].astype(np.int64), rows[f"{part}_len"].astype(np.int64)
    ends = starts + lengths
    found = [head[a:b] for head, a, b in zip(heads, starts.tolist(), ends.tolist(), strict=True)]
    have = np.fromiter(map(len, found), np.int64, len(found))
    wanting = np.flatnonzero((have < lengths) & (ends <= UNIT_BYTES_MAX))
    if len(wanting):
        more = read_ranges(file, (offsets + starts)[wanting], (offsets + ends)[wanting])
        for index, data in zip(wanting.tolist(), more, strict=True):
            found[index] = data
    return found


def read_ranges(file: File, starts: I64, ends: I64, least: int = 0) -> list[bytes]:
    """Return the bytes of each range; short at the end of the file, empty if they cannot be read.

    Nearby ranges are read together. If such a read fails, each is read alone, and then its first `least` bytes: one bad
    sector must not affect neighboring records.
    """
    order = np.argsort(starts, kind="stable")
    sorted_starts, reached = starts[order], np.maximum.accumulate(ends[order])
    breaks = np.flatnonzero(sorted_starts[1:] > reached[:-1] + MERGE_GAP_BYTES) + 1
    found = [b""] * len(starts)
    for group in np.split(order, breaks):
        base = int(starts[group[0]])
        spans = list(zip(group.tolist(), starts[group].tolist(), ends[group].tolist(), strict=True))
        try:
            data = file.pread(max(end for _, _, end in spans) - base, base)
        except OSError:
            for index, start, end in spans:
                found[index] = _read_one(file, start, end - start, least)
        else:
            for index, start, end in spans:
                found[index] = data[start - base : end - base]
    return found


def _read_one(file: File, start: int, n: int, least: int) -> bytes:
    for length in (n, least):
        try:
            return file.pread(length, start)
        except OSError:
            continue
    return b""
