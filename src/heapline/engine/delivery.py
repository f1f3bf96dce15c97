"""Lease messages to pops, and build the answers.

The pops of a turn are served together: the best messages across all partitions (local_spine.py) in one order,
distributed in the order in which the pops arrived. A pop's answer needs two things, in either order: the lease made
durable, and the records read.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from heapline.contract.columns import NO_ROWS
from heapline.contract.errors import ResourceExhausted
from heapline.contract.leases import LeasedMessages
from heapline.core.events import I64, Grant
from heapline.core.heap.run_heap import Rows
from heapline.core.ids import partition_of
from heapline.core.leases import DEADLINE, KEY, POSITION, TOKEN
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.rate import TokenBucket
from heapline.core.record import ATTEMPTS_MAX, FLAG_FAIRNESS, FLAG_HEADERS, FLAG_KEY, size_bound
from heapline.engine.counters import Counters
from heapline.engine.local_spine import Heads
from heapline.engine.topic import Topic
from heapline.journal.log import TopicLog
from heapline.journal.records import Records

NO_IDS: I64 = np.zeros(0, dtype=np.int64)
_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode


class PopCall(msgspec.Struct, eq=False):
    """One pop: its request, and then its messages."""

    future: Future[Any]
    max_messages: int
    max_bytes: int
    visibility_ms: int
    holder: str | None
    request_id: str | None
    waits: bool
    leases_max: int | None = None  # leases that its holder may have on the topic; None: no limit
    quota: int = 0  # messages in this turn: fewer if its holder may not have as many leases
    timer: Any = None
    began: float = 0.0  # start of its latency; 0 while it waits for a message
    refusal: ResourceExhausted | None = None  # decided in a turn; sent once that is durable
    count: int = 0
    ids: I64 = NO_IDS
    tokens: I64 = NO_IDS
    positions: I64 = NO_IDS
    deadline: int | I64 = 0

    def __post_init__(self) -> None:
        self.quota = self.max_messages

    def forget(self) -> None:
        """Forget the messages, to serve the call again."""
        self.count = self.deadline = 0
        self.ids = self.tokens = self.positions = NO_IDS


class Delivery:
    def __init__(self, topic: Topic, journal: TopicLog, counters: Counters, rate: TokenBucket | None) -> None:
        self._topic = topic
        self._journal = journal
        self._counters = counters
        self.rate = rate  # None: no rate limit
        self.heads = Heads(topic)

    def serve(self, calls: Sequence[PopCall], now: Now) -> list[PopCall]:
        """Lease messages to these pops; return those that got some."""
        named = [call for call in calls if call.request_id is not None]
        for call in named:
            self._repeat(call)
        # If several pops have one request id, the first is served and the others repeat it.
        first = {call.request_id: call for call in reversed(named)}
        fresh = [c for c in calls if not c.count and (c.request_id is None or first[c.request_id] is c)]
        crowded: list[PopCall] = []
        if any(call.leases_max is not None for call in fresh):
            fresh, crowded = self._within_limits(fresh)
        self._serve_fresh(fresh, now)
        for call in crowded:  # of the same holders: the pops before may have taken less than was reserved for them
            allowed, _ = self._within_limits([call])
            self._serve_fresh(allowed, now)
            if allowed and not call.count:  # nothing is left
                break
        for call in named:
            if not call.count and first[call.request_id] is not call:
                self._repeat(call)
        return [call for call in calls if call.count]

    def _within_limits(self, calls: Sequence[PopCall]) -> tuple[list[PopCall], list[PopCall]]:
        """Return the pops that may lease in this turn, each reduced to what its holder may still have, and the rest.

        Decided in the turn that grants the leases, so concurrent waiting pops cannot exceed the limit together.
        """
        held: dict[str, int] = {}
        reserved: dict[str, int] = {}
        allowed, crowded = [], []
        for call in calls:
            limit, holder = call.leases_max, call.holder or ""
            if limit is None:
                allowed.append(call)
                continue
            if holder not in held:
                held[holder], reserved[holder] = self._held(holder), 0
            room = limit - held[holder]
            if room < 1:
                what = f"leases of consumer {holder!r} on topic {self._topic.name!r}"
                call.refusal = ResourceExhausted(what, limit)
            elif room <= reserved[holder]:
                crowded.append(call)
            else:
                call.quota = min(call.max_messages, room - reserved[holder])
                reserved[holder] += call.quota
                allowed.append(call)
        return allowed, crowded

    def _held(self, holder: str) -> int:
        return sum(p.leases.held.get(holder, 0) for p in self._topic.partitions)

    def _serve_fresh(self, calls: Sequence[PopCall], now: Now) -> None:
        room = self._room(now)
        if not calls or room <= 0:
            return
        want = min(sum([call.quota for call in calls]), room)
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
        """Apply the current rate setting."""
        rate = self._topic.config.max_pops_per_second
        if not rate:
            self.rate = None
        elif self.rate is None:
            self.rate = TokenBucket(rate, now.steady)
        else:
            self.rate.change(rate, now.steady)

    def next_room_in(self, now: Now) -> int | None:
        """Return the milliseconds until time alone allows more deliveries; None if something else is needed."""
        if self._topic.paused or not self._topic.ready:
            return None
        waits = []
        if self.rate is not None and (wait := self.rate.next_in(now.steady)):
            waits.append(wait)
        if self.heads.look_again_at is not None and self.heads.look_again_at > now.steady:
            waits.append(self.heads.look_again_at - now.steady)
        return min(waits, default=None)  # after that, other conditions may still apply

    def _repeat(self, call: PopCall) -> None:
        """Give a repeated pop the leases that it got before, as far as they still exist, best first."""
        held = sorted(
            (lease[KEY], id, lease)
            for partition in self._topic.partitions
            for id in partition.leases.request(call.request_id or "")
            for lease in (partition.leases.by_id[id],)
        )
        call.count = len(held)
        if held:
            call.ids = np.array([id for _, id, _ in held], dtype=np.int64)
            call.tokens = np.array([lease[TOKEN] for _, _, lease in held], dtype=np.int64)
            call.positions = np.array([lease[POSITION] for _, _, lease in held], dtype=np.int64)
            call.deadline = np.array([lease[DEADLINE] for _, _, lease in held], dtype=np.int64)

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
        """Lease the best messages across all partitions: from each, the first ones in its own order."""
        chosen = self.heads.choose(want, now.steady)
        counts = share(size_bound(chosen.positions[:want]), calls)
        total = sum(counts)
        if not total:
            return
        ids, owner = chosen.ids[:total], chosen.owner[:total]
        given = np.bincount(owner, minlength=len(chosen.owners)).tolist()
        limits = self.heads.limits(chosen, total)
        self.heads.took(total)
        # All leases of one selection have the same spine sequence: they are one step, in the order of their keys.
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
        self,
        partition: Partition,
        rows: Rows,
        calls: Sequence[PopCall],
        counts: Sequence[int],
        now: Now,
        seq: int,
        limit: int | None = None,
    ) -> tuple[I64, I64]:
        """Lease these rows to the calls; return their tokens and positions."""
        grants: list[Grant] = []
        for call, count in zip(calls, counts, strict=True):
            if count:
                deadline = now.steady + call.visibility_ms
                last = grants[-1] if grants else None
                alike = last is not None and (last.deadline, last.holder) == (deadline, call.holder)
                if last is not None and alike and last.request_id is None is call.request_id:
                    last.count += count  # equal pops share one grant
                else:
                    grants.append(Grant(count, deadline, call.holder, call.request_id))
        count = len(rows.ids)
        tokens = np.arange(partition.offset, partition.offset + count)
        event = partition.decide_lease(rows, grants, now, seq, limit)
        self._topic.emit(self._journal, partition, event, now)
        self._counters.leased += count
        if self.rate is not None:
            self.rate.take(count)
        attempts = np.frombuffer(event.attempts, dtype=np.uint8).astype(np.int64)
        return tokens, (rows.positions & ~ATTEMPTS_MAX) | attempts


def _hand_out(calls: Sequence[PopCall], counts: Sequence[int], ids: I64, tokens: I64, positions: I64, now: Now) -> None:
    """Give each call its messages, best first."""
    start = 0
    for call, count in zip(calls, counts, strict=True):
        end = start + count
        call.count = count
        call.ids, call.tokens, call.positions = ids[start:end], tokens[start:end], positions[start:end]
        call.deadline = now.steady + call.visibility_ms
        start = end


def share(bounds: I64, calls: Sequence[PopCall]) -> list[int]:
    """Return how many of these messages, in order, each call gets: at most what it wants, in count and in bytes.

    A call that gets any gets at least one, however large.
    """
    ends = np.cumsum(bounds)
    counts: list[int] = []
    at, total = 0, len(bounds)
    if total and int(ends[-1]) <= min([call.max_bytes for call in calls]):  # all fit anywhere: only counts matter
        for call in calls:
            counts.append(min(call.quota, total - at))
            at += counts[-1]
        return counts
    for call in calls:
        if at >= total:
            counts.append(0)
            continue
        before = int(ends[at - 1]) if at else 0
        by_bytes = int(np.searchsorted(ends, before + call.max_bytes, side="right")) - at
        count = min(call.quota, max(1, by_bytes), total - at)
        counts.append(count)
        at += count
    return counts


def build_answers(calls: Sequence[PopCall], records: Records, topic: Topic) -> list[LeasedMessages]:
    """Return the messages of each served pop as columns, in the order of `records`: built per turn, not per pop."""
    rows = records.rows
    flags = rows["flags"]
    keys = headers = fairness_keys = None
    if (flags & (FLAG_KEY | FLAG_HEADERS | FLAG_FAIRNESS)).any():
        lengths = rows["key_len"].tolist(), rows["fairness_len"].tolist()
        smalls = zip(records.smalls, *lengths, flags.tolist(), strict=True)
        keys, fairness_keys, headers = map(list, zip(*[split_small(*small) for small in smalls], strict=True))
    ids = _joined([call.ids for call in calls])
    priorities = np.ascontiguousarray(rows["priority"])
    if any(p.touched for p in topic.partitions):
        priorities = _current_priorities(ids.tolist(), priorities, topic)
    attempts = (_joined([call.positions for call in calls]) & ATTEMPTS_MAX).astype(np.uint8)
    if any(call.request_id is not None for call in calls):  # repeated pops have a deadline per lease
        deadlines = _joined([np.full(call.count, call.deadline) for call in calls])
    else:
        deadlines = np.repeat([call.deadline for call in calls], [call.count for call in calls])
    partitions = None if len(topic.partitions) == 1 else packed(partition_of(ids).astype(np.uint16))
    whole = LeasedMessages(
        packed(ids),
        packed(_joined([call.tokens for call in calls])),
        records.payloads,
        packed(priorities),
        packed(attempts),
        packed(np.ascontiguousarray(rows["enqueued_at"])),
        packed(deadlines),
        partitions,
        keys,
        fairness_keys,
        headers,
    )
    if len(calls) == 1:
        return [whole]
    answers: list[LeasedMessages] = []
    start = 0
    for call in calls:
        end = start + call.count
        answers.append(_rows(whole, start, end))
        start = end
    return answers


def _joined(columns: list[I64]) -> I64:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _rows(whole: LeasedMessages, start: int, end: int) -> LeasedMessages:
    """Return rows [start, end), over the same memory: a turn of many small pops builds its columns once."""
    wide = slice(8 * start, 8 * end)
    return LeasedMessages(
        whole.ids[wide],
        whole.tokens[wide],
        whole.payloads[start:end],
        whole.priorities[wide],
        whole.attempts[start:end],
        whole.enqueued_ms[wide],
        whole.deadline_ms[wide],
        whole.partitions and whole.partitions[2 * start : 2 * end],
        whole.keys and whole.keys[start:end],
        whole.fairness_keys and whole.fairness_keys[start:end],
        whole.headers and whole.headers[start:end],
    )


def packed(column: Any) -> memoryview:
    """Return a contiguous array as a packed column, over the same memory."""
    return column.data.cast("B") if len(column) else NO_ROWS


def without(answer: LeasedMessages, bad: Sequence[int]) -> LeasedMessages:
    """Return the messages without the rows in `bad`."""
    keep = np.array([i for i in range(len(answer)) if i not in bad], dtype=np.int64)

    def picked(column: Any, form: str = "<i8") -> Any:
        return None if column is None else packed(np.frombuffer(column, dtype=form)[keep])

    def listed(column: Any) -> Any:
        return None if column is None else [column[i] for i in keep.tolist()]

    return LeasedMessages(
        picked(answer.ids),
        picked(answer.tokens),
        listed(answer.payloads),
        picked(answer.priorities),
        picked(answer.attempts, "u1"),
        picked(answer.enqueued_ms),
        picked(answer.deadline_ms),
        picked(answer.partitions, "<u2"),
        listed(answer.keys),
        listed(answer.fairness_keys),
        listed(answer.headers),
    )


def _current_priorities(ids: list[int], priorities: I64, topic: Topic) -> I64:
    """Return the current priorities: a rescheduled message has a different priority than its record."""
    for i, id in enumerate(ids):
        touched = topic.partitions[partition_of(id)].touched.get(id)
        if touched is not None and touched.priority is not None:
            priorities[i] = touched.priority
    return priorities


def split_small(
    small: bytes, key_len: int, fairness_len: int, flags: int
) -> tuple[str | None, str | None, dict[str, str] | None]:
    """Return (key, fairness key, headers)."""
    key = bytes(small[:key_len]).decode() if flags & FLAG_KEY else None
    end = key_len + fairness_len
    fairness_key = bytes(small[key_len:end]).decode() if flags & FLAG_FAIRNESS else None
    headers = _decode_headers(small[end:]) if flags & FLAG_HEADERS else None
    return key, fairness_key, headers
