"""One read of a replay, after filter and mode: rows in order, and the position after them.

A portion can be split anywhere: the first part's position is at the first row that is not in it, so that continuing
from there misses nothing and repeats nothing.

A fast replay selects by `Living`, the live messages of a topic and their current state. They are read in one turn of
the topic, so that it waits until the state is durable: a message skipped as deleted stays deleted, even after a crash.
The state is columns (8 bytes per live message, 16 more for a delayed one), not a table of all past messages. A
partition's messages are sorted by id, so a page is matched by binary search. A dead letter counts as live.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.contract.stream import ReplayFilter, StreamBatch
from heapline.core.events import EMPTY, I64
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.wheel.timing_wheel import Timers
from heapline.engine.groups.pages import Page, pick_rows
from heapline.engine.replays.scan import Stretch
from heapline.engine.runner import TopicRunner

Mask = npt.NDArray[np.bool_]


class _Standing(NamedTuple):
    """The state of one partition. Each pair of columns is sorted by id."""

    ids: I64
    delayed: I64  # ids of delayed messages
    dues: I64  # their due times, wall ms
    changed: I64  # ids of messages that were ever rescheduled: they may appear in the stream twice
    priorities: I64  # their priorities
    has_priority: Mask  # where False, the priority is that of the record


class Living:
    def __init__(self, partitions: dict[int, _Standing]) -> None:
        self._partitions = partitions

    def among(self, partition: int, ids: I64) -> Mask:
        """Return which of these messages are live."""
        return _found(self._partitions[partition].ids, ids)[0]

    def changed(self, partition: int, ids: I64) -> Mask:
        """Return which of these messages were rescheduled."""
        return _found(self._partitions[partition].changed, ids)[0]

    def dues(self, partition: int, ids: I64) -> I64:
        """Return when each message is due, in wall ms; 0 for messages that are not delayed."""
        standing = self._partitions[partition]
        waits, at = _found(standing.delayed, ids)
        dues = np.zeros(len(ids), dtype=np.int64)
        dues[waits] = standing.dues[at[waits]]
        return dues

    def priorities(self, partition: int, ids: I64, recorded: I64) -> I64:
        """Return the current priorities, given those of the records."""
        standing = self._partitions[partition]
        moved, at = _found(standing.changed, ids)
        moved[moved] = standing.has_priority[at[moved]]
        if not moved.any():
            return recorded
        priorities = recorded.copy()
        priorities[moved] = standing.priorities[at[moved]]
        return priorities


def _found(sorted_ids: I64, ids: I64) -> tuple[Mask, I64]:
    """Return which ids are among the sorted ones, and at which index."""
    if not len(sorted_ids):
        return np.zeros(len(ids), dtype=np.bool_), np.zeros(len(ids), dtype=np.int64)
    at = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return sorted_ids[at] == ids, at


async def look(runner: TopicRunner, partitions: list[int]) -> Living:
    taken = await runner.call(lambda now: [_take(runner.loaded.topic.partitions[p], now) for p in partitions])
    standing = await runner.io.run(lambda: [_sorted(each) for each in taken])
    return Living(dict(zip(partitions, standing, strict=True)))


def _take(partition: Partition, now: Now) -> _Standing:
    waiting, _, _ = partition.entries.waiting()
    ids = np.concatenate((waiting, _ids(partition.entries.leases.by_id), partition.entries.dead.rows().ids))
    delayed, dues = [EMPTY], [EMPTY]
    seen: set[int] = set()
    for wheel, wall in ((partition.entries.delays, False), (partition.entries.calendar, True)):
        for chunk in wheel.chunks():
            rows = Timers(*(column[chunk.start :] for column in chunk.columns()))
            good = partition.entries.good_delayed(rows, wall, seen)
            delayed.append(rows.ids[good])
            dues.append(rows.dues[good] + (0 if wall else now.wall - now.steady))
    touched = partition.entries.touched
    priorities = [0 if t.priority is None else t.priority for t in touched.values()]
    has_priority = np.array([t.priority is not None for t in touched.values()], dtype=np.bool_)
    return _Standing(
        ids,
        np.concatenate(delayed),
        np.concatenate(dues),
        _ids(touched),
        np.array(priorities, dtype=np.int64),
        has_priority,
    )


def _ids(table: Collection[int]) -> I64:
    return np.fromiter(table, np.int64, len(table))


def _sorted(standing: _Standing) -> _Standing:
    delayed, changed = standing.delayed.argsort(), standing.changed.argsort()
    return _Standing(
        np.sort(standing.ids),
        standing.delayed[delayed],
        standing.dues[delayed],
        standing.changed[changed],
        standing.priorities[changed],
        standing.has_priority[changed],
    )


class Rows(NamedTuple):
    """Some rows of one partition, with details that a stream does not have."""

    batch: StreamBatch
    records: Any  # fixed-size rows of their records
    dues: I64 | None  # due times, wall ms, 0 = due; None = not determined
    changed: I64  # ids among them that may appear in the stream again

    def cut(self, at: slice) -> Rows:
        return Rows(
            pick_rows(self.batch, at),
            self.records[at],
            None if self.dues is None else self.dues[at],
            self.changed[np.isin(self.changed, self.batch.ids[at])],
        )


class Portion(NamedTuple):
    rows: list[Rows]
    positions: dict[int, int]  # where to continue, by partition
    left_out: dict[int, I64]  # offsets of rows that the filter or the mode excluded, by partition
    bad: int = 0  # how many of those rows have an unreadable record

    def __len__(self) -> int:
        return sum(len(rows.batch) for rows in self.rows)

    @property
    def skipped(self) -> int:
        return sum(map(len, self.left_out.values()))

    def split(self, count: int) -> tuple[Portion, Portion]:
        """Return the first `count` rows, and the rest."""
        if count >= len(self):
            return self, Portion([], self.positions, {})
        head: list[Rows] = []
        tail: list[Rows] = []
        for rows in self.rows:
            size = len(rows.batch)
            taken = min(max(0, count), size)
            count -= taken
            if taken:
                head.append(rows if taken == size else rows.cut(slice(0, taken)))
            if taken < size:
                tail.append(rows if not taken else rows.cut(slice(taken, size)))
        positions = dict(self.positions)
        for rows in reversed(tail):
            positions[rows.batch.partition] = int(rows.batch.offsets[0])
        cuts = {p: int(np.searchsorted(offsets, positions[p])) for p, offsets in self.left_out.items()}
        before = {p: offsets[: cuts[p]] for p, offsets in self.left_out.items()}
        after = {p: offsets[cuts[p] :] for p, offsets in self.left_out.items()}
        return Portion(head, positions, before, self.bad), Portion(tail, self.positions, after)


class Sieve:
    """Selects the rows of a stretch to replay. A fast replay delivers each message once; `seen` may appear again."""

    def __init__(
        self,
        topic: str,
        id_suffix: int,
        starts: dict[int, int],
        ends: dict[int, int],
        where: ReplayFilter | None,
        seen: set[int] | None = None,
    ) -> None:
        self._topic, self._id_suffix = topic, id_suffix
        self._starts, self.ends, self._where = starts, ends, where
        self.seen: set[int] = set() if seen is None else seen

    def portion(self, stretch: Stretch, living: Living | None) -> Portion:
        chosen = {p: self._judge(page, living) for p, page in stretch.pages.items()}
        rows: list[Rows] = []
        for run in stretch.runs:
            page, (mask, priorities) = stretch.pages[run.partition], chosen[run.partition]
            at = run.first + np.flatnonzero(mask[run.first : run.last])
            if living is not None and len(at):
                at = self._once(page, at, mask, living)
            if len(at):
                rows.append(self._rows(page, stretch.records[run.partition], at, priorities, living))
        inside = {p: self._inside(page) for p, page in stretch.pages.items()}
        left_out = {p: page.rows.offsets[inside[p] & ~chosen[p][0]] for p, page in stretch.pages.items()}
        bad = sum(int(inside[p][index]) for p, page in stretch.pages.items() for index in page.bad)
        return Portion(rows, stretch.positions, left_out, bad)

    def _inside(self, page: Page) -> Mask:
        """Return which rows are in range. A page has complete units, which may extend beyond the range."""
        offsets = page.rows.offsets
        return (offsets >= self._starts[page.partition]) & (offsets < self.ends[page.partition])

    def _judge(self, page: Page, living: Living | None) -> tuple[Mask, I64]:
        mask, priorities = self._inside(page), page.priorities
        mask[list(page.bad)] = False
        if living is not None:
            mask &= living.among(page.partition, page.rows.ids)
            priorities = living.priorities(page.partition, page.rows.ids, priorities)
        if self._where is not None:
            _match(self._where, page, priorities, mask)
        return mask, priorities

    def _once(self, page: Page, at: I64, mask: Mask, living: Living) -> I64:
        keep = np.ones(len(at), dtype=np.bool_)
        ids = page.rows.ids[at]
        for i in np.flatnonzero(living.changed(page.partition, ids)).tolist():
            if int(ids[i]) in self.seen:
                keep[i] = False
            self.seen.add(int(ids[i]))
        mask[at[~keep]] = False
        return at[keep]

    def _rows(self, page: Page, records: Any, at: I64, priorities: I64, living: Living | None) -> Rows:
        whole = slice(int(at[0]), int(at[-1]) + 1)
        pick = whole if len(at) == whole.stop - whole.start else at
        batch = page.batch(None, self._topic, self._id_suffix, pick, np.ones(len(at), dtype=np.int64))
        batch.priorities = priorities[pick]
        none = np.zeros(0, dtype=np.int64)
        if living is None:
            return Rows(batch, records[pick], None, none)
        changed = batch.ids[living.changed(page.partition, batch.ids)]
        return Rows(batch, records[pick], living.dues(page.partition, batch.ids), changed)


def _match(where: ReplayFilter, page: Page, priorities: I64, mask: Mask) -> None:
    if where.priority_min is not None:
        mask &= priorities >= where.priority_min
    if where.priority_max is not None:
        mask &= priorities <= where.priority_max
    none: list[None] = [None] * len(page)
    if where.key is not None:
        mask &= np.fromiter((key == where.key for key in page.keys or none), np.bool_, len(page))
    if where.headers:
        wanted = where.headers.items()
        mask &= np.fromiter((wanted <= (h or {}).items() for h in page.headers or none), np.bool_, len(page))
