"""Decide what happens to a group's rows in one partition: ack, nack, timeout, reset and replay.

An acked event names ranges, not rows. Each range reaches from the previous pending row to the next one, so that ranges
join and the state grows with the gaps, not with the rows. In-order acks record one number. Nothing is changed here:
`decide_*` read and return events, and offset_state.py applies them. Randomness is passed in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.contract.config import GroupConfig
from heapline.core.events import (
    EMPTY,
    GroupAcked,
    GroupDead,
    GroupDeadDeleted,
    GroupDeadReplayed,
    GroupFailed,
    GroupReset,
)
from heapline.core.groups.deliveries import FAR, Columns, join_columns
from heapline.core.groups.offset_state import OffsetState, i64
from heapline.core.retry import backoffs_ms

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Progress(NamedTuple):
    """Fields that acked and dead events have in common."""

    committed: int
    rows_below: int
    starts: I64 = EMPTY
    ends: I64 = EMPTY
    counts: I64 = EMPTY


class GroupOffsets(OffsetState):
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
    ) -> tuple[list[GroupFailed | GroupDead], I64]:  # fmt: skip
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
            events.append(
                GroupDead(some.ids, self.group, some.offsets, some.positions, counts, reason, *progress, now)
            )  # fmt: skip
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
