"""One read of a replay, after filter and mode: rows in order, and the position after them.

A portion can be split anywhere: the first part's position is at the first row that is not in it, so that continuing
from there misses nothing and repeats nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from heapline.contract.stream import ReplayFilter, StreamBatch
from heapline.core.events import I64
from heapline.engine.groups.pages import Page
from heapline.engine.replays.live_messages import Living, Mask
from heapline.engine.replays.scan import Stretch


class Rows(NamedTuple):
    """Some rows of one partition, with details that a stream does not have."""

    batch: StreamBatch
    records: Any  # fixed-size rows of their records
    dues: I64 | None  # due times, wall ms, 0 = due; None = not determined
    changed: I64  # ids among them that may appear in the stream again

    def cut(self, at: slice) -> Rows:
        return Rows(cut_batch(self.batch, at), self.records[at], None if self.dues is None else self.dues[at],
                    self.changed[np.isin(self.changed, self.batch.ids[at])])  # fmt: skip


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


def cut_batch(batch: StreamBatch, at: slice) -> StreamBatch:
    def part(column: Any) -> Any:
        return None if column is None else column[at]

    return StreamBatch(
        batch._settles, batch.topic, batch.partition, batch.offsets[at], batch.ids[at], batch.payloads[at],
        batch.priorities[at], batch.attempts[at], batch.enqueued_ms[at], part(batch.keys), part(batch.headers),
        part(batch.fairness_keys), id_suffix=batch.id_suffix,
    )  # fmt: skip


class Sieve:
    """Selects the rows of a stretch to replay. A fast replay delivers each message once; `seen` may appear again."""

    def __init__(
        self, topic: str, id_suffix: int, starts: dict[int, int], ends: dict[int, int], where: ReplayFilter | None,
        seen: set[int] | None = None,
    ) -> None:  # fmt: skip
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
