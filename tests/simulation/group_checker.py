"""Promises to groups, checked in the history: every message that became ready, once, with its bytes.

`GroupSeesAll`: every group got every message that a worker got or that was enqueued without delay, at one offset
that is the same for all. `GroupAckedStaysDone`: a row whose ack was answered is never delivered again.
`GroupOffsetWaits`: the committed offset has not passed a row that was not acked. Only groups that were created with the
topic and read to the end are judged; which rows are redelivered after a crash is not promised.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulation.group_client import GROUPS, Row
from tests.simulation.history import Call, History, name_in


def group_complaints(history: History) -> Iterator[str]:
    for topic, config in history.topics.items():
        if config.streams and topic not in history.damaged:
            for group in GROUPS:
                calls = [call for call in history.calls if call.topic == topic and call.args.get("group") == group]
                story = _Story(history, topic, group, calls)
                for complaint in (*story.sees_all(), *story.acked_stays_done(), *story.offset_waits()):
                    yield f"{complaint} (group {group} of {topic})"


class _Story:
    """Everything that one group of one topic received and sent."""

    def __init__(self, history: History, topic: str, group: str, calls: list[Call]) -> None:
        self._history, self._topic = history, topic
        self._fetches = [call for call in calls if call.verb == "group_fetch" and call.outcome == "ok"]
        self._acks = [call for call in calls if call.verb == "group_ack" and call.may_have_happened]
        self._offsets = [call for call in calls if call.verb == "group_offsets" and call.outcome == "ok"]

    def _rows(self) -> Iterator[tuple[Call, Row]]:
        return ((call, row) for call in self._fetches for row in call.result)

    def sees_all(self) -> Iterator[str]:
        places: dict[int, tuple[int, int]] = {}
        for call, row in self._rows():
            place = row.partition, row.offset
            if places.setdefault(row.id, place) != place:
                yield f"GroupSeesAll {row.id} is in the stream at {places[row.id]} and at {place}"
            sent = self._history.sent.get(name_in(row.payload))
            if sent is None or sent.payload != row.payload:
                yield f"GroupSeesAll call {call.number} got {len(row.payload)} bytes at {place} that no client sent"
        if len(set(places.values())) < len(places):
            yield "GroupSeesAll two messages have one offset"
        missing = self._wanted() - places.keys()
        if missing:
            yield f"GroupSeesAll {len(missing)} messages were never delivered to it: {sorted(missing)[:3]}"

    def _wanted(self) -> set[int]:
        """Messages that were ready at some time."""
        found: set[int] = set()
        for call in self._history.of(self._topic, "pop"):
            if call.outcome == "ok":
                found.update(got.id for got in call.result)
        for call in self._history.of(self._topic, "enqueue"):
            if call.outcome == "ok":
                for sent, reported in zip(call.args["messages"], call.result, strict=True):
                    if (
                        sent.delay is None
                        and sent.deliver_at_ms is None
                        and not reported.error
                        and not reported.duplicate
                    ):
                        found.add(reported.id)
        return found

    def acked_stays_done(self) -> Iterator[str]:
        done: dict[tuple[int, int], Call] = {}
        for ack in self._acks:
            if ack.outcome == "ok":
                for place in _acked(ack):
                    done.setdefault(place, ack)
        for call, row in self._rows():
            ack = done.get((row.partition, row.offset))  # type: ignore[assignment]
            if ack is not None and call.started > ack.ended:
                yield f"GroupAckedStaysDone row {row[:2]} was acked by call {ack.number} and given to {call.number}"

    def offset_waits(self) -> Iterator[str]:
        acked: dict[tuple[int, int], int] = {}
        for ack in self._acks:
            for place in _acked(ack):
                acked[place] = min(ack.started, acked.get(place, ack.started))
        given: dict[tuple[int, int], int] = {}
        for call, row in self._rows():
            place = row.partition, row.offset
            given[place] = min(call.started, given.get(place, call.started))
        for call in self._offsets:
            for partition, offset in given:
                passed = call.result.get(partition, 0) > offset
                if passed and acked.get((partition, offset), 1 << 62) > call.ended:
                    yield f"GroupOffsetWaits call {call.number}: {call.result} has passed {partition}:{offset}"


def _acked(ack: Call) -> list[tuple[int, int]]:
    """Return the rows that an ack settled; all of them, if the outcome is unknown."""
    lost = set(ack.result["lost"]) if ack.error is not None and ack.outcome == "ok" else set()
    return [place for place in ack.args["rows"] if place not in lost]
