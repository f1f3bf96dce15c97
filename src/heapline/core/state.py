"""Apply events to the state of a partition (core/entries.py). Recovery uses `apply` alone.

*Determinism.* An event names the messages in the order in which heap or wheel served them; `apply` takes out the same
number and checks that the messages match. A journal that does not replay exactly raises `Replay`.

Time is an argument; `at` is the journal's (steady) time in ms. Positions are int64 (see core/position.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from heapline.core.entries import DEAD, DELAYED, FROM_LEASE, LEASED, READY, Dead, Replay, Touched
from heapline.core.events import (
    EMPTY,
    I64,
    KIND_NAMES,
    Acked,
    AnyEvent,
    BatchAborted,
    BatchCommitted,
    BatchPrepared,
    Cancelled,
    DeadDeleted,
    DeadLettered,
    Enqueued,
    Expired,
    Extended,
    Fired,
    Leased,
    LeaseExpired,
    Moved,
    Nacked,
    ProducerOpened,
    Purged,
    Released,
    Replayed,
    Rescheduled,
    Throttled,
)  # fmt: skip
from heapline.core.fairness.fair_entries import FairEntries
from heapline.core.leases import KEY, POSITION, Lease
from heapline.core.position import ATTEMPTS_MAX, attempts_of, with_attempts
from heapline.core.prepared import Share, join, split_hashes
from heapline.core.record import DEFAULT_RETRIES, FLAG_WALL
from heapline.core.wheel.timing_wheel import Timers


class PartitionState(FairEntries):
    # -- apply -----------------------------------------------------------------------------------------------------

    def apply(
        self, event: AnyEvent, at: int, rows: Any = None, positions: I64 | None = None, fairness: I64 | None = None
    ) -> None:
        """Apply one event.

        Events with records come with their `rows`, `positions` and, on a topic with fairness keys, `fairness`: the
        hashes of these keys.
        """
        count = event.rows()
        try:
            self._carry_out(event, at, rows, positions, fairness)
        except KeyError as error:
            detail = f"{KIND_NAMES[type(event)]} names {error}, which does not exist"
            raise Replay(f"partition {self.number}: the journal contradicts itself: {detail}") from error
        self.offset += count

    def _carry_out(
        self, event: AnyEvent, at: int, rows: Any, positions: I64 | None, fairness: I64 | None
    ) -> None:  # fmt: skip
        kind = type(event)
        if kind is Enqueued:
            self._enqueued(event, rows, positions, at, fairness)  # type: ignore[arg-type]
        elif kind is Leased:
            self._leased(event)  # type: ignore[arg-type]
        elif kind is Acked:
            self._acked(event, at)  # type: ignore[arg-type]
        elif kind is Moved:
            self._moved(rows, positions)  # type: ignore[arg-type]
        elif kind is BatchPrepared:
            self._batch_prepared(event, rows, positions, fairness)  # type: ignore[arg-type]
        else:
            handler = _HANDLERS.get(kind)
            if handler is not None:
                handler(self, event, at)

    def _enqueued(self, event: Enqueued, rows: Any, positions: I64, at: int, fairness: I64 | None) -> None:
        ids = np.ascontiguousarray(rows["id"])
        keys = self._keys_of(rows, ids, fairness)
        self.ids.observe(int(ids[-1]))
        self.live.add(positions)
        self._bring_in(rows, keys, ids, positions)
        for part in event.producers:
            prints = np.frombuffer(part.prints, dtype=np.uint32)
            self.sequences.record(part.producer, part.epoch, part.seqs, ids[part.index], prints, at)
            self.sequences.answered(part.producer, part.epoch, part.answered_below)
        if event.keys is not None:
            part_keys = event.keys
            hashes = [part_keys.hashes[i : i + 16] for i in range(0, len(part_keys.hashes), 16)]
            self.keys.record(
                hashes, ids[part_keys.index], np.frombuffer(part_keys.prints, dtype=np.uint32),
                np.frombuffer(part_keys.scopes, dtype=np.int8), part_keys.expires,
            )  # fmt: skip

    def _keys_of(self, rows: Any, ids: I64, fairness: I64 | None) -> I64:
        """Return the heap keys of new messages; on a topic with fairness keys, also remember the keys' hashes."""
        keys = self.ordering.keys(rows["priority"], rows["enqueued_at"])
        if self.fair is not None and self.key_hashes is not None and fairness is not None:
            keys = self.ordering.with_turns(keys, rows["turn"])
            self.key_hashes.append(ids, fairness)
            given = rows["turn"] != 0
            if given.any():
                self._observe_turns(ids[given], keys[given])
        return keys

    def _bring_in(self, rows: Any, keys: I64, ids: I64, positions: I64) -> None:
        """Insert messages into the heap, or into a wheel until they are due, and into a wheel for their TTL."""
        waits = rows["due"] != 0
        if not waits.any():
            self.heap.push(keys, ids, positions)
            self.ready += len(ids)
        else:
            self._insert_mixed(rows, keys, ids, positions, waits)
        ttls = rows["ttl_ms"]
        if ttls.any():
            self._insert_ttls(rows, keys, ids, positions)
        own = rows["max_retries"] != DEFAULT_RETRIES
        if own.any():
            self.limits.update(zip(ids[own].tolist(), rows["max_retries"][own].tolist(), strict=True))

    def _insert_mixed(self, rows: Any, keys: I64, ids: I64, positions: I64, waits: Any) -> None:
        now = ~waits
        if now.any():
            self.heap.push(keys[now], ids[now], positions[now])
            self.ready += int(now.sum())
        wall = (rows["flags"] & FLAG_WALL) != 0
        for mask, wheel in ((waits & ~wall, self.delays), (waits & wall, self.calendar)):
            if mask.any():
                wheel.insert(np.ascontiguousarray(rows["due"][mask]), keys[mask], ids[mask], positions[mask])
                self.delayed += int(mask.sum())

    def _insert_ttls(self, rows: Any, keys: I64, ids: I64, positions: I64) -> None:
        due = np.where(rows["due"] != 0, rows["due"], rows["enqueued_at"])
        wall = (rows["flags"] & FLAG_WALL) != 0
        has = rows["ttl_ms"] != 0
        for mask, wheel in ((has & ~wall, self.ttls), (has & wall, self.ttls_wall)):
            if mask.any():
                wheel.insert((due + rows["ttl_ms"])[mask], keys[mask], ids[mask], positions[mask])

    def _leased(self, event: Leased) -> None:
        keys, positions = self._take_ready(event.ids)
        attempts = np.frombuffer(event.attempts, dtype=np.uint8).astype(np.int64)
        ids, key_list = event.ids.tolist(), keys.tolist()
        position_list = ((positions & ~0xFF) | attempts).tolist()
        token, start = self.offset, 0
        for grant in event.grants:
            end = start + grant.count
            self.leases.grant(
                ids[start:end], token + start, position_list[start:end], key_list[start:end],
                grant.deadline, event.at, grant.holder, grant.request_id,
            )  # fmt: skip
            start = end
        self.ready -= len(ids)
        if self.touched:
            self._place(ids, LEASED, position_list)
        self.keys.leased(event.ids)

    def _acked(self, event: Acked, at: int) -> None:
        leases = self._end_leases(event.ids.tolist())
        self._depart(event.ids, _positions(leases), "acked", at, tokens=event.tokens)

    def _depart(
        self, ids: I64, positions: I64, how: str, at: int, tokens: I64 | None = None, reason: str | None = None
    ) -> None:  # fmt: skip
        """Remove messages and everything that is kept about them."""
        self.live.remove(positions)
        self.keys.gone(ids)
        if self.key_hashes is not None:
            self.key_hashes.forget(ids)
        if self.touched or self.reasons or self.limits or self.lapsed or self.retrying or self.shown:
            for id in ids.tolist():
                self.touched.pop(id, None)
                self.reasons.pop(id, None)
                self.limits.pop(id, None)
                self.lapsed.discard(id)
                self.retrying.discard(id)
                self.shown.discard(id)
        self.gone.add(ids, how, at, tokens, reason)

    def _wait_again(self, ids: I64, dues: I64, leases: Sequence[Lease]) -> None:
        """Return leased messages to the queue for a later delivery; due 0 = ready immediately."""
        keys, positions = _keys(leases), _positions(leases)
        later = dues != 0
        if later.all():
            self.delays.insert(dues, keys, ids, positions)
        else:
            now = ~later
            self.heap.push(keys[now], ids[now], positions[now])
            if later.any():
                self.delays.insert(dues[later], keys[later], ids[later], positions[later])
        waiting = int(later.sum())
        self.delayed += waiting
        self.ready += len(ids) - waiting
        self.retrying.update(ids[later].tolist())
        if self.touched:
            self._place(ids.tolist(), DELAYED, positions.tolist(), dues.tolist())

    def _nacked(self, event: Nacked, at: int) -> None:
        ids = event.ids.tolist()
        self._wait_again(event.ids, event.dues, self._end_leases(ids))
        if event.reason is not None:
            self.reasons.update(dict.fromkeys(ids, event.reason))

    def _lease_expired(self, event: LeaseExpired, at: int) -> None:
        ids = event.ids.tolist()
        self._wait_again(event.ids, event.dues, self._end_leases(ids))
        self.reasons.update(dict.fromkeys(ids, "lease expired"))

    def _released(self, event: Released, at: int) -> None:
        leases = self._end_leases(event.ids.tolist())
        positions = _positions(leases)
        # A release does not count as an attempt: subtract this delivery.
        positions = positions - (attempts_of(positions) > 0)
        self.heap.push(_keys(leases), event.ids, positions)
        self.ready += len(leases)
        if self.touched:
            self._place(event.ids.tolist(), READY, positions.tolist())

    def _extended(self, event: Extended, at: int) -> None:
        self.leases.extend(event.ids.tolist(), event.deadlines.tolist())

    def _fired(self, event: Fired, at: int) -> None:
        ids, keys = event.ids, event.keys
        count = (event.count or 0) if ids is None else len(ids)
        rows = self._take_delayed(self.calendar if event.wall else self.delays, event.wall, count)
        if ids is not None and not np.array_equal(rows.ids, ids):
            raise Replay(f"partition {self.number}: the journal fired other timers than those that were due")
        if keys is None:
            self._make_ready(rows)
            return
        self._observe_turns(rows.ids, keys)
        self._make_ready(rows._replace(keys=keys))
        for i, _, touched in self._touched_among(rows.ids):
            touched.key = int(keys[i])

    def _make_ready(self, rows: Timers) -> None:
        self.heap.push(rows.keys, rows.ids, rows.positions)
        self.delayed -= len(rows.ids)
        self.ready += len(rows.ids)
        if self.retrying:
            self.retrying.difference_update(rows.ids.tolist())
        if self.shown:
            self.shown.difference_update(rows.ids.tolist())
        if self.touched:
            self._place(rows.ids.tolist(), READY, rows.positions.tolist())

    def _dead_lettered(self, event: DeadLettered, at: int) -> None:
        ids = event.ids.tolist()
        leases = self._end_leases(ids)
        if not event.kept:
            self._depart(event.ids, _positions(leases), "dropped", event.at, reason=event.reason)
            return
        for id, lease in zip(ids, leases, strict=True):
            self.dead[id] = Dead(lease[POSITION], lease[KEY], event.reason, event.at)
            self.lapsed.discard(id)
        self._place(ids, DEAD, [lease[POSITION] for lease in leases])

    def _replayed(self, event: Replayed, at: int) -> None:
        ids = event.ids.tolist()
        dead = [self.dead.pop(id) for id in ids]
        keys = np.array([d.key for d in dead], dtype=np.int64)
        if event.keys is not None:
            keys = event.keys
            self._observe_turns(event.ids, keys)
        positions = with_attempts(np.array([d.position for d in dead], dtype=np.int64), 0)
        later = event.dues != 0
        now = ~later
        self.heap.push(keys[now], event.ids[now], positions[now])
        self.delays.insert(event.dues[later], keys[later], event.ids[later], positions[later])
        lives = event.expires != 0
        self.ttls.insert(event.expires[lives], keys[lives], event.ids[lives], positions[lives])
        waiting = int(later.sum())
        self.delayed += waiting
        self.ready += len(ids) - waiting
        self.shown.update(event.ids[later].tolist())
        may_have_ttl = len(self.ttls) + len(self.ttls_wall) > 0
        for i, (id, due, expires) in enumerate(zip(ids, event.dues.tolist(), event.expires.tolist(), strict=True)):
            self.reasons.pop(id, None)
            touched = self.touched.get(id)
            if touched is not None or may_have_ttl:  # otherwise no stale entry can be mistaken for a current one
                priority = None if touched is None else touched.priority
                place = DELAYED if due else READY
                self.touched[id] = Touched(
                    place, int(keys[i]), int(positions[i]), due, False, expires, False, priority
                )  # fmt: skip

    def _dead_deleted(self, event: DeadDeleted, at: int) -> None:
        dead = [self.dead.pop(id) for id in event.ids.tolist()]
        self._depart(event.ids, np.array([d.position for d in dead], dtype=np.int64), "deleted", at)

    def _leave_waiting(self, ids: I64, delayed: bytes) -> None:
        """Count waiting messages out of heap and wheels without popping them; their entries become stale."""
        self._refill(ids)
        self.delayed -= delayed.count(1)
        self.ready -= delayed.count(0)

    def _cancelled(self, event: Cancelled, at: int) -> None:
        self._leave_waiting(event.ids, event.delayed)
        self._depart(event.ids, event.positions, "cancelled", at)

    def _expired(self, event: Expired, at: int) -> None:
        self.lapsed.update(event.leased.tolist())
        if not len(event.ids):
            return
        self._leave_waiting(event.ids, event.delayed)
        self._end_leases([id for id, was in zip(event.ids.tolist(), event.delayed, strict=True) if was == FROM_LEASE])
        self._depart(event.ids, event.positions, "expired", event.at)

    def _rescheduled(self, event: Rescheduled, at: int) -> None:
        self._leave_waiting(event.ids, event.delayed)
        self._observe_turns(event.ids, event.keys)
        for i, id in enumerate(event.ids.tolist()):
            key, due, expires = int(event.keys[i]), int(event.dues[i]), int(event.expires[i])
            position = int(event.positions[i])
            if due:
                (self.calendar if event.wall else self.delays).insert_one(due, key, id, position)
                self.delayed += 1
            else:
                self.heap.push_one(key, id, position)
                self.ready += 1
            before = self.touched.get(id)
            if expires and (before is None or (before.expires, before.expires_wall) != (expires, event.expires_wall)):
                (self.ttls_wall if event.expires_wall else self.ttls).insert_one(expires, key, id, position)
            self.retrying.discard(id)
            if not due:
                self.shown.discard(id)
            elif not event.delayed[i]:
                self.shown.add(id)
            place = DELAYED if due else READY
            priority = int(event.priorities[i])
            self.touched[id] = Touched(place, key, position, due, event.wall, expires, event.expires_wall, priority)

    def _purged(self, event: Purged, at: int) -> None:
        ids, positions = self.waiting()
        if len(ids) != event.count:
            raise Replay(f"partition {self.number}: a purge of {event.count} messages meets {len(ids)}")
        self.heap.clear()
        self._clear_parked()
        self.delays.clear()
        self.calendar.clear()
        self.ready = self.delayed = 0
        if self.fair is not None and len(ids):
            self.fair.forget(self.hashes_of(ids))
        self._depart(ids, positions, "purged", event.at)

    def _moved(self, rows: Any, positions: I64) -> None:
        """Replace the positions of moved records. The given positions have no attempts; each entry keeps its own."""
        ids = np.ascontiguousarray(rows["id"])
        order = np.argsort(ids)
        ids, positions = ids[order], positions[order]
        old = self.positions_of(ids)
        alive = old >= 0
        ids, positions = ids[alive], positions[alive]
        self.live.remove(old[alive])
        self.live.add(positions)
        self.heap.replace_positions(ids, positions, keep=ATTEMPTS_MAX)
        if self.parked.rows:
            self.parked.replace_positions(self.hashes_of(ids), ids, positions, keep=ATTEMPTS_MAX)
        for wheel in (self.delays, self.calendar, self.ttls, self.ttls_wall):
            wheel.replace_positions(ids, positions, keep=ATTEMPTS_MAX)
        self.prepared.replace_positions(ids, positions)
        by_id = dict(zip(ids.tolist(), positions.tolist(), strict=True))
        self.leases.replace_positions(by_id)
        for id in by_id.keys() & self.dead.keys():
            dead = self.dead[id]
            self.dead[id] = dead._replace(position=by_id[id] | attempts_of(dead.position))
        for id in by_id.keys() & self.touched.keys():
            touched = self.touched[id]
            touched.position = by_id[id] | attempts_of(touched.position)

    # -- prepared batches ------------------------------------------------------------------------------------------

    def _batch_prepared(
        self, event: BatchPrepared, rows: Any, positions: I64 | None, fairness: I64 | None
    ) -> None:  # fmt: skip
        keys = self._keys_of(rows, np.ascontiguousarray(rows["id"]), fairness) if event.count else EMPTY
        share = self.prepared.add(event, rows, positions, keys)
        if event.count:
            self.ids.observe(int(share.ids[-1]))
            self.live.add(share.positions)
        for part in event.producers:
            self.sequences.answered(part.producer, part.epoch, part.answered_below)

    def _batch_committed(self, event: BatchCommitted, at: int) -> None:
        """Add the messages of prepared parts, column by column. `ids` may be fewer than the parts hold."""
        shares = self.prepared.take(event.batch_id, event.parts)
        if sum(share.count for share in shares) != len(event.ids):
            keeps = [np.isin(share.ids, event.ids) for share in shares]
            for share, keep in zip(shares, keeps, strict=True):
                self._undo(share.ids[~keep], share.positions[~keep])
            shares = [share.only(keep) for share, keep in zip(shares, keeps, strict=True)]
        attached = join(shares)
        if not np.array_equal(attached.ids, event.ids):
            raise Replay(f"partition {self.number}: the journal commits others than those that were prepared")
        if attached.count:
            keys = attached.keys
            if event.keys is not None:
                keys = event.keys
                self._observe_turns(event.ids, keys)
            self._bring_in(attached.rows, keys, attached.ids, attached.positions)
        for share in shares:
            self._remember(share, at)
        if not event.more:
            self._drop_batch(event.batch_id)

    def _remember(self, share: Share, at: int) -> None:
        """Record identities that were in doubt until now, except those made obsolete by a newer epoch or an answer."""
        for part in share.producers:
            if self.sequences.epoch_of(part.producer) == part.epoch:
                open_ones = part.seqs >= self.sequences.answered_below_of(part.producer)
                prints = np.frombuffer(part.prints, dtype=np.uint32)[open_ones]
                ids = share.ids[part.index[open_ones]]
                self.sequences.record(part.producer, part.epoch, part.seqs[open_ones], ids, prints, at)
        if share.tokens is not None:
            tokens = share.tokens
            self.keys.record(
                split_hashes(tokens.hashes), share.ids[tokens.index], np.frombuffer(tokens.prints, dtype=np.uint32),
                np.frombuffer(tokens.scopes, dtype=np.int8), tokens.expires,
            )  # fmt: skip

    def _batch_aborted(self, event: BatchAborted, at: int) -> None:
        self._drop_batch(event.batch_id)

    def _drop_batch(self, batch_id: str) -> None:
        for share in self.prepared.drop(batch_id):
            if share.count:
                self._undo(share.ids, share.positions)

    def _undo(self, ids: I64, positions: I64) -> None:
        """Drop prepared messages."""
        self.live.remove(positions)
        if self.key_hashes is not None:
            self.key_hashes.forget(ids)

    def _producer_opened(self, event: ProducerOpened, at: int) -> None:
        self.sequences.open(event.producer, event.epoch, event.partitions, at)

    def _throttled(self, event: Throttled, at: int) -> None:
        self.throttled = event.reason if event.throttled else None


_HANDLERS: dict[type, Any] = {
    Nacked: PartitionState._nacked, LeaseExpired: PartitionState._lease_expired, Released: PartitionState._released,
    Extended: PartitionState._extended, Fired: PartitionState._fired,
    DeadLettered: PartitionState._dead_lettered, Replayed: PartitionState._replayed,
    DeadDeleted: PartitionState._dead_deleted, Cancelled: PartitionState._cancelled,
    Expired: PartitionState._expired, Rescheduled: PartitionState._rescheduled, Purged: PartitionState._purged,
    ProducerOpened: PartitionState._producer_opened, Throttled: PartitionState._throttled,
    BatchCommitted: PartitionState._batch_committed, BatchAborted: PartitionState._batch_aborted,
}  # fmt: skip


def _positions(leases: Sequence[Lease]) -> I64:
    return np.array([lease[POSITION] for lease in leases], dtype=np.int64)


def _keys(leases: Sequence[Lease]) -> I64:
    return np.array([lease[KEY] for lease in leases], dtype=np.int64)
