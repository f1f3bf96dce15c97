"""Each checker rejects a history that breaks its promise and accepts one that keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from heapline.contract.config import Aging, Backoff, TopicConfig
from heapline.contract.errors import JournalCorrupt
from heapline.testing import FakeClock
from tests.simulation.checkers import judge
from tests.simulation.history import Call, Dead, Got, History, Outcome, Reply, Sent, fairness_key_of, payload_of

TOPIC = "jobs"


class Tale:
    """Writes a history call by call. Time does not advance unless moved; a lease lasts 1000 ms."""

    def __init__(self, **config: Any) -> None:
        self.clock = FakeClock()
        config = {"backoff": Backoff(base=0.5, jitter=0.0), "max_retries_default": 3, **config}
        self.history = History(self.clock, topics={TOPIC: TopicConfig(**config)}, drained={TOPIC})
        self.history.steady_of = lambda topic: self.clock.wall_ms()
        self._token = 0

    @property
    def now(self) -> int:
        return self.clock.wall_ms()

    def call(
        self, verb: str, result: Any = None, outcome: Outcome = "ok", client: str = "c", error: Any = None, **args: Any
    ) -> Call:
        call = self.history.start(client, verb, TOPIC, **args)
        self.history.end(call, outcome, result, error)
        return call

    def enqueue(
        self, *names: str, ids: Sequence[int] = (), outcome: Outcome = "ok", duplicate: bool = False, **facts: Any
    ) -> Call:
        messages = [Sent(name, payload_of(name, 40), **facts) for name in names]
        reported = [Reply(id, duplicate) for id in ids or range(1, len(names) + 1)]
        return self.call("enqueue", reported if outcome == "ok" else None, outcome, messages=messages, atomic=True)

    def got(self, name: str, id: int = 1, attempts: int = 1, priority: int = 0, at: int | None = None) -> Got:
        self._token += 1
        deadline = (self.now if at is None else at) + 1000
        return Got(id, self._token, payload_of(name, 40), priority, attempts, self.now, deadline)

    def pop(self, *gots: Got, outcome: Outcome = "ok", client: str = "c") -> Call:
        return self.call("pop", list(gots) if outcome == "ok" else None, outcome, client, visibility_ms=1000)

    def on(self, verb: str, got: Got, outcome: Outcome = "ok", result: Any = None, **args: Any) -> Call:
        return self.call(verb, result, outcome, leases=[(got.id, got.token)], **args)

    def drain(self, *gots: Got) -> None:
        for got in gots:
            self.pop(got, client="drain")
            self.call("ack", client="drain", leases=[(got.id, got.token)])

    def broken(self) -> set[str]:
        return {complaint.partition(" ")[0] for complaint in judge(self.history)}


def test_correct_history_has_no_complaints() -> None:
    tale = Tale()
    tale.enqueue("a", "b")
    first = tale.got("a")
    tale.pop(first)
    tale.on("ack", first)
    tale.drain(tale.got("b", 2))
    assert tale.broken() == set()


@pytest.mark.parametrize(
    ("end", "complaint"),
    [
        (None, {"NoLostMessage"}),
        ("ok", set()),
        ("unknown", set()),
        ("refused", {"NoLostMessage"}),
    ],
)
def test_no_lost_message(end: Outcome | None, complaint: set[str]) -> None:
    tale = Tale()
    tale.enqueue("a")
    got = tale.got("a")
    tale.pop(got)
    if end is not None:
        tale.on("ack", got, end)
    assert tale.broken() == complaint


def test_no_lost_message_allows_dead_letters_purges_and_unanswered_enqueues() -> None:
    tale = Tale()
    tale.enqueue("gone", outcome="unknown")
    tale.enqueue("dead", ids=[2])
    tale.call("dlq_list", [Dead(2, payload_of("dead", 40), "why")], client="drain")
    assert tale.broken() == set()
    tale.enqueue("purged", ids=[3])
    assert tale.broken() == {"NoLostMessage"}
    tale.call("purge", 1)
    assert tale.broken() == set()


def test_no_lost_message_counts_a_message_enqueued_after_the_purge() -> None:
    tale = Tale()
    tale.call("purge", 0)
    tale.enqueue("a")
    assert tale.broken() == {"NoLostMessage"}


def test_single_lease() -> None:
    tale = Tale(backoff=Backoff(base=0.0))
    tale.enqueue("a")
    tale.pop(tale.got("a"))
    tale.clock.advance(0.999)
    tale.drain(second := tale.got("a", attempts=2))
    assert "SingleLease" in tale.broken()
    assert second.token == 2
    tale = Tale(backoff=Backoff(base=0.0))
    tale.enqueue("a")
    tale.pop(tale.got("a"))
    tale.clock.advance(1.0)
    tale.drain(tale.got("a", attempts=2))
    assert tale.broken() == set()


@pytest.mark.parametrize(("outcome", "complaint"), [("ok", {"SingleLease"}), ("unknown", set())])
def test_single_lease_counts_an_answered_extension(outcome: Outcome, complaint: set[str]) -> None:
    tale = Tale(backoff=Backoff(base=0.0))
    tale.enqueue("a")
    got = tale.got("a")
    tale.pop(got)
    result = {"lost": [], "deadlines": {1: got.deadline_ms + 5000}}
    tale.on("extend", got, outcome, result if outcome == "ok" else None)
    tale.clock.advance(2.0)
    tale.drain(tale.got("a", attempts=2))
    assert tale.broken() - {"NeverEarly"} == complaint


def test_single_lease_ends_with_a_release_even_an_unanswered_one() -> None:
    for outcome in ("ok", "unknown"):
        tale = Tale()
        tale.enqueue("a")
        got = tale.got("a")
        tale.pop(got)
        tale.on("release", got, outcome)  # type: ignore[arg-type]
        tale.drain(tale.got("a", attempts=1))
        assert tale.broken() == set()


def test_single_lease_detects_a_repeated_lease_and_a_repeated_message_in_a_pop() -> None:
    tale = Tale()
    tale.enqueue("a")
    got = tale.got("a")
    tale.pop(got, got)
    assert "SingleLease" in tale.broken()


@pytest.mark.parametrize("verb", ["ack", "cancel", "dlq_delete"])
def test_acked_message_must_not_return(verb: str) -> None:
    tale = Tale(backoff=Backoff(base=0.0))
    tale.enqueue("a")
    got = tale.got("a")
    if verb == "ack":
        tale.pop(got)
        tale.on("ack", got)
    elif verb == "cancel":
        tale.call("cancel", id=1)
    else:
        tale.call("dlq_delete", 1, ids=[1])
    assert tale.broken() == set()
    tale.clock.advance(10)
    tale.drain(tale.got("a", attempts=2 if verb == "ack" else 1))
    assert tale.broken() == {"AckedStaysGone"}


def test_unanswered_ack_may_be_applied_or_not() -> None:
    tale = Tale()
    tale.enqueue("a")
    got = tale.got("a")
    tale.pop(got)
    tale.on("ack", got, "unknown")
    assert tale.broken() == set()
    tale.clock.advance(10)
    tale.drain(tale.got("a", attempts=2))
    assert tale.broken() == set()


def test_purged_message_must_not_return() -> None:
    tale = Tale()
    tale.enqueue("a")
    tale.call("purge", 1)
    tale.drain(tale.got("a"))
    assert tale.broken() == {"AckedStaysGone"}


def test_never_early_by_delay() -> None:
    for wait, complaint in ((4.999, {"NeverEarly"}), (5.0, set())):
        tale = Tale()
        tale.enqueue("a", delay=5.0)
        got = tale.got("a", at=tale.now + round(wait * 1000))
        tale.clock.advance(wait)
        tale.drain(got)
        assert tale.broken() == complaint


def test_never_early_by_wall_clock() -> None:
    for late, complaint in ((-1, {"NeverEarly"}), (0, set())):
        tale = Tale()
        tale.enqueue("a", deliver_at_ms=tale.now + 1000)
        tale.clock.advance(1.0 + late / 1000)
        tale.drain(tale.got("a"))
        assert tale.broken() == complaint


@pytest.mark.parametrize(
    ("verb", "args", "rest"),
    [("nack", {"backoff": 2.0}, 2.0), ("nack", {"backoff": None}, 0.5), ("nothing", {}, 1.5)],
)
def test_never_early_by_backoff(verb: str, args: dict[str, Any], rest: float) -> None:
    for wait, complaint in ((rest - 0.01, {"NeverEarly"}), (rest, set())):
        tale = Tale()
        tale.enqueue("a")
        got = tale.got("a")
        tale.pop(got)
        if verb == "nack":
            tale.on("nack", got, **args)
        tale.clock.advance(wait)
        tale.drain(tale.got("a", attempts=2))
        assert tale.broken() == complaint


def test_never_early_by_a_new_date() -> None:
    for wait, complaint in ((2.9, {"NeverEarly"}), (3.0, set())):
        tale = Tale()
        tale.enqueue("a")
        tale.call("reschedule", id=1, delay=3.0)
        tale.clock.advance(wait)
        tale.drain(tale.got("a"))
        assert tale.broken() == complaint


def test_no_double_enqueue() -> None:
    tale = Tale()
    tale.enqueue("a", outcome="unknown", identified=True)
    tale.enqueue("a", ids=[1], duplicate=True, identified=True)
    tale.drain(tale.got("a"))
    assert tale.broken() == set()
    tale.drain(tale.got("a", 2))
    assert tale.broken() == {"NoDoubleEnqueue"}


def test_no_double_enqueue_detects_a_message_enqueued_twice() -> None:
    tale = Tale()
    tale.enqueue("a", outcome="unknown")
    tale.drain(tale.got("a", 1), tale.got("a", 2))
    assert tale.broken() == {"NoDoubleEnqueue"}


def test_no_double_enqueue_detects_a_duplicate_without_a_first() -> None:
    tale = Tale()
    tale.enqueue("a", duplicate=True, identified=True)
    tale.drain(tale.got("a"))
    assert tale.broken() == {"NoDoubleEnqueue"}


def test_batch_all_or_nothing() -> None:
    tale = Tale()
    tale.enqueue("a", "b", "c", outcome="unknown")
    assert tale.broken() == set()
    tale.drain(tale.got("a"), tale.got("b", 2))
    assert tale.broken() == {"BatchAllOrNothing"}
    tale.drain(tale.got("c", 3))
    assert tale.broken() == set()


@pytest.mark.parametrize(("first", "complaint"), [("unknown", set()), ("refused", {"BatchAllOrNothing"})])
def test_purge_before_a_resend_may_shorten_an_atomic_batch(first: Outcome, complaint: set[str]) -> None:
    tale = Tale()
    tale.enqueue("a", "b", outcome=first, identified=True)
    tale.call("purge", 1)
    tale.enqueue("a", "b", outcome="unknown", identified=True)
    tale.drain(tale.got("a"))
    assert tale.broken() == complaint


def test_atomic_batch_is_not_refused_in_part() -> None:
    tale = Tale()
    call = tale.enqueue("a", "b")
    call.result[1] = Reply(0, error="PayloadTooLarge")
    tale.drain(tale.got("a"))
    assert "BatchAllOrNothing" in tale.broken()


def test_refused_changes_nothing() -> None:
    tale = Tale()
    tale.enqueue("a", outcome="refused")
    assert tale.broken() == set()
    tale.drain(tale.got("a"))
    assert tale.broken() == {"RefusedChangesNothing"}


def test_payload_intact() -> None:
    tale = Tale()
    tale.enqueue("a")
    got = tale.got("a")
    tale.drain(got._replace(payload=got.payload[:-1] + b"?"))
    assert tale.broken() == {"PayloadIntact"}
    tale = Tale()
    tale.enqueue("a", priority=5)
    tale.drain(tale.got("a", priority=6))
    assert "PayloadIntact" in tale.broken()


@pytest.mark.parametrize(("attempts", "complaint"), [(1, {"AttemptsCounted"}), (2, set()), (3, {"AttemptsCounted"})])
def test_attempts_counted(attempts: int, complaint: set[str]) -> None:
    tale = Tale()
    tale.enqueue("a")
    tale.pop(tale.got("a"))
    tale.clock.advance(10)
    tale.drain(tale.got("a", attempts=attempts))
    assert tale.broken() == complaint


@pytest.mark.parametrize(("attempts", "complaint"), [(1, set()), (2, {"AttemptsCounted"})])
def test_release_counts_no_attempt(attempts: int, complaint: set[str]) -> None:
    tale = Tale()
    tale.enqueue("a")
    got = tale.got("a")
    tale.pop(got)
    tale.on("release", got)
    tale.drain(tale.got("a", attempts=attempts))
    assert tale.broken() == complaint


def test_pop_without_an_answer_may_have_counted() -> None:
    for attempts in (1, 2):
        tale = Tale()
        tale.enqueue("a")
        tale.pop(outcome="unknown")
        tale.drain(tale.got("a", attempts=attempts))
        assert tale.broken() == set()


def test_attempts_are_limited() -> None:
    tale = Tale(max_retries_default=0)
    tale.enqueue("a")
    tale.pop(tale.got("a"))
    tale.clock.advance(10)
    tale.drain(tale.got("a", attempts=2))
    assert tale.broken() == {"AttemptsCounted"}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_strict_order(mode: str) -> None:
    better, worse = (1, 2) if mode == "min" else (2, 1)
    tale = Tale(mode=mode)
    tale.enqueue("a", ids=[1], priority=worse)
    tale.enqueue("b", ids=[2], priority=better)
    tale.drain(tale.got("b", 2, priority=better), tale.got("a", 1, priority=worse))
    assert tale.broken() == set()
    tale = Tale(mode=mode)
    tale.enqueue("a", ids=[1], priority=worse)
    tale.enqueue("b", ids=[2], priority=better)
    tale.drain(tale.got("a", 1, priority=worse), tale.got("b", 2, priority=better))
    assert tale.broken() == {"StrictOrder"}


def test_strict_order_uses_ids_among_equal_priorities() -> None:
    tale = Tale()
    tale.enqueue("a", "b")
    tale.drain(tale.got("b", 2), tale.got("a", 1))
    assert tale.broken() == {"StrictOrder"}


def test_strict_order_detects_a_pop_that_wrongly_returns_nothing() -> None:
    tale = Tale()
    tale.enqueue("a")
    tale.pop()
    tale.drain(tale.got("a"))
    assert tale.broken() == {"StrictOrder"}


def test_strict_order_allows_a_paused_topic_to_return_nothing() -> None:
    tale = Tale()
    tale.enqueue("a")
    tale.call("pause")
    tale.pop()
    tale.call("resume")
    tale.drain(tale.got("a"))
    assert tale.broken() == set()


def test_strict_order_considers_due_delayed_messages() -> None:
    for wait, complaint in ((5.1, set()), (5.5, {"StrictOrder"})):
        tale = Tale()
        tale.enqueue("a", delay=5.0)
        tale.clock.advance(wait)
        tale.pop()
        got = tale.got("a")._replace(enqueued_ms=tale.now - round(wait * 1000))
        tale.drain(got)
        assert tale.broken() == complaint


def test_strict_order_respects_aging() -> None:
    tale = Tale(ordering=Aging(1.0))
    tale.enqueue("old", ids=[1], priority=5)
    old = tale.now
    tale.clock.advance(10.0)
    tale.enqueue("new", ids=[2], priority=0)
    tale.drain(tale.got("new", 2), tale.got("old", 1, priority=5)._replace(enqueued_ms=old))
    assert tale.broken() == {"StrictOrder"}


NAMES = {key: [n for n in map(str, range(60)) if fairness_key_of(n) == key] for key in ("a", "b", None)}


def fair_tale(**config: Any) -> Tale:
    return Tale(**{"fairness": "keys", **config})


def test_strict_order_of_a_fair_topic_is_by_priority_alone() -> None:
    tale = fair_tale()
    tale.enqueue("x", "y", "z")
    tale.pop(tale.got("z", 3))
    assert "StrictOrder" not in tale.broken()
    tale.pop(tale.got("y", 2, priority=1))
    assert "StrictOrder" in tale.broken()


def test_strict_order_ignores_messages_a_limit_may_block() -> None:
    keyed, free = NAMES["a"][0], NAMES[None]
    tale = fair_tale(max_inflight_per_key=1)
    tale.enqueue(keyed, free[0], ids=[1, 2])
    tale.pop(tale.got(free[0], 2, priority=1))
    assert "StrictOrder" not in tale.broken()
    tale.enqueue(free[1], free[2], ids=[3, 4])
    tale.pop(tale.got(free[2], 4, priority=1))
    assert "StrictOrder" in tale.broken()


@pytest.mark.parametrize(("end", "complaint"), [(None, True), ("ack", False), ("nack", False), ("time", False)])
def test_key_limit(end: str | None, complaint: bool) -> None:
    tale = fair_tale(max_inflight_per_key=2)
    tale.enqueue(*NAMES["a"][:3], *NAMES["b"][:1])
    first = tale.got(NAMES["a"][0], 1)
    tale.pop(first)
    tale.pop(tale.got(NAMES["a"][1], 2), tale.got(NAMES["b"][0], 4))
    assert "KeyLimit" not in tale.broken()
    if end == "time":
        tale.clock.advance(2)
    elif end is not None:
        tale.on(end, first, outcome="unknown")
    tale.pop(tale.got(NAMES["a"][2], 3))
    assert ("KeyLimit" in tale.broken()) == complaint


def test_no_false_alarm() -> None:
    tale = Tale()
    tale.call("pop", outcome="unknown", error=JournalCorrupt("f", 0, "x"), visibility_ms=1000)
    assert tale.broken() == {"NoFalseAlarm"}
    tale.history.damaged.add(TOPIC)
    assert tale.broken() == set()


def test_no_false_alarm_among_dead_letters() -> None:
    tale = Tale()
    tale.enqueue("a")
    tale.call("dlq_list", [Dead(1, None, "record corrupt")], client="drain")
    assert tale.broken() == {"NoFalseAlarm"}


def test_crash_leaves_every_open_call_without_an_answer() -> None:
    tale = Tale()
    call = tale.history.start("c", "pop", TOPIC, visibility_ms=1000)
    tale.history.crash("CRASH")
    tale.history.end(call, "ok", [tale.got("a")])
    assert (call.outcome, call.result) == ("unknown", None)


# -- prepared batches --------------------------------------------------------------------------------------------------

OTHER = "mail"


class BatchTale(Tale):
    """Two topics; batch "b" has parts "1" (a in jobs, b in mail) and "2" (c in jobs)."""

    def __init__(self) -> None:
        super().__init__()
        self.history.topics[OTHER] = self.history.topics[TOPIC]
        self.history.drained.add(OTHER)
        for part, shares in (("1", {TOPIC: ["a"], OTHER: ["b"]}), ("2", {TOPIC: ["c"]})):
            sent = {topic: [Sent(name, payload_of(name, 40)) for name in names] for topic, names in shares.items()}
            messages = [message for row in sent.values() for message in row]
            self.call("prepare_batch", {}, messages=messages, batch="b", part=part, shares=sent)

    def commit(self, *parts: str, result: int | None = 2, outcome: Outcome = "ok") -> None:
        self.call("commit_batch", result, outcome, batch="b", parts=list(parts))

    def came(self, *names: str) -> set[str]:
        """Return the complaints if these were delivered at the end."""
        for id, name in enumerate(names):
            topic = OTHER if name == "b" else TOPIC
            call = self.history.start("drain", "pop", topic, visibility_ms=1000)
            self.history.end(call, "ok", [self.got(name, id)])
        return self.broken()


@pytest.mark.parametrize("outcome", ["ok", "unknown"])
def test_committed_parts_are_delivered_completely_and_without_others(outcome: Outcome) -> None:
    for came, verdict in (("ab", set()), ("a", {"BatchAllOrNothing"}), ("abc", {"BatchAllOrNothing"})):
        tale = BatchTale()
        tale.commit("1", outcome=outcome, result=2 if outcome == "ok" else None)
        assert tale.came(*came) == verdict


def test_commit_without_an_answer_may_have_done_nothing() -> None:
    tale = BatchTale()
    tale.commit("1", outcome="unknown", result=None)
    assert tale.came() == set()
    tale = BatchTale()
    tale.commit("1")
    assert tale.came() == {"BatchAllOrNothing"}


def test_purge_after_an_unanswered_commit_may_remove_its_messages() -> None:
    tale = BatchTale()
    tale.commit("1", outcome="unknown", result=None)
    tale.call("purge", 1)
    tale.commit("1")
    assert tale.came("b") == set()


@pytest.mark.parametrize("earlier", ["none", "refused", "other parts", "aborted"])
def test_purge_before_the_commit_removes_none_of_its_messages(earlier: str) -> None:
    tale = BatchTale()
    if earlier != "none":
        parts = ("2",) if earlier == "other parts" else ("1",)
        tale.commit(*parts, outcome="refused" if earlier == "refused" else "unknown", result=None)
    tale.call("purge", 1)
    if earlier == "aborted":
        tale.call("abort_batch", 2, batch="b")
    tale.commit("1")
    assert tale.came("b") == {"BatchAllOrNothing"}


def test_undecided_aborted_and_refused_batches_deliver_nothing() -> None:
    assert BatchTale().came() == set()
    assert BatchTale().came("a", "b") == {"BatchAllOrNothing"}
    for outcome in ("ok", "refused"):
        tale = BatchTale()
        if outcome == "ok":
            tale.commit("1", outcome="unknown", result=None)
            tale.call("abort_batch", 2, batch="b")
        else:
            tale.commit("1", outcome="refused", result=None)
        assert tale.came("a", "b") == {"BatchAllOrNothing"}


def test_commit_returns_its_count_and_only_one_commit_counts() -> None:
    tale = BatchTale()
    tale.commit("1", result=3)
    assert tale.came("a", "b") == {"BatchAllOrNothing"}
    tale = BatchTale()
    tale.commit("1")
    tale.commit("1", "2", result=3)
    assert tale.came("a", "b") == {"BatchAllOrNothing"}
