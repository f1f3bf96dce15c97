"""The audit's report: a verdict on each promise, from what tasks found and what is known of the topics.

A promise is proved, refuted with counterexamples, or not applicable for a stated reason. Proved means that the events
that were read show that it held; the report states what they cannot show. Pure: the input is counts and few examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from heapline.core.ids import partition_of
from heapline.spark.audit import histories as H
from heapline.spark.audit.facts import Facts, RankRule
from heapline.spark.audit.ranks import Intervals, exclude, ranks

PROVED, REFUTED, NOT_APPLICABLE = "proved", "refuted", "not applicable"
#: The promises, in the order of the report.
PROMISES = {
    "none_lost": "every message is done, dead, expired, cancelled, purged or still in the queue",
    "one_holder": "no message is leased to two holders at once",
    "not_early": "no message is delivered before its time",
    "rank": "each pop takes one of the K best messages",
    "batches": "prepared batches are committed completely or not at all",
    "stays_over": "no message that has ended is delivered again",
    "lawful": "every event is valid in the state of its message",
}
WHY = {
    H.DOUBLE_LEASE: "leased while another holder has it",
    H.EARLY: "leased before it was due",
    H.AFTER_END: "leased after it had ended",
    H.FROM_NOWHERE: "an event about a message that was never enqueued",
    H.TWICE_NEW: "enqueued twice",
    H.UNFIT: "not valid after the previous event of the message",
    H.TORN: "seen, but its batch was never committed",
}
_BALANCE_NAMES = ("waiting", "leased", "dead")


@dataclass(frozen=True)
class Example:
    """A counterexample. Offsets are those of the message's partition."""

    why: str
    topic: str
    partition: int | None = None
    message_id: str | None = None  # decimal digits until job.py converts it to a ULID
    offset: int | None = None
    before: int | None = None  # the offset of the event that it contradicts
    at_ms: int | None = None
    due_ms: int | None = None
    batch_id: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Check:
    name: str
    verdict: str
    looked_at: int = 0  # the number of cases that were judged
    wrong: int = 0
    why: str = ""  # why it is not applicable, or what a proof does not cover
    examples: tuple[Example, ...] = ()

    @property
    def promise(self) -> str:
        return PROMISES[self.name]


@dataclass(frozen=True)
class AuditResult:
    topics: tuple[str, ...]
    events: int
    messages: int
    from_before: int  # messages that are older than the events
    standing: Mapping[str, int]  # messages by final state: waiting, delayed, leased, dead, over
    checks: tuple[Check, ...]
    seconds: float = 0.0
    rank_max: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def is_refuted(self) -> bool:
        return any(check.verdict == REFUTED for check in self.checks)

    @property
    def refuted(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.checks if check.verdict == REFUTED)

    def check(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "refuted": list(self.refuted)}


class Ranked(NamedTuple):
    topic: int
    looked_at: int
    wrong: int
    rank_max: int
    examples: tuple[tuple[int, int, int], ...]  # (id, offset, rank)


def rank(intervals: Intervals, number: int, rule: RankRule, examples_max: int) -> Ranked:
    """Rank the leases of a topic."""
    intervals = exclude(intervals, partition_of(intervals.id), list(rule.exclusions))
    which, found = ranks(intervals, rule.older_is_better)
    late = intervals.to_unit[which] >= rule.since
    which, found = which[late], found[late]
    bad = np.flatnonzero(found > rule.k)
    examples = tuple(
        (intervals.id.item(i), intervals.offset.item(i), rank)
        for i, rank in zip(which[bad[:examples_max]].tolist(), found[bad[:examples_max]].tolist(), strict=True)
    )
    return Ranked(number, len(which), len(bad), int(found.max(initial=0)), examples)


def make_report(
    facts: Facts, findings: Sequence[H.Findings], ranked: Sequence[Ranked], examples_max: int
) -> AuditResult:
    violations: Counter[int] = Counter()
    examples: dict[int, list[Example]] = {what: [] for what in WHY}
    for part in findings:
        violations.update(part.violations)
        for violation in part.examples:
            examples[violation.what].append(_example(facts, violation))
    leases, messages, timed, unknown = (
        sum(getattr(part, name) for part in findings) for name in ("leases", "messages", "timed", "unknown")
    )

    def plain(name: str, what: int, looked_at: int, nothing: str) -> Check:
        return _check(name, looked_at, violations[what], examples[what], nothing=nothing)

    lost = [*_gaps(facts), *_purges(facts, findings), *_balances(facts, findings)]
    lost_count = violations[H.FROM_NOWHERE] + violations[H.TWICE_NEW] + len(lost)
    lost = [*examples[H.FROM_NOWHERE], *examples[H.TWICE_NEW], *lost]
    limits = [f"{unknown} messages are older than the events"] * bool(unknown)
    limits += ["not compared with what the broker holds now"] * (not facts.closing)
    torn = [Example(t.why, t.topic, t.partition, offset=t.offset, batch_id=t.batch_id) for t in facts.book.torn()]
    torn_count = len(torn) + violations[H.TORN]
    checks = (
        _check("none_lost", messages, lost_count, lost, "; ".join(limits), "there are no messages"),
        plain("one_holder", H.DOUBLE_LEASE, leases, "nothing was leased"),
        plain("not_early", H.EARLY, timed, "no message with a due time was leased"),
        _rank_check(facts, ranked),
        _check("batches", facts.book.count, torn_count, [*torn, *examples[H.TORN]], nothing="there are no batches"),
        plain("stays_over", H.AFTER_END, leases, "nothing was leased"),
        plain("lawful", H.UNFIT, messages, "there are no messages"),
    )
    standing = dict.fromkeys(H.STATES, 0)
    for part in findings:
        for (_, state), count in part.standing.items():
            standing[H.STATES[state]] += count
    return AuditResult(
        topics=tuple(topic.name for topic in facts.topics),
        events=sum(reach.rows for reach in facts.reaches),
        messages=messages,
        from_before=unknown,
        standing=standing,
        checks=tuple(replace(check, examples=check.examples[:examples_max]) for check in checks),
        rank_max=max((r.rank_max for r in ranked), default=0),
    )


def _check(
    name: str, looked_at: int, wrong: int, examples: Sequence[Example], why: str = "", nothing: str = ""
) -> Check:
    """Return the verdict on a promise. `nothing` says why it does not apply if there was no case to judge."""
    if wrong:
        return Check(name, REFUTED, looked_at, wrong, why, tuple(examples))
    if not looked_at and nothing:
        return Check(name, NOT_APPLICABLE, why=nothing)
    return Check(name, PROVED, looked_at, 0, why)


def _example(facts: Facts, violation: H.Violation) -> Example:
    return Example(
        WHY[violation.what],
        facts.topics[violation.topic].name,
        int(partition_of(violation.id)),
        str(violation.id),
        violation.offset,
        None if violation.before < 0 else violation.before,
        violation.at,
        violation.due if violation.what == H.EARLY else None,
    )


def _gaps(facts: Facts) -> Iterator[Example]:
    for reach in facts.reaches:
        missing = reach.last - reach.first + 1 - reach.rows
        if missing:
            why = f"{abs(missing)} rows of the log are {'missing' if missing > 0 else 'duplicated'}"
            yield Example(why, reach.topic, reach.partition, offset=reach.first)


def _purges(facts: Facts, findings: Sequence[H.Findings]) -> Iterator[Example]:
    for number, topic in enumerate(facts.topics):
        for mark in facts.marks:
            if mark.topic == topic.name and mark.kind == "purged" and mark.partition in topic.whole:
                where = (mark.partition, mark.offset)
                purged = sum(part.purged.get(where, 0) for part in findings if part.topic == number)
                if purged != mark.messages:
                    why = f"a purge of {mark.messages} messages removed {purged}"
                    yield Example(why, topic.name, mark.partition, offset=mark.offset)


def _balances(facts: Facts, findings: Sequence[H.Findings]) -> Iterator[Example]:
    """Compare what the broker holds with what the events leave."""
    for number, topic in enumerate(facts.topics):
        reached = {reach.partition: reach.last + 1 for reach in facts.reaches if reach.topic == topic.name}
        for partition, balance in facts.closing.get(topic.name, {}).items():
            if reached.get(partition, 0) != balance.offset or (partition not in topic.whole and partition in reached):
                continue
            count = dict.fromkeys(range(5), 0)
            for part in findings:
                for state in count:
                    count[state] += part.standing.get((partition, state), 0) if part.topic == number else 0
            expected = (count[H.WAITING] + count[H.DELAYED], count[H.LEASED], count[H.DEAD])
            actual = (balance.waits, balance.leased, balance.dead)
            differences = [
                f"{a} {name} instead of {e}"
                for name, e, a in zip(_BALANCE_NAMES, expected, actual, strict=True)
                if e != a
            ]
            if differences:
                why = f"the broker holds {', '.join(differences)}"
                yield Example(why, topic.name, partition, offset=balance.offset)


def _rank_check(facts: Facts, ranked: Sequence[Ranked]) -> Check:
    whys = [f"{topic.name}: {why}" for topic, why in zip(facts.topics, facts.why_not, strict=True) if why]
    if len(whys) == len(facts.topics):
        return Check("rank", NOT_APPLICABLE, why="; ".join(whys))
    whys += [
        f"{topic.name}: not judged before the first change of its settings, in unit {rule.since - 1}"
        for topic, rule in zip(facts.topics, facts.rules, strict=True)
        if rule is not None and rule.since > 0
    ]
    examples = []
    for r in ranked:
        for id, offset, rank in r.examples:
            why, topic = f"better messages were waiting: rank {rank}", facts.topics[r.topic].name
            examples.append(Example(why, topic, int(partition_of(id)), str(id), offset, rank=rank))
    looked_at, wrong = sum(r.looked_at for r in ranked), sum(r.wrong for r in ranked)
    return _check("rank", looked_at, wrong, examples, "; ".join(whys), "nothing was leased")
