"""The partition against the naive one: all commands in any order, time jumps, restarts from journal and snapshot.

After every step everything visible in both is compared (`Rig.check`). Drawn numbers are mapped to existing messages:
`choose` turns one into a message, so nearly every step does something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from heapline.contract.config import Aging, Backoff
from heapline.contract.message import Outgoing, from_ms
from heapline.core import entries, prepared
from tests.unit.core.naive import AGING_RATE, LIVING, clock
from tests.unit.core.partition_rig import Rig
from tests.unit.core.rig_journal import START

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
SECOND, HOUR, DAY, YEAR = 1000, 3_600_000, 86_400_000, 365 * 86_400_000
LIVING_MAX = 14  # then enqueues stop: few messages with long histories find more than many
STEADY_MAX = START + 30 * YEAR

PRIORITIES = st.one_of(
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([INT64_MIN, INT64_MIN + 1, -(1 << 52), -1, 1 << 52, INT64_MAX - 1, INT64_MAX]),
    st.integers(INT64_MIN, INT64_MAX),
)
#: Few different ones, so that several are often due together.
WAITS = st.sampled_from([1, 100, SECOND, SECOND, 5 * SECOND, 5 * SECOND, DAY, 3 * YEAR])
JUMPS = st.sampled_from([1, 99, SECOND, 31 * SECOND, HOUR, 2 * DAY, YEAR])
NUMBERS = st.integers(0, 1 << 16)
LEASES = st.lists(NUMBERS, min_size=1, max_size=4)
SMALL = st.sampled_from([1, 1, 2, 3, 1000])
REASONS = st.sampled_from([None, "boom", "no such host"])

OUTGOING = st.fixed_dictionaries(
    {
        "priority": PRIORITIES,
        "size": st.sampled_from([0, 1, 5000]),
        "wait": st.sampled_from([None, None, "delay", "at"]),
        "ms": WAITS,
        "ttl": st.sampled_from([None, None, 100, SECOND, SECOND, 5 * SECOND, DAY]),
        "max_retries": st.sampled_from([None, None, 0, 1, 3]),
    }
)


class Step(NamedTuple):
    name: str
    weight: int
    when: Callable[[Any], Any]
    arguments: st.SearchStrategy[dict[str, Any]]

    def __repr__(self) -> str:
        return self.name


STEPS: list[Step] = []


def step(weight: int, when: Callable[[Any], Any] = lambda machine: True, **arguments: Any) -> Callable[[Any], Any]:
    """Mark a method as a possible step. One Hypothesis rule per step would be simpler, but Hypothesis omits
    whole rules from a run, and histories without an enqueue are useless here.
    """

    def add(method: Any) -> Any:
        STEPS.append(Step(method.__name__, weight, when, st.fixed_dictionaries(arguments)))
        return method

    return add


class PartitionMachine(RuleBasedStateMachine):
    """Random histories of one partition."""

    rig: Rig

    @initialize(
        mode=st.sampled_from(["min", "max"]),
        aging=st.sampled_from([False, False, True]),
        streams=st.booleans(),
        tick=st.sampled_from([0.01, 0.1, 1.0]),
        wall=st.sampled_from([0, 0, -DAY, YEAR]),
        base=st.sampled_from([0.0, 1.0, 1.0]),
        dlq=st.sampled_from([True, True, False]),
    )
    def begin(self, mode: Any, aging: bool, streams: bool, tick: float, wall: int, base: float, dlq: bool) -> None:
        self.rig = Rig(
            START + wall, mode=mode, ordering=Aging(AGING_RATE) if aging else "strict", streams=streams, tick=tick,
            dlq=dlq, backoff=Backoff(base=base), max_retries_default=2, lease_max=120.0, dedup_window=3600.0,
        )  # fmt: skip
        self.dues: list[tuple[int, int, bool]] = []  # id, due, wall: past due times of messages

    def has(self, *states: str) -> bool:
        return bool(self.rig.model.inside(*states))

    def choose(self, number: int, *states: str) -> int:
        """Return a message in one of these states (one must exist); occasionally one in any state."""
        inside = self.rig.model.inside(*states)
        if number % 16 == 15:
            inside = list(self.rig.model.messages.values())
        return inside[number // 16 % len(inside)].id

    def choose_some(self, numbers: list[int], *states: str) -> list[int]:
        inside = self.rig.model.inside(*states)
        return list(dict.fromkeys(inside[n % len(inside)].id for n in numbers))

    def leases(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Return ids with tokens that were valid once and mostly still are; duplicates are possible."""
        held = [(m.id, m.lease.token) for m in self.rig.model.inside("leased") if m.lease is not None]
        old = self.rig.old_tokens
        pools = [old if n % 8 == 7 else held for n in numbers]
        pairs = [pool[n // 8 % len(pool)] for n, pool in zip(numbers, pools, strict=True)]
        return [id for id, _ in pairs], [token for _, token in pairs]

    @property
    def has_room(self) -> bool:
        return len(self.rig.model.inside(*LIVING)) < LIVING_MAX

    # -- in --------------------------------------------------------------------------------------------------------

    def outgoing(self, facts: dict[str, Any], **more: Any) -> Outgoing:
        wait, ms, ttl = facts["wait"], facts["ms"], facts["ttl"]
        return Outgoing(
            bytes(facts["size"]),
            priority=facts["priority"],
            delay=ms / 1000 if wait == "delay" else None,
            deliver_at=from_ms(self.rig.now.wall + ms) if wait == "at" else None,
            ttl=None if ttl is None else ttl / 1000,
            max_retries=facts["max_retries"],
            **more,
        )

    @step(6, when=lambda self: self.has_room, batch=st.lists(OUTGOING, min_size=1, max_size=5))
    def enqueue(self, batch: list[dict[str, Any]]) -> None:
        self.rig.enqueue(*(self.outgoing(facts) for facts in batch))

    @step(
        4,
        when=lambda self: self.has_room,
        facts=OUTGOING,
        keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
        scope=st.sampled_from([None, "window", "pending", "until_ack"]),
        seqs=st.lists(st.integers(0, 9), min_size=3, max_size=3, unique=True),
        producer=st.sampled_from([None, "p", "q"]),
        answered=st.sampled_from([0, 0, 0, 2, 5]),
    )
    def enqueue_identified(
        self, facts: dict[str, Any], keys: list[str], scope: Any, seqs: list[int], producer: Any, answered: int
    ) -> None:
        if producer is not None and producer not in self.rig.model.producers:
            self.rig.open_producer(producer)
        doubts = self.rig._doubts(keys, None)
        keys = [key for i, key in enumerate(keys) if i not in doubts]
        messages = [self.outgoing(facts, idempotency_key=k, idempotency_scope=scope) for k in keys]
        if not messages:
            return
        if producer is not None:
            messages = [replace(m, seq=seq) for m, seq in zip(messages, seqs, strict=False)]
        self.rig.enqueue(*messages, producer=producer, answered_below=answered)

    # -- prepared batches ------------------------------------------------------------------------------------------

    @step(
        3,
        when=lambda self: self.has_room and len(self.rig.prepared_ids()) < LIVING_MAX,
        batch=st.sampled_from(["b", "c"]),
        part=st.sampled_from(["1", "2", "3"]),
        rows=st.lists(st.tuples(OUTGOING, st.sampled_from([None, None, "a", "b", "c"])), max_size=4),
        scope=st.sampled_from([None, "window", "pending", "until_ack"]),
    )
    def prepare(self, batch: str, part: str, rows: list[tuple[dict[str, Any], Any]], scope: Any) -> None:
        if part in self.rig.batches.get(batch, {}):
            return
        keys = [key for _, key in rows]
        messages = [
            self.outgoing(facts, idempotency_key=key, idempotency_scope=scope if key else None)
            for i, (facts, key) in enumerate(rows) if key is None or key not in keys[:i]
        ]  # fmt: skip
        self.rig.prepare(batch, part, *messages)

    @step(3, when=lambda self: self.rig.batches, number=NUMBERS, parts=st.permutations(["1", "2", "3"]))
    def commit(self, number: int, parts: list[str]) -> None:
        batch = sorted(self.rig.batches)[number % len(self.rig.batches)]
        held = [part for part in parts if part in self.rig.batches[batch]]
        size = 1 if number % 5 == 0 else prepared.COMMIT_BYTES_MAX
        with mock.patch.object(prepared, "COMMIT_BYTES_MAX", size):
            self.rig.commit(batch, held[: number // 8 % (len(held) + 1)])

    @step(1, when=lambda self: self.rig.batches, number=NUMBERS)
    def abort(self, number: int) -> None:
        self.rig.abort(sorted(self.rig.batches)[number % len(self.rig.batches)])

    @step(1, when=lambda self: self.rig.prepared_ids(), numbers=st.lists(NUMBERS, min_size=1, max_size=8))
    def move_prepared(self, numbers: list[int]) -> None:
        ids = self.rig.prepared_ids()
        self.rig.roll()
        self.rig.move(list(dict.fromkeys(ids[n % len(ids)] for n in numbers)))

    # -- out -------------------------------------------------------------------------------------------------------

    @step(
        12,
        when=lambda self: self.has("ready"),
        counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        visibility=st.sampled_from([100, 5 * SECOND, 30 * SECOND, 120 * SECOND]),
        holder=st.sampled_from([None, "w1", "w2"]),
        request=st.sampled_from([None, "r", "s"]),
    )
    def pop(self, counts: list[int], visibility: int, holder: Any, request: Any) -> None:
        self.rig.pop(*counts, visibility=visibility, holder=holder, request=request)

    @step(2, when=lambda self: self.has("leased"), numbers=LEASES)
    def ack(self, numbers: list[int]) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.ack(*ids, tokens=tokens)

    @step(
        6,
        when=lambda self: self.has("leased"),
        numbers=LEASES,
        backoff=st.sampled_from([None, None, 0, 100, SECOND, DAY]),
        reason=REASONS,
    )
    def nack(self, numbers: list[int], backoff: Any, reason: Any) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.nack(*ids, tokens=tokens, backoff=backoff, reason=reason)

    @step(4, when=lambda self: self.has("leased"), numbers=LEASES)
    def release(self, numbers: list[int]) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.release(*ids, tokens=tokens)

    @step(2, when=lambda self: self.has("leased"), numbers=LEASES, by=WAITS)
    def extend(self, numbers: list[int], by: int) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.extend(*ids, tokens=tokens, by=by)

    @step(2, when=lambda self: self.has("leased"), numbers=LEASES, reason=REASONS, keep=st.booleans())
    def bury(self, numbers: list[int], reason: Any, keep: bool) -> None:
        ids, tokens = self.leases(numbers)
        self.rig.bury(*ids, tokens=tokens, reason=reason, keep=keep)

    # -- time ------------------------------------------------------------------------------------------------------

    @step(10, number=st.integers(0, 5), off=st.sampled_from([-1, 0, 0, 0, 1]), limit=SMALL)
    def wait_for_something(self, number: int, off: int, limit: int) -> None:
        """Advance to just before, at or after a time at which something is due, then process it."""
        waits = sorted(w + off for w in self.rig.model.changes_in(self.rig.now) if w + off > 0)
        if waits and self.rig.now.steady + waits[number % len(waits)] < STEADY_MAX:
            self.rig.advance(waits[number % len(waits)])
        self.rig.tick(limit)

    @step(3, ms=JUMPS, which=st.sampled_from(["both", "both", "wall", "wall back"]))
    def jump(self, ms: int, which: str) -> None:
        wall = self.rig.now.wall + (-ms if which == "wall back" else ms)
        if which == "both" and self.rig.now.steady + ms < STEADY_MAX:
            self.rig.advance(ms)
        elif which != "both" and abs(wall - START) < 20 * YEAR:
            self.rig.set_wall(wall)

    @step(3, limit=SMALL, turns=SMALL)
    def tick(self, limit: int, turns: int) -> None:
        self.rig.tick(limit, turns)

    # -- changes to single messages ------------------------------------------------------------------------------------

    @step(2, when=lambda self: self.has("ready", "delayed"), number=NUMBERS)
    def cancel(self, number: int) -> None:
        self.rig.cancel(self.choose(number, "ready", "delayed"))

    @step(5, when=lambda self: self.has("ready", "delayed"), number=NUMBERS, priority=PRIORITIES)
    def reprioritise(self, number: int, priority: int) -> None:
        self.rig.reschedule(self.choose(number, "ready", "delayed"), priority=priority)

    @step(
        6,
        when=lambda self: self.has("ready", "delayed"),
        number=NUMBERS,
        priority=st.one_of(st.none(), st.integers(0, 2)),
        wait=st.one_of(st.sampled_from([0, -1, -DAY]), WAITS),
        wall=st.booleans(),
    )
    def reschedule(self, number: int, priority: Any, wait: int, wall: bool) -> None:
        due = clock(self.rig.now, wall) + wait
        id = self.choose(number, "ready", "delayed")
        self.dues.append((id, due, wall))
        self.rig.reschedule(id, priority=priority, due=due, wall=wall)

    @step(6, when=lambda self: self.dues, number=NUMBERS, priority=st.sampled_from([None, None, 0, 1]))
    def reschedule_to_an_old_time(self, number: int, priority: Any) -> None:
        """Reschedule to an earlier due time of the message: stale entries equal to the current one."""
        id, due, wall = self.dues[number % len(self.dues)]
        self.rig.reschedule(id, priority=priority, due=due, wall=wall)

    @step(4, when=lambda self: self.has("dead"), numbers=LEASES, wait=st.one_of(st.none(), WAITS))
    def replay_dead(self, numbers: list[int], wait: Any) -> None:
        ids = self.choose_some(numbers, "dead")
        dues = [self.rig.now.steady + wait * i if wait is not None and i else 0 for i in range(len(ids))]
        self.rig.replay_dead(ids, dues)

    @step(1, when=lambda self: self.has("dead"), number=NUMBERS)
    def delete_dead(self, number: int) -> None:
        self.rig.delete_dead(self.choose_some([number], "dead"))

    @step(2, what=st.integers(0, 5), dlq=st.booleans(), retries=st.sampled_from([0, 1, 2, 5]))
    def do_something_rare(self, what: int, dlq: bool, retries: int) -> None:
        if what == 0 and len(self.rig.model.inside("ready", "delayed")) > 2:
            self.rig.purge()
        elif what == 1:
            self.rig.open_producer("p")
        elif what == 2:
            self.rig.roll()
        else:
            self.rig.configure(dlq=dlq, max_retries_default=retries, lease_max=120.0 if what < 5 else 31.0)

    # -- maintenance ---------------------------------------------------------------------------------------------------

    @step(3, when=lambda self: self.has(*LIVING), numbers=st.lists(NUMBERS, min_size=1, max_size=8))
    def move(self, numbers: list[int]) -> None:
        self.rig.roll()
        self.rig.move(self.choose_some(numbers, *LIVING))

    @step(2, budget=st.sampled_from([1, 3, 10, 65536]))
    def maintain(self, budget: int) -> None:
        with mock.patch.object(entries, "GARBAGE_ROWS_MIN", 0):  # so that few stale entries are swept
            self.rig.p.maintain(self.rig.now, budget)

    @step(2)
    def look(self) -> None:
        """Reading the next messages changes nothing (though it drops stale entries)."""
        self.rig.check(look=True)

    @step(2, blob_rows_min=st.sampled_from([1, 4096]))
    def take_snapshot(self, blob_rows_min: int) -> None:
        self.rig.take_snapshot(blob_rows_min)

    @step(4, from_snapshot=st.booleans(), go_on=st.booleans())
    def restart(self, from_snapshot: bool, go_on: bool) -> None:
        """Load it again; continue with the loaded one, or discard it after comparing."""
        if from_snapshot and self.rig.snapshot is None:
            self.rig.take_snapshot()
        topic = self.rig.thawed() if from_snapshot else self.rig.replayed()
        if go_on:
            self.rig.restart(topic)
        else:
            self.rig.check(topic.partitions[0], look=True)

    @rule(data=st.data())
    def act(self, data: Any) -> None:
        possible = [s for s in STEPS if s.when(self) for _ in range(s.weight)]
        chosen = data.draw(st.sampled_from(possible))
        arguments = data.draw(chosen.arguments)
        getattr(self, chosen.name)(**arguments)

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
