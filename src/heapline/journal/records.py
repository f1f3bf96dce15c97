"""Messages by position: from memory soon after their enqueue, else from disk, each one checked.

`RecordCache` maps positions to the blocks of recent units. Blocks arrive in journal order and the oldest are dropped
first, when the byte budget (which many journals may share) is exhausted. A block that is not written yet is never
dropped, because it could not be read back. Cached blocks were made in this process, so their checksums are not checked
again. Used by the event loop's thread only, except `mark_written`.

`RecordReader` reads rows, small parts and payloads from disk. Reads close to each other are merged: a batch enqueued
together costs two preads, a single message one. A corrupt or unreadable record is reported individually
(`Records.bad`); the others are returned nevertheless. The calls block and may run in any number of threads.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from heapline.accelerator import accelerated
from heapline.checksum import crc32c
from heapline.core.events import I64
from heapline.core.record import ALIGN, ROW, PositionLayout, size_bound
from heapline.journal.block import ROW_BYTES, Block, Rows, row_checks
from heapline.journal.disk import Disk, File
from heapline.journal.segment import segment_path
from heapline.journal.unit import UNIT_BYTES_MAX

CACHE_BYTES_DEFAULT = 64 << 20


class BadRecord(NamedTuple):
    """A corrupt record: the data of RecordCorrupt without the topic's name."""

    message_id: int  # as stored in the row, so possibly wrong; 0 if the row could not be read
    path: str
    offset: int
    detail: str


class Records(msgspec.Struct):
    """Records in the order of the requested positions. A missing or bad one has a zero row and b"" as bytes."""

    rows: Rows
    payloads: list[bytes]
    smalls: list[bytes]
    bad: dict[int, BadRecord] = {}

    def fill(self, indexes: I64, others: Records) -> None:
        """Insert records that were read later."""
        self.rows[indexes] = others.rows
        for index, payload, small in zip(indexes.tolist(), others.payloads, others.smalls, strict=True):
            self.payloads[index] = payload
            self.smalls[index] = small
        for at, bad in others.bad.items():
            self.bad[int(indexes[at])] = bad


def empty_records(count: int) -> Records:
    return Records(np.zeros(count, ROW), [b""] * count, [b""] * count)


class CacheBudget:
    """A byte budget shared by several caches. The oldest block of all caches is dropped first."""

    def __init__(self, limit_bytes: int = CACHE_BYTES_DEFAULT) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._order: deque[RecordCache] = deque()

    def took(self, cache: RecordCache, nbytes: int) -> None:
        self.used_bytes += nbytes
        self._order.append(cache)
        while self.used_bytes > self.limit_bytes and self._order and self._order[0].drop_oldest():
            self._order.popleft()

    def gave(self, nbytes: int) -> None:
        self.used_bytes -= nbytes


class RecordCache:
    """The blocks of one journal that are still in memory."""

    def __init__(self, layout: PositionLayout, budget: CacheBudget | None = None) -> None:
        self.layout = layout
        self.budget = budget if budget is not None else CacheBudget()
        # Columns of a queue: entries from _head to _tail are in memory, ascending by position. Those before are empty.
        self._starts: I64 = np.zeros(256, np.int64)
        self._ends: I64 = np.zeros(256, np.int64)
        self._blocks: list[bytes] = []
        self._units: deque[int] = deque()
        self._head = 0
        self._tail = 0
        self._written_unit = 0

    def __len__(self) -> int:
        return self._tail - self._head

    def add(self, segment: int, offset: int, block: Block, unit: int) -> None:
        """Keep a block that was just added to a unit."""
        if self._tail == len(self._starts):
            self._make_room()
        start = (segment << self.layout.place_bits) | (offset // ALIGN)  # as `layout.spot` of the first row's position
        self._starts[self._tail] = start
        self._ends[self._tail] = start + block.count * (ROW_BYTES // ALIGN)
        self._tail += 1
        self._blocks.append(block.data)
        self._units.append(unit)
        self.budget.took(self, block.nbytes)

    def _make_room(self) -> None:
        """Move the columns to the front of arrays that are at most half full."""
        live = slice(self._head, self._tail)
        count = self._tail - self._head
        size = max(256, 2 * count)
        for name in ("_starts", "_ends"):
            fresh = np.zeros(size, np.int64)
            fresh[:count] = getattr(self, name)[live]
            setattr(self, name, fresh)
        self._blocks = self._blocks[live]
        self._head, self._tail = 0, count

    def mark_written(self, unit: int) -> None:
        """Note that everything up to this unit can be read back from disk."""
        self._written_unit = unit

    def drop_oldest(self) -> bool:
        """Drop the oldest block. Return False if it must stay for now, True otherwise."""
        if self._head == self._tail:
            return True
        if self._units[0] > self._written_unit:
            return False
        self._units.popleft()
        self.budget.gave(len(self._blocks[self._head]))
        self._blocks[self._head] = b""
        self._head += 1
        return True

    def clear(self) -> None:
        """Drop everything, because the journal is closed or reloaded."""
        self.budget.gave(sum(map(len, self._blocks)))
        self._blocks.clear()
        self._units.clear()
        self._head = self._tail = 0

    def cached(self, positions: I64) -> tuple[Records, I64]:
        """Return the records in memory, and the indexes of those that are not. No I/O."""
        spots = self.layout.spot(positions)
        starts = self._starts[self._head : self._tail]
        found = np.searchsorted(starts, spots, side="right") - 1
        if len(starts):
            there = (found >= 0) & (spots < self._ends[self._head : self._tail][found])
        else:
            there = np.zeros(len(spots), np.bool_)
        if there.all():
            return self._gather(found, (spots - starts[found]) * ALIGN), np.empty(0, np.int64)
        records = empty_records(len(spots))
        hits = np.flatnonzero(there)
        if len(hits):
            which = found[hits]
            records.fill(hits, self._gather(which, (spots[hits] - starts[which]) * ALIGN))
        return records, np.flatnonzero(~there)

    def _gather(self, which: I64, offsets: I64) -> Records:
        rows, payloads, smalls = cut_records(self._blocks, which + self._head, offsets)
        return Records(np.frombuffer(rows, ROW), payloads, smalls)


@accelerated
def cut_records(blocks: list[bytes], which: I64, offsets: I64) -> tuple[bytearray, list[bytes], list[bytes]]:
    """Return the rows, payloads and small parts of records, each by its block's index and its row's offset there.

    Raise ValueError if a record is not inside its block. Checksums are not checked.
    """
    if len(which) != len(offsets):
        raise ValueError("indexes and offsets must be columns of int64 of the same length")
    if len(which) and not 0 <= which.min() <= which.max() < len(blocks):
        raise ValueError("no block has this index")
    if (offsets < 0).any():
        raise ValueError(OUTSIDE)
    datas = [blocks[i] for i in which.tolist()]
    raw = bytearray().join([data[at : at + ROW_BYTES] for data, at in zip(datas, offsets.tolist(), strict=True)])
    if len(raw) != len(datas) * ROW_BYTES:
        raise ValueError(OUTSIDE)
    rows = np.frombuffer(raw, ROW)
    payloads = _cut(datas, offsets + rows["payload_at"], rows["payload_len"])
    return raw, payloads, _cut(datas, offsets + rows["small_at"], rows["small_len"])


OUTSIDE = "a record reaches past its block"


def _cut(datas: list[bytes], starts: I64, lengths: Any) -> list[bytes]:
    expected = int(lengths.sum())
    if not expected:
        return [b""] * len(datas)
    ends = (starts + lengths).tolist()
    found = [data[a:b] for data, a, b in zip(datas, starts.tolist(), ends, strict=True)]
    if sum(map(len, found)) != expected:  # a slice ends where its block does
        raise ValueError(OUTSIDE)
    return found


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
