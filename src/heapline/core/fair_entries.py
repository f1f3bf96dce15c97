"""Entries of a partition whose fairness keys may be blocked: parking, and taking leases past what is parked.

*What holds.* Where a key may have f more leases, the heap holds the f best of the key's entries in this partition, or
all of them; the rest may be parked (core/parking.py). So the best that are not blocked are found by looking at the heap
alone (`unblocked`), which parks whatever it meets that is beyond its key's slots. It stays true because
- what becomes ready goes to the heap, and what is leased is the best of its key;
- when leases of a key end, as many of its best come back as slots became free, in every partition that has any;
- when waiting messages of a key leave by another door, as many come back in their place (`_refill`);
- when the limit changes, or all events of a journal are applied, everything comes back (`unpark_all`).
More in the heap than needed does no harm: it is parked again when it is met. A rescheduled (touched) message may have
an equal entry in the heap already, so what comes back of those is not counted.

*Replay.* A lease event names what was leased; whatever stood before that in the heap was blocked then. Which keys were
blocked is not asked again: partitions are replayed one after the other within a unit, and the limit may have been
another. Of a key, the best were leased, so those come back from parking as they are asked for.

On a topic without fairness all of this is skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from heapline.core.entries import LEASED, Entries, Replay
from heapline.core.events import EMPTY, I64
from heapline.core.heap import Rows
from heapline.core.key_hashes import NO_KEY
from heapline.core.leases import Lease
from heapline.core.order import TURN_BITS
from heapline.core.runs import Row, cut, tuples_of

_LOOK_MAX = 4096
_FEW = 4  # rows that cost less one by one than as columns


class FairEntries(Entries):
    # -- parking ---------------------------------------------------------------------------------------------------

    def unblocked(self, count: int) -> Rows:
        """The first `count` messages that are ready and whose keys have slots for them."""
        assert self.fair is not None
        look = count
        while True:
            rows = self.heap.peek(look)
            if not len(rows.ids):
                return rows
            good = self.good_ready(*rows)
            hashes = self.hashes_of(rows.ids)
            blocked = np.zeros(len(good), dtype=np.bool_)
            blocked[good] = self.fair.beyond(hashes[good])
            stays = good & ~blocked
            if stays[:count].all():
                return cut(rows, 0, count)
            end = len(stays) - int(np.argmin(stays[::-1]))  # behind the last that does not stay
            self.heap.pop(end)
            self._push(_pick(rows, np.flatnonzero(stays[:end])))
            self._park(_pick(rows, np.flatnonzero(blocked)), hashes[blocked])
            if 2 * int(stays.sum()) < len(stays):  # there may be many more of them
                look = min(2 * look, max(count, _LOOK_MAX))

    def unpark(self, wants: Iterable[tuple[int, int]]) -> None:
        """For each (key, count) bring the key's best parked messages back into the heap: so many, or all there are."""
        missing = dict(wants)
        while missing:
            owners: list[int] = []
            taken: list[Row] = []
            for key, count in missing.items():
                rows = self.parked.take(key, count)
                taken += rows
                owners += [key] * len(rows)
            if taken:
                uncounted = self._bring_back(taken)
                missing = Counter(owners[i] for i in uncounted if owners[i] in self.parked)
            else:
                missing = {}
            if self.fair is not None:
                for key in set(owners):
                    if key not in self.parked:
                        self.fair.note_parked(key, self, False)

    def _bring_back(self, taken: list[Row]) -> list[int]:
        """Push those of these entries that are good; the numbers of those that are not, or may be in the heap twice."""
        rows = Rows(*np.array(taken, dtype=np.int64).T)
        good = self.good_ready(*rows)
        self._push(_pick(rows, np.flatnonzero(good)))
        bad: list[int] = np.flatnonzero(~good).tolist()
        return bad + [i for i, _, _ in self._touched_among(rows.ids) if good[i]]

    def unpark_all(self) -> None:
        for rows in self._clear_parked():
            self._push(rows)

    @property
    def blocked(self) -> int:
        """How many ready messages are parked."""
        runs = list(self.parked.runs())
        seen: set[int] = set()
        return sum(int(self.good_ready(*run.rest(), seen).sum()) for run in runs)

    def _park(self, rows: Rows, hashes: I64) -> None:
        if len(rows.ids) and self.fair is not None:
            for key in self.parked.park(rows, hashes):
                self.fair.note_parked(key, self, True)

    def _clear_parked(self) -> list[Rows]:
        left, keys = self.parked.clear()
        if self.fair is not None:
            for key in keys:
                self.fair.note_parked(key, self, False)
        return left

    def _refill(self, ids: I64) -> None:
        """These waiting messages leave; where that leaves a free slot without its message, another takes the place."""
        if self.fair is None or not self.parked.rows:
            return
        keys, counts = np.unique(self.hashes_of(ids), return_counts=True)
        pairs = zip(keys.tolist(), counts.tolist(), strict=True)
        self.unpark((key, min(count, self.fair.free(key))) for key, count in pairs if key in self.parked)

    def _push(self, rows: Rows) -> None:
        if len(rows.ids) > _FEW:
            self.heap.push(*rows)
        else:
            for row in tuples_of(rows):
                self.heap.push_one(*row)

    # -- leases ----------------------------------------------------------------------------------------------------

    def _take_ready(self, ids: I64) -> tuple[I64, I64]:
        if self.fair is None:
            return super()._take_ready(ids)
        clean = not self.stale
        rows = self.heap.pop(len(ids))
        if not (clean and np.array_equal(rows.ids, ids)):
            rows = self._take_among(rows, ids)
        self.fair.advance(rows.keys)
        if self.fair.limit:
            self.fair.leased(self.hashes_of(ids))
        return rows.keys, rows.positions

    def _take_among(self, rows: Rows, ids: I64) -> Rows:
        """Take these messages, past those of blocked keys. `rows` were popped already."""
        if self.parked.rows:
            keys, counts = np.unique(self.hashes_of(ids), return_counts=True)
            self.unpark(zip(keys.tolist(), counts.tolist(), strict=True))
        taken: list[Rows] = []
        others: list[Rows] = []
        have, step = 0, len(ids)
        while True:
            good = self.good_ready(*rows)
            mine = good & np.isin(rows.ids, ids)
            taken.append(_pick(rows, np.flatnonzero(mine)))
            others.append(_pick(rows, np.flatnonzero(good & ~mine)))
            # At once: an equal entry behind it is stale from here.
            self._place(taken[-1].ids.tolist(), LEASED, taken[-1].positions.tolist())
            have += len(taken[-1].ids)
            if have >= len(ids):
                break
            step = min(2 * step, _LOOK_MAX)
            rows = self.heap.pop(step)
            if not len(rows.ids):
                raise Replay(f"partition {self.number}: the journal leased messages that are not ready")
        found = _in_order(taken)
        if not np.array_equal(found.ids, ids):
            raise Replay(f"partition {self.number}: the journal leased in another order than that of the queue")
        self._set_aside(_in_order(others), int(found.keys[-1]), int(found.ids[-1]))
        return found

    def _set_aside(self, rows: Rows, key: int, id: int) -> None:
        """Rows that were met on the way to the one with this key and id: those before it were blocked."""
        before = (rows.keys < key) | ((rows.keys == key) & (rows.ids < id))
        self._push(_pick(rows, np.flatnonzero(~before)))
        passed = _pick(rows, np.flatnonzero(before))
        hashes = self.hashes_of(passed.ids)
        if (hashes == NO_KEY).any():
            raise Replay(f"partition {self.number}: the journal leased others than those that were first")
        self._park(passed, hashes)

    def _end_leases(self, ids: list[int]) -> list[Lease]:
        """These leases end, whatever becomes of the messages; they must be held."""
        leases = self.leases.take(ids)
        if self.fair is not None and self.fair.limit:
            self.fair.ended(self.hashes_of(np.array(ids, dtype=np.int64)))
        return leases

    def leased_keys(self) -> I64:
        """The hash of the fairness key of each leased message."""
        return self.hashes_of(np.fromiter(self.leases.by_id, np.int64, len(self.leases)))

    # -- turns -----------------------------------------------------------------------------------------------------

    def in_turn(self, ids: I64, keys: I64, which: npt.NDArray[np.bool_]) -> I64:
        """The heap keys of messages with these; those that become ready now get their turns."""
        assert self.fair is not None
        keys = keys.copy()
        if which.any():
            priorities = keys[which] >> TURN_BITS
            turns = self.fair.take(priorities, self.hashes_of(ids[which]))
            keys[which] = self.ordering.with_turns(priorities, turns)
        return keys

    def _observe_turns(self, ids: I64, keys: I64) -> None:
        """Turns that events give, when they are applied again."""
        if self.fair is not None and self.fair.is_loading and len(ids):
            self.fair.observe(keys, self.hashes_of(ids))

    def _rescheduled_key(self, id: int, ready_key: int | None, priority_key: int, waits: bool) -> int:
        """The heap key of a rescheduled message. One that is ready and stays so at its priority keeps its turn; else it
        comes after the messages of its fairness key that are there, once it is ready."""
        key = int(self.ordering.with_turns(priority_key, 0))
        if waits:
            return key
        if ready_key is not None and ready_key >> TURN_BITS == priority_key:
            return ready_key
        return int(self.in_turn(np.array([id]), np.array([key]), np.ones(1, dtype=np.bool_))[0])

    def priorities_in_use(self) -> set[int]:
        """Priorities, as upper parts of heap keys, of all living messages, prepared ones too."""
        columns = [run.rest().keys for run in (*self.heap.runs(), *self.parked.runs())]
        columns += [chunk.keys[chunk.start :] for wheel in (self.delays, self.calendar) for chunk in wheel.chunks()]
        columns.append(np.array([lease[2] for lease in self.leases.by_id.values()], dtype=np.int64))
        columns += [share.keys for share in self.prepared.shares()]
        columns.append(np.array([dead.key for dead in self.dead.values()], dtype=np.int64))
        columns += [share.keys for share in self.prepared.shares()]
        found = [np.unique(column >> TURN_BITS) for column in columns]
        return set(np.concatenate([EMPTY, *found]).tolist())


def _pick(rows: Rows, index: npt.NDArray[np.intp]) -> Rows:
    return Rows(rows.keys[index], rows.ids[index], rows.positions[index])


def _in_order(pieces: list[Rows]) -> Rows:
    keys, ids, positions = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
    return _pick(Rows(keys, ids, positions), np.lexsort((ids, keys)))
