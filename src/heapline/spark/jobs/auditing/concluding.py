"""All that was found, put together: what tasks found of messages, what is known of the topics, and what others say of
them (the balance before and after). From that, a verdict on each promise.

Pure, and small by the time it comes here: counts, and a few examples of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from heapline.core.ids import partition_of
from heapline.spark.jobs.auditing import histories as H
from heapline.spark.jobs.auditing.batches import BatchBook
from heapline.spark.jobs.auditing.marks import Mark, Reach, settings_of, spells_of
from heapline.spark.jobs.auditing.ranks import Intervals, Spell, ranks, without
from heapline.spark.jobs.auditing.verdicts import NOT_APPLICABLE, AuditResult, Check, Example, judged
from heapline.ulid import to_ulid

WHY = {
    H.DOUBLE_LEASE: "leased while another holder has it",
    H.EARLY: "leased before it was due",
    H.AFTER_END: "leased after it had ended",
    H.FROM_NOWHERE: "something happens to it, though it never came",
    H.TWICE_NEW: "it came twice",
    H.UNFIT: "does not fit what happened to it before",
    H.TORN: "seen, though its batch was never committed",
}


class Standing(NamedTuple):
    """What a partition holds by somebody else's account, at an offset: that of the next row."""

    offset: int
    waits: int  # ready or delayed
    leased: int
    dead: int


class Ranked(NamedTuple):
    topic: int
    looked_at: int
    wrong: int
    rank_max: int
    examples: tuple[tuple[int, int, int], ...]  # (id, offset, rank)


@dataclass(frozen=True)
class Ordered:
    """How the ranks of a topic are judged."""

    k: int
    spells: tuple[Spell, ...]
    since: int  # unit: what was leased before is not judged
    older_is_better: bool


@dataclass
class Known:
    """What is known before the messages are looked at."""

    topics: list[H.Topic]
    orders: list[Ordered | None]
    why_not: list[str]  # of topics whose ranks are not judged
    marks: list[Mark]
    reaches: list[Reach]
    book: BatchBook
    closing: Mapping[str, Mapping[int, Standing]] = field(default_factory=dict)


def known(
    names: Sequence[str], marks: Sequence[Mark], reaches: Sequence[Reach], configs: Mapping[str, Any],
    closing: Mapping[str, Mapping[int, Standing]] | None = None, opened: bool = False,
) -> Known:  # fmt: skip
    """`opened`: what was there before the events begin is told by steps of its own."""
    book = BatchBook(marks, reaches)
    found = Known([], [], [], list(marks), list(reaches), book, closing or {})
    for name in names:
        mine, reach = [m for m in marks if m.topic == name], [r for r in reaches if r.topic == name]
        settings, since = settings_of(mine, configs.get(name))
        config = configs.get(name) or (settings[-1] if settings else None)
        why = _why_no_ranks(settings)
        whole = frozenset(r.partition for r in reach if r.first == 0 or opened)
        purges = tuple(H.Purge(m.partition, m.offset, m.unit) for m in mine if m.kind == "purged")
        ahead = max((r.wall_ahead for r in reach), default=0)
        topic = H.Topic(name, None if why else config, whole, purges, ahead, book.hidden(name))
        found.topics.append(topic)
        found.why_not.append(why)
        order = None
        if not why and config is not None:
            has_turns = config.fairness == "keys"
            spells = tuple(spells_of(mine, reach))
            order = Ordered(max(c.k for c in settings), spells, since, not has_turns)
        found.orders.append(order)
    return found


def _why_no_ranks(settings: Sequence[Any]) -> str:
    if not settings:
        return "the topic's settings are not known: say where the queue is, or give config="
    if any(config.strategy != "best_first" for config in settings):
        return "pops take partitions in turn, which gives the bound up"
    if any(config.max_inflight_per_key for config in settings):
        return "leases per fairness key are limited, so that any message may have been held back"
    return ""


def rank(intervals: Intervals, number: int, order: Ordered, examples_max: int) -> Ranked:
    intervals = without(intervals, partition_of(intervals.id), list(order.spells))
    which, found = ranks(intervals, order.older_is_better)
    late = intervals.to_unit[which] >= order.since
    which, found = which[late], found[late]
    bad = np.flatnonzero(found > order.k)
    examples = tuple(
        (intervals.id.item(i), intervals.offset.item(i), rank)
        for i, rank in zip(which[bad[:examples_max]].tolist(), found[bad[:examples_max]].tolist(), strict=True)
    )
    return Ranked(number, len(which), len(bad), int(found.max(initial=0)), examples)


def conclude(facts: Known, looked: Sequence[H.Looked], ranked: Sequence[Ranked], examples_max: int) -> AuditResult:
    complaints: dict[int, int] = {}
    examples: dict[int, list[Example]] = {}
    for part in looked:
        for what, count in part.complaints.items():
            complaints[what] = complaints.get(what, 0) + count
        for complaint in part.examples:
            examples.setdefault(complaint.what, []).append(_example(facts, complaint))
    leases, messages = sum(part.leases for part in looked), sum(part.messages for part in looked)

    def plain(name: str, what: int, looked_at: int, nothing: str) -> Check:
        return judged(name, looked_at, complaints.get(what, 0), examples.get(what, [])[:examples_max], nothing=nothing)

    timed = sum(part.timed for part in looked)
    checks = (
        _none_lost(facts, looked, messages, complaints, examples, examples_max),
        plain("one_holder", H.DOUBLE_LEASE, leases, "nothing was leased"),
        plain("not_early", H.EARLY, timed, "nothing that had to wait for its time was leased"),
        _rank_check(facts, ranked, examples_max),
        _batch_check(facts, complaints.get(H.TORN, 0), examples.get(H.TORN, []), examples_max),
        plain("stays_over", H.AFTER_END, leases, "nothing was leased"),
        plain("lawful", H.UNFIT, messages, "there are no messages"),
    )
    standing = dict.fromkeys(H.STATES, 0)
    for part in looked:
        for (_, state), count in part.standing.items():
            standing[H.STATES[state]] += count
    return AuditResult(
        tuple(topic.name for topic in facts.topics), sum(reach.rows for reach in facts.reaches), messages,
        sum(part.unknown for part in looked), standing, checks, rank_max=max((r.rank_max for r in ranked), default=0),
    )  # fmt: skip


def _example(facts: Known, found: H.Complaint) -> Example:
    return Example(
        WHY[found.what], facts.topics[found.topic].name, int(partition_of(found.id)), to_ulid(found.id), found.offset,
        None if found.before < 0 else found.before, found.at, found.due if found.what == H.EARLY else None,
    )  # fmt: skip


def _none_lost(
    facts: Known, looked: Sequence[H.Looked], messages: int, complaints: Mapping[int, int],
    examples: Mapping[int, list[Example]], examples_max: int,
) -> Check:  # fmt: skip
    wrong = complaints.get(H.FROM_NOWHERE, 0) + complaints.get(H.TWICE_NEW, 0)
    told = [*examples.get(H.FROM_NOWHERE, []), *examples.get(H.TWICE_NEW, [])]
    for example in [*_gaps(facts), *_purges(facts, looked), *_balance(facts, looked)]:
        wrong += 1
        told.append(example)
    unknown = sum(part.unknown for part in looked)
    said = [f"{unknown} messages began before the events"] * bool(unknown)
    said += ["not compared with what the broker holds now"] * (not facts.closing)
    return judged("none_lost", messages, wrong, told[:examples_max], "; ".join(said), "there are no messages")


def _gaps(facts: Known) -> Iterator[Example]:
    for reach in facts.reaches:
        missing = reach.last - reach.first + 1 - reach.rows
        if missing > 0:
            yield Example(f"{missing} rows of the log are missing", reach.topic, reach.partition, offset=reach.first)
        elif missing < 0:
            yield Example(f"{-missing} rows of the log came twice", reach.topic, reach.partition, offset=reach.first)


def _purges(facts: Known, looked: Sequence[H.Looked]) -> Iterator[Example]:
    for number, topic in enumerate(facts.topics):
        for mark in facts.marks:
            if mark.topic == topic.name and mark.kind == "purged" and mark.partition in topic.whole:
                gone = sum(part.purged.get((mark.partition, mark.offset), 0) for part in looked if _of(part, number))
                if gone != mark.messages:
                    yield Example(
                        f"a purge of {mark.messages} messages met {gone}",
                        topic.name,
                        mark.partition,
                        offset=mark.offset,
                    )


def _of(part: H.Looked, number: int) -> bool:
    return part.topic == number


def _balance(facts: Known, looked: Sequence[H.Looked]) -> Iterator[Example]:
    """Does the broker hold what the events leave?"""
    for number, topic in enumerate(facts.topics):
        reached = {reach.partition: reach.last + 1 for reach in facts.reaches if reach.topic == topic.name}
        for partition, stands in facts.closing.get(topic.name, {}).items():
            if reached.get(partition, 0) != stands.offset or (partition not in topic.whole and partition in reached):
                continue
            count = dict.fromkeys(range(5), 0)
            for part in looked:
                for state in count:
                    count[state] += part.standing.get((partition, state), 0) if part.topic == number else 0
            ours = (count[H.WAITING] + count[H.DELAYED], count[H.LEASED], count[H.DEAD])
            theirs = (stands.waits, stands.leased, stands.dead)
            if ours != theirs:
                words = [
                    f"{t} {name} instead of {o}" for name, o, t in zip(_NAMES, ours, theirs, strict=True) if o != t
                ]
                yield Example(f"the broker holds {', '.join(words)}", topic.name, partition, offset=stands.offset)


_NAMES = ("waiting", "leased", "dead")


def _rank_check(facts: Known, ranked: Sequence[Ranked], examples_max: int) -> Check:
    whys = [f"{topic.name}: {why}" for topic, why in zip(facts.topics, facts.why_not, strict=True) if why]
    if len(whys) == len(facts.topics):
        return Check("rank", NOT_APPLICABLE, why="; ".join(whys))
    whys += [
        f"{topic.name}: not judged before the first change of its settings, in unit {order.since - 1}"
        for topic, order in zip(facts.topics, facts.orders, strict=True) if order is not None and order.since > 0
    ]  # fmt: skip
    examples = [
        Example(f"better ones were waiting: rank {rank}", facts.topics[r.topic].name, int(partition_of(id)),
                to_ulid(id), offset, rank=rank)
        for r in ranked for id, offset, rank in r.examples
    ]  # fmt: skip
    looked_at, wrong = sum(r.looked_at for r in ranked), sum(r.wrong for r in ranked)
    return judged("rank", looked_at, wrong, examples[:examples_max], "; ".join(whys), "nothing was leased")


def _batch_check(facts: Known, seen: int, examples: Sequence[Example], examples_max: int) -> Check:
    torn = list(facts.book.torn())
    told = [Example(t.why, t.topic, t.partition, offset=t.offset, batch_id=t.batch_id) for t in torn]
    wrong = len(torn) + seen
    return judged("batches", facts.book.count, wrong, [*told, *examples][:examples_max], nothing="there are no batches")
