"""The partition against the naive one: all commands in any order, time that jumps, restarts from journal and snapshot.

After every step all that can be seen of both is compared (`Rig.check`). What the drawn numbers mean depends on what is
there: `choose` turns one into a message, so that nearly every step does something.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from heapline.config import Aging, Backoff
from heapline.core import partition
from heapline.model import Outgoing, from_ms
from tests.unit.core.naive import AGING_RATE, clock
from tests.unit.core.partition_rig import START, Rig

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
SECOND, HOUR, DAY, YEAR = 1000, 3_600_000, 86_400_000, 365 * 86_400_000
MESSAGES_MAX = 60  # then no more are enqueued: what matters are few messages that live through much
STEADY_MAX = START + 30 * YEAR

PRIORITIES = st.one_of(
    st.integers(0, 2),
    st.sampled_from([INT64_MIN, INT64_MIN + 1, -(1 << 52), -1, 1 << 52, INT64_MAX - 1, INT64_MAX]),
    st.integers(INT64_MIN, INT64_MAX),
)
WAITS = st.sampled_from([1, 50, 100, 101, 999, SECOND, SECOND, 5 * SECOND, 30 * SECOND, HOUR, DAY, 3 * YEAR])
TTLS = st.sampled_from([1, 100, SECOND, SECOND, 10 * SECOND, DAY])
JUMPS = st.sampled_from([0, 1, 7, 99, 100, SECOND, 31 * SECOND, HOUR, 2 * DAY, YEAR])
NUMBERS = st.integers(0, 1 << 16)
SMALL = st.sampled_from([1, 1, 2, 3, 7, 1000])
REASONS = st.sampled_from([None, "boom", "no such host"])
BACKOFFS = st.sampled_from([None, None, 0, 100, SECOND, DAY])

OUTGOING = st.fixed_dictionaries(
    {"priority": PRIORITIES, "size": st.sampled_from([0, 1, 200, 5000])},
    optional={
        "delay": WAITS,
        "at": WAITS,
        "ttl": TTLS,
        "max_retries": st.sampled_from([0, 0, 1, 3, 250]),
    },
)


class PartitionMachine(RuleBasedStateMachine):
    """Random histories of one partition."""

    rig: Rig

    @initialize(
        mode=st.sampled_from(["min", "max"]),
        aging=st.booleans(),
        streams=st.booleans(),
        tick=st.sampled_from([0.01, 0.1, 1.0]),
        wall=st.sampled_from([0, 0, -DAY, YEAR]),
        base=st.sampled_from([0.0, 1.0]),
    )
    def begin(self, mode: Any, aging: bool, streams: bool, tick: float, wall: int, base: float) -> None:
        self.rig = Rig(
            START + wall, mode=mode, ordering=Aging(AGING_RATE) if aging else "strict", streams=streams, tick=tick,
            backoff=Backoff(base=base), max_retries_default=2, lease_max=120.0, dedup_window=3600.0,
        )  # fmt: skip

    def choose(self, number: int, *states: str) -> int | None:
        """One of the messages in these states (or of all), the number says which."""
        ids = [m.id for m in (self.rig.model.inside(*states) if states else self.rig.model.messages.values())]
        return ids[number % len(ids)] if ids else None

    def choose_some(self, numbers: list[int], *states: str) -> list[int]:
        return list(dict.fromkeys(id for n in numbers if (id := self.choose(n, *states)) is not None))

    def leases(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Ids with tokens that were good once and may still be; the same one may come twice."""
        held = [(m.id, m.lease.token) for m in self.rig.model.inside("leased") if m.lease is not None]
        old = self.rig.old_tokens
        pairs = []
        for n in numbers:
            pool = held if held and n % 4 else old
            if pool:
                pairs.append(pool[n // 4 % len(pool)])
        return [id for id, _ in pairs], [token for _, token in pairs]

    @property
    def has_room(self) -> bool:
        return len(self.rig.model.messages) < MESSAGES_MAX

    # -- in --------------------------------------------------------------------------------------------------------

    def outgoing(self, facts: dict[str, Any], **more: Any) -> Outgoing:
        delay, at, ttl = facts.get("delay"), facts.get("at"), facts.get("ttl")
        return Outgoing(
            bytes(facts["size"]),
            priority=facts["priority"],
            delay=delay / 1000 if delay is not None and at is None else None,
            deliver_at=from_ms(self.rig.now.wall + at) if at is not None else None,
            ttl=None if ttl is None else ttl / 1000,
            max_retries=facts.get("max_retries"),
            **more,
        )

    @precondition(lambda self: self.has_room)
    @rule(batch=st.lists(OUTGOING, min_size=1, max_size=6))
    def enqueue(self, batch: list[dict[str, Any]]) -> None:
        self.rig.enqueue(*(self.outgoing(facts) for facts in batch))

    @precondition(lambda self: self.has_room)
    @rule(
        facts=OUTGOING,
        keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
        scope=st.sampled_from([None, "window", "pending", "until_ack"]),
    )
    def enqueue_keyed(self, facts: dict[str, Any], keys: list[str], scope: Any) -> None:
        self.rig.enqueue(*(self.outgoing(facts, idempotency_key=k, idempotency_scope=scope) for k in keys))

    @precondition(lambda self: self.has_room)
    @rule(
        facts=OUTGOING,
        producer=st.sampled_from("pq"),
        seqs=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
        answered=st.sampled_from([0, 0, 0, 2, 5]),
        key=st.sampled_from([None, None, "a"]),
    )
    def enqueue_numbered(self, facts: dict[str, Any], producer: str, seqs: list[int], answered: int, key: Any) -> None:
        if producer not in self.rig.model.producers:
            self.rig.open_producer(producer)
        first, *rest = (self.outgoing(facts, seq=seq, idempotency_key=None) for seq in seqs)
        if key is not None:
            first = self.outgoing(facts, seq=seqs[0], idempotency_key=key)
        self.rig.enqueue(first, *rest, producer=producer, answered_below=answered)

    @rule(producer=st.sampled_from("pq"))
    def open_epoch(self, producer: str) -> None:
        self.rig.open_producer(producer)

    # -- out -------------------------------------------------------------------------------------------------------

    @rule(
        counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        visibility=st.sampled_from([1, 100, 30 * SECOND, 120 * SECOND]),
        holder=st.sampled_from([None, "w1", "w2"]),
        request=st.sampled_from([None, "r", "s"]),
    )
    def pop(self, counts: list[int], visibility: int, holder: Any, request: Any) -> None:
        self.rig.pop(*counts, visibility=visibility, holder=holder, request=request)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=5))
    def ack(self, numbers: list[int]) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.ack(*ids, tokens=tokens)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=5), backoff=BACKOFFS, reason=REASONS)
    def nack(self, numbers: list[int], backoff: Any, reason: Any) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.nack(*ids, tokens=tokens, backoff=backoff, reason=reason)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=3))
    def release(self, numbers: list[int]) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.release(*ids, tokens=tokens)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=3), by=WAITS)
    def extend(self, numbers: list[int], by: int) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.extend(*ids, tokens=tokens, by=by)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=3), reason=REASONS, keep=st.booleans())
    def bury(self, numbers: list[int], reason: Any, keep: bool) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.bury(*ids, tokens=tokens, reason=reason, keep=keep)

    # -- time ------------------------------------------------------------------------------------------------------

    @rule(ms=JUMPS)
    def advance(self, ms: int) -> None:
        if self.rig.now.steady + ms <= STEADY_MAX:
            self.rig.advance(ms)

    @rule(number=NUMBERS, off=st.sampled_from([-1, 0, 0, 1]))
    def advance_to_something(self, number: int, off: int) -> None:
        """To just before, at or after a moment at which something is due."""
        waits = [w + off for w in self.rig.model.changes_in(self.rig.now) if w + off > 0]
        if waits:
            self.advance(sorted(waits)[number % len(waits)])

    @rule(ms=JUMPS, back=st.booleans())
    def jump_wall(self, ms: int, back: bool) -> None:
        wall = self.rig.now.wall + (-ms if back else ms)
        if abs(wall - START) < 20 * YEAR:
            self.rig.set_wall(wall)

    @rule(limit=SMALL, turns=SMALL)
    def tick(self, limit: int, turns: int) -> None:
        self.rig.tick(limit, turns)

    @rule()
    def tick_to_the_end(self) -> None:
        self.rig.tick()

    # -- by hand ---------------------------------------------------------------------------------------------------

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        id = self.choose(number)
        if id is not None:
            self.rig.cancel(id)

    @rule(number=NUMBERS, priority=st.one_of(st.integers(0, 2), PRIORITIES))
    def reprioritise(self, number: int, priority: int) -> None:
        id = self.choose(number, "ready", "delayed") if number % 8 else self.choose(number)
        if id is not None:
            self.rig.reschedule(id, priority=priority)

    @rule(
        number=NUMBERS,
        priority=st.one_of(st.none(), st.integers(0, 2)),
        wait=st.one_of(st.sampled_from([0, -1, -DAY]), WAITS),
        wall=st.booleans(),
    )
    def reschedule(self, number: int, priority: Any, wait: int, wall: bool) -> None:
        id = self.choose(number, "ready", "delayed") if number % 8 else self.choose(number)
        if id is not None:
            self.rig.reschedule(id, priority=priority, due=clock(self.rig.now, wall) + wait, wall=wall)

    @rule(number=NUMBERS, other=NUMBERS)
    def reschedule_to_a_time_of_before(self, number: int, other: int) -> None:
        """A message comes back to a due time that it, or another, had: stale entries equal to the current one."""
        id = self.choose(number, "ready", "delayed")
        dues = sorted({(m.due, m.wall) for m in self.rig.model.inside("delayed")})
        if id is not None:
            if dues:
                self.seen_dues = [*getattr(self, "seen_dues", []), *dues][-20:]
            if seen := getattr(self, "seen_dues", []):
                due, wall = seen[other % len(seen)]
                self.rig.reschedule(id, due=due, wall=wall)

    @rule()
    def purge(self) -> None:
        self.rig.purge()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=4), wait=st.one_of(st.none(), WAITS), ttl=st.booleans())
    def replay_dead(self, numbers: list[int], wait: Any, ttl: bool) -> None:
        ids = self.choose_some(numbers, "dead")
        if ids:
            dues = [0 if wait is None or not i else self.rig.now.steady + wait * i for i in range(len(ids))]
            self.rig.replay_dead(ids, dues, restart_ttl=ttl)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=2))
    def delete_dead(self, numbers: list[int]) -> None:
        ids = self.choose_some(numbers, "dead")
        if ids:
            self.rig.delete_dead(ids)

    @rule(dlq=st.booleans(), retries=st.sampled_from([0, 1, 2, 5]), lease_max=st.sampled_from([120.0, 31.0]))
    def configure(self, dlq: bool, retries: int, lease_max: float) -> None:
        self.rig.configure(dlq=dlq, max_retries_default=retries, lease_max=lease_max)

    # -- upkeep ----------------------------------------------------------------------------------------------------

    @rule()
    def roll(self) -> None:
        self.rig.roll()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=8))
    def move(self, numbers: list[int]) -> None:
        ids = self.choose_some(numbers, "ready", "delayed", "leased", "dead")
        if ids:
            self.rig.roll()
            self.rig.move(ids)

    @rule(budget=st.sampled_from([1, 3, 10, 65536]))
    def maintain(self, budget: int) -> None:
        with mock.patch.object(partition, "GARBAGE_ROWS_MIN", 0):  # so that few stale entries are swept
            self.rig.p.maintain(self.rig.now, budget)

    @rule()
    def look(self) -> None:
        """Asking who is next changes nothing (though it drops stale entries)."""
        self.rig.check(look=True)

    @rule(blob_rows_min=st.sampled_from([1, 4096]))
    def take_snapshot(self, blob_rows_min: int) -> None:
        self.rig.take_snapshot(blob_rows_min)

    @rule(go_on=st.booleans())
    def replay_journal(self, go_on: bool) -> None:
        topic = self.rig.replayed()
        if go_on:
            self.rig.restart(topic)
        else:
            self.rig.check(topic.partitions[0], look=True)

    @precondition(lambda self: self.rig.snapshot is not None)
    @rule(go_on=st.booleans())
    def thaw_snapshot(self, go_on: bool) -> None:
        topic = self.rig.thawed()
        if go_on:
            self.rig.restart(topic)
        else:
            self.rig.check(topic.partitions[0], look=True)

    @invariant()
    def both_look_the_same(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check(self.rig.replayed().partitions[0], look=True)
            self.rig.tick()
            self.rig.check(look=True)


TestPartitionAgainstNaiveModel = PartitionMachine.TestCase
TestPartitionAgainstNaiveModel.settings = settings()
