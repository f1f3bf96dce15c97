"""The entries of a partition's messages, one per message, and how to detect stale ones.

A waiting message is one entry (key, id, position): in the heap when ready, in a wheel when delayed. A leased message is
in the lease table, a dead one in `dead` (core/dead_letters.py). Nothing else is kept per message, so ten million
messages fit in memory.

*Stale entries.* Removing an entry from the middle of a heap or wheel would be expensive, so a message that is
cancelled, expired or rescheduled leaves its entry behind. An entry is valid only if its record is live (`LiveMap`) and,
for a message in `touched`, if it is the current entry. `touched` holds every live message that was ever explicitly
moved; it is dropped when the message is removed. Two equal entries of one touched message are interchangeable: the
first one found moves the message on, and the other no longer matches.

*TTLs* run in their own wheels. A row there means "check this message then"; whether it still matters is decided at that
time.

*Fairness keys.* On a topic where they take turns, messages of blocked keys are parked beside the heap, and each
message's key is kept (core/fairness/fair_entries.py).

The effects of events on the entries are in core/state.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from heapline.contract.errors import CorruptionError
from heapline.core.dead_letters import DeadLetters
from heapline.core.events import EMPTY, I64
from heapline.core.fairness.keys import KeyHashes, Parking
from heapline.core.heap.run_heap import Rows, RunHeap
from heapline.core.leases import POSITION, LeaseTable
from heapline.core.live_map import LiveMap
from heapline.core.now import Now
from heapline.core.order import Ordering
from heapline.core.prepared import Prepared
from heapline.core.record import with_attempts
from heapline.core.wheel.timing_wheel import Timers, TimingWheel

READY, DELAYED, LEASED, DEAD = range(4)
FROM_LEASE = 2  # in an event's `delayed` column: it was in neither heap nor wheel
FEW_ROWS = 8  # up to this many rows, plain integers cost less than the fixed cost of the numpy calls
GARBAGE_ROWS_MIN = 4096
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Replay(CorruptionError):
    """The journal cannot be replayed: an event contradicts the state before it."""


class Touched(msgspec.Struct):
    """Current location of a message that was rescheduled or replayed."""

    place: int
    key: int
    position: int
    due: int
    wall: bool  # due is wall time
    expires: int
    expires_wall: bool
    priority: int | None

    def is_ready(self, key: int, position: int) -> bool:
        return self.place == READY and self.key == key and self.position == position

    def is_delayed(self, due: int, wall: bool, key: int, position: int) -> bool:
        return (self.place, self.due, self.wall, self.key, self.position) == (DELAYED, due, wall, key, position)

    def to_state(self) -> tuple[Any, ...]:
        return msgspec.structs.astuple(self)


class Found(NamedTuple):
    """Current state and location of a live message."""

    place: int
    position: int
    key: int
    due: int  # 0 when ready
    wall: bool


class Entries:
    def __init__(self, number: int, ordering: Ordering, live: LiveMap, now: Now, tick_ms: int, *, keyed: bool) -> None:
        self.number = number
        self.ordering = ordering
        self.live = live
        self.heap = RunHeap()
        self.delays = TimingWheel(now.steady, tick_ms)  # steady time: delays and backoff
        self.calendar = TimingWheel(now.wall, tick_ms)  # wall time: deliver_at
        self.ttls = TimingWheel(now.steady, tick_ms)  # TTL expiry in steady time
        self.ttls_wall = TimingWheel(now.wall, tick_ms)  # TTL expiry in wall time
        self.leases = LeaseTable()
        self.dead = DeadLetters()
        self.touched: dict[int, Touched] = {}
        self.reasons: dict[int, str] = {}  # why a live message last failed, if a reason was given
        self.limits: dict[int, int] = {}  # max_retries of messages that set their own
        self.lapsed: set[int] = set()  # leased messages whose TTL has ended
        self.retrying: set[int] = set()  # messages that wait for a retry
        self.shown: set[int] = set()  # waiting messages that already have their offset in the stream
        self.prepared = Prepared()
        self.key_hashes = KeyHashes() if keyed else None  # only where fairness keys take turns
        self.parked = Parking()
        self.ready = 0
        self.delayed = 0
        self.left_behind = 0  # upper bound of `stale`, which is expensive to compute; nearly always 0

    # -- entries ---------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> int:
        """The number of stale entries in heap and wheels."""
        if not self.left_behind:
            return 0
        entries = len(self.heap) + self.parked.rows + len(self.delays) + len(self.calendar)
        return entries - self.ready - self.delayed

    @property
    def has_timers(self) -> bool:
        return bool(self.delays.count or self.ttls.count or self.calendar.count or self.ttls_wall.count)

    def loaded(self) -> None:
        """Count the stale entries, after heap and wheels were loaded from a snapshot."""
        self.left_behind = 1  # so that they are counted
        self.left_behind = self.stale

    @property
    def blocked(self) -> int:
        """The number of ready messages that are parked because their fairness key is blocked."""
        seen: set[int] = set()
        return sum(int(self.good_ready(*run.rest(), seen).sum()) for run in self.parked.runs())

    def hashes_of(self, ids: I64) -> I64:
        """Return the fairness-key hashes of these messages."""
        return np.zeros(len(ids), dtype=np.int64) if self.key_hashes is None else self.key_hashes.of(ids)

    def first_ready(self, count: int) -> Rows:
        """Return the first `count` ready messages, in order. Drop the stale entries before them."""
        look = count
        while True:
            rows = self.heap.peek(look)
            good = self.good_ready(*rows)
            stale_run = len(good) if not good.any() else int(np.argmax(good))
            if stale_run:
                self.heap.pop(stale_run)  # stale: these messages were cancelled, expired or rescheduled
            elif int(good.sum()) >= count or len(rows.ids) < look:
                return Rows(rows.keys[good][:count], rows.ids[good][:count], rows.positions[good][:count])
            else:
                look *= 2
            if not len(self.heap):
                return self.heap.peek(0)

    def good_ready(self, keys: I64, ids: I64, positions: I64, seen: set[int] | None = None) -> Mask:
        """Return which of these heap entries, in this order, are ready messages.

        `seen` collects the touched messages found so far, for callers that check in pieces: each is valid only once.
        """
        good = self.live.alive(positions)
        seen = set() if seen is None else seen
        for i, id, touched in self.touched_among(ids):
            good[i] &= id not in seen and touched.is_ready(keys.item(i), positions.item(i))
            if good[i]:
                seen.add(id)
        return good

    def good_delayed(self, rows: Timers, wall: bool, seen: set[int] | None = None) -> Mask:
        """Return which of these wheel entries, in this order, are delayed messages. `seen` works as in `good_ready`."""
        good = self.live.alive(rows.positions)
        seen = set() if seen is None else seen
        for i, id, touched in self.touched_among(rows.ids):
            due, key, position = rows.dues.item(i), rows.keys.item(i), rows.positions.item(i)
            good[i] &= id not in seen and touched.is_delayed(due, wall, key, position)
            if good[i]:
                seen.add(id)
        return good

    def touched_among(self, ids: I64) -> Iterator[tuple[int, int, Touched]]:
        """Yield (row, id, location) of the touched messages among these."""
        table = self.touched
        if not table:
            return
        rows: Iterable[int] = range(len(ids))
        if len(ids) > 64 + 4 * len(table):  # few touched messages: avoid a Python loop over a large heap
            found = np.flatnonzero(np.isin(ids, np.fromiter(table, np.int64, len(table))))
            rows, ids = found.tolist(), ids[found]
        for i, id in zip(rows, ids.tolist(), strict=True):
            touched = table.get(id)
            if touched is not None:
                yield i, id, touched

    def relocate(
        self, ids: Sequence[int], place: int, positions: Sequence[int], dues: Sequence[int] | None = None
    ) -> None:
        """Update `touched` for messages that move. Due times passed here are steady."""
        for i, id in enumerate(ids):
            touched = self.touched.get(id)
            if touched is not None:
                touched.place, touched.position = place, positions[i]
                if dues is not None:
                    touched.due, touched.wall = dues[i], False
                    touched.place = DELAYED if dues[i] else READY

    def take_ready(self, ids: I64, attempts: bytes) -> tuple[list[int], list[int]]:
        """Take exactly these messages off the heap's front; only stale entries may be between them.

        Return their keys, and their positions with these attempts.
        """
        clean = not self.stale
        rows = self.heap.pop(len(ids))
        if clean and np.array_equal(rows.ids, ids):
            return rows.keys.tolist(), counted(rows.positions, attempts)
        parts: list[tuple[I64, I64]] = []
        have = 0
        while True:
            if not len(rows.ids):
                raise Replay(f"partition {self.number}: the journal leased messages that are not ready")
            good = self.good_ready(rows.keys, rows.ids, rows.positions)
            found = rows.ids[good]
            if not np.array_equal(found, ids[have : have + len(found)]):
                raise Replay(f"partition {self.number}: the journal leased messages that were not first")
            # Update immediately: from now on an equal entry after it is stale.
            self.relocate(found.tolist(), LEASED, rows.positions[good].tolist())
            parts.append((rows.keys[good], rows.positions[good]))
            have += len(found)
            if have == len(ids):
                keys, found_positions = (np.concatenate(columns) for columns in zip(*parts, strict=True))
                return keys.tolist(), counted(found_positions, attempts)
            rows = self.heap.pop(len(ids) - have)

    def take_delayed(self, wheel: TimingWheel, wall: bool, count: int) -> Timers:
        """Take the first `count` valid rows off a wheel."""
        clean = not self.stale
        parts: list[Timers] = []
        have = 0
        while have < count:
            rows = wheel.take(count - have)
            if not len(rows.ids):
                raise Replay(f"partition {self.number}: the journal fired timers that are not there")
            if not clean:
                good = self.good_delayed(rows, wall)
                rows = Timers(*(column[good] for column in rows))
                self.relocate(rows.ids.tolist(), READY, rows.positions.tolist())
            parts.append(rows)
            have += len(rows.ids)
        return parts[0] if len(parts) == 1 else Timers(*(np.concatenate(c) for c in zip(*parts, strict=True)))

    def waiting(self) -> tuple[I64, I64, int]:
        """Return ids and positions of all ready and then of all delayed messages, and how many are ready."""
        parts: list[tuple[I64, I64]] = [(EMPTY, EMPTY)]
        seen: set[int] = set()
        for run in (*self.heap.runs(), *self.parked.runs()):
            keys, ids, positions = run.rest()
            good = self.good_ready(keys, ids, positions, seen)
            parts.append((ids[good], positions[good]))
        ready = sum(len(part[0]) for part in parts)
        for wheel, wall in ((self.delays, False), (self.calendar, True)):
            for chunk in wheel.chunks():
                rows = chunk.timers()
                good = self.good_delayed(rows, wall, seen)
                parts.append((rows.ids[good], rows.positions[good]))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), ready

    def find(self, id: int) -> Found | None:
        """Return the state and location of a live message. Searches heap and wheels, so call it rarely."""
        lease = self.leases.by_id.get(id)
        if lease is not None:
            return Found(LEASED, lease[POSITION], lease[2], 0, False)
        dead = self.dead.get(id)
        if dead is not None:
            return Found(DEAD, dead.position, dead.key, 0, False)
        touched = self.touched.get(id)
        if touched is not None:
            due = touched.due if touched.place == DELAYED else 0
            return Found(touched.place, touched.position, touched.key, due, touched.wall)
        entry = self.heap.find(id)
        if entry is None and self.key_hashes is not None:
            entry = self.parked.find(self.key_hashes.of_one(id), id)
        if entry is not None and self.live.is_alive(entry[2]):
            return Found(READY, entry[2], entry[0], 0, False)
        for wheel, wall in ((self.delays, False), (self.calendar, True)):
            timer = wheel.find(id) if len(wheel) else None
            if timer is not None and self.live.is_alive(timer[3]):
                return Found(DELAYED, timer[3], timer[1], timer[0], wall)
        return None

    def positions_of(self, ids: I64) -> I64:
        """Return current positions (with attempts) of live messages; -1 for removed ones. Ids are sorted."""
        found = np.full(len(ids), -1, dtype=np.int64)

        def look(entry_ids: I64, entry_positions: I64) -> None:
            at = np.searchsorted(ids, entry_ids)
            at[at == len(ids)] = 0
            hit = (ids[at] == entry_ids) & self.live.alive(entry_positions)
            found[at[hit]] = entry_positions[hit]

        if not len(ids):
            return found
        parked = self.parked.runs(np.unique(self.hashes_of(ids)).tolist()) if self.parked.rows else ()
        for run in (*self.heap.runs(), *parked):
            look(run.ids[run.start :], run.positions[run.start :])
        for wheel in (self.delays, self.calendar):
            for chunk in wheel.chunks():
                rows = chunk.timers()
                look(rows.ids, rows.positions)
        for share in self.prepared.shares():
            look(share.ids, share.positions)
        for i, id in enumerate(ids.tolist()):
            lease = self.leases.by_id.get(id)
            dead = self.dead.get(id)
            if lease is not None:
                found[i] = lease[POSITION]
            elif dead is not None:
                found[i] = dead.position
        return found

    def ends(self, id: int, due: int, wall: bool) -> bool:
        """Whether an existing message's TTL ends at this time. Its TTL may have been changed."""
        touched = self.touched.get(id)
        if touched is not None and (touched.expires, touched.expires_wall) != (due, wall):
            return False
        return id not in self.dead

    def waits(self, id: int) -> bool:
        """Whether a message whose first due time has passed is in a wheel rather than in the heap."""
        touched = self.touched.get(id)
        return id in self.retrying if touched is None else touched.place == DELAYED

    def maintain_timers(self, budget: int) -> bool:
        """Do a bounded amount of work on the wheels, and drop outdated TTL expiries; return True if more is left."""
        more = False
        for wheel in (self.delays, self.calendar, self.ttls, self.ttls_wall):
            if wheel.count:
                more = wheel.maintain(budget) or more
        ttls_max = 2 * (self.ready + self.delayed + len(self.leases.by_id)) + GARBAGE_ROWS_MIN
        for wheel, wall in ((self.ttls, False), (self.ttls_wall, True)):
            if wheel.count > ttls_max:
                wheel.keep(partial(self._good_ends, wall=wall, seen=set()))
        return more

    def wants_sweep(self) -> bool:
        """Whether more than half of all entries are stale."""
        bound = self.ready + self.delayed + GARBAGE_ROWS_MIN
        if self.left_behind > bound:
            self.left_behind = self.stale  # many may have been skipped meanwhile
        return self.left_behind > bound

    def sweep(self) -> None:
        """Drop the stale entries. None may be parked."""
        seen: set[int] = set()
        for wheel, wall in ((self.delays, False), (self.calendar, True)):
            wheel.keep(partial(self.good_delayed, wall=wall, seen=seen))
        rests = [run.rest() for run in self.heap.runs()]
        left_over = np.unique(np.concatenate([EMPTY, *(r.ids[~self.good_ready(*r, seen)] for r in rests)]))
        self.heap.discard(left_over)
        for _, id, touched in self.touched_among(left_over):
            if touched.place == READY:  # the current entry was dropped with the stale ones
                self.heap.push_one(touched.key, id, touched.position)
        self.left_behind = self.stale

    def _good_ends(self, rows: Timers, wall: bool, seen: set[int]) -> Mask:
        """Return which of these TTL expiries are still current, each once."""
        good = self.live.alive(rows.positions)
        for i, id, _ in self.touched_among(rows.ids):
            good[i] &= id not in seen and self.ends(id, rows.dues.item(i), wall)
            if good[i]:
                seen.add(id)
        return good

    @property
    def nbytes(self) -> int:
        wheels = (self.delays, self.calendar, self.ttls, self.ttls_wall)
        kept = self.prepared.nbytes
        if self.key_hashes is not None:
            kept += self.key_hashes.nbytes + self.parked.nbytes
        return self.heap.nbytes + sum(w.nbytes for w in wheels) + kept


def counted(positions: I64, attempts: bytes) -> list[int]:
    """Return the positions with these attempts, a byte per row."""
    found: list[int] = with_attempts(positions, np.frombuffer(attempts, dtype=np.uint8)).tolist()
    return found
