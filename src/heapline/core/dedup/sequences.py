"""Producer sequences that a partition has seen: detect duplicates by (producer, epoch, sequence).

A producer numbers its messages. The broker assigns its epoch, and only the current epoch is accepted; a newer epoch
drops the sequences of the older one. The producer reports the sequence below which it has all answers, and those
sequences are dropped. Others are dropped when their chunk was last written before the window. A dropped sequence is
refused as STALE, never accepted as NEW.

Sequences are in chunks by their upper bits, each chunk as columns sorted by the lower bits (2 + 8 + 4 bytes per row). A
producer counts upwards, so nearly every record appends at the end; one out of order moves the rows after it. Sequences
of a topic with many partitions are sparse here and cost only what is present. Producers themselves are never dropped,
because their epoch fences a predecessor. *Passing* producers are the exception: a client uses such a name only while it
runs and never again. They are dropped a day or more after their last message in any partition, when no client can still
be repeating a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.contract.config import PASSING
from heapline.contract.errors import SnapshotCorrupt, StaleEpoch, UnknownFormat
from heapline.core.dedup.verdict import CONFLICT, DUPLICATE, I8, NEW, STALE, U32, Verdict, judge_twins
from heapline.core.events import I64

U16 = npt.NDArray[np.uint16]

_ROWS_AT_FIRST = 16


class Chunk:
    __slots__ = ("count", "ids", "offsets", "prints", "time")

    def __init__(self, time: int) -> None:
        self.time = time
        self.count = 0
        self.offsets: U16 = np.empty(_ROWS_AT_FIRST, dtype=np.uint16)
        self.ids: I64 = np.empty(_ROWS_AT_FIRST, dtype=np.int64)
        self.prints: U32 = np.empty(_ROWS_AT_FIRST, dtype=np.uint32)

    @property
    def last(self) -> int:
        return self.offsets.item(self.count - 1)

    def find(self, offsets: U16) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return the row of each offset (or where it would be), and whether it is present."""
        kept = self.offsets[: self.count]
        index = kept.searchsorted(offsets)
        np.minimum(index, self.count - 1, out=index)
        return index, kept[index] == offsets

    def put(self, offsets: U16, ids: I64, prints: U32) -> None:
        """Add rows in ascending order of offset, within capacity. A row that is already present does not change."""
        if self.count and offsets.item(0) <= self.last:
            found = self.find(offsets)[1]
            if found.any():
                offsets, ids, prints = offsets[~found], ids[~found], prints[~found]
            self._insert(offsets, ids, prints)
        else:
            self._append(offsets, ids, prints)

    def find_one(self, offset: int) -> int:
        """Return the row of an offset, or `-1 - row` of its insertion point if it is absent."""
        at = int(self.offsets[: self.count].searchsorted(np.uint16(offset)))
        return at if at < self.count and self.offsets.item(at) == offset else -1 - at

    def put_one(self, offset: int, message_id: int, print_: int) -> None:
        at, end = self.count, self.count
        if end and offset <= self.last:
            at = -1 - self.find_one(offset)
            if at < 0:
                return
            for column in (self.offsets, self.ids, self.prints):
                column[at + 1 : end + 1] = column[at:end]
        self.offsets[at], self.ids[at], self.prints[at] = offset, message_id, print_
        self.count = end + 1

    def make_room(self, more: int, floor: int, rows_max: int) -> None:
        """Ensure capacity for `more` rows: drop rows below `floor`, and double unless that freed half."""
        if self.count + more <= len(self.ids):
            return
        kept = self.count_from(floor)
        start = self.count - kept
        capacity = len(self.ids)
        while capacity < kept + more or (capacity < kept * 2 and capacity < rows_max):
            capacity *= 2
        # Repeated rows are counted in `more` though they are not added, so the limit is not simply rows_max.
        capacity = max(min(capacity, rows_max), kept + more)
        for name in ("offsets", "ids", "prints"):
            old = getattr(self, name)
            new = np.empty(capacity, dtype=old.dtype)
            new[:kept] = old[start : self.count]
            setattr(self, name, new)
        self.count = kept

    def count_from(self, floor: int) -> int:
        """Count rows at or above the offset `floor`, which may be outside the chunk on either side."""
        if floor <= 0:
            return self.count
        if floor > self.last:
            return 0
        return self.count - int(self.offsets[: self.count].searchsorted(np.uint16(floor)))

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.ids.nbytes + self.prints.nbytes + 3 * 112

    def to_state(self) -> tuple[int, bytes, bytes, bytes]:
        n = self.count
        return (
            self.time,
            self.offsets[:n].astype("<u2").tobytes(),
            self.ids[:n].astype("<i8").tobytes(),
            self.prints[:n].astype("<u4").tobytes(),
        )

    @classmethod
    def from_state(cls, time: int, offsets: bytes, ids: bytes, prints: bytes) -> Chunk:
        chunk = cls(time)
        chunk.offsets = np.frombuffer(offsets, "<u2").astype(np.uint16)
        chunk.ids = np.frombuffer(ids, "<i8").astype(np.int64)
        chunk.prints = np.frombuffer(prints, "<u4").astype(np.uint32)
        chunk.count = len(chunk.ids)
        if not len(chunk.offsets) == len(chunk.prints) == chunk.count > 0:
            raise ValueError("the columns of a chunk differ in length")
        if (chunk.offsets[1:] <= chunk.offsets[:-1]).any():
            raise ValueError("the offsets of a chunk do not ascend")
        return chunk

    def _append(self, offsets: U16, ids: I64, prints: U32) -> None:
        start, self.count = self.count, self.count + len(offsets)
        self.offsets[start : self.count] = offsets
        self.ids[start : self.count] = ids
        self.prints[start : self.count] = prints

    def _insert(self, offsets: U16, ids: I64, prints: U32) -> None:
        """Insert rows. Only rows after the lowest new one move."""
        if not len(offsets):
            return
        cut = int(self.offsets[: self.count].searchsorted(offsets[0]))
        tail = slice(cut, self.count)
        merged = np.concatenate((self.offsets[tail], offsets))
        order = merged.argsort(kind="stable")
        ids = np.concatenate((self.ids[tail], ids))[order]
        prints = np.concatenate((self.prints[tail], prints))[order]
        self.count = cut
        self._append(merged[order], ids, prints)


_CHUNK_BITS = 14
_STATE_VERSION = 1
_FAR_FUTURE = (1 << 63) - 1
PASSED_MS = 24 * 3600_000  # a passing producer is dropped at least this long (ms) after its last message


class _Producer:
    __slots__ = ("answered_below", "chunks", "epoch", "forgotten_below", "highest", "partitions", "used_at")

    def __init__(self, epoch: int, partitions: int, used_at: int) -> None:
        self.epoch, self.partitions, self.used_at = epoch, partitions, used_at
        self.answered_below = 0
        self.forgotten_below = 0
        self.highest = -1
        self.chunks: dict[int, Chunk] = {}


class SequenceWindow:
    """The producers of one topic partition and their open sequences."""

    def __init__(self, *, _chunk_bits: int = _CHUNK_BITS) -> None:
        assert 1 <= _chunk_bits <= 16, "offsets in a chunk are 16 bits"
        self._bits = _chunk_bits
        self._mask = (1 << _chunk_bits) - 1
        self._producers: dict[str, _Producer] = {}
        self._oldest = _FAR_FUTURE  # lower bound of the last write times of all chunks

    def open(self, producer_id: str, epoch: int, partitions: int, now: int) -> None:
        """Start a new epoch: fence older ones and drop their sequences. Repeating the call changes nothing."""
        producer = self._producers.get(producer_id)
        if producer is not None and epoch <= producer.epoch:
            if epoch < producer.epoch:
                raise StaleEpoch(producer_id, epoch, producer.epoch)
            return
        self._producers[producer_id] = _Producer(epoch, partitions, now)

    def epoch_of(self, producer_id: str) -> int | None:
        producer = self._producers.get(producer_id)
        return None if producer is None else producer.epoch

    def partitions_of(self, producer_id: str) -> int | None:
        """Return the topic's partition count when the current epoch was opened."""
        producer = self._producers.get(producer_id)
        return None if producer is None else producer.partitions

    def highest_of(self, producer_id: str, epoch: int) -> int:
        """Return the highest sequence ever recorded here under the current epoch; -1 if none or not current."""
        producer = self._producers.get(producer_id)
        return -1 if producer is None or producer.epoch != epoch else producer.highest

    def answered_below_of(self, producer_id: str) -> int:
        """Return the sequence below which all were answered or are too old, for errors about STALE rows."""
        producer = self._producers.get(producer_id)
        return 0 if producer is None else max(producer.answered_below, producer.forgotten_below)

    def done_up_to(self, producer_id: str) -> int:
        """Return the highest sequence of the current epoch that was seen here or is done; -1 if there is none."""
        producer = self._producers.get(producer_id)
        return -1 if producer is None else max(producer.highest, self.answered_below_of(producer_id) - 1)

    def is_unseen(self, producer_id: str, epoch: int, first: int) -> bool:
        """Return whether `check` would find `first`, and every number above it, new. A cheap first question."""
        producer = self._producers.get(producer_id)
        return (
            producer is not None
            and producer.epoch == epoch
            and first > producer.highest
            and first >= producer.answered_below
        )

    def check(self, producer_id: str, epoch: int, seqs: I64, fingerprints: U32) -> Verdict:
        """Judge each row. Raise StaleEpoch unless `epoch` is the current one."""
        producer = self._current(producer_id, epoch)
        if len(seqs) <= 1:
            return self._judge_one(producer, seqs.item(), fingerprints.item()) if len(seqs) else Verdict.unseen(0)
        ascending = bool((seqs[1:] > seqs[:-1]).all())
        if ascending and seqs.item(0) > producer.highest and seqs.item(0) >= producer.answered_below:
            return Verdict.unseen(len(seqs))
        verdict = Verdict.fresh(len(seqs))
        order = np.arange(len(seqs)) if ascending else seqs.argsort(kind="stable")
        self._judge(producer, seqs[order], fingerprints[order], order, verdict)
        if not ascending:
            _find_twins(seqs[order], order, verdict)
            judge_twins(verdict.status, verdict.twins, fingerprints)
        verdict.all_new = not verdict.status.any()
        return verdict

    def record(self, producer_id: str, epoch: int, seqs: I64, ids: I64, fingerprints: U32, now: int) -> None:
        """Remember rows that were enqueued. A known sequence keeps its first id."""
        producer = self._current(producer_id, epoch)
        if not len(seqs):
            return
        if len(seqs) > 1 and not (seqs[1:] > seqs[:-1]).all():
            seqs, first = np.unique(seqs, return_index=True)
            ids, fingerprints = ids[first], fingerprints[first]
        for number, start, end in self._spans(seqs):
            chunk = producer.chunks.get(number)
            if chunk is None:
                chunk = producer.chunks[number] = Chunk(now)
            chunk.make_room(end - start, producer.answered_below - (number << self._bits), self._mask + 1)
            if end - start == 1:
                chunk.put_one(seqs.item(start) & self._mask, ids.item(start), fingerprints.item(start))
            else:
                offsets = (seqs[start:end] & self._mask).astype(np.uint16)
                chunk.put(offsets, ids[start:end], fingerprints[start:end])
            chunk.time = max(chunk.time, now)
            self._oldest = min(self._oldest, chunk.time)
        producer.highest = max(producer.highest, seqs.item(-1))
        producer.used_at = max(producer.used_at, now)

    def answered(self, producer_id: str, epoch: int, below: int) -> None:
        """Drop all sequences below `below`: the producer has their answers."""
        producer = self._current(producer_id, epoch)
        before = producer.answered_below
        if below <= before:
            return
        producer.answered_below = below
        if below >> self._bits != before >> self._bits:
            for number in [n for n in producer.chunks if n < below >> self._bits]:
                del producer.chunks[number]

    def expire(self, now: int, window_ms: int) -> int:
        """Drop chunks last written before the window; return how many sequences were dropped."""
        limit = now - window_ms
        if self._oldest > limit:
            return 0
        gone, oldest = 0, _FAR_FUTURE
        for producer in self._producers.values():
            for number, chunk in list(producer.chunks.items()):
                if chunk.time > limit:
                    oldest = min(oldest, chunk.time)
                    continue
                last = (number << self._bits) + chunk.last
                producer.forgotten_below = max(producer.forgotten_below, last + 1)
                gone += chunk.count
                del producer.chunks[number]
        self._oldest = oldest
        return gone

    def passing(self) -> dict[str, int]:
        """Return the passing producers and when each was last used here."""
        return {name: p.used_at for name, p in self._producers.items() if name.startswith(PASSING)}

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._producers.pop(name, None)

    def __len__(self) -> int:
        """Return the number of open sequences."""
        return sum(
            chunk.count_from(producer.answered_below - (number << self._bits))
            for producer in self._producers.values()
            for number, chunk in producer.chunks.items()
        )

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes of producers and open sequences."""
        chunks = sum(chunk.nbytes + 100 for p in self._producers.values() for chunk in p.chunks.values())
        return chunks + 400 * len(self._producers)

    def to_state(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "chunk_bits": self._bits,
            "producers": [
                [name, p.epoch, p.partitions, p.answered_below, p.forgotten_below, p.highest, _chunks_state(p)]
                for name, p in self._producers.items()
            ],
            "passing": self.passing(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SequenceWindow:
        if state.get("version") != _STATE_VERSION:
            raise UnknownFormat("sequence window of a snapshot", state.get("version", 0))
        try:
            window = cls(_chunk_bits=state["chunk_bits"])
            used_at = state.get("passing", {})
            for name, epoch, partitions, answered, forgotten, highest, chunks in state["producers"]:
                producer = window._producers[name] = _Producer(epoch, partitions, used_at.get(name, 0))
                producer.answered_below, producer.forgotten_below, producer.highest = answered, forgotten, highest
                producer.chunks = {number: Chunk.from_state(*parts) for number, *parts in chunks}
        except (KeyError, TypeError, ValueError) as problem:
            raise SnapshotCorrupt("sequence window", repr(problem)) from problem
        times = [chunk.time for p in window._producers.values() for chunk in p.chunks.values()]
        window._oldest = min(times, default=_FAR_FUTURE)
        return window

    def _current(self, producer_id: str, epoch: int) -> _Producer:
        """Return the producer, or raise StaleEpoch. Only the broker assigns epochs, so a later epoch is invalid too."""
        producer = self._producers.get(producer_id)
        if producer is None or producer.epoch != epoch:
            raise StaleEpoch(producer_id, epoch, 0 if producer is None else producer.epoch)
        return producer

    def _spans(self, ascending: I64) -> list[tuple[int, int, int]]:
        """Return chunk number, first row and end row for each chunk that ascending sequences touch."""
        first, last = ascending.item(0) >> self._bits, ascending.item(-1) >> self._bits
        if first == last:
            return [(first, 0, len(ascending))]
        numbers = ascending >> self._bits
        starts = np.concatenate(([0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1))
        cuts = starts.tolist()
        return list(zip(numbers[starts].tolist(), cuts, [*cuts[1:], len(ascending)], strict=True))

    def _judge_one(self, producer: _Producer, seq: int, fingerprint: int) -> Verdict:
        if seq > producer.highest and seq >= producer.answered_below:
            return Verdict.unseen(1)
        verdict = Verdict.fresh(1)
        chunk = producer.chunks.get(seq >> self._bits) if seq >= producer.answered_below else None
        at = -1 if chunk is None else chunk.find_one(seq & self._mask)
        if chunk is not None and at >= 0:
            verdict.first_ids[0] = chunk.ids[at]
            verdict.status[0] = DUPLICATE if chunk.prints.item(at) == fingerprint else CONFLICT
        elif seq < producer.answered_below or seq < producer.forgotten_below:
            verdict.status[0] = STALE
        verdict.all_new = verdict.status.item() == NEW
        return verdict

    def _judge(self, producer: _Producer, seqs: I64, prints: U32, order: I64, verdict: Verdict) -> None:
        """Judge ascending `seqs`, which are at rows `order` of the batch, against the recorded rows."""
        floor = max(producer.answered_below, producer.forgotten_below)
        status: I8 = np.where(seqs < floor, STALE, NEW).astype(np.int8)
        for number, start, end in self._spans(seqs):
            chunk = producer.chunks.get(number)
            if chunk is None:
                continue
            index, found = chunk.find((seqs[start:end] & self._mask).astype(np.uint16))
            found &= seqs[start:end] >= producer.answered_below
            rows, at = start + np.flatnonzero(found), index[found]
            status[rows] = np.where(chunk.prints[at] == prints[rows], DUPLICATE, CONFLICT)
            verdict.first_ids[order[rows]] = chunk.ids[at]
        verdict.status[order] = status


def _chunks_state(producer: _Producer) -> list[list[Any]]:
    return [[number, *chunk.to_state()] for number, chunk in producer.chunks.items()]


def _find_twins(seqs: I64, order: npt.NDArray[np.intp], verdict: Verdict) -> None:
    """Mark NEW rows that repeat a sequence of an earlier row. Equal sequences are adjacent, first row first."""
    repeats = np.concatenate(([False], seqs[1:] == seqs[:-1]))
    leaders = np.maximum.accumulate(np.where(repeats, 0, np.arange(len(seqs))))
    repeats &= verdict.status[order] == NEW
    verdict.twins[order[repeats]] = order[leaders[repeats]]
