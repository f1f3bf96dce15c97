"""Judge the steps of complete messages: whether each is valid after the one before, and when messages were available.

All steps of a message must be present, in any order. They are sorted once and then compared with the previous row, for
all messages together. A message that has ended stays ended: later steps are violations and do not change where it
counts. A purge names no messages: it ends those that wait in its partition.

This module assigns violations to promises; report.py derives the verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.partition import ordering_of
from heapline.spark.audit import steps as S
from heapline.spark.audit.ranks import BEGIN, END, NEVER, Intervals
from heapline.spark.audit.steps import I64, NO_DUE, NO_KEY, NO_SEQ, Steps

Bools = npt.NDArray[np.bool_]

#: States of a message after a step. UNKNOWN: it is older than the events, so its state is unknown.
WAITING, DELAYED, LEASED, DEAD, OVER, NOWHERE, UNKNOWN = range(7)
STATES = ("waiting", "delayed", "leased", "dead", "over")
#: Violations.
DOUBLE_LEASE, EARLY, AFTER_END, FROM_NOWHERE, TWICE_NEW, UNFIT, TORN = range(7)
_AFTER = np.full(17, OVER, dtype=np.int64)
for _step, _state in {
    S.NEW: WAITING, S.FIRED: WAITING, S.LEASED: LEASED, S.RETURNED: WAITING, S.RELEASED: WAITING, S.DEAD: DEAD,
    S.REPLAYED: WAITING, S.RESCHEDULED: WAITING, S.OPEN_WAITING: WAITING, S.OPEN_DELAYED: DELAYED,
    S.OPEN_LEASED: LEASED, S.OPEN_DEAD: DEAD,
}.items():  # fmt: skip
    _AFTER[_step] = _state
_SETS_DUE = np.isin(np.arange(17), [S.NEW, S.RETURNED, S.REPLAYED, S.RESCHEDULED, S.OPEN_WAITING, S.OPEN_DELAYED])
_ENDS = np.isin(np.arange(17), [S.ACKED, S.DROPPED, S.DELETED, S.CANCELLED, S.EXPIRED])
#: The states in which a step is valid.
_FITS = np.zeros((17, 7), dtype=np.bool_)
for _step, _states in {
    S.NEW: (NOWHERE,), S.FIRED: (DELAYED,), S.LEASED: (WAITING, DELAYED), S.ACKED: (LEASED,), S.RETURNED: (LEASED,),
    S.RELEASED: (LEASED,), S.DEAD: (LEASED,), S.DROPPED: (LEASED,), S.REPLAYED: (DEAD,), S.DELETED: (DEAD,),
    S.CANCELLED: (WAITING, DELAYED), S.EXPIRED: (WAITING, DELAYED, LEASED), S.RESCHEDULED: (WAITING, DELAYED),
}.items():  # fmt: skip
    _FITS[_step, list(_states)] = True
    _FITS[_step, UNKNOWN] = _step != S.NEW
_FITS[S.OPEN_WAITING :, NOWHERE] = True


class Purge(NamedTuple):
    partition: int
    offset: int
    unit: int


@dataclass(frozen=True)
class Topic:
    """Facts about a topic that the steps of its messages do not contain."""

    name: str
    config: Any = None  # TopicConfig; without it leases are not ranked
    whole: frozenset[int] = frozenset()  # partitions whose messages are all known
    purges: tuple[Purge, ...] = ()
    wall_ahead: int = 0  # ms: how far the machine's clock was ahead of the journal's at most
    #: By partition: [first, last] ids of parts that were never committed.
    hidden: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)


class Violation(NamedTuple):
    what: int
    topic: int
    id: int
    offset: int
    before: int  # the offset of the previous step; -1: there is none
    at: int  # ms
    due: int  # ms, if it matters


@dataclass
class Findings:
    """Violations and counts of some messages of a topic."""

    topic: int = 0
    violations: dict[int, int] = field(default_factory=dict)  # violation -> count
    examples: list[Violation] = field(default_factory=list)
    standing: dict[tuple[int, int], int] = field(default_factory=dict)  # (partition, final state) -> messages
    purged: dict[tuple[int, int], int] = field(default_factory=dict)  # (partition, offset of the purge) -> messages
    messages: int = 0
    leases: int = 0
    timed: int = 0  # leases of messages that had a due time
    unknown: int = 0  # messages that are older than the events
    intervals: Intervals | None = None


def judge(steps: Steps, number: int, topic: Topic, examples_max: int = 10) -> Findings:
    """Judge the messages of one topic. All steps of each must be present."""
    order = np.lexsort((steps.offset, steps.id))
    rows = _Rows(steps.take(order), topic)
    found = Findings(number, messages=int(rows.first.sum()), leases=int((rows.steps.step == S.LEASED).sum()))
    found.unknown = int((rows.before[rows.first] == UNKNOWN).sum())
    _find_violations(rows, number, topic, found, examples_max)
    _count(rows, found)
    if topic.config is not None:
        found.intervals = _intervals(rows, topic.config)
    return found


class _Rows:
    """Steps sorted by message and offset, and the state around each."""

    def __init__(self, steps: Steps, topic: Topic) -> None:
        self.steps = steps
        count = len(steps.id)
        self.first = np.ones(count, dtype=np.bool_)  # the first row of its message
        self.first[1:] = steps.id[1:] != steps.id[:-1]
        self.last = np.roll(self.first, -1) if count else self.first
        self.after = _AFTER[steps.step]
        self.after[(self.after == WAITING) & _SETS_DUE[steps.step] & (steps.due != NO_DUE)] = DELAYED
        self.purge = self._purges(topic)  # offset of the purge that ended the message after this row, or -1
        self.over = self._over()  # the message had ended before this row
        self.before = np.full(count, NOWHERE, dtype=np.int64)
        self.before[1:][~self.first[1:]] = self.after[:-1][~self.first[1:]]
        opens = self.first & (steps.step != S.NEW) & (steps.step < S.OPEN_WAITING)
        whole = np.isin(steps.partition, np.fromiter(topic.whole, np.int64, len(topic.whole)))
        self.before[opens & ~whole] = UNKNOWN

    def _purges(self, topic: Topic) -> I64:
        steps = self.steps
        found = np.full(len(steps.id), -1, dtype=np.int64)
        self.purge_unit = np.full(len(steps.id), NEVER, dtype=np.int64)
        waits = self.after <= DELAYED
        next_offset = np.where(self.last, NEVER, np.roll(steps.offset, -1))
        for partition in {purge.partition for purge in topic.purges}:
            offsets, units = np.array(sorted((p.offset, p.unit) for p in topic.purges if p.partition == partition)).T
            mine = np.flatnonzero(waits & (steps.partition == partition))
            place = np.searchsorted(offsets, steps.offset[mine])
            hit = place < len(offsets)
            mine, place = mine[hit], place[hit]
            hit = offsets[place] < next_offset[mine]
            found[mine[hit]], self.purge_unit[mine[hit]] = offsets[place[hit]], units[place[hit]]
        return found

    def _over(self) -> Bools:
        ends = _ENDS[self.steps.step] | (self.purge >= 0)
        ended: I64 = np.cumsum(ends) - ends
        start: I64 = ended[self.first]
        return ended > np.repeat(start, np.diff(np.flatnonzero(self.first), append=len(ends)))

    def latest(self, here: Bools) -> I64:
        """Return, for each row, the last row of the same message up to it where `here` is true, or -1."""
        index = np.arange(len(here))
        found = np.maximum.accumulate(np.where(here, index, -1))
        start = np.maximum.accumulate(np.where(self.first, index, 0))
        return np.where(found >= start, found, -1)


def _find_violations(rows: _Rows, number: int, topic: Topic, found: Findings, examples_max: int) -> None:
    steps, before = rows.steps, rows.before
    is_lease = steps.step == S.LEASED
    due_row = np.roll(rows.latest(_SETS_DUE[steps.step]), 1)
    due_row[rows.first] = -1
    due = np.where(due_row >= 0, steps.due[due_row], NO_DUE)
    ahead = np.where(steps.wall[due_row] == 1, topic.wall_ahead, 0)
    found.timed = int((is_lease & (due != NO_DUE)).sum())
    fits = _FITS[steps.step, before] & ~rows.over
    nowhere = ~fits & ~rows.over & (before == NOWHERE)
    hidden = nowhere & _hidden(steps, topic)
    found_by_kind = {
        DOUBLE_LEASE: is_lease & ~rows.over & (before == LEASED),
        EARLY: is_lease & ~rows.over & (due != NO_DUE) & (steps.at + ahead < due),
        AFTER_END: is_lease & (rows.over | (before == DEAD)),
        TORN: hidden,
        FROM_NOWHERE: nowhere & ~hidden,
        TWICE_NEW: ~fits & (steps.step == S.NEW),
    }
    named = np.logical_or.reduce(list(found_by_kind.values()))
    found_by_kind[UNFIT] = ~fits & ~named
    for what, where in found_by_kind.items():
        bad = np.flatnonzero(where)
        if len(bad):
            found.violations[what] = len(bad)
            for i in bad[:examples_max].tolist():
                earlier = -1 if rows.first[i] else steps.offset.item(i - 1)
                where_and_when = (steps.id.item(i), steps.offset.item(i), earlier, steps.at.item(i), due.item(i))
                found.examples.append(Violation(what, number, *where_and_when))


def _hidden(steps: Steps, topic: Topic) -> Bools:
    """Return which messages belong to parts that were never committed."""
    found = np.zeros(len(steps.id), dtype=np.bool_)
    for partition, ranges in topic.hidden.items():
        mine = steps.partition == partition
        for first, last in ranges:
            found |= mine & (steps.id >= first) & (steps.id <= last)
    return found


def _count(rows: _Rows, found: Findings) -> None:
    """Count messages by their final state."""
    steps = rows.steps
    state = np.where(rows.over | (rows.purge >= 0) | _ENDS[steps.step], OVER, rows.after)[rows.last]
    partition = steps.partition[rows.last]
    pairs, counts = np.unique(partition * 8 + state, return_counts=True)
    found.standing = {(int(pair) >> 3, int(pair) & 7): int(n) for pair, n in zip(pairs, counts, strict=True)}
    gone = np.flatnonzero((rows.purge >= 0) & ~rows.over)
    for partition_, offset in zip(steps.partition[gone].tolist(), rows.purge[gone].tolist(), strict=True):
        found.purged[partition_, offset] = found.purged.get((partition_, offset), 0) + 1


def _intervals(rows: _Rows, config: Any) -> Intervals:
    """Return when each message was certainly available, and which of these intervals ended in a lease."""
    steps, ordering = rows.steps, ordering_of(config)
    key = _keys(rows, ordering)
    starts = (rows.after == WAITING) & ~rows.over & (key != NO_KEY)
    leases = (steps.step == S.LEASED) & ~rows.over & (key != NO_KEY) & (rows.before <= DELAYED)
    begins = np.flatnonzero(starts)
    sequenced = np.isin(steps.step, [S.NEW, S.FIRED, S.RELEASED, S.REPLAYED]) & (steps.seq != NO_SEQ)
    from_step = np.where(sequenced, steps.seq, END)
    from_step[steps.step == S.OPEN_WAITING] = BEGIN
    # The next step of the message ends its interval. A step without a sequence ends it at the beginning of its unit.
    after = np.minimum(begins + 1, len(steps.id) - 1)
    has_next = ~rows.last[begins]
    next_lease = has_next & (steps.step[after] == S.LEASED) & (rows.purge[begins] < 0)
    to_unit = np.where(rows.purge[begins] >= 0, rows.purge_unit[begins], np.where(has_next, steps.unit[after], NEVER))
    to_step = np.where(next_lease, steps.seq[after], BEGIN)
    judged = next_lease & leases[after]
    alone = np.flatnonzero(
        leases & ~_mask(after[judged], len(leases))
    )  # leases of messages that were not known to be ready
    none = np.zeros(len(alone), dtype=np.int64)
    return Intervals(
        key=ordering.rank_key(np.concatenate((key[begins], key[alone]))),
        id=np.concatenate((steps.id[begins], steps.id[alone])),
        from_unit=np.concatenate((steps.unit[begins], steps.unit[alone])),
        from_step=np.concatenate((from_step[begins], none + END)),
        to_unit=np.concatenate((to_unit, steps.unit[alone])),
        to_step=np.concatenate((to_step, steps.seq[alone])),
        judged=np.concatenate((judged.astype(np.int64), none + 1)),
        offset=np.concatenate((steps.offset[after], steps.offset[alone])),
    )


def _keys(rows: _Rows, ordering: Any) -> I64:
    """Return the heap key of each row's message at that time, or NO_KEY if it is unknown."""
    steps = rows.steps
    new = (steps.step == S.NEW) | (steps.step >= S.OPEN_WAITING)
    own = np.where(new, ordering.keys(steps.key, steps.since), steps.key)
    if ordering.has_turns:
        own = np.where(new, ordering.with_turns(np.where(new, own, 0), 0), own)
    own[steps.key == NO_KEY] = NO_KEY
    row = rows.latest(new | (steps.step == S.RESCHEDULED))
    return np.where(row >= 0, own[row], NO_KEY)


def _mask(index: I64, count: int) -> Bools:
    found = np.zeros(count, dtype=np.bool_)
    found[index] = True
    return found
