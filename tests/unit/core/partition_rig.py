"""A real partition and the naive one side by side, with a journal that is a list.

Every command goes to both; what the real one decides is compared with what the naive one expects, encoded, kept, and
applied. `check` compares all that can be seen of the two. `replayed` and `thawed` build the partition again from what
was kept, as a restart would. Records have positions but no bytes: their rows are kept in a dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.config import TopicConfig
from heapline.core.dedup import CONFLICT, DUPLICATE, NEW, STALE
from heapline.core.events import (
    KIND_NAMES,
    Acked,
    AnyEvent,
    ConfigChanged,
    DeadLettered,
    Enqueued,
    Expired,
    Extended,
    Fired,
    FiredCount,
    Grant,
    KeyRows,
    LeaseExpired,
    Moved,
    Nacked,
    ProducerOpened,
    ProducerRows,
    Purged,
    decode_events,
    encode_event,
)  # fmt: skip
from heapline.core.heap import RunHeap
from heapline.core.idempotency import key_hash
from heapline.core.leases import Lease
from heapline.core.lifecycle import ALLOWED
from heapline.core.live import LiveMap
from heapline.core.partition import Found, Partition
from heapline.core.position import attempts_of, size_class
from heapline.core.record import DEFAULT_RETRIES, FLAG_WALL
from heapline.core.state import DEAD, DELAYED, FROM_LEASE, LEASED, READY
from heapline.core.timer_chunks import Sizes
from heapline.core.wheel import TimingWheel
from heapline.engine import freeze as freezing
from heapline.engine.columns import SCOPES, Columns
from heapline.engine.topic import Topic
from heapline.model import Now, Outgoing
from tests.unit.core.naive import NaiveKey, NaiveLease, NaiveMessage, NaivePartition, NaiveProducer, clock

START = 1_790_000_000_000
RECORD_BYTES = 1024
PLACES = {READY: "ready", DELAYED: "delayed", LEASED: "leased", DEAD: "dead"}
STOOD = {0: "ready", 1: "delayed", FROM_LEASE: "leased"}
#: So small that a dozen messages make runs, lanes, slots and far runs.
TINY_HEAP = {"front_rows": 6, "slice_rows": 5, "small_rows": 4, "singles_rows": 7, "fan_in": 2, "block_rows": 3}
TINY_WHEEL = Sizes(slots=3, fan_bits=1, chunk_rows=8, head_rows=4, slice_rows=2)
_WHEELS = (("delays", False), ("calendar", True), ("ttls", False), ("ttls_wall", True))


class Entry(NamedTuple):
    """An event as it would stand in the journal."""

    data: bytes
    at: int
    rows: Any
    positions: Any


class Snapshot(NamedTuple):
    frozen: freezing.Frozen
    entries: int  # of the log, that it stands for


def middle(count: int) -> npt.NDArray[np.float64]:
    return np.full(count, 0.5)


def fresh_topic(config: TopicConfig, now: Now) -> Topic:
    topic = Topic("jobs", config, now, middle)
    topic.live = LiveMap(topic.layout, check=True)
    topic.partitions = [Partition(0, config, topic.live, now, middle)]
    shrink(topic.partitions[0], now)
    return topic


def shrink(p: Partition, now: Now) -> None:
    """Give heap and wheels sizes at which few rows reach every path."""
    p.heap = RunHeap.from_runs(p.heap.runs(), **TINY_HEAP)
    for name, wall in _WHEELS:
        wheel: TimingWheel = getattr(p, name)
        chunks = wheel.chunks()
        setattr(p, name, TimingWheel.from_chunks(clock(now, wall), wheel.tick_ms, chunks, _sizes=TINY_WHEEL))


class Rig:
    def __init__(self, wall: int = START, **config: Any) -> None:
        self.config = TopicConfig(**config)
        self.config.validate()
        self.now = Now(START, wall)
        self.model = NaivePartition(self.config)
        self.topic = fresh_topic(self.config, self.now)
        self.log: list[Entry] = []
        self.snapshot: Snapshot | None = None
        self.records: dict[int, Any] = {}  # id -> row
        self.where: dict[int, tuple[int, int]] = {}  # id -> segment, byte
        self.segment, self._at = 1, 512
        self.reached: set[tuple[str, str, str]] = set()
        self.old_tokens: list[tuple[int, int]] = []
        self._seq = 1

    @property
    def p(self) -> Partition:
        return self.topic.partitions[0]

    # -- the journal -----------------------------------------------------------------------------------------------

    def take_seq(self, count: int = 1) -> int:
        self._seq += count
        return self._seq - count

    def emit(self, event: AnyEvent, rows: Any = None, positions: Any = None) -> None:
        """Keep an event and apply it; what it does to states must stand in the table of the lifecycle."""
        self.log.append(Entry(encode_event(event), self.now.steady, rows, positions))
        ids = self._ids_of(event, rows)
        before = {id: self.state_of(id) for id in ids}
        self.p.apply(event, self.now.steady, rows, positions)
        kind = KIND_NAMES[type(event)].replace("fired_count", "fired")
        for id in ids:
            step = (kind, before[id], self.state_of(id))
            if isinstance(event, Extended | Moved):
                assert step[1] == step[2], f"{kind} changes no state"
            else:
                assert step in ALLOWED, f"{step} is no transition of the lifecycle"
                self.reached.add(step)

    def _ids_of(self, event: AnyEvent, rows: Any) -> list[int]:
        if isinstance(event, Enqueued | Moved):
            found: list[int] = rows["id"].tolist()
            return found
        if isinstance(event, Purged):
            return [m.id for m in self.model.inside("ready", "delayed")]
        if isinstance(event, FiredCount):
            return [m.id for m in self.model.timers(event.wall)[: event.count]]
        return event.ids.tolist() if hasattr(event, "ids") else []

    def state_of(self, id: int) -> str:
        found = self.p.find(id)
        if found is not None:
            return PLACES[found.place]
        gone = self.p.gone.find(id)
        return "" if gone is None else gone.how

    def allot(self, rows: Any) -> Any:
        """Places for records, one behind the other."""
        places = self._at + np.arange(len(rows), dtype=np.int64) * RECORD_BYTES
        self._at += len(rows) * RECORD_BYTES
        for id, place in zip(rows["id"].tolist(), places.tolist(), strict=True):
            self.where[id] = (self.segment, place)
        return self.topic.layout.pack(self.segment, places, size_class(rows["payload_len"].astype(np.int64)))

    def roll(self) -> None:
        self.segment, self._at = self.segment + 1, 512

    # -- in --------------------------------------------------------------------------------------------------------

    def enqueue(self, *messages: Outgoing, producer: str | None = None, answered_below: int = 0) -> list[int]:
        """Enqueue those that are no duplicates; returns their ids. A producer speaks in its current epoch."""
        columns = Columns(messages)
        prints = np.array([len(m.payload) for m in messages], dtype=np.uint32)
        status = np.zeros(len(messages), dtype=np.int8)
        if producer is not None:
            self._judge_seqs(producer, columns, prints, status)
        keyed = [i for i, m in enumerate(messages) if m.idempotency_key is not None]
        self._judge_keys(keyed, columns, prints, status)
        new = np.flatnonzero(status == NEW)
        if not len(new):
            return []
        part = columns.subset(new.tolist())
        rows, _ = part.fill(*self.now)
        rows["payload_len"] = [len(p) for p in part.payloads]
        rows["id"] = self.p.ids.take(len(new), self.now.steady)
        event = Enqueued(0, 0, len(new), self.take_seq(len(new)))
        ids: list[int] = rows["id"].tolist()
        if producer is not None:
            event.producers = [self._producer_rows(producer, answered_below, ids, part, prints[new])]
        event.keys = self._key_rows(ids, part, prints[new])
        self.emit(event, rows, self.allot(rows))
        for row in rows:
            self.records[int(row["id"])] = row
            self.model.enqueue(_naive_message(row))
        return ids

    def _judge_seqs(self, producer: str, columns: Columns, prints: Any, status: Any) -> None:
        known = self.model.producers[producer]
        seqs = np.array(columns.seqs, dtype=np.int64)
        verdict = self.p.sequences.check(producer, known.epoch, seqs, prints)
        window = round(self.config.dedup_window * 1000)
        aged = any(at <= self.now.steady - window for at in known.written_at)
        for i, seq in enumerate(seqs.tolist()):
            first = known.seqs.get(seq)
            allowed = {NEW}
            if seq < known.answered_below:
                allowed = {STALE}
            elif first is not None:
                allowed = {DUPLICATE if first[1] == int(prints[i]) else CONFLICT}
            if (aged and first is not None) or (aged and seq < max(known.seqs, default=-1)):
                allowed |= {STALE}
            assert verdict.status[i] in allowed, "a sequence was judged otherwise than it should be"
            if verdict.status[i] in (DUPLICATE, CONFLICT):
                assert first is not None
                assert verdict.first_ids[i] == first[0]
        np.maximum(status, verdict.status, out=status)

    def _judge_keys(self, keyed: list[int], columns: Columns, prints: Any, status: Any) -> None:
        if not keyed:
            return
        names = [columns.tokens[i] for i in keyed]  # type: ignore[index]
        verdict = self.p.keys.check([key_hash(name) for name in names], prints[keyed], self.now.steady)
        for row, i in enumerate(keyed):
            known = self.model.known_key(names[row], self.now)
            expected = NEW if known is None else DUPLICATE if known.print == int(prints[i]) else CONFLICT
            assert verdict.status[row] == expected, f"key {names[row]} was judged otherwise than it should be"
            if known is not None:
                assert verdict.first_ids[row] == known.id
        status[keyed] = np.maximum(status[keyed], verdict.status)

    def _producer_rows(
        self, name: str, answered_below: int, ids: list[int], part: Columns, prints: Any
    ) -> ProducerRows:
        producer = self.model.producers[name]
        seqs = np.array(part.seqs, dtype=np.int64)
        for id, seq, print in zip(ids, seqs.tolist(), prints.tolist(), strict=True):
            producer.seqs[seq] = (id, print)
        producer.answered_below = max(producer.answered_below, answered_below)
        producer.written_at.append(self.now.steady)
        return ProducerRows(name, producer.epoch, answered_below, np.arange(len(ids)), seqs, prints.tobytes())

    def _key_rows(self, ids: list[int], part: Columns, prints: Any) -> KeyRows | None:
        keyed = [i for i, token in enumerate(part.tokens or ()) if token is not None]
        if not keyed:
            return None
        expires = self.now.steady + round(self.config.dedup_window * 1000)
        names = [part.tokens[i] for i in keyed]  # type: ignore[index]
        scopes = [SCOPES[(part.scopes[i] if part.scopes else None) or "window"] for i in keyed]
        for i, name, scope in zip(keyed, names, scopes, strict=True):
            self.model.keys[name] = NaiveKey(ids[i], int(prints[i]), scope, expires)
        return KeyRows(
            np.array(keyed), b"".join(map(key_hash, names)), prints[keyed].tobytes(),
            np.array(scopes, dtype=np.int8).tobytes(), np.full(len(keyed), expires),
        )  # fmt: skip

    def open_producer(self, name: str) -> None:
        epoch = (self.p.sequences.epoch_of(name) or 0) + 1
        self.emit(ProducerOpened(name, epoch, 1))
        self.model.producers[name] = NaiveProducer(epoch)

    # -- out -------------------------------------------------------------------------------------------------------

    def pop(
        self, *counts: int, visibility: int = 30_000, holder: str | None = None, request: str | None = None
    ) -> list[int]:
        """Serve pops of these sizes in one event; returns the ids, best first."""
        counts = counts or (1,)
        rows = self.p.eligible(sum(counts))
        ids: list[int] = rows.ids.tolist()
        assert ids == [m.id for m in self.model.line()[: sum(counts)]], "the best come first, and nothing else comes"
        grants: list[Grant] = []
        for number, count in enumerate(counts):
            share = min(count, len(ids) - sum(g.count for g in grants))
            if share:
                name = None if request is None else f"{request}{number}"
                grants.append(Grant(share, self.now.steady + visibility + number, holder, name))
        if not ids:
            return []
        token = self.p.offset
        event = self.p.decide_lease(rows, grants, self.now, self.take_seq(len(ids)))
        self.emit(event)
        at = 0
        for grant in grants:
            for i in range(at, at + grant.count):
                self.model.lease(ids[i], NaiveLease(token + i, grant.deadline, self.now.steady, holder))
                self.old_tokens.append((ids[i], token + i))
            if grant.request_id is not None:
                assert self.p.leases.request(grant.request_id) == ids[at : at + grant.count]
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
        """To the moment at which a delayed message is due."""
        m = self.model.messages[id]
        assert m.state == "delayed"
        self.advance(m.due - clock(self.now, m.wall))

    def set_wall(self, wall: int) -> None:
        self.now = Now(self.now.steady, wall)

    def tick(self, limit: int = 1000, turns: int = 10_000) -> list[AnyEvent]:
        """Let time do what is due, `turns` decisions of it. Each must be right; at the end none may lack."""
        done: list[AnyEvent] = []
        for _ in range(turns):
            events = self.p.decide_tick(self.now, limit, self.take_seq)
            if not events:
                waits = self.model.changes_in(self.now)
                assert not [w for w in waits if w <= 0], "something that is due was left undone"
                wake = self.p.next_wake_in(self.now)
                assert wake is None or wake > 0, "it would wake again at once, for nothing"
                break
            for event in events:
                assert event.rows() <= limit
                self.emit_observed(event)
            done += events
        return done

    def emit_observed(self, event: AnyEvent) -> None:
        """Check an event that time brought about against the model, then apply it to both."""
        self.emit(event)
        model, now = self.model, self.now
        if isinstance(event, Fired):
            model.fire(event.ids.tolist(), event.wall, now)
        elif isinstance(event, FiredCount):
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
            assert isinstance(event, Expired), f"time alone brings about no {event}"
            self._observe_expired(event)

    def _observe_expired(self, event: Expired) -> None:
        for id in event.leased.tolist():
            self.model.lapse(id, self.now)
        for id, stood in zip(event.ids.tolist(), event.delayed, strict=True):
            if stood == FROM_LEASE:
                self.model.time_out(id, self.now, "expired")
            else:
                self.model.expire(id, STOOD[stood], self.now)

    # -- by hand ---------------------------------------------------------------------------------------------------

    def waiting(self, id: int) -> Found | None:
        """What the broker asks before it cancels or reschedules."""
        found = self.p.find(id)
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
        """As `engine/lookup.py` does it: the record's facts, unless the message was touched since."""
        found = self.waiting(id)
        assert (found is not None) == self.model.messages[id].is_waiting
        if found is None:
            return False
        row, touched = self.records[id], self.p.touched.get(id)
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
        self.config.validate()
        self.p.config = self.topic.config = self.model.config = self.config
        self.emit(ConfigChanged(msgspec.json.encode(self.config)))

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def move(self, ids: Sequence[int]) -> None:
        """Write the records of these living messages again, as a rewrite of their segment would."""
        rows = np.array([self.records[id] for id in ids])
        self.emit(Moved(0, 0, len(rows)), rows, self.allot(rows))

    def take_snapshot(self, blob_rows_min: int = 4096) -> None:
        """Freeze now; the bytes are made when they are needed, as an I/O thread would."""
        with mock.patch.object(freezing, "BLOB_ROWS_MIN", blob_rows_min):
            self.snapshot = Snapshot(freezing.freeze(self.topic, len(self.log)), len(self.log))

    def replayed(self) -> Topic:
        """The topic that the whole journal leads to."""
        topic = fresh_topic(self.config, Now(START, START))
        self._replay_onto(topic, 0)
        return topic

    def thawed(self) -> Topic:
        """The topic that the last snapshot and the journal behind it lead to."""
        assert self.snapshot is not None
        frozen, entries = self.snapshot
        topic = fresh_topic(self.config, self.now)
        blobs = {name: b"".join(c.tobytes() for c in columns) for name, columns in frozen.blobs.items()}
        freezing.thaw(topic, frozen.encode(), blobs, self.now.steady, self.now.wall, "memory")
        shrink(topic.partitions[0], self.now)
        self._replay_onto(topic, entries)
        return topic

    def _replay_onto(self, topic: Topic, start: int) -> None:
        for data, at, rows, positions in self.log[start:]:
            (event,) = decode_events(b"\x91" + data, "memory")
            topic.partitions[0].apply(event, at, rows, positions)

    def restart(self, topic: Topic) -> None:
        """Go on with this one instead."""
        self.topic = topic

    # -- comparing -------------------------------------------------------------------------------------------------

    def check(self, p: Partition | None = None, look: bool = False) -> None:
        """All that can be seen of the partition is as the model says. `look` also asks who is next."""
        p = p or self.p
        model = self.model
        assert p.ready == model.count("ready")
        assert p.delayed == model.count("delayed")
        assert len(p.leases) == model.count("leased")
        assert len(p.dead) == model.count("dead")
        assert p.stale >= 0
        for m in model.messages.values():
            self._check_message(p, m)
        self._check_bookkeeping(p)
        self._check_live(p.live)
        if look:
            self._check_next(p)

    def _check_message(self, p: Partition, m: NaiveMessage) -> None:
        found = p.find(m.id)
        if not m.is_living:
            assert found is None
            gone = p.gone.find(m.id)
            assert gone is not None
            assert gone == (m.state, m.ended_at, m.end_reason)
            return
        assert found is not None, f"{m} is lost"
        assert PLACES[found.place] == m.state
        assert found.position == self._position(m)
        assert found.key == p.ordering.key(m.priority, m.enqueued_at)
        if m.state == "delayed":
            assert (found.due, found.wall) == (m.due, m.wall)
        assert p.reasons.get(m.id) == m.reason
        if m.lease is not None:
            lease: Lease = p.leases.by_id[m.id]
            expected = (m.lease.token, found.position, found.key, m.lease.deadline, m.lease.started, m.lease.holder)
            assert lease == expected
        if m.state == "dead":
            assert p.dead[m.id] == (found.position, found.key, m.end_reason, m.ended_at)

    def _position(self, m: NaiveMessage) -> int:
        segment, place = self.where[m.id]
        size = size_class(np.int64(self.records[m.id]["payload_len"]))
        return int(self.topic.layout.pack(segment, place, int(size), m.attempts))

    def _check_bookkeeping(self, p: Partition) -> None:
        """Nothing is kept of messages that are gone."""
        messages = self.model.messages
        living = {m.id for m in messages.values() if m.is_living}
        assert {id for id, m in messages.items() if m.lapsed} == p.lapsed
        assert p.retrying <= {id for id in living if messages[id].state == "delayed"}
        assert p.touched.keys() <= living
        assert p.limits == {id: messages[id].max_retries for id in living if messages[id].max_retries is not None}
        assert p.reasons.keys() <= living

    def _check_live(self, live: LiveMap) -> None:
        expected: dict[int, list[int]] = {}
        for m in self.model.messages.values():
            if m.is_living:
                segment, place = self.where[m.id]
                expected.setdefault(segment, []).append(place)
        for segment in {*live.segments(), *expected}:
            assert live.count(segment) == len(expected.get(segment, []))
            assert live.places(segment).tolist() == sorted(expected.get(segment, []))

    def _check_next(self, p: Partition) -> None:
        rows = p.eligible(len(self.model.messages) + 1)
        line = self.model.line()
        assert rows.ids.tolist() == [m.id for m in line]
        assert attempts_of(rows.positions).tolist() == [m.attempts for m in line]
        head = p.head()
        assert (None if head is None else head[1]) == (line[0].id if line else None)
        wake, waits = p.next_wake_in(self.now), self.model.changes_in(self.now)
        if waits:
            assert wake is not None
            assert wake < max(0, min(waits)) + p.delays.tick_ms, "it would sleep for too long"


def _naive_message(row: Any) -> NaiveMessage:
    retries = int(row["max_retries"])
    return NaiveMessage(
        id=int(row["id"]), priority=int(row["priority"]), enqueued_at=int(row["enqueued_at"]), due=int(row["due"]),
        wall=bool(int(row["flags"]) & FLAG_WALL), ttl_ms=int(row["ttl_ms"]),
        max_retries=None if retries == DEFAULT_RETRIES else retries,
    )  # fmt: skip
