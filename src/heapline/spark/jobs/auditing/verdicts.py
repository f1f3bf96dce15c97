"""From what was found to a verdict on each promise: proved, refuted with counterexamples, or not applicable and why.

Proved means: the events, as far as they were read, show that it held. What they cannot show is said with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PROVED, REFUTED, NOT_APPLICABLE = "proved", "refuted", "not applicable"
#: The promises, in the order in which they are told.
PROMISES = {
    "none_lost": "every message is done, dead, expired, cancelled, purged or still there",
    "one_holder": "no message is leased to two holders at once",
    "not_early": "nothing is delivered before its time",
    "rank": "each pop takes one of the K best messages",
    "batches": "prepared batches come whole or not at all",
    "stays_over": "no message that has ended is delivered again",
    "lawful": "every event fits the state of its message",
}


@dataclass(frozen=True)
class Example:
    """A counterexample; offsets are of the message's partition."""

    why: str
    topic: str
    partition: int | None = None
    message_id: str | None = None
    offset: int | None = None
    before: int | None = None  # the offset of what it does not fit to
    at_ms: int | None = None
    due_ms: int | None = None
    batch_id: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Check:
    name: str
    verdict: str
    looked_at: int = 0  # how many cases were judged
    wrong: int = 0
    why: str = ""  # it is not applicable, or what a proof does not cover
    examples: tuple[Example, ...] = ()

    @property
    def promise(self) -> str:
        return PROMISES[self.name]


@dataclass(frozen=True)
class AuditResult:
    topics: tuple[str, ...]
    events: int
    messages: int
    from_before: int  # messages whose beginning the events do not tell
    standing: Mapping[str, int]  # where the messages are in the end: waiting, delayed, leased, dead, over
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


def judged(
    name: str, looked_at: int, wrong: int, examples: Sequence[Example], why: str = "", nothing: str = ""
) -> Check:
    """`nothing`: why a promise does not apply of which there was no case to look at."""
    if wrong:
        return Check(name, REFUTED, looked_at, wrong, why, tuple(examples))
    if not looked_at and nothing:
        return Check(name, NOT_APPLICABLE, why=nothing)
    return Check(name, PROVED, looked_at, 0, why)
