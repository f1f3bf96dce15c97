"""One history, read once for all checkers: what happened to each message of one topic, as far as clients could see.

Certain and possible events are kept apart: an unanswered ack *may* have ended a message, an answered one *has*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.simulation.history import Call, Dead, Got, History, Reply

DRAIN = "drain"  # the client that empties every topic at the end


class Delivery(NamedTuple):
    got: Got
    call: Call

    @property
    def decided(self) -> int:
        """Steady time at which the lease was granted."""
        return self.got.deadline_ms - int(self.call.args["visibility_ms"])


@dataclass(slots=True)
class Life:
    """One message id."""

    id: int
    names: set[str] = field(default_factory=set)
    deliveries: list[Delivery] = field(default_factory=list)  # by token
    acks: list[Call] = field(default_factory=list)  # calls that may have ended it
    returns: list[Call] = field(default_factory=list)  # nack, release, bury
    extends: list[Call] = field(default_factory=list)
    moves: list[Call] = field(default_factory=list)  # reschedules
    ends: list[Call] = field(default_factory=list)  # cancels and deletes from the dead letters (of one id each)


class Evidence:
    def __init__(self, history: History, topic: str) -> None:
        self.history, self.topic = history, topic
        self.config = history.topics[topic]
        self.lives: dict[int, Life] = {}
        self.reported: dict[str, list[tuple[Reply, Call]]] = defaultdict(list)  # by name
        self.sends: dict[str, list[Call]] = defaultdict(list)
        self.listed: dict[int, list[tuple[Dead, Call]]] = defaultdict(list)
        self.purges = [c for c in history.of(topic, "purge") if c.may_have_happened]
        self.replays = [c for c in history.of(topic, "dlq_replay") if c.may_have_happened]
        self.unsure_pops = [c for c in history.of(topic, "pop") if c.outcome in ("unknown", "open")]
        for call in history.calls:
            if "shares" in call.args:
                for message in call.args["shares"].get(topic, ()):
                    self.sends[message.name].append(call)
            elif call.topic == topic:
                self._take(call)
        for life in self.lives.values():
            life.deliveries.sort(key=lambda d: (d.got.token, d.call.number))

    def life(self, id: int) -> Life:
        found = self.lives.get(id)
        if found is None:
            found = self.lives[id] = Life(id)
        return found

    def _take(self, call: Call) -> None:
        if call.verb == "enqueue":
            for i, message in enumerate(call.args["messages"]):
                self.sends[message.name].append(call)
                if call.outcome == "ok":
                    self.reported[message.name].append((call.result[i], call))
                    if not call.result[i].error:
                        self.life(call.result[i].id).names.add(message.name)
        elif call.verb == "pop" and call.outcome == "ok":
            for got in call.result:
                life = self.life(got.id)
                life.names.add(got.name)
                life.deliveries.append(Delivery(got, call))
        elif call.verb == "dlq_list" and call.outcome == "ok":
            for dead in call.result:
                self.listed[dead.id].append((dead, call))
        elif call.may_have_happened:
            self._take_change(call)

    def _take_change(self, call: Call) -> None:
        kinds = {"ack": "acks", "nack": "returns", "release": "returns", "bury": "returns", "extend": "extends"}
        if call.verb in kinds:
            for id, _ in call.args["leases"]:
                if not was_lost(call, id):
                    getattr(self.life(id), kinds[call.verb]).append(call)
        elif call.verb == "cancel":
            self.life(call.args["id"]).ends.append(call)
        elif call.verb == "dlq_delete" and call.result != 0:
            for id in call.args["ids"]:
                self.life(id).ends.append(call)
        elif call.verb == "reschedule":
            self.life(call.args["id"]).moves.append(call)

    def pairs(self) -> Iterator[tuple[Life, Delivery, Delivery]]:
        """Deliveries of one message that follow each other."""
        for life in self.lives.values():
            for i in range(1, len(life.deliveries)):
                yield life, life.deliveries[i - 1], life.deliveries[i]


def was_lost(call: Call, id: int) -> bool:
    return isinstance(call.result, dict) and id in call.result.get("lost", ())


def is_on(call: Call, got: Got) -> bool:
    """Whether a call named exactly this lease."""
    return (got.id, got.token) in call.args["leases"]
