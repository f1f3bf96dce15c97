"""`StrictOrder`: a pop returns the best messages that are eligible at that time.

Judged where it is certain: a message is *certainly eligible* for a pop if its enqueue was answered before the pop
began, it was due by then with a tick to spare, no call changed it until the pop was answered, and its own first
delivery began only after that. Then every message in the pop's answer must be better, and the answer cannot be empty.

Timers fire in slices, one per commit while callers wait: if slices are very small, and for a while after an open or a
reload, when many timers may be due together, delayed messages are not counted. If fairness keys take turns, only
priorities are judged, and where leases per key are limited only messages without a key are certainly eligible. Other
strategies than best first, and a minimum freshness, are not judged here; nor, where there is a rate, empty answers.
A record that cannot be read is set aside when its turn comes, so nothing is judged after that.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from typing import NamedTuple

from heapline.contract.config import Aging
from heapline.core.ids import partition_of
from tests.simulation.evidence import Evidence
from tests.simulation.history import Call, Got, Sent, fairness_key_of

Rank = tuple[float, int]
HERD_SECONDS = 1.0
LATE_MS = 100  # over the tick


class Waiting(NamedTuple):
    """A message while only its first pop can move it."""

    id: int
    rank: Rank  # the worst possible, if it is not known exactly
    since: int  # order
    until: int  # order: its first pop's start
    due: int  # steady ms
    delayed: bool


class StrictOrder:
    def complaints(self, seen: Evidence) -> Iterator[str]:
        if seen.topic in seen.history.damaged or seen.config.strategy != "best_first" or seen.config.min_freshness:
            return
        waiting = sorted(self._waiting(seen), key=lambda w: w.rank)
        pauses = _spells(seen, "pause", "resume")
        prompt = not seen.history.small_slices
        throttled = {
            partition: _spells(seen, "throttle", "unthrottle", partition) for partition in range(seen.config.partitions)
        }
        upsets = sorted(
            [note.at for note in seen.history.notes]
            + [c.ended_at for c in seen.history.calls if c.topic == seen.topic and c.outcome == "unknown"]
        )
        for call in seen.history.of(seen.topic, "pop"):
            if call.outcome != "ok" or call.steady_start is None or call.ended > seen.history.reads_failed:
                continue
            place = bisect(upsets, call.ended_at)
            before = upsets[place - 1] if place else -HERD_SECONDS
            shut = {p for p, spells in throttled.items() if _overlaps(spells, call)}
            best = self._best(seen, waiting, call, shut, calm=prompt and call.started_at > before + HERD_SECONDS)
            if best is None:
                continue
            if call.result:
                worst = max(self._rank_of(seen, got) for got in call.result)
                if best.rank < worst:
                    yield f"call {call.number} got {worst}, though {best.id} at {best.rank} was waiting"
            elif not _overlaps(pauses, call) and not seen.config.max_pops_per_second:
                yield f"call {call.number} got nothing, though {best.id} at {best.rank} was waiting"

    @staticmethod
    def _best(seen: Evidence, waiting: list[Waiting], call: Call, shut: set[int], calm: bool) -> Waiting | None:
        due = (call.decided_after or 0) - round(seen.config.tick * 1000) - LATE_MS
        for w in waiting:
            there = w.since < call.started and call.ended < w.until and partition_of(w.id) not in shut
            if there and (not w.delayed or (calm and w.due <= due)):
                return w
        return None

    def _waiting(self, seen: Evidence) -> Iterator[Waiting]:
        for life in seen.lives.values():
            answers = [
                (reported, c) for name in life.names for reported, c in seen.reported[name] if reported.id == life.id
            ]
            if not answers or len(life.names) != 1 or seen.listed.get(life.id):
                continue
            first = min((c for _, c in answers), key=lambda c: c.ended)
            sent = seen.history.sent[next(iter(life.names))]
            if seen.config.max_inflight_per_key and fairness_key_of(sent.name) is not None:
                continue
            if sent.deliver_at_ms is not None or sent.ttl is not None or first.steady_end is None:
                continue
            starts = [d.call.started for d in life.deliveries]
            starts += [c.started for c in (*life.moves, *life.ends)]
            # An unanswered call may have it, so its position is no longer certain. It may have
            # been enqueued by an earlier unanswered try.
            begun = min(c.started for name in life.names for c in seen.sends[name])
            starts += [c.started for c in (*seen.purges, *seen.unsure_pops) if c.ended > begun]
            due = first.steady_end + round((sent.delay or 0) * 1000)
            until = min(starts, default=1 << 61)
            rank = (self._worst_key(seen, sent, first), _place(seen, life.id))
            yield Waiting(life.id, rank, first.ended, until, due, bool(sent.delay))

    def _worst_key(self, seen: Evidence, sent: Sent, call: Call) -> float:
        assert call.steady_end is not None
        return _key(seen, sent.priority, call.steady_end, late=True)

    @staticmethod
    def _rank_of(seen: Evidence, got: Got) -> Rank:
        return (_key(seen, got.priority, got.enqueued_ms, late=False), _place(seen, got.id))


def _spells(seen: Evidence, begin: str, end: str, partition: int | None = None) -> list[tuple[int, int]]:
    """Intervals, by order, in which the topic may have been paused, or a partition throttled."""

    def of(verb: str) -> list[Call]:
        return [c for c in seen.history.of(seen.topic, verb) if c.args.get("partition") == partition]

    ends = [c for c in of(end) if c.outcome == "ok"]
    return [
        (call.started, min((c.ended for c in ends if c.started > call.ended), default=1 << 62))
        for call in of(begin)
        if call.may_have_happened
    ]


def _overlaps(spells: list[tuple[int, int]], call: Call) -> bool:
    return any(start < call.ended and call.started < end for start, end in spells)


def _place(seen: Evidence, id: int) -> int:
    return id if seen.config.fairness == "none" else 0


def _key(seen: Evidence, priority: int, enqueued_ms: int, late: bool) -> float:
    """Smaller is served first. Aged keys are exact to about a thousandth: `late` adds one, in the broker's favor."""
    key: float = priority if seen.config.mode == "min" else -priority
    if isinstance(seen.config.ordering, Aging):
        key += seen.config.ordering.rate * (enqueued_ms / 1000 - 1.7e9) + (0.01 if late else 0.0)
    return key
