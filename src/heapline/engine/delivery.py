"""Handing messages out: which go to which pop, and what a popped message looks like.

The pops of a turn are served together: the best messages over all partitions (engine/heads.py) in one order, shared
out in the order in which the pops came. A pop's answer needs two things, in either order: the lease made durable, and
the records read.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from heapline.core.events import I64, Grant
from heapline.core.heap import Rows
from heapline.core.ids import partition_of
from heapline.core.leases import DEADLINE, KEY, POSITION, TOKEN
from heapline.core.partition import Partition
from heapline.core.position import ATTEMPTS_MAX, size_bound
from heapline.core.rate import TokenBucket
from heapline.core.record import FLAG_FAIRNESS, FLAG_HEADERS, FLAG_KEY
from heapline.engine.heads import Heads
from heapline.engine.topic import Topic
from heapline.journal.journal import Journal
from heapline.journal.records import Records
from heapline.model import Message, Now, Popped

if TYPE_CHECKING:
    from heapline.broker import Broker

_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode


class PopCall:
    """One pop: what it wants, and then what it got."""

    __slots__ = (
        "began", "by_columns", "deadline", "future", "holder", "ids", "max_bytes", "max_messages", "positions",
        "request_id", "timer", "tokens", "visibility_ms", "waits",
    )  # fmt: skip

    def __init__(
        self, future: Future[Any], max_messages: int, max_bytes: int, visibility_ms: int, holder: str | None,
        request_id: str | None, waits: bool, by_columns: bool = False,
    ) -> None:  # fmt: skip
        self.by_columns = by_columns  # answer with Popped instead of messages
        self.future = future
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.visibility_ms = visibility_ms
        self.holder = holder
        self.request_id = request_id
        self.waits = waits
        self.timer: Any = None
        self.began = 0.0  # when its latency began to count; 0 while it waits for something to be there
        self.ids: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.deadline: int | list[int] = 0


class Delivery:
    def __init__(self, topic: Topic, journal: Journal, rate: TokenBucket | None = None) -> None:
        self._topic = topic
        self._journal = journal
        self.rate = rate  # None: as many as are asked for
        self.leased = 0
        self.heads = Heads(topic)

    def serve(self, calls: Sequence[PopCall], now: Now) -> list[PopCall]:
        """Lease messages to these pops; returns those that got some."""
        named = [call for call in calls if call.request_id is not None]
        for call in named:
            self._repeat(call)
        # Of pops with one request id that come together, the first is served and the others repeat it.
        first = {call.request_id: call for call in reversed(named)}
        fresh = [c for c in calls if not c.ids and (c.request_id is None or first[c.request_id] is c)]
        self._serve_fresh(fresh, now)
        for call in named:
            if not call.ids and first[call.request_id] is not call:
                self._repeat(call)
        return [call for call in calls if call.ids]

    def _serve_fresh(self, calls: Sequence[PopCall], now: Now) -> None:
        room = self._room(now)
        if not calls or room <= 0:
            return
        want = min(sum([call.max_messages for call in calls]), room)
        partitions = self._topic.partitions
        if len(partitions) > 1 or self._topic.config.min_freshness:
            self._serve_many(calls, want, now)
        elif partitions[0].ready and partitions[0].throttled is None:
            self._serve_one(partitions[0], calls, want, now)

    def _room(self, now: Now) -> int:
        if self._topic.paused:
            return 0
        limit = self._topic.config.max_inflight
        room = limit - self._topic.leased if limit else 1 << 40
        return room if self.rate is None else min(room, self.rate.room(now.steady))

    def retune(self, now: Now) -> None:
        """Hand out at the rate that is set now."""
        rate = self._topic.config.max_pops_per_second
        if not rate:
            self.rate = None
        elif self.rate is None:
            self.rate = TokenBucket(rate, now.steady)
        else:
            self.rate.change(rate, now.steady)

    def next_room_in(self, now: Now) -> int | None:
        """Milliseconds until more may be handed out by time alone; None if something else is waited for."""
        if self._topic.paused or not self._topic.ready:
            return None
        waits = []
        if self.rate is not None and (wait := self.rate.next_in(now.steady)):
            waits.append(wait)
        if self.heads.look_again_at is not None and self.heads.look_again_at > now.steady:
            waits.append(self.heads.look_again_at - now.steady)
        return min(waits, default=None)  # and then what is still waited for

    def _repeat(self, call: PopCall) -> None:
        """A pop that was asked before gets the leases that it got then, as far as they still stand, best first."""
        held = sorted(
            (lease[KEY], id, lease)
            for partition in self._topic.partitions
            for id in partition.leases.request(call.request_id or "")
            for lease in (partition.leases.by_id[id],)
        )
        call.ids = [id for _, id, _ in held]
        call.tokens = [lease[TOKEN] for _, _, lease in held]
        call.positions = [lease[POSITION] for _, _, lease in held]
        call.deadline = [lease[DEADLINE] for _, _, lease in held]

    def _serve_one(self, partition: Partition, calls: Sequence[PopCall], want: int, now: Now) -> None:
        rows = partition.eligible(want)
        counts = share(size_bound(rows.positions), calls)
        total = sum(counts)
        if total:
            rows = Rows(*(column[:total] for column in rows))
            tokens, positions = self._lease(partition, rows, calls, counts, now, self._topic.take_seq(total))
            self.heads.taken[0] += total
            _hand_out(calls, counts, rows.ids, tokens, positions, now)

    def _serve_many(self, calls: Sequence[PopCall], want: int, now: Now) -> None:
        """The best over all partitions. Of each, that is the first so many in its own order."""
        chosen = self.heads.choose(want, now.steady)
        counts = share(size_bound(chosen.positions[:want]), calls)
        total = sum(counts)
        if not total:
            return
        ids, owner = chosen.ids[:total], chosen.owner[:total]
        given = np.bincount(owner, minlength=len(chosen.owners)).tolist()
        limits = self.heads.limits(chosen, total)
        self.heads.took(total)
        # Of one selection all leases carry the same spine sequence: they are one step, in the order of their keys.
        seq = self._topic.take_seq(total)
        by_owner = owner.argsort(kind="stable")
        whose = np.repeat(np.arange(len(calls)), counts)[by_owner]
        tokens, leased = np.empty_like(ids), np.empty_like(ids)
        start = 0
        for number, rows, count, limit in zip(chosen.owners, chosen.rows, given, limits, strict=True):
            if count:
                mine = by_owner[start : start + count]
                shares = np.bincount(whose[start : start + count], minlength=len(calls)).tolist()
                taken = Rows(*(column[chosen.place[mine]] for column in rows))
                partition = self._topic.partitions[number]
                tokens[mine], leased[mine] = self._lease(partition, taken, calls, shares, now, seq, limit)
                self.heads.taken[number] += count
                start += count
        _hand_out(calls, counts, ids, tokens, leased, now)

    def _lease(
        self, partition: Partition, rows: Rows, calls: Sequence[PopCall], counts: Sequence[int], now: Now, seq: int,
        limit: int | None = None,
    ) -> tuple[I64, I64]:  # fmt: skip
        """Lease these rows to the calls; returns their tokens and positions."""
        grants: list[Grant] = []
        for call, count in zip(calls, counts, strict=True):
            if count:
                deadline = now.steady + call.visibility_ms
                last = grants[-1] if grants else None
                alike = last is not None and (last.deadline, last.holder) == (deadline, call.holder)
                if last is not None and alike and last.request_id is None is call.request_id:
                    last.count += count  # pops that ask alike need not be told apart
                else:
                    grants.append(Grant(count, deadline, call.holder, call.request_id))
        count = len(rows.ids)
        tokens = np.arange(partition.offset, partition.offset + count)
        event = partition.decide_lease(rows, grants, now, seq, limit)
        self._topic.emit(self._journal, partition, event, now)
        self.leased += count
        if self.rate is not None:
            self.rate.take(count)
        attempts = np.frombuffer(event.attempts, dtype=np.uint8).astype(np.int64)
        return tokens, (rows.positions & ~ATTEMPTS_MAX) | attempts


def _hand_out(calls: Sequence[PopCall], counts: Sequence[int], ids: I64, tokens: I64, positions: I64, now: Now) -> None:
    """Tell each call which messages are its own, best first."""
    all_ids, all_tokens, all_positions = ids.tolist(), tokens.tolist(), positions.tolist()
    start = 0
    for call, count in zip(calls, counts, strict=True):
        end = start + count
        call.ids, call.tokens = all_ids[start:end], all_tokens[start:end]
        call.positions = all_positions[start:end]
        call.deadline = now.steady + call.visibility_ms
        start = end


def share(bounds: I64, calls: Sequence[PopCall]) -> list[int]:
    """How many of these messages, in order, each call gets: at most what it wants, in count and in bytes.

    A call that gets any gets at least one, however large.
    """
    ends = np.cumsum(bounds)
    counts: list[int] = []
    at, total = 0, len(bounds)
    if total and int(ends[-1]) <= min([call.max_bytes for call in calls]):  # all fit anywhere: only counts matter
        for call in calls:
            counts.append(min(call.max_messages, total - at))
            at += counts[-1]
        return counts
    for call in calls:
        if at >= total:
            counts.append(0)
            continue
        before = int(ends[at - 1]) if at else 0
        by_bytes = int(np.searchsorted(ends, before + call.max_bytes, side="right")) - at
        count = min(call.max_messages, max(1, by_bytes), total - at)
        counts.append(count)
        at += count
    return counts


def build_answers(calls: Sequence[PopCall], records: Records, topic: Topic, broker: Broker) -> list[Any]:
    """What each served pop is answered with, in the order of `records`: messages, or their columns."""
    popped = build_columns(calls, records, topic)
    whole = None if all(call.by_columns for call in calls) else build_messages(popped, topic, broker)
    if len(calls) == 1:
        return [popped if whole is None else whole]
    answers: list[Any] = []
    start = 0
    for call in calls:
        end = start + len(call.ids)
        if call.by_columns:
            columns: Any = [column and column[start:end] for column in popped]
            answers.append(Popped(*columns))
        else:
            answers.append(whole[start:end] if whole is not None else [])
        start = end
    return answers


def build_columns(calls: Sequence[PopCall], records: Records, topic: Topic) -> Popped:
    """The fields of all messages of served pops, one pop after the other: per batch, not per pop."""
    rows = records.rows
    ids = [id for call in calls for id in call.ids]
    flags = rows["flags"]
    keys = headers = fairness_keys = None
    if (flags & (FLAG_KEY | FLAG_HEADERS | FLAG_FAIRNESS)).any():
        lengths = rows["key_len"].tolist(), rows["fairness_len"].tolist()
        smalls = zip(records.smalls, *lengths, flags.tolist(), strict=True)
        keys, fairness_keys, headers = map(list, zip(*[split_small(*small) for small in smalls], strict=True))
    deadlines = [
        deadline
        for call in calls
        for deadline in (call.deadline if isinstance(call.deadline, list) else repeat(call.deadline, len(call.ids)))
    ]
    priorities = rows["priority"].tolist()
    if any(p.touched for p in topic.partitions):
        priorities = _current_priorities(ids, priorities, topic)
    return Popped(
        ids,
        [token for call in calls for token in call.tokens],
        priorities,
        records.payloads,
        [position & ATTEMPTS_MAX for call in calls for position in call.positions],
        rows["enqueued_at"].tolist(),
        deadlines,
        [0] * len(ids) if len(topic.partitions) == 1 else partition_of(np.array(ids, dtype=np.int64)).tolist(),
        keys,
        fairness_keys,
        headers,
    )


def build_messages(popped: Popped, topic: Topic, broker: Broker) -> list[Message]:
    columns = zip(
        repeat(broker, len(popped.ids)),
        repeat(topic.name),
        popped.partitions,
        popped.ids,
        popped.tokens,
        popped.payloads,
        popped.priorities,
        popped.attempts,
        popped.keys or repeat(None),
        popped.headers or repeat(None),
        popped.enqueued_ms,
        popped.deadline_ms,
        popped.fairness_keys or repeat(None),
        strict=False,
    )
    return list(starmap(Message, columns))


def _current_priorities(ids: list[int], priorities: list[int], topic: Topic) -> list[int]:
    """A rescheduled message has another priority than its record says."""
    for i, id in enumerate(ids):
        touched = topic.partitions[partition_of(id)].touched.get(id)
        if touched is not None and touched.priority is not None:
            priorities[i] = touched.priority
    return priorities


def split_small(
    small: bytes, key_len: int, fairness_len: int, flags: int
) -> tuple[str | None, str | None, dict[str, str] | None]:
    """(key, fairness key, headers)"""
    key = bytes(small[:key_len]).decode() if flags & FLAG_KEY else None
    end = key_len + fairness_len
    fairness_key = bytes(small[key_len:end]).decode() if flags & FLAG_FAIRNESS else None
    headers = _decode_headers(small[end:]) if flags & FLAG_HEADERS else None
    return key, fairness_key, headers
