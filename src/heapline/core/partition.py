"""Decisions of one partition. `decide_*(…, now)` reads the state and returns events.

A partition has a state (core/state.py), which applies events. The state has the messages' entries (core/entries.py)
and, where fairness keys take turns, what keeps those in order (core/fairness/fair_entries.py).

A decision changes nothing that an event does not also change, except that it may drop stale entries. The caller applies
the events of a decision before it requests the next decision, and makes them durable before it answers a client.
Randomness (jitter) and time are passed in; the partition does not know a clock, disk or socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.contract.config import TopicConfig
from heapline.core import events as ev
from heapline.core.depth_histogram import Census
from heapline.core.entries import DELAYED, FROM_LEASE, READY, Found
from heapline.core.events import EMPTY, I64, AnyEvent
from heapline.core.fairness.turns import FairShare
from heapline.core.heap.run_heap import Rows
from heapline.core.heap.runs import Row, tuples_of
from heapline.core.ids import unix_ms_of
from heapline.core.leases import DEADLINE, POSITION, STARTED
from heapline.core.live_map import LiveMap
from heapline.core.now import Now
from heapline.core.order import Ordering
from heapline.core.record import attempts_of
from heapline.core.retry import backoffs_ms
from heapline.core.state import PartitionState
from heapline.core.wheel.timing_wheel import Timers, TimingWheel

Draw = Callable[[int], npt.NDArray[np.float64]]
Failed = Callable[[I64, I64, I64], AnyEvent]  # (ids, tokens, dues) -> the event of messages that wait for a retry
LEASE_EXPIRED = "lease expired"
#: Leases and TTLs that end are processed one by one, which costs this many times as much as firing a timer.
ROW_BY_ROW = 8
#: Stale entries that a tick may skip, as a multiple of the rows that it may change.
PASS_OVER = 4
#: Time between two checks for expired identities and stale entries.
CLEAN_UP_MS = 1000


class Decision(NamedTuple):
    events: list[AnyEvent]
    lost: Sequence[int] = ()  # ids of leases that were not held


class Partition:
    def __init__(
        self, number: int, config: TopicConfig, live: LiveMap, now: Now, draw: Draw, fair: FairShare | None = None
    ) -> None:
        self.number = number
        self.config = config
        self.state = PartitionState(number, ordering_of(config), live, now, round(config.tick * 1000), fair)
        self.entries, self.fairness = self.state.entries, self.state.fairness
        self._draw = draw
        self.fired_dues: I64 = EMPTY  # due times of the messages that fired last, to measure how late they were
        self._clean_up_at = 0
        self.census = Census(self.entries)

    # -- delivery --------------------------------------------------------------------------------------------------

    def eligible(self, count: int) -> Rows:
        """Return the first `count` messages, in order, that are ready and not blocked by their fairness key's limit."""
        if self.fairness is not None and self.fairness.share.limit:
            return self.fairness.unblocked(count)
        entries = self.entries
        return entries.first_ready(count) if entries.stale else entries.heap.peek(count)

    def head(self) -> tuple[int, int] | None:
        """Return (key, id) of the best ready message that is not blocked."""
        if not self.entries.stale and (self.fairness is None or not self.fairness.share.limit):
            return self.entries.heap.head()
        rows = self.eligible(1)
        return (int(rows.keys[0]), int(rows.ids[0])) if len(rows.ids) else None

    def candidates(self, count: int) -> list[Row]:
        """Return the messages of `eligible(count)` as tuples, last first: for callers that need a few."""
        if self.entries.stale or (self.fairness is not None and self.fairness.share.limit):
            return tuples_of(self.eligible(count))[::-1]
        return self.entries.heap.first(count)

    def decide_lease(
        self, ids: I64, attempts: bytes, grants: list[ev.Grant], now: Now, seq: int, limit: int | None = None
    ) -> ev.Leased:
        """Lease messages that `eligible` has just returned; `attempts` counts this delivery."""
        return ev.Leased(ids, attempts, grants, now.steady, seq, limit)

    def _held(self, ids: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Return (held ids, their tokens, ids that are not held). A repeated id counts once."""
        return self.entries.leases.by_id.held(list(ids), list(tokens))

    def decide_ack(self, ids: Sequence[int], tokens: Sequence[int]) -> Decision:
        held, held_tokens, lost = self._held(ids, tokens)
        if lost:  # an ack that is resent because its response was lost is valid
            leases, gone = self.entries.leases, self.state.gone
            pairs = zip(ids, tokens, strict=True)
            lost = [id for id, t in pairs if not leases.holds(id, t) and not gone.was_acked(id, t)]
        if not held:
            return Decision([], lost)
        return Decision([ev.Acked(_i64(held), _i64(held_tokens))], lost)

    def decide_nack(
        self, ids: Sequence[int], tokens: Sequence[int], now: Now, backoff_ms: int | None, reason: str | None
    ) -> Decision:
        held, held_tokens, lost = self._held(ids, tokens)

        def failed(ids: I64, tokens: I64, dues: I64) -> AnyEvent:
            return ev.Nacked(ids, tokens, dues, reason)

        return Decision(self._retry(held, held_tokens, now, backoff_ms, reason or "nacked", failed), lost)

    def decide_bury(
        self, ids: Sequence[int], tokens: Sequence[int], now: Now, reason: str | None, keep: bool = False
    ) -> Decision:
        """Move leased messages to the dead-letter queue. With `keep`, do so even on a topic that has none."""
        held, _, lost = self._held(ids, tokens)
        if not held:
            return Decision([], lost)
        return Decision([ev.DeadLettered(_i64(held), reason or "buried", now.steady, keep or self.config.dlq)], lost)

    def decide_release(self, ids: Sequence[int], tokens: Sequence[int], now: Now, seq: int) -> Decision:
        held, held_tokens, lost = self._held(ids, tokens)
        events, held, held_tokens = self._lapse(held, held_tokens, now)
        if held:
            events.append(ev.Released(_i64(held), _i64(held_tokens), seq))
        return Decision(events, lost)

    def decide_extend(self, ids: Sequence[int], tokens: Sequence[int], now: Now, extend_ms: int) -> Decision:
        """Set deadlines to now + extend_ms: never earlier than before, never past lease_max from the pop."""
        held, held_tokens, lost = self._held(ids, tokens)
        if not held:
            return Decision([], lost)
        leases = [self.entries.leases.by_id[id] for id in held]
        cap = round(self.config.lease_max * 1000)
        deadlines = [max(x[DEADLINE], min(now.steady + extend_ms, x[STARTED] + cap)) for x in leases]
        return Decision([ev.Extended(_i64(held), _i64(held_tokens), _i64(deadlines))], lost)

    def _retry(
        self, ids: list[int], tokens: list[int], now: Now, backoff_ms: int | None, reason: str, failed: Failed
    ) -> list[AnyEvent]:
        """Return leased messages unprocessed: each expires, becomes a dead letter, or waits for another attempt."""
        if not ids:
            return []
        events, ids, tokens = self._lapse(ids, tokens, now)
        leases = [self.entries.leases.by_id[id] for id in ids]
        attempts = [attempts_of(lease[POSITION]) for lease in leases]
        default = self.config.max_retries_default
        worn = {id for id, tried in zip(ids, attempts, strict=True) if tried > self.entries.limits.get(id, default)}
        if worn:
            events.append(ev.DeadLettered(_i64([id for id in ids if id in worn]), reason, now.steady, self.config.dlq))
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

    def _lapse(self, ids: list[int], tokens: list[int], now: Now) -> tuple[list[AnyEvent], list[int], list[int]]:
        """Expire the leased messages whose TTL has ended; return the event, if any, and the other ids and tokens."""
        lapsed = [id for id in ids if id in self.entries.lapsed] if self.entries.lapsed else []
        if not lapsed:
            return [], ids, tokens
        positions = [self.entries.leases.by_id[id][POSITION] for id in lapsed]
        expired = ev.Expired(_i64(lapsed), _i64(positions), bytes([FROM_LEASE]) * len(lapsed), EMPTY, now.steady)
        return [expired], *_without(ids, tokens, set(lapsed))

    # -- time ------------------------------------------------------------------------------------------------------

    def decide_tick(self, now: Now, limit: int, seq: Callable[[int], int]) -> list[AnyEvent]:
        """Return the events caused by time alone, for at most about `limit` rows, and fewer if they are expensive.

        The result may be empty although more is due, if all checked entries were stale: see `next_wake_in`.
        """
        entries = self.entries
        expensive_rows = max(1, limit // ROW_BY_ROW)
        overdue = entries.leases.overdue(now.steady, expensive_rows)
        if overdue:
            tokens = [entries.leases.by_id[id][0] for id in overdue]
            return self._retry(overdue, tokens, now, None, LEASE_EXPIRED, lambda i, t, d: ev.LeaseExpired(i, d))
        # TTLs end after everything due has fired, because a message's location is derived from that.
        for wheel, wall, time in ((entries.delays, False, now.steady), (entries.calendar, True, now.wall)):
            fired = self._fire(wheel, wall, time, limit, seq)
            if fired is not None:
                return fired
        for wheel, wall, time in ((entries.ttls, False, now.steady), (entries.ttls_wall, True, now.wall)):
            ended = self._end_of_life(wheel, wall, time, expensive_rows, now)
            if ended is not None:
                return ended
        return []

    def _fire(
        self, wheel: TimingWheel, wall: bool, time: int, limit: int, seq: Callable[[int], int]
    ) -> list[AnyEvent] | None:
        """Fire due timers. Return None if nothing is due."""
        entries = self.entries
        for _ in range(PASS_OVER if len(wheel) else 0):
            rows = wheel.due(time, limit)
            if not len(rows.ids):
                return None
            if entries.stale:
                good = entries.good_delayed(rows, wall)
                if not good.any():
                    wheel.take(len(rows.ids))
                    continue
                rows = Timers(*(column[good] for column in rows))
            count = len(rows.ids)
            self.fired_dues = rows.dues
            again = self._again(rows.ids) if self.config.streams else None
            if self.fairness is not None:
                first = ~np.isin(rows.ids, np.fromiter(entries.retrying, np.int64, len(entries.retrying)))
                keys = self.fairness.in_turn(rows.ids, rows.keys, first)  # a retry keeps its turn
                return [ev.Fired(wall, seq(count), rows.ids, rows.positions, keys, again)]
            if self.config.streams:
                return [ev.Fired(wall, seq(count), rows.ids, rows.positions, again=again)]
            return [ev.Fired(wall, seq(count), count=count)]
        return [] if len(wheel) else None

    def _again(self, ids: I64) -> bytes | None:
        """Return a byte per id: 1 = the message already has its offset in the stream. Usually none has: None."""
        if not self.entries.shown:
            return None
        again = np.isin(ids, np.fromiter(self.entries.shown, np.int64, len(self.entries.shown)))
        return again.astype(np.uint8).tobytes() if again.any() else None

    def _end_of_life(self, wheel: TimingWheel, wall: bool, time: int, limit: int, now: Now) -> list[AnyEvent] | None:
        """Expire messages whose TTL has ended. Return None if none is due."""
        entries = self.entries
        for _ in range(PASS_OVER * ROW_BY_ROW if len(wheel) else 0):
            rows = wheel.due(time, limit)
            if not len(rows.ids):
                return None
            wheel.take(len(rows.ids))
            current = entries.live.alive(rows.positions)
            columns = (rows.ids, rows.dues, rows.positions)
            ended: dict[int, int] = {}  # id -> position; the wheel may contain the same expiry twice
            for id, due, position in zip(*(column[current].tolist() for column in columns), strict=True):
                if entries.ends(id, due, wall):
                    ended[id] = position
            if ended:
                leased = [id for id in ended if id in entries.leases.by_id]
                ids = [id for id in ended if id not in entries.leases.by_id]
                flags = bytes(entries.waits(id) for id in ids)
                return [ev.Expired(_i64(ids), _i64([ended[id] for id in ids]), flags, _i64(leased), now.steady)]
        return [] if len(wheel) else None

    def next_wake_in(self, now: Now) -> int | None:
        """Return the milliseconds until time alone may change something; 0 = already; None = never."""
        entries = self.entries
        deadline = entries.leases.next_deadline() if entries.leases.by_id else None
        waits = [] if deadline is None else [deadline - now.steady]
        if entries.has_timers:
            steady, wall = (entries.delays, entries.ttls), (entries.calendar, entries.ttls_wall)
            for time, wheels in ((now.steady, steady), (now.wall, wall)):
                waits += [wake - time for wheel in wheels if (wake := wheel.next_wake()) is not None]
        return max(0, min(waits)) if waits else None

    # -- explicit changes ------------------------------------------------------------------------------------------

    def decide_cancel(self, id: int, found: Found) -> ev.Cancelled:
        return ev.Cancelled(_i64([id]), _i64([found.position]), bytes([found.place == DELAYED]))

    def decide_reschedule(
        self,
        id: int,
        found: Found,
        now: Now,
        seq: int,
        *,
        priority: int,
        enqueued_at: int,
        due: int | None,
        wall: bool,
        expires: int,
        expires_wall: bool | None = None,
    ) -> ev.Rescheduled:
        """Reschedule a message. With `due` None it keeps its due time.

        `expires` is 0 or an instant, on the due time's clock unless `expires_wall` is given.
        """
        if expires_wall is None:
            expires_wall = wall if due is not None else found.wall
        if due is None:
            due, wall = found.due, found.wall
        elif due <= (time := now.wall if wall else now.steady):
            # A time in the past means now, and the TTL counts from now.
            due, expires = 0, expires and expires + time - due
        key = self.entries.ordering.key(priority, enqueued_at)
        if self.fairness is not None:
            key = self.fairness.rescheduled_key(id, found.key if found.place == READY else None, key, due != 0)
        return ev.Rescheduled(
            _i64([id]),
            _i64([found.position]),
            bytes([found.place == DELAYED]),
            _i64([priority]),
            _i64([key]),
            _i64([due]),
            _i64([expires]),
            wall,
            seq,
            expires_wall,
            again=b"\x01" if id in self.entries.shown else None,
        )

    def decide_purge(self, now: Now, before: int | None = None, limit: int = 0) -> ev.Purged | ev.Cancelled | None:
        """Remove all waiting messages, or up to `limit` of those that were enqueued before this Unix time in ms.

        A part is removed as if each message was cancelled: a purge names no messages, which readers of the log rely on.
        """
        count = self.entries.ready + self.entries.delayed
        if before is None or not count:
            return ev.Purged(count, now.steady) if count else None
        ids, positions, ready = self.entries.waiting()
        chosen = np.flatnonzero(unix_ms_of(ids) < before)
        if len(chosen) == len(ids):
            return ev.Purged(count, now.steady)
        chosen = chosen[:limit]
        delayed = (chosen >= ready).astype(np.uint8).tobytes()
        return ev.Cancelled(ids[chosen], positions[chosen], delayed) if len(chosen) else None

    def count_waiting(self, before: int) -> int:
        """Return how many ready and delayed messages were enqueued before this Unix time in ms."""
        return int(np.count_nonzero(unix_ms_of(self.entries.waiting()[0]) < before))

    def decide_replay(self, ids: list[int], dues: list[int], expires: list[int], seq: int) -> ev.Replayed:
        keys = None
        if self.fairness is not None:  # messages that are ready immediately get their turns now
            keys = self.fairness.in_turn(_i64(ids), _i64([self.entries.dead[id].key for id in ids]), _i64(dues) == 0)
        return ev.Replayed(_i64(ids), _i64(dues), _i64(expires), seq, keys)

    def decide_turns(self, event: ev.BatchCommitted) -> I64:
        """Return the heap keys of a commit's messages. Ready ones get their turns now, not at preparation."""
        assert self.fairness is not None
        share = self.entries.prepared.joined(event)
        kept = np.isin(share.ids, event.ids)
        return self.fairness.in_turn(share.ids[kept], share.keys[kept], (share.rows["due"] == 0)[kept])

    def place_in_stream(self, event: ev.BatchCommitted) -> None:
        """Add the columns that a commit has on a topic with streams."""
        share = self.entries.prepared.joined(event)
        kept = np.isin(share.ids, event.ids)
        event.positions = share.positions[kept]
        event.ready = (share.rows["due"] == 0)[kept].astype(np.uint8).tobytes()

    def decide_dlq_delete(self, ids: list[int], expired: bool = False) -> ev.DeadDeleted:
        return ev.DeadDeleted(_i64(ids), expired)

    # -- maintenance -----------------------------------------------------------------------------------------------

    @property
    def needs_maintenance(self) -> bool:
        """Whether `maintain` may have work even though nothing was added or ended."""
        return self.entries.left_behind > 0 or not self.entries.heap.is_settled or self.fairness is not None

    def has_upkeep(self, now: Now) -> bool:
        """Return whether `maintain` may have something to do. It is often nothing."""
        return self.needs_maintenance or self.entries.has_timers or now.steady >= self._clean_up_at

    def maintain(self, now: Now, budget: int) -> bool:
        """Do a bounded amount of background work; return True if more is left. It has no visible effect."""
        entries, fairness = self.entries, self.fairness
        more = entries.heap.maintain(budget)
        if now.steady < self._clean_up_at and not (entries.left_behind or entries.has_timers or fairness is not None):
            return more
        more = entries.maintain_timers(budget) or more
        if now.steady >= self._clean_up_at:
            self._clean_up_at = now.steady + CLEAN_UP_MS
            self.state.keys.expire(now.steady)
            self.state.sequences.expire(now.steady, round(self.config.dedup_window * 1000))
            entries.left_behind = entries.stale
        if entries.wants_sweep():
            if fairness is not None:
                fairness.unpark_all()
            entries.sweep()
        if fairness is not None:
            fairness.share.sweep()
        return more


def ordering_of(config: TopicConfig) -> Ordering:
    aging = None if isinstance(config.ordering, str) else config.ordering.rate
    return Ordering(config.mode, aging, turns=config.fairness == "keys")


def _i64(values: Sequence[int]) -> I64:
    return np.array(values, dtype=np.int64)


def _without(ids: list[int], tokens: list[int], drop: set[int]) -> tuple[list[int], list[int]]:
    kept = [(id, token) for id, token in zip(ids, tokens, strict=True) if id not in drop]
    return [id for id, _ in kept], [token for _, token in kept]
