"""`StrictOrder`: a pop returns the best messages that are eligible at that moment.

Judged where it is exact: a message counts as *certainly eligible* for a pop if its enqueue was answered before the pop
began, it was due by then with a tick to spare, nothing has touched it until the pop was answered, and its own first
delivery began only after that. Then every message in the pop's answer must be better, and the answer cannot be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from heapline.config import Aging
from heapline.testing.evidence import Evidence
from heapline.testing.history import Call, Got, Sent

Rank = tuple[float, int]


class Waiting(NamedTuple):
    """A message while nothing but its first pop can move it."""

    id: int
    rank: Rank  # at its worst, where it is not known exactly
    since: int  # order
    until: int  # order: its first pop's start
    due: int  # steady ms


class StrictOrder:
    def complaints(self, seen: Evidence) -> Iterator[str]:
        waiting = sorted(self._waiting(seen), key=lambda w: w.rank)
        pauses = self._pauses(seen)
        for call in seen.history.of(seen.topic, "pop"):
            if call.outcome != "ok" or call.steady_start is None:
                continue
            best = self._best(seen, waiting, call)
            if best is None:
                continue
            if call.result:
                worst = max(self._rank_of(seen, got) for got in call.result)
                if best.rank < worst:
                    yield f"call {call.number} got {worst}, though {best.id} at {best.rank} was waiting"
            elif not any(start < call.ended and call.started < end for start, end in pauses):
                yield f"call {call.number} got nothing, though {best.id} at {best.rank} was waiting"

    def _best(self, seen: Evidence, waiting: list[Waiting], call: Call) -> Waiting | None:
        tick = round(seen.config.tick * 1000) + 2
        due = (call.decided_after or 0) - tick
        return next((w for w in waiting if w.since < call.started and call.ended < w.until and w.due <= due), None)

    def _waiting(self, seen: Evidence) -> Iterator[Waiting]:
        for life in seen.lives.values():
            answers = [(told, c) for name in life.names for told, c in seen.told[name] if told.id == life.id]
            if not answers or len(life.names) != 1:
                continue
            first = min((c for _, c in answers), key=lambda c: c.ended)
            sent = seen.history.sent[next(iter(life.names))]
            if sent.deliver_at_ms is not None or sent.ttl is not None or first.steady_end is None:
                continue
            starts = [d.call.started for d in life.deliveries]
            starts += [c.started for c in (*life.moves, *life.ends)]
            # What was lost with an answer may have it: it is no longer certain where the message stands.
            starts += [c.started for c in (*seen.purges, *seen.unsure_pops) if c.ended > first.started]
            due = first.steady_end + round((sent.delay or 0) * 1000)
            until = min(starts, default=1 << 61)
            yield Waiting(life.id, (self._worst_key(seen, sent, first), life.id), first.ended, until, due)

    def _worst_key(self, seen: Evidence, sent: Sent, call: Call) -> float:
        assert call.steady_end is not None
        return _key(seen, sent.priority, call.steady_end, late=True)

    @staticmethod
    def _rank_of(seen: Evidence, got: Got) -> Rank:
        return (_key(seen, got.priority, got.enqueued_ms, late=False), got.id)

    @staticmethod
    def _pauses(seen: Evidence) -> list[tuple[int, int]]:
        """Times, by order, in which the topic may have been paused."""
        pauses = []
        for pause in seen.history.of(seen.topic, "pause"):
            if pause.may_have_happened:
                resumes = [
                    c.ended for c in seen.history.of(seen.topic, "resume")
                    if c.outcome == "ok" and c.started > pause.ended
                ]  # fmt: skip
                pauses.append((pause.started, min(resumes, default=1 << 62)))
        return pauses


def _key(seen: Evidence, priority: int, enqueued_ms: int, late: bool) -> float:
    """Smaller is served first. Aged keys are exact to about a thousandth: `late` adds one, so that doubt acquits."""
    key: float = priority if seen.config.mode == "min" else -priority
    if isinstance(seen.config.ordering, Aging):
        key += seen.config.ordering.rate * (enqueued_ms / 1000 - 1.7e9) + (0.01 if late else 0.0)
    return key
