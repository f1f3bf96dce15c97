"""The spine of a topic whose partitions are all in this process: the head of each, and the next messages across all.

Here a publication is a memory write: a change marks its partition, and the partition's head is read again before the
next selection. So every head is current at each selection, and the order across all partitions is exact; the bound in
force is 1 whatever `k` allows.

A selection must not read all of every partition. Two observations keep it small. If `want` heads are no worse than T,
then so are the `want` best messages: partitions whose head is worse than T are skipped. From the others, only about as
many rows are read as each is likely to give; a partition that gives all of them is read deeper.

The *limit* of a partition's lease is the best message that any other partition kept: nothing leased is worse than it.

The other strategies (core/spine/strategy.py) serve partitions in turn; order then holds only within each. With a
minimum freshness, a message must have been at the head of its partition for that long. Until then, no worse message is
leased either (best first), or its partition is skipped (the other strategies).
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.events import EMPTY, I64
from heapline.core.heap.run_heap import Rows
from heapline.core.heap.runs import Row
from heapline.core.spine.strategy import Rotation, rotation
from heapline.engine.topic import Topic

NOTHING = (1 << 63) - 1  # key of a partition that has nothing to give; a message may have it, so `_full` decides
DEPTH_MIN = 8
FEW_ROWS = 4  # per partition: then a selection costs less row by row
Index = npt.NDArray[np.intp]
_NO_INDEX: Index = np.zeros(0, dtype=np.intp)


class Selection(NamedTuple):
    """Messages in the order in which they may be leased, and after those that were wanted, some that are kept."""

    owners: list[int]  # numbers of the partitions that may give
    owner: Index  # of each message: its partition, as an index of `owners`
    keys: I64
    ids: I64
    positions: I64


class _Planned(NamedTuple):
    ready: dict[int, int]  # ready counts that the turns were planned with
    turns: int
    after: Rotation  # the rotation after all of these turns


NO_SELECTION = Selection([], _NO_INDEX, EMPTY, EMPTY, EMPTY)


class Heads:
    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._keys = self._ids = EMPTY
        self._full = np.empty(0, dtype=np.bool_)  # whether it has something to give
        self._since: list[int] = []  # when its current head, or a better one, came to the head
        self._read_at: list[int] = []
        self._rotation: Rotation | None = None
        self._planned: _Planned | None = None  # turns of the last selection
        self._rotates_by: tuple[str, dict[int, float]] = ("best_first", {})
        self.look_again_at: int | None = None  # steady ms at which too fresh messages become eligible
        self.updates: list[int] = []  # by partition: how often its head was read
        self.taken: list[int] = []  # by partition: messages leased from it
        self.selections = 0
        self.refusals = 0
        self._fit(0)

    def _fit(self, now: int) -> None:
        """Add new partitions, and read all heads again."""
        count = len(self._topic.partitions)
        added = count - len(self.updates)
        self._keys = np.concatenate((self._keys, np.full(added, NOTHING, dtype=np.int64)))
        self._ids = np.concatenate((self._ids, np.zeros(added, dtype=np.int64)))
        self._full = np.concatenate((self._full, np.zeros(added, dtype=np.bool_)))
        self._since += [now] * added
        self._read_at += [now] * added
        self.updates += [0] * added
        self.taken += [0] * added
        self._topic.new_heads.update(range(count))

    def refresh(self, now: int) -> None:
        """Read the heads of changed partitions again."""
        partitions, changed = self._topic.partitions, self._topic.new_heads
        if len(self.updates) != len(partitions):
            self._fit(now)
        self._mark_old(now)
        for number in changed:
            partition = partitions[number]
            head = partition.head() if partition.entries.ready and partition.state.throttled is None else None
            if head is not None:
                if not self._full.item(number) or head < (self._keys.item(number), self._ids.item(number)):
                    self._since[number] = now
                self._keys[number], self._ids[number] = head
            elif self._full.item(number):
                self._keys[number], self._ids[number] = NOTHING, 0
            self._full[number] = head is not None
            self._read_at[number] = now
            self.updates[number] += 1
        changed.clear()

    def _mark_old(self, now: int) -> None:
        topic = self._topic
        if topic.config.max_staleness:
            oldest = now - round(topic.config.max_staleness * 1000)
            topic.new_heads.update(number for number, at in enumerate(self._read_at) if at < oldest)
        if self._is_limited:
            # After a growth a key may be in several partitions: leases in one of them block messages in the others.
            topic.new_heads.update(range(len(topic.partitions)))

    @property
    def _is_limited(self) -> bool:
        return self._topic.fair is not None and self._topic.fair.limit > 0

    @property
    def candidates(self) -> int:
        return int(self._full.sum())

    # -- selection -------------------------------------------------------------------------------------------------

    def choose(self, want: int, now: int) -> Selection:
        """Return the next messages: the first `want` of the selection, or fewer. They are best first unless the
        strategy defines another order."""
        self.refresh(now)
        self.selections += 1
        full, barrier = self._ripe(now)
        turns = self._turns()
        chosen = self._best(full, want, barrier) if turns is None else self._in_turn(full, want, turns)
        if not len(chosen.ids):
            self.refusals += any(p.entries.ready for p in self._topic.partitions)
        return chosen

    def _turns(self) -> Rotation | None:
        config = self._topic.config
        if config.strategy == "best_first":
            return None
        rotates_by = (config.strategy, config.partition_weights)
        if rotates_by != self._rotates_by:
            self._rotation, self._rotates_by = rotation(*rotates_by), rotates_by
        return self._rotation

    def _ripe(self, now: int) -> tuple[Index, tuple[int, int] | None]:
        """Return the partitions that may give, and the best head that is too fresh: nothing worse may precede it."""
        full = np.flatnonzero(self._full)
        self.look_again_at = None
        wait = round(self._topic.config.min_freshness * 1000)
        if not wait or not len(full):
            return full, None
        ripe_at = np.array(self._since, dtype=np.int64)[full] + wait
        fresh = full[ripe_at > now]
        if not len(fresh):
            return full, None
        self.look_again_at = int(ripe_at[ripe_at > now].min())
        barrier = min((self._keys.item(n), self._ids.item(n)) for n in fresh.tolist())
        return full[ripe_at <= now], barrier

    def _best(self, full: Index, want: int, barrier: tuple[int, int] | None) -> Selection:
        # Rows beyond their key's limit are removed below, so `want` heads may give fewer than `want` messages.
        owners = full.tolist() if want > 1 and self._is_limited else self._owners(full, want)
        if not owners:
            return NO_SELECTION
        partitions = self._topic.partitions
        if len(owners) > 1 and want <= FEW_ROWS * len(owners) and not self._is_limited:
            return _before(self._one_by_one(owners, want), barrier)
        depth = want if len(owners) == 1 else 2 * want // len(owners) + DEPTH_MIN
        found = [partitions[number].eligible(depth) for number in owners]
        depths = [depth] * len(owners)
        while True:
            chosen = self._within_limits(_merged(owners, found))
            short = [i for i in _unseen(chosen, found, want) if len(found[i].ids) == depths[i]]
            if not short:
                return _before(chosen, barrier)
            for i in short:
                depths[i] *= 4
                found[i] = partitions[owners[i]].eligible(depths[i])

    def _one_by_one(self, owners: list[int], want: int) -> Selection:
        """Select by a heap of heads. If each partition gives only a few rows, this costs less than numpy's calls."""
        heads = list(zip(self._keys[owners].tolist(), self._ids[owners].tolist(), range(len(owners)), strict=True))
        heapq.heapify(heads)
        rests: dict[int, list[Row]] = {}  # of each owner that gave a message: its next ones, last first
        chosen: list[Row] = []
        owner: list[int] = []
        while heads and len(chosen) < want:
            i = heads[0][2]
            rest = rests.get(i)
            if rest is None:
                rest = rests[i] = self._topic.partitions[owners[i]].candidates(DEPTH_MIN)
            chosen.append(rest.pop())
            owner.append(i)
            if not rest:  # it gives more than usual
                given = owner.count(i)
                rest = rests[i] = self._topic.partitions[owners[i]].candidates(DEPTH_MIN * given)
                del rest[-given:]
            if rest:
                heapq.heapreplace(heads, (rest[-1][0], rest[-1][1], i))
            else:
                heapq.heappop(heads)
        for key, id, i in heapq.nsmallest(2, heads):  # of two partitions: enough to know what each one's others keep
            chosen.append((key, id, 0))
            owner.append(i)
        keys, ids, positions = (np.array(column, dtype=np.int64) for column in zip(*chosen, strict=True))
        return Selection(owners, np.array(owner), keys, ids, positions)

    def _owners(self, full: Index, want: int) -> list[int]:
        """Return the partitions that may hold any of the `want` best messages."""
        if len(full) > want:
            keys = self._keys[full]
            bound = keys.min() if want == 1 else np.partition(keys, want - 1)[want - 1]
            full = full[keys <= bound]
        numbers: list[int] = full.tolist()
        if want == 1 and len(numbers) > 1:  # several with one key: the id decides
            return [min(numbers, key=self._ids.item)]
        return numbers

    def _in_turn(self, full: Index, want: int, turns: Rotation) -> Selection:
        partitions = self._topic.partitions
        numbers: list[int] = full.tolist()
        if self._is_limited:  # blocked messages use no turns
            ready = {number: len(partitions[number].eligible(want).ids) for number in numbers}
        else:
            ready = {number: partitions[number].entries.ready for number in numbers}
        after = turns.fork()
        plan = after.plan(ready, want)
        self._planned = _Planned(ready, len(plan.order), after)
        counts = plan.counts()
        if not counts:
            return NO_SELECTION
        owners = list(counts)
        found = [partitions[number].eligible(counts[number]) for number in owners]
        merged = _merged(owners, found)
        # Each row's position in the plan: the n-th turn of its partition, which may have more turns than rows.
        turns_of = [iter([at for at, turn in enumerate(plan.order) if turn == number]) for number in owners]
        when = [next(turns_of[i]) for i in merged.owner.tolist()]
        return self._within_limits(_reordered(merged, np.argsort(when, kind="stable")))

    def took(self, total: int) -> None:
        """Record that the first `total` of the last selection were leased: only their turns are used up."""
        planned, self._planned = self._planned, None
        if planned is None or self._rotation is None:
            return
        if total == planned.turns:
            self._rotation = planned.after
        else:
            self._rotation.plan(planned.ready, total)

    def _within_limits(self, chosen: Selection) -> Selection:
        """Apply the lease limit per fairness key across partitions. Each has applied it, but a key may be in
        several."""
        fair = self._topic.fair
        if fair is None or not fair.limit or not len(chosen.ids):
            return chosen
        partitions = self._topic.partitions
        hashes = np.empty(len(chosen.ids), dtype=np.int64)
        for i, number in enumerate(chosen.owners):
            mine = chosen.owner == i
            hashes[mine] = partitions[number].entries.hashes_of(chosen.ids[mine])
        return _reordered(chosen, np.flatnonzero(~fair.beyond(hashes)))

    # -- limits ----------------------------------------------------------------------------------------------------

    def limits(self, chosen: Selection, total: int) -> list[int | None]:
        """Return, for each owner, the key of the best message that the others keep after the first `total`."""
        kept: list[tuple[int, int]] = []  # (key, owner)
        owner, keys = chosen.owner[total:], chosen.keys[total:]
        if len(owner):
            kept.append((keys.item(0), owner.item(0)))
            others = np.flatnonzero(owner != owner[0])
            if len(others):
                kept.append((keys.item(others[0]), owner.item(others[0])))
        rest = self._full.copy()
        rest[chosen.owners] = False
        if rest.any():
            kept.append((int(self._keys[rest].min()), -1))
        kept.sort()
        limits: list[int | None] = [kept[0][0] if kept else None] * len(chosen.owners)
        if kept and kept[0][1] >= 0:  # its own message does not limit it
            limits[kept[0][1]] = kept[1][0] if len(kept) > 1 else None
        return limits


def _merged(owners: list[int], found: list[Rows]) -> Selection:
    """Return all rows that were read, in one order."""
    keys, ids, positions = (np.concatenate(columns) for columns in zip(*found, strict=True))
    counts = [len(rows.ids) for rows in found]
    whole = Selection(owners, np.repeat(np.arange(len(found)), counts), keys, ids, positions)
    return whole if len(found) == 1 else _reordered(whole, np.lexsort((ids, keys)))


def _reordered(chosen: Selection, order: Index) -> Selection:
    return Selection(chosen.owners, *(column[order] for column in chosen[1:]))


def _unseen(chosen: Selection, found: list[Rows], want: int) -> list[int]:
    """Return the owners with an unread row that could be among the first `want`, or be the best that is kept."""
    if len(found) == 1:
        return []
    last = [(rows.keys.item(-1), rows.ids.item(-1)) for rows in found if len(rows.ids)]
    owners = [i for i, rows in enumerate(found) if len(rows.ids)]
    if len(chosen.ids) < want:
        return owners
    cut = chosen.keys.item(want - 1), chosen.ids.item(want - 1)
    return [i for i, end in zip(owners, last, strict=True) if end <= cut]


def _before(chosen: Selection, barrier: tuple[int, int] | None) -> Selection:
    if barrier is None:
        return chosen
    key, id = barrier
    better = (chosen.keys < key) | ((chosen.keys == key) & (chosen.ids < id))
    return _reordered(chosen, np.flatnonzero(better))
