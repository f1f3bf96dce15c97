"""Lease messages to pops.

The pops of a turn are served together: the best messages across all partitions (local_spine.py) in one order,
distributed in the order in which the pops arrived. Their answers are in pop_replies.py.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from heapline.contract.errors import ResourceExhausted
from heapline.core.events import I64, Grant
from heapline.core.leases import DEADLINE, KEY, POSITION, TOKEN
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.rate import TokenBucket
from heapline.core.record import (
    FLAG_FAIRNESS,
    FLAG_HEADERS,
    FLAG_KEY,
    after_delivery,
    attempts_column,
    size_bound,
)
from heapline.engine.counters import Counters
from heapline.engine.local_spine import NO_SELECTION, Heads, Selection
from heapline.engine.topic import ChosenLease, Topic
from heapline.journal.log import TopicLog

NO_IDS: I64 = np.zeros(0, dtype=np.int64)
_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode


class LeasedRows(NamedTuple):
    """Rows that were leased in one step, best first: to one pop, or to several in the order of the pops."""

    ids: I64
    tokens: I64
    positions: I64
    deadlines: I64


NO_LEASES = LeasedRows(NO_IDS, NO_IDS, NO_IDS, NO_IDS)


class PopCall(msgspec.Struct, eq=False):
    """One pop: its request, and then its messages."""

    future: Future[Any]
    max_messages: int
    max_bytes: int
    visibility_ms: int
    holder: str | None
    request_id: str | None
    waits: bool
    leases_max: int | None  # leases that its holder may have on the topic; None: no limit
    quota: int  # messages in this turn: `max_messages`, or fewer if its holder may not have as many leases
    began: float = 0.0  # start of its latency; 0 while it waits for a message
    refusal: ResourceExhausted | None = None  # decided in a turn; sent once that is durable
    leased: LeasedRows = NO_LEASES  # its rows are [start, start + count); a slice for each pop would take longer
    start: int = 0
    count: int = 0

    @property
    def rows(self) -> LeasedRows:
        """The rows of this pop alone."""
        return LeasedRows(*[column[self.start : self.start + self.count] for column in self.leased])

    def forget(self) -> None:
        """Forget the messages, to serve the call again."""
        self.start = self.count = 0
        self.leased = NO_LEASES


def rows_of(calls: Sequence[PopCall]) -> LeasedRows:
    """Return the rows of all pops that a turn served, in the order of the pops."""
    whole = calls[0].leased
    others = [call for call in calls if call.leased is not whole]
    if not others:
        return whole
    return LeasedRows(*map(np.concatenate, zip(*[call.rows for call in calls], strict=True)))


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
        if named:
            self._serve_named(calls, named, now)
        else:
            self._serve_limited(calls, now)
        return [call for call in calls if call.count]

    def _serve_named(self, calls: Sequence[PopCall], named: Sequence[PopCall], now: Now) -> None:
        """Serve pops of which some have a request id, and may repeat an earlier pop."""
        for call in named:
            self._repeat(call)
        # If several pops have one request id, the first is served and the others repeat it.
        first = {call.request_id: call for call in reversed(named)}
        fresh = [c for c in calls if not c.count and (c.request_id is None or first[c.request_id] is c)]
        self._serve_limited(fresh, now)
        for call in named:
            if not call.count and first[call.request_id] is not call:
                self._repeat(call)

    def _serve_limited(self, calls: Sequence[PopCall], now: Now) -> None:
        """Serve pops that repeat no other, within the limits of their holders."""
        limited = [call for call in calls if call.leases_max is not None]
        if not limited:
            self._serve_fresh(calls, now)
            return
        allowed, crowded = self._within_limits(calls)
        self._serve_fresh(allowed, now)
        for call in crowded:  # of the same holders: the pops before may have taken less than was reserved for them
            allowed, _ = self._within_limits([call])
            self._serve_fresh(allowed, now)
            if allowed and not call.count:  # nothing is left
                break

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
        return sum(p.entries.leases.held.get(holder, 0) for p in self._topic.partitions)

    def _serve_fresh(self, calls: Sequence[PopCall], now: Now) -> None:
        room = self._room(now)
        if not calls or room <= 0:
            return
        want = min(sum([call.quota for call in calls]), room)
        partitions = self._topic.partitions
        if len(partitions) > 1 or self._topic.config.min_freshness:
            self._serve_many(calls, want, now)
        elif partitions[0].entries.ready and partitions[0].state.throttled is None:
            self._serve_one(partitions[0], calls, want, now)

    def preview(self, want: int, now: Now) -> Selection:
        """Return the messages that pops would lease next, as if the topic were neither paused nor at a limit."""
        heads, partition = self.heads, self._topic.partitions[0]
        if len(self._topic.partitions) > 1 or self._topic.config.min_freshness:
            counts = heads.selections, heads.refusals
            chosen = heads.choose(want, now.steady)
            heads.selections, heads.refusals = counts
        elif partition.entries.ready and partition.state.throttled is None:
            rows = partition.eligible(want)
            chosen = Selection([0], np.zeros(len(rows.ids), dtype=np.intp), *rows)
        else:
            return NO_SELECTION
        return Selection(chosen.owners, *(column[:want] for column in chosen[1:]))

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
            for id in partition.entries.leases.request(call.request_id or "")
            for lease in (partition.entries.leases.by_id[id],)
        )
        call.start, call.count = 0, len(held)
        if held:
            rows = [(id, lease[TOKEN], lease[POSITION], lease[DEADLINE]) for _, id, lease in held]
            call.leased = LeasedRows(*np.array(rows, dtype=np.int64).T.copy())

    def _serve_one(self, partition: Partition, calls: Sequence[PopCall], want: int, now: Now) -> None:
        rows = partition.eligible(want)
        counts = share(size_bound(rows.positions), calls)
        total = sum(counts)
        if total:
            ids, positions = rows.ids[:total], after_delivery(rows.positions[:total])
            tokens = np.arange(partition.state.offset, partition.state.offset + total)
            grants = _Grants(calls, counts, now).of(slice(total))
            seq = self._topic.take_seq(total)
            event = partition.decide_lease(ids, attempts_column(positions), grants, now, seq)
            columns = ids.tolist(), rows.keys[:total].tolist(), positions.tolist()
            self._topic.emit_leases(self._journal, [(partition, event, *columns)], now)
            self.heads.taken[0] += total
            self._leased(calls, counts, LeasedRows(ids, tokens, positions, _deadlines(calls, counts, now)), now)

    def _serve_many(self, calls: Sequence[PopCall], want: int, now: Now) -> None:
        """Lease the best messages across all partitions: from each, the first ones in its own order."""
        chosen = self.heads.choose(want, now.steady)
        counts = share(size_bound(chosen.positions[:want]), calls)
        total = sum(counts)
        if not total:
            return
        limits = self.heads.limits(chosen, total)
        self.heads.took(total)
        # All leases of one selection have the same spine sequence: they are one step, in the order of their keys.
        seq = self._topic.take_seq(total)
        owner = chosen.owner[:total]
        given = np.bincount(owner, minlength=len(chosen.owners)).tolist()
        by_owner = owner.argsort(kind="stable")
        ids, positions = chosen.ids[by_owner], after_delivery(chosen.positions[by_owner])
        attempts, grants = attempts_column(positions), _Grants(calls, counts, now, by_owner)
        columns = ids.tolist(), chosen.keys[by_owner].tolist(), positions.tolist()
        tokens: list[int] = []
        leases: list[ChosenLease] = []
        start = 0
        for number, count, limit in zip(chosen.owners, given, limits, strict=True):
            if count:
                partition, mine = self._topic.partitions[number], slice(start, start + count)
                tokens += range(partition.state.offset, partition.state.offset + count)
                event = partition.decide_lease(ids[mine], attempts[mine], grants.of(mine), now, seq, limit)
                leases.append((partition, event, columns[0][mine], columns[1][mine], columns[2][mine]))
                self.heads.taken[number] += count
                start += count
        self._topic.emit_leases(self._journal, leases, now)
        order = by_owner.argsort()
        leased = ids[order], np.array(tokens, dtype=np.int64)[order], positions[order]
        self._leased(calls, counts, LeasedRows(*leased, _deadlines(calls, counts, now)), now)

    def _leased(self, calls: Sequence[PopCall], counts: Sequence[int], leased: LeasedRows, now: Now) -> None:
        """Give each call its messages, best first."""
        total = len(leased.ids)
        self._counters.leased += total
        if self.rate is not None:
            self.rate.take(total)
        start = 0
        for call, count in zip(calls, counts, strict=True):
            if count:
                call.leased, call.start, call.count = leased, start, count
                start += count
                if call.holder is not None:
                    self._counters.workers.took(call.holder, count, now.steady)


class _Grants:
    """The shares of the pops in the lease events of one step."""

    def __init__(self, calls: Sequence[PopCall], counts: Sequence[int], now: Now, order: Any = slice(None)) -> None:
        """`order` is the order of the rows in the events; each event's rows stay in the order of the pops."""
        self._shared: dict[int, Grant] = {}  # by count, if all pops are equal
        self._of_call: list[Grant] = []  # one object for adjacent pops that are equal: they share one grant
        last: Grant | None = None
        for call in calls:
            deadline = now.steady + call.visibility_ms
            if (
                last is None
                or last.deadline != deadline
                or last.holder != call.holder
                or last.request_id is not None
                or call.request_id is not None
            ):
                last = Grant(0, deadline, call.holder, call.request_id)
            self._of_call.append(last)
        self._calls: list[int] | None = None  # of each row; not needed if all are equal
        if self._of_call[0] is not last:
            self._calls = np.repeat(np.arange(len(calls)), counts)[order].tolist()

    def of(self, rows: slice) -> list[Grant]:
        """Return the grants of one event's rows."""
        if self._calls is None:
            count = rows.stop - (rows.start or 0)
            grant = self._shared.get(count)
            if grant is None:
                grant = self._shared[count] = _copy(self._of_call[0], count)
            return [grant]
        grants: list[Grant] = []
        last: Grant | None = None
        for call in self._calls[rows]:
            if self._of_call[call] is not last:
                last = self._of_call[call]
                grants.append(_copy(last, 0))
            grants[-1].count += 1
        return grants


def _copy(grant: Grant, count: int) -> Grant:
    return Grant(count, grant.deadline, grant.holder, grant.request_id)


def _deadlines(calls: Sequence[PopCall], counts: Sequence[int], now: Now) -> I64:
    """Return the deadline of each message."""
    visibilities = [call.visibility_ms for call in calls]
    if len(set(visibilities)) == 1:
        return np.full(sum(counts), now.steady + visibilities[0])
    return np.repeat(visibilities, counts) + now.steady


def share(bounds: I64, calls: Sequence[PopCall]) -> list[int]:
    """Return how many of these messages, in order, each call gets: at most what it wants, in count and in bytes.

    A call that gets any gets at least one, however large.
    """
    ends = np.cumsum(bounds)
    counts: list[int] = []
    at, total = 0, len(bounds)
    if total and int(ends[-1]) <= min([call.max_bytes for call in calls]):  # all fit anywhere: only counts matter
        quotas = [call.quota for call in calls]
        if sum(quotas) <= total:
            return quotas
        for quota in quotas:
            counts.append(min(quota, total - at))
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


def split_small(
    small: bytes, key_len: int, fairness_len: int, flags: int
) -> tuple[str | None, str | None, dict[str, str] | None]:
    """Return (key, fairness key, headers)."""
    key = bytes(small[:key_len]).decode() if flags & FLAG_KEY else None
    end = key_len + fairness_len
    fairness_key = bytes(small[key_len:end]).decode() if flags & FLAG_FAIRNESS else None
    headers = _decode_headers(small[end:]) if flags & FLAG_HEADERS else None
    return key, fairness_key, headers
