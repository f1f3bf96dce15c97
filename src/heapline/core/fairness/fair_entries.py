"""Entries of a partition whose fairness keys may be blocked: park them, and lease past the parked ones.

*Invariant.* Where a key may have f more leases, the heap holds the f best of the key's entries in this partition, or
all of them; the rest may be parked (keys.py). So a search of the heap alone finds the best messages that are
not blocked (`unblocked`). It parks every message that it finds beyond its key's slots. The invariant holds because
- messages that become ready go to the heap, and a leased message is the best of its key;
- when leases of a key end, as many of its best messages return as slots became free, in every partition that has any;
- when waiting messages of a key are cancelled, expired or rescheduled, as many return in their place (`_refill`);
- when the limit changes, or all events of a journal are applied, all messages return (`unpark_all`).
Extra entries in the heap are harmless: they are parked again when found. A rescheduled (touched) message may already
have an equal entry in the heap, so returned entries of such messages are not counted.

*Replay.* A lease event names the leased messages; everything before them in the heap was blocked at that time. Replay
does not recompute which keys were blocked, because partitions are replayed one after the other within a unit, and the
limit may have been different. The best messages of a key were leased, so they return from parking as needed.

On a topic without fairness all of this is skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from heapline.core.entries import LEASED, Entries, Replay
from heapline.core.events import EMPTY, I64
from heapline.core.fairness.keys import NO_KEY
from heapline.core.heap.run_heap import Rows
from heapline.core.heap.runs import Row, cut, tuples_of
from heapline.core.leases import Lease
from heapline.core.order import TURN_BITS

_LOOK_MAX = 4096
_FEW = 4  # fewer rows are cheaper one by one than as columns


class FairEntries(Entries):
    # -- parking ---------------------------------------------------------------------------------------------------

    def unblocked(self, count: int) -> Rows:
        """Return the first `count` messages that are ready and whose keys have slots for them."""
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
            end = len(stays) - int(np.argmin(stays[::-1]))  # after the last that does not stay
            self.heap.pop(end)
            self._push(_pick(rows, np.flatnonzero(stays[:end])))
            self._park(_pick(rows, np.flatnonzero(blocked)), hashes[blocked])
            if 2 * int(stays.sum()) < len(stays):  # there may be many more blocked messages
                look = min(2 * look, max(count, _LOOK_MAX))

    def unpark(self, wants: Iterable[tuple[int, int]]) -> None:
        """Return parked messages to the heap: for each (key, count), up to `count` of the key's best."""
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
        """Push the valid entries; return the indexes of those that are stale or may be in the heap twice."""
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
        """The number of ready messages that are parked."""
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
        """Unpark messages to replace these waiting ones, which leave, wherever their key has free slots."""
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
        """Take these messages, past those of blocked keys. `rows` were already popped."""
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
            # Update immediately: from now on an equal entry after it is stale.
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
        """Set aside rows found before the one with this key and id: they were blocked."""
        before = (rows.keys < key) | ((rows.keys == key) & (rows.ids < id))
        self._push(_pick(rows, np.flatnonzero(~before)))
        passed = _pick(rows, np.flatnonzero(before))
        hashes = self.hashes_of(passed.ids)
        if (hashes == NO_KEY).any():
            raise Replay(f"partition {self.number}: the journal leased others than those that were first")
        self._park(passed, hashes)

    def _end_leases(self, ids: list[int]) -> list[Lease]:
        """End these leases, whatever happens to the messages; they must be held."""
        leases = self.leases.take(ids)
        if self.fair is not None and self.fair.limit:
            self.fair.ended(self.hashes_of(np.array(ids, dtype=np.int64)))
        return leases

    def leased_keys(self) -> I64:
        """Return the hash of the fairness key of each leased message."""
        return self.hashes_of(np.fromiter(self.leases.by_id, np.int64, len(self.leases)))

    # -- turns -----------------------------------------------------------------------------------------------------

    def in_turn(self, ids: I64, keys: I64, which: npt.NDArray[np.bool_]) -> I64:
        """Return the messages' heap keys; those in `which` become ready now and get their turns."""
        assert self.fair is not None
        keys = keys.copy()
        if which.any():
            priorities = keys[which] >> TURN_BITS
            turns = self.fair.take(priorities, self.hashes_of(ids[which]))
            keys[which] = self.ordering.with_turns(priorities, turns)
        return keys

    def _observe_turns(self, ids: I64, keys: I64) -> None:
        """Record the turns given by events when they are replayed."""
        if self.fair is not None and self.fair.is_loading and len(ids):
            self.fair.observe(keys, self.hashes_of(ids))

    def _rescheduled_key(self, id: int, ready_key: int | None, priority_key: int, waits: bool) -> int:
        """Return the heap key of a rescheduled message.

        A message that is ready and stays ready at its priority keeps its turn. Otherwise it comes after the present
        messages of its fairness key, once it is ready.
        """
        key = int(self.ordering.with_turns(priority_key, 0))
        if waits:
            return key
        if ready_key is not None and ready_key >> TURN_BITS == priority_key:
            return ready_key
        return int(self.in_turn(np.array([id]), np.array([key]), np.ones(1, dtype=np.bool_))[0])

    def priorities_in_use(self) -> set[int]:
        """Return the priorities, as upper parts of heap keys, of all live messages, including prepared ones."""
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
