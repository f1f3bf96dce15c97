"""Progress of one group in one partition: rows that are done, in flight, waiting for redelivery, or dead.

Theory of operation. Two offsets matter. Everything below `committed` is done or is not a stream row. Rows below
`cursor` were delivered (or found done); those not done are *pending*: in flight for the first time (`fresh`) or failed
before (`failed`, waiting or in flight again). So the committed offset is the lowest pending offset, or the cursor
itself if nothing is pending.

*Durable* state is what events record: committed, the done ranges above it, failures and dead letters. Deliveries are
not recorded. After a crash the cursor is at `committed`, nothing is in flight, and the rows are read again, except
those that are done or wait as failed. A delivery interrupted by a crash is not a failure. `rewind` does the same to a
running group.

`count` is the number of stream rows below `committed`. Together with the rows in the ranges it gives the exact lag
without reading a row. The committed offset may run ahead of the recorded one, over rows that are not in the stream.
Before such rows are deleted, the deleter records the offset (`decide_record`); otherwise a crash would put the group
below the journal's start.

An acked event names ranges, not rows. Each range reaches from the previous pending row to the next one, so that ranges
join and the state grows with the gaps, not with the rows. In-order acks record one number.

`decide_*` read and return events, and `apply` applies them. Randomness is passed in. Which member holds the rows is not
known here (group.py): one member at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from heapline.contract.config import GroupConfig
from heapline.core.events import (
    EMPTY,
    F64,
    I64,
    Event,
    GroupAcked,
    GroupDead,
    GroupDeadDeleted,
    GroupDeadReplayed,
    GroupFailed,
    GroupReset,
    Mask,
)
from heapline.core.groups.acked_ranges import DoneRanges
from heapline.core.groups.deliveries import FAR, NO_COLUMNS, Columns, Deliveries, FailedRows, join_columns
from heapline.core.groups.stream import StreamRows
from heapline.core.record import size_bound
from heapline.core.retry import backoffs_ms


class Handed(NamedTuple):
    """Rows that a member receives and the delivery number of each; 1 = the first delivery."""

    rows: Columns
    attempts: I64


class DeadRow(NamedTuple):
    id: int
    position: int
    attempts: int
    reason: str
    at: int


class Progress(NamedTuple):
    """Fields that acked and dead events have in common."""

    committed: int
    rows_below: int
    starts: I64 = EMPTY
    ends: I64 = EMPTY
    counts: I64 = EMPTY


class GroupOffsets:
    def __init__(self, group: str, offset: int, count: int) -> None:
        self.group = group
        self.committed = offset
        self.recorded = offset  # `committed` as of the last event that recorded it
        self.count = count
        self.done = DoneRanges()
        self.failed = FailedRows()
        self.dead: dict[int, DeadRow] = {}  # by offset
        self.cursor = offset
        self.fresh = Deliveries()

    # -- deliveries ------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        return len(self.fresh) + self.failed.out

    def take(
        self, credits: int, page: StreamRows | None, now: int, deadline: int, nbytes: int = FAR, least: int = 1
    ) -> Handed:
        """Take at most `credits` rows of at most `nbytes`, but `least` rows if that many exist.

        Rows due for redelivery come first, then the next rows of `page`, which must cover the cursor.
        """
        again = self._take_again(credits, now, deadline, nbytes, least)
        left = credits - len(again.attempts)
        if page is None or left <= 0:
            return again
        if not page.start <= self.cursor <= page.end:
            raise ValueError(f"a page of [{page.start}, {page.end}) does not cover the cursor, {self.cursor}")
        if nbytes != FAR and len(again.attempts):
            nbytes, least = nbytes - int(size_bound(again.rows.positions).sum()), 0
        rows = self._next(page, left, nbytes, least)
        self.fresh.add(rows, deadline)
        self._settle()
        if not len(again.attempts):
            return Handed(rows, np.ones(len(rows.offsets), dtype=np.int64))
        attempts = np.concatenate((again.attempts, np.ones(len(rows.offsets), dtype=np.int64)))
        return Handed(join_columns([again.rows, rows]), attempts)

    def _take_again(self, credits: int, now: int, deadline: int, nbytes: int, least: int) -> Handed:
        at = self.failed.due(now, max(credits, 0))
        if nbytes != FAR and len(at):
            at = at[: _fitting(self.failed.positions[at], nbytes, least)]
        if not len(at):
            return Handed(NO_COLUMNS, EMPTY)
        self.failed.hand_out(at, deadline)
        return Handed(self.failed.columns(at), self.failed.failures[at] + 1)

    def _next(self, page: StreamRows, limit: int, nbytes: int, least: int) -> Columns:
        """Return the next rows from the cursor on, and move the cursor after them."""
        offsets = page.rows.offsets
        first = int(np.searchsorted(offsets, self.cursor))
        waiting = self.failed.offsets
        if len(self.done) or (len(waiting) and int(waiting[-1]) >= self.cursor):
            # Only after a rewind: some of the rows ahead were handled before it.
            ahead = offsets[first:]
            at = first + np.flatnonzero(~self.done.contains(ahead) & (self.failed.find(ahead) < 0))
            if nbytes != FAR:
                limit = _fitting(page.rows.positions[at[:limit]], nbytes, least)
            rows, behind = page.rows.only(at[:limit]), offsets[at[limit : limit + 1]]
        else:
            if nbytes != FAR:
                limit = _fitting(page.rows.positions[first : first + limit], nbytes, least)
            rows, behind = page.rows.only(slice(first, first + limit)), offsets[first + limit : first + limit + 1]
        self.cursor = self.done.end_at(int(behind[0]) if len(behind) else page.end)
        return rows

    def rewind(self) -> None:
        """Forget all deliveries in flight. Their rows that are not done are read again."""
        self.fresh.clear()
        self.failed.rest()
        self.cursor = self.done.end_at(self.committed)

    def overdue(self, now: int, limit: int) -> I64:
        """Return the offsets of deliveries whose deadline has passed; pass them to `decide_fail`."""
        late = self.fresh.overdue(now, limit)
        if len(self.failed) and len(late) < limit:
            late = np.sort(np.concatenate((late, self.failed.overdue(now, limit - len(late)))))
        return late

    def next_deadline(self, now: int) -> int | None:
        """Return when time alone changes something next."""
        soonest = min(self.fresh.next_deadline(now), self.failed.next_deadline(now))
        return None if soonest == FAR else soonest

    def last_deadline(self) -> int:
        """Return the deadline of the last delivery in flight; 0 if none is."""
        return max(self.fresh.last_deadline(), int(self.failed.deadlines.max(initial=0)))

    # -- decisions -------------------------------------------------------------------------------------------------

    def decide_ack(self, offsets: I64, now: int) -> tuple[GroupAcked | None, I64]:
        """Return the event (None: nothing changes) and the offsets that are neither held nor done."""
        offsets = _sorted(offsets)
        held, back = self._held(offsets)
        lost = self._lost(offsets, ~held)
        if not held.any():
            return None, lost
        again = offsets[back]
        progress = self._progress(offsets[held & ~back] if len(again) else offsets[held])
        return GroupAcked(self.group, *progress, again, now), lost

    def decide_fail(
        self, offsets: I64, draws: F64, reason: str, now: int, config: GroupConfig
    ) -> tuple[list[GroupFailed | GroupDead], I64]:
        """Fail rows that were nacked or timed out. `draws` are numbers in [0, 1), one per offset, for the jitter."""
        offsets = _sorted(offsets)
        held, back = self._held(offsets)
        lost = self._lost(offsets, ~held)
        rows, before = self._columns(offsets[held])
        failures = before + 1
        over = failures > config.max_retries
        events: list[GroupFailed | GroupDead] = []
        if not over.all():
            some, counts = rows.only(~over), failures[~over]
            dues = now + backoffs_ms(config.backoff, counts, draws[: len(offsets)][held][~over])
            events.append(GroupFailed(some.ids, self.group, some.offsets, some.positions, counts, dues, reason, now))
        if over.any():
            some, counts = rows.only(over), failures[over]
            progress = self._progress(some.offsets[~back[held][over]])
            events.append(GroupDead(some.ids, self.group, some.offsets, some.positions, counts, reason, *progress, now))
        return events, lost

    def decide_reset(self, offset: int, count: int, now: int) -> GroupReset:
        """Move the group to `offset`. `count` is the number of stream rows below `offset` (StreamCount)."""
        return GroupReset(self.group, offset, count, now)

    def decide_delete_dead(self, offsets: I64, now: int) -> GroupDeadDeleted | None:
        known = [offset for offset in _sorted(offsets).tolist() if offset in self.dead]
        if not known:
            return None
        return GroupDeadDeleted(i64([self.dead[offset].id for offset in known]), self.group, i64(known), now)

    def decide_replay_dead(self, offsets: I64, due: int, now: int) -> list[GroupDeadReplayed | GroupDeadDeleted]:
        """Replay dead letters. One that the group will read again after a reset only stops being dead."""
        known = i64([offset for offset in _sorted(offsets).tolist() if offset in self.dead])
        passed = (known < self.committed) | self.done.contains(known)
        events: list[GroupDeadReplayed | GroupDeadDeleted] = []
        for some, replay in ((known[passed], True), (known[~passed], False)):
            ids = i64([self.dead[offset].id for offset in some.tolist()])
            if len(some) and replay:
                events.append(GroupDeadReplayed(ids, self.group, some, np.full(len(some), due, dtype=np.int64), now))
            elif len(some):
                events.append(GroupDeadDeleted(ids, self.group, some, now))
        return events

    def held(self, offsets: I64) -> Mask:
        """Return which of these sorted offsets are in flight."""
        return self._held(offsets)[0]

    def _held(self, offsets: I64) -> tuple[Mask, Mask]:
        """Return which offsets are in flight, and which of those are replayed dead letters."""
        held = self.fresh.held(offsets)
        if not len(self.failed):
            return held, np.zeros(len(offsets), dtype=np.bool_)
        at = self.failed.find(offsets)
        again = (at >= 0) & (self.failed.deadlines[at] != 0)
        return held | again, again & (self.failed.back[at] == 1)

    def _lost(self, offsets: I64, which: Mask) -> I64:
        """Return the offsets that are neither in flight nor done."""
        if not which.any():
            return EMPTY
        offsets = offsets[which]
        done = (offsets < self.committed) | self.done.contains(offsets)
        done &= self.failed.find(offsets) < 0
        if self.dead and done.any():
            done &= ~np.isin(offsets, np.fromiter(self.dead, dtype=np.int64))
        return offsets[~done]

    def _columns(self, offsets: I64) -> tuple[Columns, I64]:
        """Return the rows of offsets in flight, and how often each has failed before."""
        at = self.failed.find(offsets)
        first = self.fresh.columns(offsets[at < 0])
        known = at[at >= 0]
        rows = join_columns([first, self.failed.columns(known)])
        failures = np.concatenate((np.zeros(len(first.offsets), dtype=np.int64), self.failed.failures[known]))
        order = np.argsort(rows.offsets)
        return rows.only(order), failures[order]

    def _progress(self, offsets: I64) -> Progress:
        """Return the progress when these pending rows (sorted, none a replayed dead letter) are done."""
        waiting = self.failed.in_stream()
        if len(waiting):
            waiting = _without(waiting, offsets)
        edge = min(self.fresh.first_without(offsets), int(waiting[0]) if len(waiting) else FAR, self.cursor)
        below = int(np.searchsorted(offsets, edge))
        count = self.count + below + self.done.rows_below(edge)
        above = offsets[below:]
        if not len(above):
            return Progress(edge, count)
        pending = _without(self.fresh.offsets(), offsets)
        if len(waiting):
            pending = np.sort(np.concatenate((pending, waiting)))
        return Progress(edge, count, *self._ranges(above, pending))

    def _ranges(self, offsets: I64, pending: I64) -> tuple[I64, I64, I64]:
        """Return done rows as ranges between pending ones. Past the cursor, the rows between two rows are unknown."""
        known = offsets[offsets < self.cursor]
        ahead = offsets[len(known) :]
        gaps, counts = np.unique(np.searchsorted(pending, known), return_counts=True)
        starts = pending[gaps - 1] + 1  # the committed offset is pending, so each gap has a pending row before it
        ends = np.minimum(np.append(pending, FAR)[gaps], self.cursor)
        ones = np.ones(len(ahead), dtype=np.int64)
        return np.append(starts, ahead), np.append(ends, ahead + 1), np.append(counts, ones)

    def decide_record(self, at: int) -> GroupAcked:
        """Return an event that records the current committed offset."""
        return GroupAcked(self.group, self.committed, self.count, EMPTY, EMPTY, EMPTY, EMPTY, at)

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        if isinstance(event, GroupAcked):
            self.failed.drop(event.again)
            self._progressed(event)
        elif isinstance(event, GroupFailed):
            self.fresh.end(event.offsets)
            self.failed.put(Columns(event.offsets, event.ids, event.positions), event.failures, event.dues)
        elif isinstance(event, GroupDead):
            self._died(event)
        elif isinstance(event, GroupReset):
            self._reset(event)
        elif isinstance(event, GroupDeadDeleted):
            for offset in event.offsets.tolist():
                del self.dead[offset]
        elif isinstance(event, GroupDeadReplayed):
            self._replayed(event)

    def _progressed(self, event: GroupAcked | GroupDead) -> None:
        # Cut first: an added range may begin where a range that `event.count` includes ends, and would join it.
        self.done.cut(event.committed)
        self.done.add(event.starts, event.ends, event.counts)
        self.committed, self.count = event.committed, event.count
        self.recorded = event.committed
        self.fresh.end_below(event.committed)
        self.fresh.end_ranges(event.starts, event.ends)
        if len(self.failed):
            offsets = self.failed.offsets
            passed = (offsets < event.committed) | self.done.contains(offsets)
            self.failed.keep(~passed | (self.failed.back == 1))
        self.cursor = self.done.end_at(max(self.cursor, event.committed))
        self._settle()

    def _settle(self) -> None:
        """Advance the committed offset towards the cursor, over rows that are done or not in the stream."""
        waiting = self.failed.in_stream()
        edge = min(self.fresh.first_without(EMPTY), int(waiting[0]) if len(waiting) else FAR, self.cursor)
        if edge > self.committed:
            self.count += self.done.cut(edge)
            self.committed = edge

    def _died(self, event: GroupDead) -> None:
        self.failed.drop(event.offsets)
        columns = (event.offsets, event.ids, event.positions, event.attempts)
        for offset, id, position, attempts in zip(*(column.tolist() for column in columns), strict=True):
            self.dead[offset] = DeadRow(id, position, attempts, event.reason, event.at)
        self._progressed(event)

    def _reset(self, event: GroupReset) -> None:
        # Keep replayed dead letters: stream progress does not affect them, unless the group reads over them again.
        self.failed.keep((self.failed.back == 1) & (self.failed.offsets < event.offset))
        self.done = DoneRanges()
        self.committed, self.count = event.offset, event.count
        self.recorded = event.offset
        self.rewind()

    def _replayed(self, event: GroupDeadReplayed) -> None:
        dead = [self.dead.pop(offset) for offset in event.offsets.tolist()]
        rows = Columns(event.offsets, event.ids, i64([row.position for row in dead]))
        self.failed.put(rows, np.zeros(len(dead), dtype=np.int64), event.dues, back=True)

    # -- queries ---------------------------------------------------------------------------------------------------

    def lag(self, total: int) -> int:
        """Return the number of stream rows that are not done; `total` is how many the partition has had."""
        back = int(self.failed.back.sum()) if len(self.failed) else 0
        return total - self.count - self.done.rows + back

    def holds(self) -> Columns:
        """Return messages that are needed although the committed offset has passed them, or may pass them."""
        back = self.failed.columns(np.flatnonzero(self.failed.back))
        dead = Columns(
            i64(self.dead), i64([d.id for d in self.dead.values()]), i64([d.position for d in self.dead.values()])
        )
        return join_columns([back, dead])

    def moved(self, ids: I64, positions: I64) -> None:
        """Update the positions of moved records (`Moved`); `ids` are sorted."""
        self.fresh.replace_positions(ids, positions)
        self.failed.replace_positions(ids, positions)
        if self.dead:
            by_id = dict(zip(ids.tolist(), positions.tolist(), strict=True))
            for offset, row in self.dead.items():
                if row.id in by_id:
                    self.dead[offset] = row._replace(position=by_id[row.id])

    def to_state(self) -> dict[str, Any]:
        return {
            "committed": self.committed, "count": self.count, "done": self.done.to_state(),
            "failed": self.failed.to_state(), "dead": [(offset, *row) for offset, row in self.dead.items()],
        }  # fmt: skip

    @classmethod
    def from_state(cls, group: str, state: dict[str, Any]) -> Self:
        offsets = cls(group, state["committed"], state["count"])
        offsets.done = DoneRanges.from_state(state["done"])
        offsets.failed = FailedRows.from_state(state["failed"])
        offsets.dead = {offset: DeadRow(*row) for offset, *row in state["dead"]}
        offsets.rewind()
        return offsets


def _fitting(positions: I64, nbytes: int, least: int) -> int:
    """Return how many of these rows, in order, fit into `nbytes`."""
    return max(least, int(np.searchsorted(np.cumsum(size_bound(positions)), nbytes, side="right")))


def i64(values: Any) -> I64:
    return np.fromiter(values, dtype=np.int64)


def _sorted(offsets: I64) -> I64:
    if len(offsets) > 1 and not (offsets[1:] > offsets[:-1]).all():
        return np.unique(offsets)
    return offsets


def _without(offsets: I64, some: I64) -> I64:
    """Return `offsets` without `some`. Both are sorted; `some` are few."""
    if not len(offsets):
        return offsets
    at = np.minimum(np.searchsorted(offsets, some), len(offsets) - 1)
    which = np.ones(len(offsets), dtype=np.bool_)
    which[at[offsets[at] == some]] = False
    return offsets[which]
