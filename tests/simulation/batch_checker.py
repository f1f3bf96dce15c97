"""`BatchAllOrNothing` for prepared batches: judged over all topics together, because that is the promise.

Of a committed batch every message of the named parts is visible and none of the others; of an aborted or undecided one
none is. If a commit was not answered, either outcome must explain everything that was seen, in every topic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.simulation.evidence import Evidence
from tests.simulation.history import Call, History, name_in

Place = tuple[str, str]  # topic, name of a message


def prepared_complaints(history: History, seen: Mapping[str, Evidence]) -> Iterator[str]:
    batches: dict[str, list[Call]] = {}
    for call in history.calls:
        if "batch" in call.args:
            batches.setdefault(call.args["batch"], []).append(call)
    visible = {(topic, name) for topic, evidence in seen.items() for name in _visible(evidence)}
    for batch, calls in batches.items():
        story = _Story(history, seen, batch, calls)
        if story.is_reported:
            yield from story.complaints(visible)


def _visible(seen: Evidence) -> set[str]:
    names = {got.name for life in seen.lives.values() for got, _ in life.deliveries}
    return names | {name_in(d.payload) for rows in seen.listed.values() for d, _ in rows if d.payload is not None}


class _Story:
    """All calls about one batch."""

    def __init__(self, history: History, seen: Mapping[str, Evidence], batch: str, calls: list[Call]) -> None:
        self.batch, self._seen, self._history = batch, seen, history
        self._parts: dict[str, set[Place]] = {}
        for call in calls:
            if call.verb == "prepare_batch":
                places = {(topic, m.name) for topic, sent in call.args["shares"].items() for m in sent}
                self._parts[call.args["part"]] = places
        self._commits = [call for call in calls if call.verb == "commit_batch" and call.may_have_happened]
        self._aborts = [call for call in calls if call.verb == "abort_batch" and call.outcome == "ok"]
        self._all = set().union(*self._parts.values())

    @property
    def is_reported(self) -> bool:
        """Whether everything about it can be seen."""
        topics = {topic for topic, _ in self._all}
        return topics <= self._history.drained and not topics & self._history.damaged

    def complaints(self, visible: set[Place]) -> Iterator[str]:
        there = self._all & visible
        answered = [call for call in self._commits if call.outcome == "ok"]
        last_abort = max((call.started for call in self._aborts), default=-1)
        possible = [call for call in self._commits if call.ended > last_abort]
        if answered:
            yield from self._numbers(answered)
            # An earlier unanswered commit of the same parts may be the one that took effect.
            possible = [answered[0], *(call for call in possible if self._may_be_repeated_by(answered[0], call))]
        if any(self._explains(call, there) for call in possible):
            return
        if not answered and not there:
            return
        if not possible:
            yield f"{self.batch} was never committed, and {sorted(there)[:5]} of it came out"
            return
        wanted = self._wanted(possible[0])
        lacking, extra = sorted(wanted - there)[:5], sorted(there - wanted)[:5]
        yield f"{self.batch} (commit in call {possible[0].number}): {lacking} lack, {extra} should not be there"

    @staticmethod
    def _may_be_repeated_by(answered: Call, call: Call) -> bool:
        return call.started < answered.started and set(call.args["parts"]) == set(answered.args["parts"])

    def _wanted(self, call: Call) -> set[Place]:
        return set().union(*(self._parts[part] for part in call.args["parts"]))

    def _explains(self, call: Call, there: set[Place]) -> bool:
        wanted = self._wanted(call)
        return there <= wanted and all(self._may_lack(place, call) for place in wanted - there)

    def _may_lack(self, place: Place, call: Call) -> bool:
        topic, name = place
        if self._history.sent[name].ttl is not None:
            return True
        return any(purge.ended > call.started for purge in self._seen[topic].purges)

    def _numbers(self, answered: list[Call]) -> Iterator[str]:
        for call in answered:
            if set(call.args["parts"]) != set(answered[0].args["parts"]):
                yield f"{self.batch} was committed by call {answered[0].number} and otherwise by call {call.number}"
            elif call.result != len(self._wanted(call)):
                yield f"call {call.number} committed {len(self._wanted(call))} messages and was reported {call.result}"
