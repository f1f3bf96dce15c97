"""One partition: decides what happens. `decide_*(…, now)` looks at the state and returns events; it changes nothing
that an event does not also change (it may only drop entries that are stale). `apply` (core/state.py) carries them out.

The caller applies the events of a decision at once, before it asks for the next decision, and makes them durable
before it answers anybody. Randomness (jitter) and time are passed in; the partition knows no clock, disk or socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.config import TopicConfig
from heapline.core.census import Census
from heapline.core.entries import DEAD, DELAYED, FROM_LEASE, LEASED, READY, Mask
from heapline.core.events import (
    EMPTY,
    I64,
    Acked,
    AnyEvent,
    BatchCommitted,
    BatchPlaced,
    Cancelled,
    DeadDeleted,
    DeadLettered,
    Expired,
    Extended,
    Fired,
    FiredAgain,
    FiredCount,
    FiredInTurn,
    FiredInTurnAgain,
    Grant,
    Leased,
    LeaseExpired,
    Nacked,
    Purged,
    Released,
    Replayed,
    ReplayedInTurn,
    Rescheduled,
    RescheduledAgain,
)  # fmt: skip
from heapline.core.fairness import FairShare
from heapline.core.heap import Rows
from heapline.core.leases import DEADLINE, POSITION, STARTED
from heapline.core.live import LiveMap
from heapline.core.order import Ordering
from heapline.core.position import attempts_of
from heapline.core.retry import backoffs_ms
from heapline.core.state import PartitionState
from heapline.core.wheel import Timers, TimingWheel
from heapline.model import Now

Draw = Callable[[int], npt.NDArray[np.float64]]
LEASE_EXPIRED = "lease expired"
GARBAGE_ROWS_MIN = 4096
#: Leases and lives that end are gone through one by one, which costs so many times as much as firing a timer.
ROW_BY_ROW = 8
#: Left-over entries that a tick passes over, in times the rows that it may bring about.
PASS_OVER = 4


class Decision(NamedTuple):
    events: list[AnyEvent]
    lost: Sequence[int] = ()  # ids of leases that were not held


class Found(NamedTuple):
    """Where a living message stands."""

    place: int
    position: int
    key: int
    due: int  # 0 when ready
    wall: bool


class Partition(PartitionState):
    def __init__(
        self, number: int, config: TopicConfig, live: LiveMap, now: Now, draw: Draw, fair: FairShare | None = None
    ) -> None:
        super().__init__(number, ordering_of(config), live, now.steady, now.wall, round(config.tick * 1000), fair)
        self.config = config
        self._draw = draw
        self.fired_dues: I64 = EMPTY  # of those that fired last, for whoever measures how late that was
        self.census = Census(self)

    # -- delivery --------------------------------------------------------------------------------------------------

    def eligible(self, count: int) -> Rows:
        """The first `count` messages that are ready, and not blocked by the limit of their fairness key, in order."""
        if self.fair is not None and self.fair.limit:
            return self.unblocked(count)
        if not self.stale:
            return self.heap.peek(count)
        look = count
        while True:
            rows = self.heap.peek(look)
            good = self.good_ready(*rows)
            stale_run = len(good) if not good.any() else int(np.argmax(good))
            if stale_run:
                self.heap.pop(stale_run)  # entries of messages that left by another door
            elif int(good.sum()) >= count or len(rows.ids) < look:
                return Rows(rows.keys[good][:count], rows.ids[good][:count], rows.positions[good][:count])
            else:
                look *= 2
            if not len(self.heap):
                return self.heap.peek(0)

    def head(self) -> tuple[int, int] | None:
        """(key, id) of the best ready message that is not blocked."""
        if not self.stale and (self.fair is None or not self.fair.limit):
            return self.heap.head()
        rows = self.eligible(1)
        return (int(rows.keys[0]), int(rows.ids[0])) if len(rows.ids) else None

    def decide_lease(self, rows: Rows, grants: list[Grant], now: Now, seq: int, limit: int | None = None) -> Leased:
        """Lease the given rows, which `eligible` has just returned."""
        attempts = np.minimum(attempts_of(rows.positions) + 1, 255).astype(np.uint8).tobytes()
        return Leased(rows.ids, attempts, grants, now.steady, seq, limit)

    def _held(self, ids: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """(held ids, their tokens, ids that are not held). An id given twice counts once."""
        by_id = self.leases.by_id
        good: dict[int, int] = {}
        lost: list[int] = []
        for id, token in zip(ids, tokens, strict=True):
            lease = by_id.get(id)
            if lease is not None and lease[0] == token:
                good[id] = token
            else:
                lost.append(id)
        return list(good), list(good.values()), lost

    def decide_ack(self, ids: Sequence[int], tokens: Sequence[int]) -> Decision:
        held, held_tokens, lost = self._held(ids, tokens)
        if lost:  # an ack that is repeated because its answer was lost is good
            lost = [
                id for id, token in zip(ids, tokens, strict=True)
                if not self.leases.holds(id, token) and not self.gone.was_acked(id, token)
            ]  # fmt: skip
        if not held:
            return Decision([], lost)
        return Decision([Acked(_i64(held), _i64(held_tokens))], lost)

    def decide_nack(
        self, ids: Sequence[int], tokens: Sequence[int], now: Now, backoff_ms: int | None, reason: str | None
    ) -> Decision:
        held, held_tokens, lost = self._held(ids, tokens)

        def failed(ids: I64, tokens: I64, dues: I64) -> AnyEvent:
            return Nacked(ids, tokens, dues, reason)

        return Decision(self._return(held, held_tokens, now, backoff_ms, reason or "nacked", failed), lost)

    def decide_bury(
        self, ids: Sequence[int], tokens: Sequence[int], now: Now, reason: str | None, keep: bool = False
    ) -> Decision:
        """`keep`: into the dead-letter queue even on a topic that has none."""
        held, _, lost = self._held(ids, tokens)
        if not held:
            return Decision([], lost)
        return Decision([DeadLettered(_i64(held), reason or "buried", now.steady, keep or self.config.dlq)], lost)

    def decide_release(self, ids: Sequence[int], tokens: Sequence[int], now: Now, seq: int) -> Decision:
        held, held_tokens, lost = self._held(ids, tokens)
        events: list[AnyEvent] = []
        lapsed = [id for id in held if id in self.lapsed] if self.lapsed else []
        if lapsed:
            events.append(self._lapse(lapsed, now))
            held, held_tokens = _without(held, held_tokens, set(lapsed))
        if held:
            events.append(Released(_i64(held), _i64(held_tokens), seq))
        return Decision(events, lost)

    def decide_extend(self, ids: Sequence[int], tokens: Sequence[int], now: Now, extend_ms: int) -> Decision:
        """Deadlines become now + extend_ms: never earlier than they were, never past lease_max from the pop."""
        held, held_tokens, lost = self._held(ids, tokens)
        if not held:
            return Decision([], lost)
        leases = [self.leases.by_id[id] for id in held]
        cap = round(self.config.lease_max * 1000)
        deadlines = [max(x[DEADLINE], min(now.steady + extend_ms, x[STARTED] + cap)) for x in leases]
        return Decision([Extended(_i64(held), _i64(held_tokens), _i64(deadlines))], lost)

    def _return(
        self, ids: list[int], tokens: list[int], now: Now, backoff_ms: int | None, reason: str,
        failed: Callable[[I64, I64, I64], AnyEvent],
    ) -> list[AnyEvent]:  # fmt: skip
        """Leased messages come back unprocessed: they expire, die, or wait for another try."""
        if not ids:
            return []
        events: list[AnyEvent] = []
        if self.lapsed:
            lapsed = [id for id in ids if id in self.lapsed]
            if lapsed:
                events.append(self._lapse(lapsed, now))
                ids, tokens = _without(ids, tokens, set(lapsed))
        leases = [self.leases.by_id[id] for id in ids]
        attempts = [attempts_of(lease[POSITION]) for lease in leases]
        default = self.config.max_retries_default
        worn = {id for id, tried in zip(ids, attempts, strict=True) if tried > self.limits.get(id, default)}
        if worn:
            events.append(DeadLettered(_i64([id for id in ids if id in worn]), reason, now.steady, self.config.dlq))
            attempts = [a for id, a in zip(ids, attempts, strict=True) if id not in worn]
            ids, tokens = _without(ids, tokens, worn)
        if ids:
            if backoff_ms is None:
                waits = backoffs_ms(self.config.backoff, _i64(attempts), self._draw(len(ids)))
            else:
                waits = np.full(len(ids), backoff_ms, dtype=np.int64)
            dues = np.where(waits > 0, now.steady + waits, 0)
            events.append(failed(_i64(ids), _i64(tokens), dues))
        return events

    def _lapse(self, ids: list[int], now: Now) -> Expired:
        positions = [self.leases.by_id[id][POSITION] for id in ids]
        return Expired(_i64(ids), _i64(positions), bytes([FROM_LEASE]) * len(ids), EMPTY, now.steady)

    # -- time ------------------------------------------------------------------------------------------------------

    def decide_tick(self, now: Now, limit: int, seq: Callable[[int], int]) -> list[AnyEvent]:
        """What time alone brings about, at most about `limit` rows, and fewer of what is dear.

        Nothing may come of it although more is due, if all that was looked at was left over: see `next_wake_in`.
        """
        dear = max(1, limit // ROW_BY_ROW)
        overdue = self.leases.overdue(now.steady, dear)
        if overdue:
            tokens = [self.leases.by_id[id][0] for id in overdue]
            return self._return(overdue, tokens, now, None, LEASE_EXPIRED, lambda i, t, d: LeaseExpired(i, d))
        # Lives end after all that is due has fired: where a message stands is told from that.
        for wheel, wall, time in ((self.delays, False, now.steady), (self.calendar, True, now.wall)):
            fired = self._fire(wheel, wall, time, limit, seq)
            if fired is not None:
                return fired
        for wheel, wall, time in ((self.ttls, False, now.steady), (self.ttls_wall, True, now.wall)):
            ended = self._end_of_life(wheel, wall, time, dear, now)
            if ended is not None:
                return ended
        return []

    def _fire(
        self, wheel: TimingWheel, wall: bool, time: int, limit: int, seq: Callable[[int], int]
    ) -> list[AnyEvent] | None:
        """None if nothing is due."""
        for _ in range(PASS_OVER if len(wheel) else 0):
            rows = wheel.due(time, limit)
            if not len(rows.ids):
                return None
            if self.stale:
                good = self.good_delayed(rows, wall)
                if not good.any():
                    wheel.take(len(rows.ids))
                    continue
                rows = Timers(*(column[good] for column in rows))
            count = len(rows.ids)
            self.fired_dues = rows.dues
            if self.fair is not None:
                first = ~np.isin(rows.ids, np.fromiter(self.retrying, np.int64, len(self.retrying)))
                keys = self.in_turn(rows.ids, rows.keys, first)  # a retry keeps the turn that it had
                if self.config.streams and (again := self._again(rows.ids)):
                    return [FiredInTurnAgain(rows.ids, rows.positions, wall, seq(count), keys, again)]
                return [FiredInTurn(rows.ids, rows.positions, wall, seq(count), keys)]
            if self.config.streams:
                if again := self._again(rows.ids):
                    return [FiredAgain(rows.ids, rows.positions, wall, seq(count), again)]
                return [Fired(rows.ids, rows.positions, wall, seq(count))]
            return [FiredCount(count, wall, seq(count))]
        return [] if len(wheel) else None

    def _again(self, ids: I64) -> bytes:
        """A byte for each: 1 = it has had its place in the stream. Empty if none has, which is usual."""
        if not self.shown:
            return b""
        again = np.isin(ids, np.fromiter(self.shown, np.int64, len(self.shown)))
        return again.astype(np.uint8).tobytes() if again.any() else b""

    def _end_of_life(self, wheel: TimingWheel, wall: bool, time: int, limit: int, now: Now) -> list[AnyEvent] | None:
        """None if none is due."""
        for _ in range(PASS_OVER * ROW_BY_ROW if len(wheel) else 0):
            rows = wheel.due(time, limit)
            if not len(rows.ids):
                return None
            wheel.take(len(rows.ids))
            current = self.live.alive(rows.positions)
            columns = (rows.ids, rows.dues, rows.positions)
            ended: dict[int, int] = {}  # id -> position; the same end may stand in the wheel twice
            for id, due, position in zip(*(column[current].tolist() for column in columns), strict=True):
                if self._ends(id, due, wall):
                    ended[id] = position
            if ended:
                leased = [id for id in ended if id in self.leases.by_id]
                ids = [id for id in ended if id not in self.leases.by_id]
                flags = bytes(self._waits(id) for id in ids)
                return [Expired(_i64(ids), _i64([ended[id] for id in ids]), flags, _i64(leased), now.steady)]
        return [] if len(wheel) else None

    def _ends(self, id: int, due: int, wall: bool) -> bool:
        """Whether this is when the life of a message ends that is still there: it may have been given another."""
        touched = self.touched.get(id)
        if touched is not None and (touched.expires, touched.expires_wall) != (due, wall):
            return False
        return id not in self.dead

    def _waits(self, id: int) -> bool:
        """Whether a message whose first due time has passed stands in a wheel, rather than in the heap."""
        touched = self.touched.get(id)
        return id in self.retrying if touched is None else touched.place == DELAYED

    def next_wake_in(self, now: Now) -> int | None:
        """Milliseconds until time alone may change something; 0 = already; None = never."""
        waits = []
        deadline = self.leases.next_deadline()
        if deadline is not None:
            waits.append(deadline - now.steady)
        for wheel, time in (
            (self.delays, now.steady), (self.calendar, now.wall), (self.ttls, now.steady), (self.ttls_wall, now.wall),
        ):  # fmt: skip
            if len(wheel):
                wake = wheel.next_wake()
                if wake is not None:
                    waits.append(wake - time)
        return max(0, min(waits)) if waits else None

    # -- by hand ---------------------------------------------------------------------------------------------------

    def find(self, id: int) -> Found | None:
        """Where a living message stands. Looks through heap and wheels: for rare calls."""
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

    def decide_cancel(self, id: int, found: Found) -> Cancelled:
        return Cancelled(_i64([id]), _i64([found.position]), bytes([found.place == DELAYED]))

    def decide_reschedule(
        self, id: int, found: Found, now: Now, seq: int, *, priority: int, enqueued_at: int,
        due: int | None, wall: bool, expires: int, expires_wall: bool | None = None,
    ) -> Rescheduled:  # fmt: skip
        """`due` None keeps the due time. `expires` is 0 or an instant, on the due time's clock if that is not said."""
        if expires_wall is None:
            expires_wall = wall if due is not None else found.wall
        if due is None:
            due, wall = found.due, found.wall
        elif due <= (time := now.wall if wall else now.steady):
            # A moment that has passed means now, and the time to live counts from there.
            due, expires = 0, expires and expires + time - due
        key = self.ordering.key(priority, enqueued_at)
        if self.fair is not None:
            key = self._rescheduled_key(id, found.key if found.place == READY else None, key, due != 0)
        kind = RescheduledAgain if id in self.shown else Rescheduled
        return kind(
            _i64([id]), _i64([found.position]), bytes([found.place == DELAYED]), _i64([priority]), _i64([key]),
            _i64([due]), _i64([expires]), wall, seq, expires_wall,
        )  # fmt: skip

    def decide_purge(self, now: Now) -> Purged | None:
        count = self.ready + self.delayed
        return Purged(count, now.steady) if count else None

    def decide_replay(
        self, ids: list[int], dues: list[int], expires: list[int], seq: int
    ) -> Replayed | ReplayedInTurn:  # fmt: skip
        if self.fair is None:
            return Replayed(_i64(ids), _i64(dues), _i64(expires), seq)
        keys = self.in_turn(_i64(ids), _i64([self.dead[id].key for id in ids]), _i64(dues) == 0)
        return ReplayedInTurn(_i64(ids), _i64(dues), _i64(expires), seq, keys)

    def decide_turns(self, event: BatchCommitted) -> I64:
        """The heap keys of what a commit attaches: what is ready gets its turns now, not when it was prepared."""
        held = self.prepared.batches[event.batch_id]
        shares = [held[part] for part in event.parts]
        ids = np.concatenate([share.ids for share in shares])
        keys = np.concatenate([share.keys for share in shares])
        ready = np.concatenate([share.rows["due"] for share in shares]) == 0
        kept = np.isin(ids, event.ids)
        return self.in_turn(ids[kept], keys[kept], ready[kept])

    def decide_places(self, event: BatchCommitted) -> BatchPlaced:
        """The commit of a topic with streams."""
        held = self.prepared.batches[event.batch_id]
        shares = [held[part] for part in event.parts]
        ids = np.concatenate([EMPTY, *(share.ids for share in shares)])
        positions = np.concatenate([EMPTY, *(share.positions for share in shares)])
        ready = np.concatenate([EMPTY, *(share.rows["due"] for share in shares)]) == 0
        kept = np.isin(ids, event.ids)
        return BatchPlaced(
            event.ids, event.batch_id, event.parts, event.seq, event.at, event.more, event.keys,
            positions[kept], ready[kept].astype(np.uint8).tobytes(),
        )  # fmt: skip

    def decide_dlq_delete(self, ids: list[int]) -> DeadDeleted:
        return DeadDeleted(_i64(ids))

    # -- housekeeping ----------------------------------------------------------------------------------------------

    def maintain(self, now: Now, budget: int) -> bool:
        """A bounded piece of background work; True if more is left. Changes nothing that anyone can see."""
        more = self.heap.maintain(budget)
        for wheel in (self.delays, self.calendar, self.ttls, self.ttls_wall):
            if len(wheel):
                more = wheel.maintain(budget) or more
        self.keys.expire(now.steady)
        self.sequences.expire(now.steady, round(self.config.dedup_window * 1000))
        self._sweep()
        if self.fair is not None:
            self.fair.sweep()
        return more

    def _sweep(self) -> None:
        """Where more than half of the entries are left over, drop those."""
        living = self.ready + self.delayed + len(self.leases)
        for wheel, wall in ((self.ttls, False), (self.ttls_wall, True)):
            if len(wheel) > 2 * living + GARBAGE_ROWS_MIN:
                wheel.keep(partial(self._good_ends, wall=wall, seen=set()))
        if self.stale > self.ready + self.delayed + GARBAGE_ROWS_MIN:
            self.unpark_all()
            seen: set[int] = set()
            for wheel, wall in ((self.delays, False), (self.calendar, True)):
                wheel.keep(partial(self.good_delayed, wall=wall, seen=seen))
            self._sweep_heap(seen)

    def _sweep_heap(self, seen: set[int]) -> None:
        rests = [run.rest() for run in self.heap.runs()]
        left_over = np.unique(np.concatenate([EMPTY, *(r.ids[~self.good_ready(*r, seen)] for r in rests)]))
        self.heap.discard(left_over)
        for _, id, touched in self._touched_among(left_over):
            if touched.place == READY:  # the entry that counts went with those that do not
                self.heap.push_one(touched.key, id, touched.position)

    def _good_ends(self, rows: Timers, wall: bool, seen: set[int]) -> Mask:
        """Which of these ends of life still count, each once."""
        good = self.live.alive(rows.positions)
        for i, id, _ in self._touched_among(rows.ids):
            good[i] &= id not in seen and self._ends(id, rows.dues.item(i), wall)
            if good[i]:
                seen.add(id)
        return good

    @property
    def nbytes(self) -> int:
        wheels = (self.delays, self.calendar, self.ttls, self.ttls_wall)
        kept = self.keys.nbytes + self.sequences.nbytes + self.prepared.nbytes
        if self.key_hashes is not None:
            kept += self.key_hashes.nbytes + self.parked.nbytes
        return self.heap.nbytes + sum(w.nbytes for w in wheels) + kept


def ordering_of(config: TopicConfig) -> Ordering:
    aging = None if isinstance(config.ordering, str) else config.ordering.rate
    return Ordering(config.mode, aging, turns=config.fairness == "keys")


def _i64(values: Sequence[int]) -> I64:
    return np.array(values, dtype=np.int64)


def _without(ids: list[int], tokens: list[int], drop: set[int]) -> tuple[list[int], list[int]]:
    kept = [(id, token) for id, token in zip(ids, tokens, strict=True) if id not in drop]
    return [id for id, _ in kept], [token for _, token in kept]
