"""The state of a partition: its entries, and what it remembers of past messages. Recovery uses `apply` alone.

*Determinism.* An event names the messages in the order in which heap or wheel served them; `apply` takes out the same
number and checks that the messages match. A journal that does not replay exactly raises `Replay`.

Time is an argument; `at` is the journal's (steady) time in ms. Positions are int64 (see core/record.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from heapline.core import events as ev
from heapline.core.dedup.idempotency import KeyWindow
from heapline.core.dedup.sequences import SequenceWindow
from heapline.core.entries import (
    DEAD,
    DELAYED,
    FEW_ROWS,
    FROM_LEASE,
    LEASED,
    READY,
    Entries,
    Replay,
    Touched,
)
from heapline.core.events import EMPTY, I64, KIND_NAMES, AnyEvent
from heapline.core.fairness.fair_entries import FairEntries
from heapline.core.fairness.turns import FairShare
from heapline.core.ids import IdMaker
from heapline.core.leases import KEY, POSITION, Lease
from heapline.core.live_map import LiveMap
from heapline.core.now import Now
from heapline.core.order import Ordering
from heapline.core.prepared import Share, join, split_hashes
from heapline.core.recent_ends import GoneMemory
from heapline.core.record import ATTEMPTS_MAX, DEFAULT_RETRIES, FLAG_WALL, attempts_of, with_attempts
from heapline.core.wheel.timing_wheel import Timers


class PartitionState:
    def __init__(
        self, number: int, ordering: Ordering, live: LiveMap, now: Now, tick_ms: int, fair: FairShare | None
    ) -> None:
        self.entries = Entries(number, ordering, live, now, tick_ms, keyed=fair is not None)
        self.fairness = None if fair is None else FairEntries(self.entries, fair)  # None: keys take no turns
        self.offset = 0  # offset of the next row
        self.ids = IdMaker(number)
        self.sequences = SequenceWindow()
        self.keys = KeyWindow()
        self.gone = GoneMemory()
        self.throttled: str | None = None  # why it is excluded from pops; None = it is not

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.keys.nbytes + self.sequences.nbytes

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply(
        self, event: AnyEvent, at: int, rows: Any = None, positions: I64 | None = None, fairness: I64 | None = None
    ) -> None:
        """Apply one event.

        Events with records come with their `rows`, `positions` and, on a topic with fairness keys, `fairness`: the
        hashes of these keys.
        """
        kind = type(event)
        count = event.rows()
        try:
            if kind is ev.Enqueued:
                self._enqueued(event, rows, positions, at, fairness)  # type: ignore[arg-type]
            elif kind is ev.Moved:
                self._moved(rows, positions)  # type: ignore[arg-type]
            elif kind is ev.BatchPrepared:
                self._batch_prepared(event, rows, positions, fairness)  # type: ignore[arg-type]
            elif kind in _HANDLERS:
                _HANDLERS[kind](self, event, at)
        except KeyError as error:
            detail = f"{KIND_NAMES[kind]} names {error}, which does not exist"
            raise Replay(f"partition {self.entries.number}: the journal is inconsistent: {detail}") from error
        self.offset += count

    def _enqueued(self, event: ev.Enqueued, rows: Any, positions: I64, at: int, fairness: I64 | None) -> None:
        ids = np.ascontiguousarray(rows["id"])
        keys = self._keys_of(rows, ids, fairness)
        self.ids.observe(int(ids[-1]))
        self.entries.live.add(positions)
        self._bring_in(rows, keys, ids, positions)
        for part in event.producers:
            prints = np.frombuffer(part.prints, dtype=np.uint32)
            self.sequences.record(part.producer, part.epoch, part.seqs, ids[part.index], prints, at)
            self.sequences.answered(part.producer, part.epoch, part.answered_below)
        if event.keys is not None:
            self._record_keys(event.keys, ids)

    def _record_keys(self, keys: ev.KeyRows, ids: I64) -> None:
        prints, scopes = np.frombuffer(keys.prints, dtype=np.uint32), np.frombuffer(keys.scopes, dtype=np.int8)
        self.keys.record(split_hashes(keys.hashes), ids[keys.index], prints, scopes, keys.expires)

    def _keys_of(self, rows: Any, ids: I64, fairness: I64 | None) -> I64:
        """Return the heap keys of new messages; on a topic with fairness keys, also remember the keys' hashes."""
        entries = self.entries
        keys = entries.ordering.keys(rows["priority"], rows["enqueued_at"])
        if self.fairness is not None and entries.key_hashes is not None and fairness is not None:
            keys = entries.ordering.with_turns(keys, rows["turn"])
            entries.key_hashes.append(ids, fairness)
            given = rows["turn"] != 0
            if given.any():
                self.fairness.observe_turns(ids[given], keys[given])
        return keys

    def _observe_turns(self, ids: I64, keys: I64) -> None:
        if self.fairness is not None:
            self.fairness.observe_turns(ids, keys)

    def _bring_in(self, rows: Any, keys: I64, ids: I64, positions: I64) -> None:
        """Insert messages into the heap, or into a wheel until they are due, and into a wheel for their TTL."""
        if not _any(rows["due"]):
            self.entries.heap.push(keys, ids, positions)
            self.entries.ready += len(ids)
        else:
            self._insert_mixed(rows, keys, ids, positions, rows["due"] != 0)
        if _any(rows["ttl_ms"]):
            self._insert_ttls(rows, keys, ids, positions)
        if _any(rows["max_retries"] ^ DEFAULT_RETRIES):
            own = rows["max_retries"] != DEFAULT_RETRIES
            self.entries.limits.update(zip(ids[own].tolist(), rows["max_retries"][own].tolist(), strict=True))

    def _insert_mixed(self, rows: Any, keys: I64, ids: I64, positions: I64, waits: Any) -> None:
        entries = self.entries
        now = ~waits
        if now.any():
            entries.heap.push(keys[now], ids[now], positions[now])
            entries.ready += int(now.sum())
        wall = (rows["flags"] & FLAG_WALL) != 0
        for mask, wheel in ((waits & ~wall, entries.delays), (waits & wall, entries.calendar)):
            if mask.any():
                wheel.insert(np.ascontiguousarray(rows["due"][mask]), keys[mask], ids[mask], positions[mask])
                entries.delayed += int(mask.sum())

    def _insert_ttls(self, rows: Any, keys: I64, ids: I64, positions: I64) -> None:
        due = np.where(rows["due"] != 0, rows["due"], rows["enqueued_at"])
        wall = (rows["flags"] & FLAG_WALL) != 0
        has = rows["ttl_ms"] != 0
        for mask, wheel in ((has & ~wall, self.entries.ttls), (has & wall, self.entries.ttls_wall)):
            if mask.any():
                wheel.insert((due + rows["ttl_ms"])[mask], keys[mask], ids[mask], positions[mask])

    def apply_lease(self, event: ev.Leased, ids: list[int], keys: list[int], positions: list[int]) -> None:
        """Apply a lease of the messages that were just read as the first. Like `apply`, which reads and compares them
        again."""
        if self.fairness is not None or self.entries.stale:
            self.apply(event, event.at)
            return
        self.entries.heap.skip(len(ids))
        self._grant(event, ids, keys, positions)
        self.offset += len(ids)

    def _leased(self, event: ev.Leased, at: int) -> None:
        keys, positions = (self.fairness or self.entries).take_ready(event.ids, event.attempts)
        self._grant(event, event.ids.tolist(), keys, positions)

    def _grant(self, event: ev.Leased, ids: list[int], keys: list[int], positions: list[int]) -> None:
        """Record the leases of messages that have left the heap."""
        entries = self.entries
        token, start = self.offset, 0
        if len(event.grants) == 1:
            entries.leases.grant(ids, token, positions, keys, event.grants[0], event.at)
        else:
            for grant in event.grants:
                end = start + grant.count
                columns = ids[start:end], token + start, positions[start:end], keys[start:end]
                entries.leases.grant(*columns, grant, event.at)
                start = end
        entries.ready -= len(ids)
        if entries.touched:
            entries.relocate(ids, LEASED, positions)
        self.keys.leased(event.ids)

    def _end_leases(self, ids: list[int]) -> list[Lease]:
        """End these leases, whatever happens to the messages; they must be held."""
        leases = self.entries.leases.take(ids)
        if self.fairness is not None:
            self.fairness.end_leases(ids)
        return leases

    def _acked(self, event: ev.Acked, at: int) -> None:
        ids = event.ids.tolist()
        positions = self.entries.leases.end(ids)
        if self.fairness is not None:
            self.fairness.end_leases(ids)
        self._depart(event.ids, positions, "acked", at, tokens=event.tokens)

    def _depart(
        self, ids: I64, positions: I64, how: str, at: int, tokens: I64 | None = None, reason: str | None = None
    ) -> None:
        """Remove messages and everything that is kept about them."""
        entries = self.entries
        entries.live.remove(positions)
        self.keys.gone(ids)
        if entries.key_hashes is not None:
            entries.key_hashes.forget(ids)
        if entries.touched or entries.reasons or entries.limits or entries.lapsed or entries.retrying or entries.shown:
            for id in ids.tolist():
                entries.touched.pop(id, None)
                entries.reasons.pop(id, None)
                entries.limits.pop(id, None)
                entries.lapsed.discard(id)
                entries.retrying.discard(id)
                entries.shown.discard(id)
        self.gone.add(ids, how, at, tokens, reason)

    def _wait_again(self, ids: I64, dues: I64, leases: Sequence[Lease]) -> None:
        """Return leased messages to the queue for a later delivery; due 0 = ready immediately."""
        positions = _positions(leases)
        self.entries.retrying.update(self._return(_keys(leases), ids, positions, dues))
        if self.entries.touched:
            self.entries.relocate(ids.tolist(), DELAYED, positions.tolist(), dues.tolist())

    def _return(self, keys: I64, ids: I64, positions: I64, dues: I64) -> list[int]:
        """Insert messages that wait again into the heap or, if they have a due time, a wheel; return the latter."""
        entries = self.entries
        later = dues != 0
        waiting = int(later.sum())
        if waiting == len(ids):
            entries.delays.insert(dues, keys, ids, positions)
        else:
            entries.heap.push(keys[~later], ids[~later], positions[~later])
            if waiting:
                entries.delays.insert(dues[later], keys[later], ids[later], positions[later])
        entries.delayed += waiting
        entries.ready += len(ids) - waiting
        delayed: list[int] = ids[later].tolist()
        return delayed

    def _nacked(self, event: ev.Nacked, at: int) -> None:
        ids = event.ids.tolist()
        self._wait_again(event.ids, event.dues, self._end_leases(ids))
        if event.reason is not None:
            self.entries.reasons.update(dict.fromkeys(ids, event.reason))

    def _lease_expired(self, event: ev.LeaseExpired, at: int) -> None:
        ids = event.ids.tolist()
        self._wait_again(event.ids, event.dues, self._end_leases(ids))
        self.entries.reasons.update(dict.fromkeys(ids, "lease expired"))

    def _released(self, event: ev.Released, at: int) -> None:
        entries = self.entries
        leases = self._end_leases(event.ids.tolist())
        positions = _positions(leases)
        # A release does not count as an attempt: subtract this delivery.
        positions = positions - (attempts_of(positions) > 0)
        entries.heap.push(_keys(leases), event.ids, positions)
        entries.ready += len(leases)
        if entries.touched:
            entries.relocate(event.ids.tolist(), READY, positions.tolist())

    def _extended(self, event: ev.Extended, at: int) -> None:
        self.entries.leases.extend(event.ids.tolist(), event.deadlines.tolist())

    def _fired(self, event: ev.Fired, at: int) -> None:
        entries = self.entries
        ids, keys = event.ids, event.keys
        count = (event.count or 0) if ids is None else len(ids)
        rows = entries.take_delayed(entries.calendar if event.wall else entries.delays, event.wall, count)
        if ids is not None and not np.array_equal(rows.ids, ids):
            raise Replay(f"partition {entries.number}: the journal fired other timers than those that were due")
        if keys is None:
            self._make_ready(rows)
            return
        self._observe_turns(rows.ids, keys)
        self._make_ready(rows._replace(keys=keys))
        for i, _, touched in entries.touched_among(rows.ids):
            touched.key = int(keys[i])

    def _make_ready(self, rows: Timers) -> None:
        entries = self.entries
        entries.heap.push(rows.keys, rows.ids, rows.positions)
        entries.delayed -= len(rows.ids)
        entries.ready += len(rows.ids)
        if entries.retrying:
            entries.retrying.difference_update(rows.ids.tolist())
        if entries.shown:
            entries.shown.difference_update(rows.ids.tolist())
        if entries.touched:
            entries.relocate(rows.ids.tolist(), READY, rows.positions.tolist())

    def _dead_lettered(self, event: ev.DeadLettered, at: int) -> None:
        ids = event.ids.tolist()
        leases = self._end_leases(ids)
        if not event.kept:
            self._depart(event.ids, _positions(leases), "dropped", event.at, reason=event.reason)
            return
        positions = _positions(leases)
        self.entries.dead.add(event.ids, positions, _keys(leases), event.reason, event.at)
        self.entries.lapsed.difference_update(ids)
        if self.entries.touched:
            self.entries.relocate(ids, DEAD, positions.tolist())

    def _replayed(self, event: ev.Replayed, at: int) -> None:
        entries = self.entries
        ids = event.ids.tolist()
        keys, positions = entries.dead.take(event.ids)
        if event.keys is not None:
            keys = event.keys
            self._observe_turns(event.ids, keys)
        positions = with_attempts(positions, 0)
        entries.shown.update(self._return(keys, event.ids, positions, event.dues))
        lives = event.expires != 0
        entries.ttls.insert(event.expires[lives], keys[lives], event.ids[lives], positions[lives])
        may_have_ttl = len(entries.ttls) + len(entries.ttls_wall) > 0
        rows = zip(ids, keys.tolist(), positions.tolist(), event.dues.tolist(), event.expires.tolist(), strict=True)
        for id, key, position, due, expires in rows:
            entries.reasons.pop(id, None)
            touched = entries.touched.get(id)
            if touched is not None or may_have_ttl:  # otherwise no stale entry can be mistaken for a current one
                priority = None if touched is None else touched.priority
                place = DELAYED if due else READY
                entries.touched[id] = Touched(place, key, position, due, False, expires, False, priority)

    def _dead_deleted(self, event: ev.DeadDeleted, at: int) -> None:
        _, positions = self.entries.dead.take(event.ids)
        self._depart(event.ids, positions, "deleted", at, reason=event.reason)

    def _leave_waiting(self, ids: I64, delayed: bytes) -> None:
        """Count waiting messages out of heap and wheels without popping them; their entries become stale."""
        if self.fairness is not None:
            self.fairness.refill(ids)
        self.entries.left_behind += len(ids)
        self.entries.delayed -= delayed.count(1)
        self.entries.ready -= delayed.count(0)

    def _cancelled(self, event: ev.Cancelled, at: int) -> None:
        self._leave_waiting(event.ids, event.delayed)
        self._depart(event.ids, event.positions, "cancelled", at)

    def _expired(self, event: ev.Expired, at: int) -> None:
        self.entries.lapsed.update(event.leased.tolist())
        if not len(event.ids):
            return
        self._leave_waiting(event.ids, event.delayed)
        self._end_leases([id for id, was in zip(event.ids.tolist(), event.delayed, strict=True) if was == FROM_LEASE])
        self._depart(event.ids, event.positions, "expired", event.at)

    def _rescheduled(self, event: ev.Rescheduled, at: int) -> None:
        entries = self.entries
        self._leave_waiting(event.ids, event.delayed)
        self._observe_turns(event.ids, event.keys)
        for i, id in enumerate(event.ids.tolist()):
            key, due, expires = int(event.keys[i]), int(event.dues[i]), int(event.expires[i])
            position = int(event.positions[i])
            if due:
                (entries.calendar if event.wall else entries.delays).insert_one(due, key, id, position)
                entries.delayed += 1
            else:
                entries.heap.push_one(key, id, position)
                entries.ready += 1
            before = entries.touched.get(id)
            if expires and (before is None or (before.expires, before.expires_wall) != (expires, event.expires_wall)):
                (entries.ttls_wall if event.expires_wall else entries.ttls).insert_one(expires, key, id, position)
            entries.retrying.discard(id)
            if not due:
                entries.shown.discard(id)
            elif not event.delayed[i]:
                entries.shown.add(id)
            place = DELAYED if due else READY
            priority = int(event.priorities[i])
            entries.touched[id] = Touched(place, key, position, due, event.wall, expires, event.expires_wall, priority)

    def _purged(self, event: ev.Purged, at: int) -> None:
        entries = self.entries
        ids, positions, _ = entries.waiting()
        if len(ids) != event.count:
            raise Replay(f"partition {entries.number}: a purge of {event.count} messages meets {len(ids)}")
        entries.heap.clear()
        entries.delays.clear()
        entries.calendar.clear()
        entries.ready = entries.delayed = 0
        if self.fairness is not None:
            self.fairness.clear_parked()
            if len(ids):
                self.fairness.share.forget(entries.hashes_of(ids))
        self._depart(ids, positions, "purged", event.at)

    def _moved(self, rows: Any, positions: I64) -> None:
        """Replace the positions of moved records. The given positions have no attempts; each entry keeps its own."""
        entries = self.entries
        ids = np.ascontiguousarray(rows["id"])
        order = np.argsort(ids)
        ids, positions = ids[order], positions[order]
        old = entries.positions_of(ids)
        alive = old >= 0
        ids, positions = ids[alive], positions[alive]
        entries.live.remove(old[alive])
        entries.live.add(positions)
        entries.heap.replace_positions(ids, positions, keep=ATTEMPTS_MAX)
        if entries.parked.rows:
            entries.parked.replace_positions(entries.hashes_of(ids), ids, positions, keep=ATTEMPTS_MAX)
        for wheel in (entries.delays, entries.calendar, entries.ttls, entries.ttls_wall):
            wheel.replace_positions(ids, positions, keep=ATTEMPTS_MAX)
        entries.prepared.replace_positions(ids, positions)
        by_id = dict(zip(ids.tolist(), positions.tolist(), strict=True))
        entries.leases.replace_positions(by_id)
        entries.dead.replace_positions(ids, positions)
        for id in by_id.keys() & entries.touched.keys():
            touched = entries.touched[id]
            touched.position = by_id[id] | attempts_of(touched.position)

    # -- prepared batches ------------------------------------------------------------------------------------------

    def _batch_prepared(self, event: ev.BatchPrepared, rows: Any, positions: I64 | None, fairness: I64 | None) -> None:
        keys = self._keys_of(rows, np.ascontiguousarray(rows["id"]), fairness) if event.count else EMPTY
        share = self.entries.prepared.add(event, rows, positions, keys)
        if event.count:
            self.ids.observe(int(share.ids[-1]))
            self.entries.live.add(share.positions)
        for part in event.producers:
            self.sequences.answered(part.producer, part.epoch, part.answered_below)

    def _batch_committed(self, event: ev.BatchCommitted, at: int) -> None:
        """Add the messages of prepared parts, column by column. `ids` may be fewer than the parts hold."""
        shares = self.entries.prepared.take(event.batch_id, event.parts)
        if sum(share.count for share in shares) != len(event.ids):
            keeps = [np.isin(share.ids, event.ids) for share in shares]
            for share, keep in zip(shares, keeps, strict=True):
                self._undo(share.ids[~keep], share.positions[~keep])
            shares = [share.only(keep) for share, keep in zip(shares, keeps, strict=True)]
        attached = join(shares)
        if not np.array_equal(attached.ids, event.ids):
            raise Replay(f"partition {self.entries.number}: the journal commits others than those that were prepared")
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
            self._record_keys(share.tokens, share.ids)

    def _batch_aborted(self, event: ev.BatchAborted, at: int) -> None:
        self._drop_batch(event.batch_id)

    def _drop_batch(self, batch_id: str) -> None:
        for share in self.entries.prepared.drop(batch_id):
            if share.count:
                self._undo(share.ids, share.positions)

    def _undo(self, ids: I64, positions: I64) -> None:
        """Drop prepared messages."""
        self.entries.live.remove(positions)
        if self.entries.key_hashes is not None:
            self.entries.key_hashes.forget(ids)

    def _producer_opened(self, event: ev.ProducerOpened, at: int) -> None:
        self.sequences.open(event.producer, event.epoch, event.partitions, at)

    def _throttled(self, event: ev.Throttled, at: int) -> None:
        self.throttled = event.reason if event.throttled else None


_HANDLERS: dict[type, Any] = {
    ev.Leased: PartitionState._leased, ev.Acked: PartitionState._acked, ev.Nacked: PartitionState._nacked,
    ev.LeaseExpired: PartitionState._lease_expired, ev.Released: PartitionState._released,
    ev.Extended: PartitionState._extended, ev.Fired: PartitionState._fired,
    ev.DeadLettered: PartitionState._dead_lettered, ev.Replayed: PartitionState._replayed,
    ev.DeadDeleted: PartitionState._dead_deleted, ev.Cancelled: PartitionState._cancelled,
    ev.Expired: PartitionState._expired, ev.Rescheduled: PartitionState._rescheduled, ev.Purged: PartitionState._purged,
    ev.ProducerOpened: PartitionState._producer_opened, ev.Throttled: PartitionState._throttled,
    ev.BatchCommitted: PartitionState._batch_committed, ev.BatchAborted: PartitionState._batch_aborted,
}  # fmt: skip


def _any(column: Any) -> bool:
    """Return whether any number differs from 0; `any` of a short column costs a tenth of numpy's."""
    return any(column.tolist()) if len(column) <= FEW_ROWS else bool(column.any())


def _positions(leases: Sequence[Lease]) -> I64:
    return np.array([lease[POSITION] for lease in leases], dtype=np.int64)


def _keys(leases: Sequence[Lease]) -> I64:
    return np.array([lease[KEY] for lease in leases], dtype=np.int64)
