"""A real partition and the naive one side by side: every command goes to both.

The decision of the real one is compared with that of the naive one, then applied. `check` (rig_checks) compares
everything visible in both; `replayed` and `thawed` (rig_journal) rebuild the partition from what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from heapline.contract.config import check_config
from heapline.core.entries import DEAD, FROM_LEASE, LEASED, Found
from heapline.core.events import (
    Acked,
    AnyEvent,
    ConfigChanged,
    DeadLettered,
    Expired,
    Fired,
    Grant,
    LeaseExpired,
    Nacked,
)  # fmt: skip
from heapline.core.now import Now
from heapline.core.record import FLAG_WALL, after_delivery, attempts_column
from tests.unit.core.naive import NaiveLease, clock
from tests.unit.core.rig_batches import BatchRig
from tests.unit.core.rig_journal import STOOD


class Rig(BatchRig):
    def pop(
        self, *counts: int, visibility: int = 30_000, holder: str | None = None, request: str | None = None
    ) -> list[int]:
        """Serve pops of these sizes in one event; return the ids, best first."""
        counts = counts or (1,)
        rows = self.p.eligible(sum(counts))
        ids: list[int] = rows.ids.tolist()
        assert ids == [m.id for m in self.model.line()[: sum(counts)]], "the best are served, in order, and no others"
        grants: list[Grant] = []
        for number, count in enumerate(counts):
            share = min(count, len(ids) - sum(g.count for g in grants))
            if share:
                name = None if request is None else f"{request}{number}"
                grants.append(Grant(share, self.now.steady + visibility + number, holder, name))
        if not ids:
            return []
        token = self.p.state.offset
        delivered = after_delivery(rows.positions)
        event = self.p.decide_lease(rows.ids, attempts_column(delivered), grants, self.now, self.take_seq(len(ids)))
        self.emit(event, chosen=(ids, rows.keys.tolist(), delivered.tolist()))
        at = 0
        for grant in grants:
            for i in range(at, at + grant.count):
                self.model.lease(ids[i], NaiveLease(token + i, grant.deadline, self.now.steady, holder))
                self.old_tokens.append((ids[i], token + i))
            if grant.request_id is not None:
                assert self.p.entries.leases.request(grant.request_id) == ids[at : at + grant.count]
            at += grant.count
        assert list(event.attempts) == [self.model.messages[id].attempts for id in ids]
        return ids

    def token(self, id: int) -> int:
        lease = self.model.messages[id].lease
        assert lease is not None
        return lease.token

    def ack(self, *ids: int, tokens: Sequence[int] | None = None) -> list[int]:
        tokens = self._tokens(ids, tokens)
        decision = self.p.decide_ack(ids, tokens)
        held, lost = self.model.ack(ids, tokens, self.now)
        assert decision.lost == lost
        assert [e.ids.tolist() for e in decision.events if isinstance(e, Acked)] == ([held] if held else [])
        self._emit_all(decision.events)
        return decision.lost

    def nack(
        self, *ids: int, tokens: Sequence[int] | None = None, backoff: int | None = None, reason: str | None = None
    ) -> list[int]:
        tokens = self._tokens(ids, tokens)
        decision = self.p.decide_nack(ids, tokens, self.now, backoff, reason)
        held, lost = self.model.split(ids, tokens)
        assert decision.lost == lost
        for event in decision.events:
            if isinstance(event, Nacked):
                assert event.dues.tolist() == [self.model.retry_due(id, self.now, backoff) for id in event.ids.tolist()]
        for id in held:
            self.model.come_back(id, self.now, backoff, reason, reason or "nacked")
        self._emit_all(decision.events)
        return decision.lost

    def release(self, *ids: int, tokens: Sequence[int] | None = None) -> list[int]:
        tokens = self._tokens(ids, tokens)
        decision = self.p.decide_release(ids, tokens, self.now, self.take_seq(len(ids)))
        held, lost = self.model.split(ids, tokens)
        assert decision.lost == lost
        for id in held:
            self.model.release(id, self.now)
        self._emit_all(decision.events)
        return decision.lost

    def extend(self, *ids: int, tokens: Sequence[int] | None = None, by: int) -> list[int]:
        tokens = self._tokens(ids, tokens)
        decision = self.p.decide_extend(ids, tokens, self.now, by)
        held, lost = self.model.split(ids, tokens)
        assert decision.lost == lost
        for id in held:
            self.model.extend(id, self.now, by)
        self._emit_all(decision.events)
        return decision.lost

    def bury(
        self, *ids: int, tokens: Sequence[int] | None = None, reason: str | None = None, keep: bool = False
    ) -> list[int]:
        tokens = self._tokens(ids, tokens)
        decision = self.p.decide_bury(ids, tokens, self.now, reason, keep)
        held, lost = self.model.split(ids, tokens)
        assert decision.lost == lost
        for id in held:
            self.model.die(id, reason or "buried", self.now, keep=keep or self.config.dlq)
        self._emit_all(decision.events)
        return decision.lost

    def _tokens(self, ids: Sequence[int], tokens: Sequence[int] | None) -> Sequence[int]:
        return [self.token(id) for id in ids] if tokens is None else tokens

    def _emit_all(self, events: Sequence[AnyEvent]) -> None:
        for event in events:
            self.emit(event)

    # -- time ------------------------------------------------------------------------------------------------------

    def advance(self, ms: int) -> None:
        self.now = Now(self.now.steady + ms, self.now.wall + ms)

    def advance_to(self, id: int) -> None:
        """Advance to the time at which a delayed message is due."""
        m = self.model.messages[id]
        assert m.state == "delayed"
        self.advance(m.due - clock(self.now, m.wall))

    def set_wall(self, wall: int) -> None:
        self.now = Now(self.now.steady, wall)

    def tick(self, limit: int = 1000, turns: int = 10_000) -> list[AnyEvent]:
        """Process what is due, in `turns` decisions. Each must be correct; at the end none may be missing."""
        done: list[AnyEvent] = []
        for _ in range(turns):
            events = self.p.decide_tick(self.now, limit, self.take_seq)
            for _ in range(1000):  # stale entries are skipped in slices
                if events or self.p.next_wake_in(self.now) != 0:
                    break
                events = self.p.decide_tick(self.now, limit, self.take_seq)
            if not events:
                waits = self.model.changes_in(self.now)
                assert not [w for w in waits if w <= 0], "an event that is due did not happen"
                wake = self.p.next_wake_in(self.now)
                assert wake is None or wake > 0, "it would wake again immediately without work"
                break
            for event in events:
                assert event.rows() <= limit
                self.emit_observed(event)
            done += events
        return done

    def emit_observed(self, event: AnyEvent) -> None:
        """Check an event caused by time against the model, then apply it to both."""
        self.emit(event)
        model, now = self.model, self.now
        if isinstance(event, Fired) and event.ids is not None:
            assert event.count is None
            model.fire(event.ids.tolist(), event.wall, now)
        elif isinstance(event, Fired):
            assert not self.config.streams
            model.fire([m.id for m in model.timers(event.wall)[: event.count]], event.wall, now)
        elif isinstance(event, LeaseExpired):
            for id, due in zip(event.ids.tolist(), event.dues.tolist(), strict=True):
                assert due == model.retry_due(id, now, None)
                model.time_out(id, now, "waits")
        elif isinstance(event, DeadLettered):
            assert event.kept == self.config.dlq
            for id in event.ids.tolist():
                model.time_out(id, now, "dead" if event.kept else "dropped")
        else:
            assert isinstance(event, Expired), f"time alone cannot cause {event}"
            self._observe_expired(event)

    def _observe_expired(self, event: Expired) -> None:
        for id in event.leased.tolist():
            self.model.lapse(id, self.now)
        for id, stood in zip(event.ids.tolist(), event.delayed, strict=True):
            if stood == FROM_LEASE:
                self.model.time_out(id, self.now, "expired")
            else:
                self.model.expire(id, STOOD[stood], self.now)

    # -- changes to single messages --------------------------------------------------------------------------------

    def waiting(self, id: int) -> Found | None:
        """Return what the broker checks before it cancels or reschedules."""
        found = self.p.entries.find(id)
        return None if found is None or found.place in (LEASED, DEAD) else found

    def cancel(self, id: int) -> bool:
        found = self.waiting(id)
        m = self.model.messages.get(id)
        assert (found is not None) == (m is not None and m.is_waiting)
        if found is None:
            return False
        self.emit(self.p.decide_cancel(id, found))
        self.model.end(id, "cancelled", self.now.steady)
        return True

    def reschedule(self, id: int, *, priority: int | None = None, due: int | None = None, wall: bool = False) -> bool:
        """Like `engine/lookup.py`: the fields in the record, unless the message was changed since."""
        found = self.waiting(id)
        assert (found is not None) == self.model.messages[id].is_waiting
        if found is None:
            return False
        row, touched = self.records[id], self.p.entries.touched.get(id)
        ttl = int(row["ttl_ms"])
        if due is not None:
            expires, expires_wall = (due + ttl if ttl else 0), wall
        elif touched is not None:
            expires, expires_wall = touched.expires, touched.expires_wall
        else:
            expires = (int(row["due"]) or int(row["enqueued_at"])) + ttl if ttl else 0
            expires_wall = bool(int(row["flags"]) & FLAG_WALL)
        kept = touched.priority if touched is not None and touched.priority is not None else int(row["priority"])
        event = self.p.decide_reschedule(
            id, found, self.now, self.take_seq(), priority=kept if priority is None else priority,
            enqueued_at=int(row["enqueued_at"]), due=due, wall=wall, expires=expires, expires_wall=expires_wall,
        )  # fmt: skip
        self.emit(event)
        self.model.reschedule(id, self.now, priority=priority, due=due, wall=wall)
        return True

    def purge(self) -> int:
        event = self.p.decide_purge(self.now)
        waiting = self.model.inside("ready", "delayed")
        assert (0 if event is None else event.count) == len(waiting)
        if event is not None:
            self.emit(event)
        for m in waiting:
            self.model.turns.forget(m.fairness)
            self.model.end(m.id, "purged", self.now.steady)
        return len(waiting)

    def replay_dead(self, ids: Sequence[int], dues: Sequence[int] | None = None, restart_ttl: bool = True) -> None:
        dues = dues or [0] * len(ids)
        ttls = [self.model.messages[id].ttl_ms for id in ids]
        expires = [
            (due or self.now.steady) + ttl if ttl and restart_ttl else 0 for due, ttl in zip(dues, ttls, strict=True)
        ]
        self.emit(self.p.decide_replay(list(ids), list(dues), expires, self.take_seq(len(ids))))
        for id, due in zip(ids, dues, strict=True):
            self.model.replay(id, self.now, due, restart_ttl)

    def delete_dead(self, ids: Sequence[int]) -> None:
        self.emit(self.p.decide_dlq_delete(list(ids)))
        for id in ids:
            self.model.end(id, "deleted", self.now.steady)

    def configure(self, **changes: Any) -> None:
        self.config = msgspec.structs.replace(self.config, **changes)
        check_config(self.config)
        self.p.config = self.topic.config = self.model.config = self.config
        if "max_inflight_per_key" in changes:
            self.topic.settle()
        self.emit(ConfigChanged(msgspec.json.encode(self.config)))

    def everywhere(self) -> None:
        """Check that the partition, and those rebuilt from its journal and from a snapshot, equal the model."""
        self.check(self.replayed().partitions[0], look=True)
        if self.snapshot is not None:
            self.check(self.thawed().partitions[0], look=True)
        self.take_snapshot()
        self.check(self.thawed().partitions[0], look=True)
        self.check(look=True)
