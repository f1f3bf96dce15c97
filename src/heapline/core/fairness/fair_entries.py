"""Entries of a partition whose fairness keys may be blocked: park them, and lease past the parked ones.

*Invariant.* Where a key may have f more leases, the heap holds the f best of the key's entries in this partition, or
all of them; the rest may be parked (keys.py). So a search of the heap alone finds the best messages that are
not blocked (`unblocked`). It parks every message that it finds beyond its key's slots. The invariant holds because
- messages that become ready go to the heap, and a leased message is the best of its key;
- when leases of a key end, as many of its best messages return as slots became free, in every partition that has any;
- when waiting messages of a key are cancelled, expired or rescheduled, as many return in their place (`refill`);
- when the limit changes, or all events of a journal are applied, all messages return (`unpark_all`).
Extra entries in the heap are harmless: they are parked again when found. A rescheduled (touched) message may already
have an equal entry in the heap, so returned entries of such messages are not counted.

*Replay.* A lease event names the leased messages; everything before them in the heap was blocked at that time. Replay
does not recompute which keys were blocked, because partitions are replayed one after the other within a unit, and the
limit may have been different. The best messages of a key were leased, so they return from parking as needed.

The object exists only on topics where fairness keys take turns. The parked entries and the keys' hashes are part of the
entries, because snapshots and searches read them there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from heapline.core.entries import LEASED, Entries, Replay, counted
from heapline.core.events import EMPTY, I64
from heapline.core.fairness.keys import NO_KEY
from heapline.core.fairness.turns import FairShare
from heapline.core.heap.run_heap import Rows
from heapline.core.heap.runs import Row, cut, tuples_of
from heapline.core.leases import KEY
from heapline.core.order import TURN_BITS

_LOOK_MAX = 4096
_FEW = 4  # fewer rows are cheaper one by one than as columns


class FairEntries:
    """The turns and limits of one partition's fairness keys."""

    def __init__(self, entries: Entries, share: FairShare) -> None:
        self._entries, self.share = entries, share

    # -- parking ---------------------------------------------------------------------------------------------------

    def unblocked(self, count: int) -> Rows:
        """Return the first `count` messages that are ready and whose keys have slots for them."""
        look = count
        while True:
            rows = self._entries.heap.peek(look)
            if not len(rows.ids):
                return rows
            good = self._entries.good_ready(*rows)
            hashes = self._entries.hashes_of(rows.ids)
            blocked = np.zeros(len(good), dtype=np.bool_)
            blocked[good] = self.share.beyond(hashes[good])
            stays = good & ~blocked
            if stays[:count].all():
                return cut(rows, 0, count)
            end = len(stays) - int(np.argmin(stays[::-1]))  # after the last that does not stay
            self._entries.heap.pop(end)
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
                rows = self._entries.parked.take(key, count)
                taken += rows
                owners += [key] * len(rows)
            if taken:
                uncounted = self._bring_back(taken)
                missing = Counter(owners[i] for i in uncounted if owners[i] in self._entries.parked)
            else:
                missing = {}
            for key in set(owners):
                if key not in self._entries.parked:
                    self.share.note_parked(key, self, False)

    def _bring_back(self, taken: list[Row]) -> list[int]:
        """Push the valid entries; return the indexes of those that are stale or may be in the heap twice."""
        rows = Rows(*np.array(taken, dtype=np.int64).T)
        good = self._entries.good_ready(*rows)
        self._push(_pick(rows, np.flatnonzero(good)))
        bad: list[int] = np.flatnonzero(~good).tolist()
        return bad + [i for i, _, _ in self._entries.touched_among(rows.ids) if good[i]]

    def unpark_all(self) -> None:
        for rows in self.clear_parked():
            self._push(rows)

    def _park(self, rows: Rows, hashes: I64) -> None:
        if len(rows.ids):
            for key in self._entries.parked.park(rows, hashes):
                self.share.note_parked(key, self, True)

    def clear_parked(self) -> list[Rows]:
        """Remove and return the parked entries."""
        left, keys = self._entries.parked.clear()
        for key in keys:
            self.share.note_parked(key, self, False)
        return left

    def refill(self, ids: I64) -> None:
        """Unpark messages to replace these waiting ones, which leave, wherever their key has free slots."""
        if not self._entries.parked.rows:
            return
        keys, counts = np.unique(self._entries.hashes_of(ids), return_counts=True)
        pairs = zip(keys.tolist(), counts.tolist(), strict=True)
        self.unpark((key, min(count, self.share.free(key))) for key, count in pairs if key in self._entries.parked)

    def _push(self, rows: Rows) -> None:
        if len(rows.ids) > _FEW:
            self._entries.heap.push(*rows)
        else:
            for row in tuples_of(rows):
                self._entries.heap.push_one(*row)

    # -- leases ----------------------------------------------------------------------------------------------------

    def take_ready(self, ids: I64, attempts: bytes) -> tuple[list[int], list[int]]:
        """Take exactly these messages off the heap; before them are only stale entries and blocked messages.

        Return their keys, and their positions with these attempts.
        """
        clean = not self._entries.stale
        rows = self._entries.heap.pop(len(ids))
        if not (clean and np.array_equal(rows.ids, ids)):
            rows = self._take_among(rows, ids)
        self.share.advance(rows.keys)
        if self.share.limit:
            self.share.leased(self._entries.hashes_of(ids))
        return rows.keys.tolist(), counted(rows.positions, attempts)

    def _take_among(self, rows: Rows, ids: I64) -> Rows:
        """Take these messages, past those of blocked keys. `rows` were already popped."""
        if self._entries.parked.rows:
            keys, counts = np.unique(self._entries.hashes_of(ids), return_counts=True)
            self.unpark(zip(keys.tolist(), counts.tolist(), strict=True))
        taken: list[Rows] = []
        others: list[Rows] = []
        have, step = 0, len(ids)
        while True:
            good = self._entries.good_ready(*rows)
            mine = good & np.isin(rows.ids, ids)
            taken.append(_pick(rows, np.flatnonzero(mine)))
            others.append(_pick(rows, np.flatnonzero(good & ~mine)))
            # Update immediately: from now on an equal entry after it is stale.
            self._entries.relocate(taken[-1].ids.tolist(), LEASED, taken[-1].positions.tolist())
            have += len(taken[-1].ids)
            if have >= len(ids):
                break
            step = min(2 * step, _LOOK_MAX)
            rows = self._entries.heap.pop(step)
            if not len(rows.ids):
                raise Replay(f"partition {self._entries.number}: the journal leased messages that are not ready")
        found = _in_order(taken)
        if not np.array_equal(found.ids, ids):
            raise Replay(f"partition {self._entries.number}: the journal leased in another order than the queue's")
        self._set_aside(_in_order(others), int(found.keys[-1]), int(found.ids[-1]))
        return found

    def _set_aside(self, rows: Rows, key: int, id: int) -> None:
        """Set aside rows found before the one with this key and id: they were blocked."""
        before = (rows.keys < key) | ((rows.keys == key) & (rows.ids < id))
        self._push(_pick(rows, np.flatnonzero(~before)))
        passed = _pick(rows, np.flatnonzero(before))
        hashes = self._entries.hashes_of(passed.ids)
        if (hashes == NO_KEY).any():
            raise Replay(f"partition {self._entries.number}: the journal leased messages that were not first")
        self._park(passed, hashes)

    def end_leases(self, ids: list[int]) -> None:
        """Count ended leases, and unpark as many messages as slots became free."""
        if self.share.limit:
            self.share.ended(self._entries.hashes_of(np.array(ids, dtype=np.int64)))

    def leased_keys(self) -> I64:
        """Return the hash of the fairness key of each leased message."""
        return self._entries.hashes_of(np.fromiter(self._entries.leases.by_id, np.int64, len(self._entries.leases)))

    # -- turns -----------------------------------------------------------------------------------------------------

    def in_turn(self, ids: I64, keys: I64, which: npt.NDArray[np.bool_]) -> I64:
        """Return the messages' heap keys; those in `which` become ready now and get their turns."""
        keys = keys.copy()
        if which.any():
            priorities = keys[which] >> TURN_BITS
            turns = self.share.take(priorities, self._entries.hashes_of(ids[which]))
            keys[which] = self._entries.ordering.with_turns(priorities, turns)
        return keys

    def observe_turns(self, ids: I64, keys: I64) -> None:
        """Record the turns given by events when they are replayed."""
        if self.share.is_loading and len(ids):
            self.share.observe(keys, self._entries.hashes_of(ids))

    def rescheduled_key(self, id: int, ready_key: int | None, priority_key: int, waits: bool) -> int:
        """Return the heap key of a rescheduled message.

        A message that is ready and stays ready at its priority keeps its turn. Otherwise it comes after the present
        messages of its fairness key, once it is ready.
        """
        key = int(self._entries.ordering.with_turns(priority_key, 0))
        if waits:
            return key
        if ready_key is not None and ready_key >> TURN_BITS == priority_key:
            return ready_key
        return int(self.in_turn(np.array([id]), np.array([key]), np.ones(1, dtype=np.bool_))[0])

    def priorities_in_use(self) -> set[int]:
        """Return the priorities, as upper parts of heap keys, of all live messages, including prepared ones."""
        entries = self._entries
        columns = [run.rest().keys for run in (*entries.heap.runs(), *entries.parked.runs())]
        for wheel in (entries.delays, entries.calendar):
            columns += [chunk.timers().keys for chunk in wheel.chunks()]
        columns.append(np.array([lease[KEY] for lease in entries.leases.by_id.values()], dtype=np.int64))
        columns.append(entries.dead.rows().keys)
        columns += [share.keys for share in entries.prepared.shares()]
        found = [np.unique(column >> TURN_BITS) for column in columns]
        return set(np.concatenate([EMPTY, *found]).tolist())


def _pick(rows: Rows, index: npt.NDArray[np.intp]) -> Rows:
    return Rows(rows.keys[index], rows.ids[index], rows.positions[index])


def _in_order(pieces: list[Rows]) -> Rows:
    keys, ids, positions = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
    return _pick(Rows(keys, ids, positions), np.lexsort((ids, keys)))
