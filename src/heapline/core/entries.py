"""Where the messages of a partition stand: one entry each, and how to tell entries that no longer count.

A waiting message is one entry (key, id, position): in the heap when ready, in a wheel when delayed. A leased one
stands in the lease table, a dead one in `dead`. Nothing else is kept per message, so ten million of them fit in memory.

*Stale entries.* Taking an entry out of the middle of a heap or wheel would be dear, so a message that leaves by
another door (cancelled, expired, rescheduled) leaves its entry behind. An entry is good only if its record is live
(`LiveMap`) and, for a message in `touched`, if it is the current one. `touched` holds every live message whose place
was ever changed by hand; it is forgotten when the message goes.
Two equal entries of one touched message are interchangeable: whichever is met first moves the message on, and the
other no longer matches.

*Times to live* run in wheels of their own. A row there says "look at this message then"; whether it still matters is
decided when it comes up.

*Fairness keys.* On a topic where they take turns, messages of blocked keys are parked beside the heap, and which key a
message has is kept (core/fair_entries.py).

What events do to all this is in core/state.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from heapline.core.events import EMPTY, I64
from heapline.core.fairness import FairShare
from heapline.core.gone import GoneMemory
from heapline.core.heap import RunHeap
from heapline.core.idempotency import KeyWindow
from heapline.core.ids import IdMaker
from heapline.core.key_hashes import KeyHashes
from heapline.core.leases import POSITION, LeaseTable
from heapline.core.live import LiveMap
from heapline.core.order import Ordering
from heapline.core.parking import Parking
from heapline.core.prepared import Prepared
from heapline.core.sequences import SequenceWindow
from heapline.core.wheel import Timers, TimingWheel
from heapline.errors import CorruptionError

READY, DELAYED, LEASED, DEAD = range(4)
FROM_LEASE = 2  # in an event's `delayed` column: it stood neither in heap nor wheel
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Replay(CorruptionError):
    """The journal does not replay: an event does not fit the state before it."""


class Touched:
    """Where a message that was rescheduled or replayed stands now."""

    __slots__ = ("due", "expires", "expires_wall", "key", "place", "position", "priority", "wall")

    def __init__(
        self, place: int, key: int, position: int, due: int, wall: bool, expires: int, expires_wall: bool,
        priority: int | None,
    ) -> None:  # fmt: skip
        self.place, self.key, self.position = place, key, position
        self.due, self.wall = due, wall
        self.expires, self.expires_wall = expires, expires_wall
        self.priority = priority

    def is_ready(self, key: int, position: int) -> bool:
        return self.place == READY and self.key == key and self.position == position

    def is_delayed(self, due: int, wall: bool, key: int, position: int) -> bool:
        return (self.place, self.due, self.wall, self.key, self.position) == (DELAYED, due, wall, key, position)

    def to_state(self) -> tuple[Any, ...]:
        return (
            self.place, self.key, self.position, self.due, self.wall, self.expires, self.expires_wall, self.priority
        )  # fmt: skip


class Dead(NamedTuple):
    position: int
    key: int
    reason: str
    at: int


class Entries:
    def __init__(
        self, number: int, ordering: Ordering, live: LiveMap, now: int, wall: int, tick_ms: int,
        fair: FairShare | None = None,
    ) -> None:  # fmt: skip
        self.number = number
        self.ordering = ordering
        self.live = live
        self.offset = 0  # of the next row
        self.ids = IdMaker(number)
        self.heap = RunHeap()
        self.delays = TimingWheel(now, tick_ms)  # steady time: delays and back-off
        self.calendar = TimingWheel(wall, tick_ms)  # wall time: deliver_at
        self.ttls = TimingWheel(now, tick_ms)  # ends of life in steady time
        self.ttls_wall = TimingWheel(wall, tick_ms)  # and in wall time
        self.leases = LeaseTable()
        self.dead: dict[int, Dead] = {}
        self.touched: dict[int, Touched] = {}
        self.reasons: dict[int, str] = {}  # why a living message last failed, where it was said
        self.limits: dict[int, int] = {}  # max_retries of messages that brought their own
        self.lapsed: set[int] = set()  # leased messages whose time to live has ended
        self.retrying: set[int] = set()  # messages that wait for a retry
        self.shown: set[int] = set()  # messages that wait though they have had their place in the stream
        self.sequences = SequenceWindow()
        self.keys = KeyWindow()
        self.gone = GoneMemory()
        self.prepared = Prepared()
        self.fair = fair  # None: fairness keys take no turns
        self.key_hashes = None if fair is None else KeyHashes()
        self.parked = Parking()
        self.ready = 0
        self.delayed = 0
        self.throttled: str | None = None  # why it is left out of pops; None = it is not

    # -- entries ---------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> int:
        """How many entries in heap and wheels are left over."""
        entries = len(self.heap) + self.parked.rows + len(self.delays) + len(self.calendar)
        return entries - self.ready - self.delayed

    def hashes_of(self, ids: I64) -> I64:
        """The hashes of these messages' fairness keys."""
        return np.zeros(len(ids), dtype=np.int64) if self.key_hashes is None else self.key_hashes.of(ids)

    def good_ready(self, keys: I64, ids: I64, positions: I64, seen: set[int] | None = None) -> Mask:
        """Which of these heap entries, taken in this order, are messages that are ready.

        `seen` gathers the touched messages that were met, for those who ask piece by piece: each is good but once.
        """
        good = self.live.alive(positions)
        seen = set() if seen is None else seen
        for i, id, touched in self._touched_among(ids):
            good[i] &= id not in seen and touched.is_ready(keys.item(i), positions.item(i))
            if good[i]:
                seen.add(id)
        return good

    def good_delayed(self, rows: Timers, wall: bool, seen: set[int] | None = None) -> Mask:
        """The same for entries of a wheel."""
        good = self.live.alive(rows.positions)
        seen = set() if seen is None else seen
        for i, id, touched in self._touched_among(rows.ids):
            due, key, position = rows.dues.item(i), rows.keys.item(i), rows.positions.item(i)
            good[i] &= id not in seen and touched.is_delayed(due, wall, key, position)
            if good[i]:
                seen.add(id)
        return good

    def _touched_among(self, ids: I64) -> Iterator[tuple[int, int, Touched]]:
        """(row, id, where it stands) of the touched ones among these."""
        table = self.touched
        if not table:
            return
        rows: Iterable[int] = range(len(ids))
        if len(ids) > 64 + 4 * len(table):  # a whole heap against few: do not walk it in Python
            found = np.flatnonzero(np.isin(ids, np.fromiter(table, np.int64, len(table))))
            rows, ids = found.tolist(), ids[found]
        for i, id in zip(rows, ids.tolist(), strict=True):
            touched = table.get(id)
            if touched is not None:
                yield i, id, touched

    def _place(
        self, ids: Sequence[int], place: int, positions: Sequence[int], dues: Sequence[int] | None = None
    ) -> None:
        """Keep `touched` true of messages that move; due times given here are steady."""
        for i, id in enumerate(ids):
            touched = self.touched.get(id)
            if touched is not None:
                touched.place, touched.position = place, positions[i]
                if dues is not None:
                    touched.due, touched.wall = dues[i], False
                    touched.place = DELAYED if dues[i] else READY

    def _take_ready(self, ids: I64) -> tuple[I64, I64]:
        """Take exactly these messages off the heap's front; only stale entries may lie between them."""
        clean = not self.stale
        rows = self.heap.pop(len(ids))
        if clean and np.array_equal(rows.ids, ids):
            return rows.keys, rows.positions
        parts: list[tuple[I64, I64]] = []
        have = 0
        while True:
            if not len(rows.ids):
                raise Replay(f"partition {self.number}: the journal leased messages that are not ready")
            good = self.good_ready(rows.keys, rows.ids, rows.positions)
            found = rows.ids[good]
            if not np.array_equal(found, ids[have : have + len(found)]):
                raise Replay(f"partition {self.number}: the journal leased others than those that were first")
            # At once: an equal entry behind it is stale from here.
            self._place(found.tolist(), LEASED, rows.positions[good].tolist())
            parts.append((rows.keys[good], rows.positions[good]))
            have += len(found)
            if have == len(ids):
                return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
            rows = self.heap.pop(len(ids) - have)

    def _take_delayed(self, wheel: TimingWheel, wall: bool, count: int) -> Timers:
        """Take the first `count` good rows off a wheel."""
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
                self._place(rows.ids.tolist(), READY, rows.positions.tolist())
            parts.append(rows)
            have += len(rows.ids)
        return parts[0] if len(parts) == 1 else Timers(*(np.concatenate(c) for c in zip(*parts, strict=True)))

    def waiting(self) -> tuple[I64, I64]:
        """Ids and positions of everything ready and delayed."""
        parts: list[tuple[I64, I64]] = [(EMPTY, EMPTY)]
        seen: set[int] = set()
        for run in (*self.heap.runs(), *self.parked.runs()):
            keys, ids, positions = run.rest()
            good = self.good_ready(keys, ids, positions, seen)
            parts.append((ids[good], positions[good]))
        for wheel, wall in ((self.delays, False), (self.calendar, True)):
            for chunk in wheel.chunks():
                rows = Timers(*(column[chunk.start :] for column in chunk.columns()))
                good = self.good_delayed(rows, wall, seen)
                parts.append((rows.ids[good], rows.positions[good]))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def positions_of(self, ids: I64) -> I64:
        """Current positions (with attempts) of living messages; -1 for those that are gone. Ids are sorted."""
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
                look(chunk.ids[chunk.start :], chunk.positions[chunk.start :])
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
