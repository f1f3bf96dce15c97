"""The database of an outbox, as the relay uses it. Each call is one transaction.

A *lane* is one relay's own line of numbers: its name is the producer's name at the broker. Rows are claimed by a lane,
with an epoch and a number, before they are sent. The owner of a lane is recorded in its row (`owner`, `beat_ms`), and
every turn of a lane begins by renewing that record, so a relay that has lost its lane changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from heapline.client.outbox.rows import Row


@dataclass(slots=True)
class Line:
    """The numbers of a lane on one topic."""

    epoch: int
    next_seq: int = 0


@dataclass(slots=True)
class Turn:
    """Outcomes of rows since the last turn, and what to claim next."""

    lane: str
    owner: str
    now_ms: int
    sent: list[int] = field(default_factory=list)  # ids of rows that were enqueued, to be deleted
    failed: list[tuple[int, str]] = field(default_factory=list)  # ids and reasons of rows that stay for an operator
    returned: list[int] = field(default_factory=list)  # ids of rows that were not sent, to be released
    lines: dict[str, Line] = field(default_factory=dict)  # by topic; numbers are taken from them
    without: frozenset[str] = frozenset()  # topics whose rows are not claimed
    rows_max: int = 0
    bytes_max: int = 0


@dataclass(slots=True)
class Claimed:
    rows: list[Row]
    unknown: list[str]  # topics of rows that were skipped because they have no line yet


class OutboxStore(Protocol):
    async def take_lane(self, owner: str, now_ms: int, stale_ms: int) -> str:
        """Return a lane without an owner, one whose owner has been silent since before `stale_ms`, or a new one."""

    async def abandoned_lanes(self, stale_ms: int) -> list[str]:
        """Return lanes with rows whose owner has been silent since before `stale_ms`."""

    async def adopt(self, lane: str, owner: str, now_ms: int, stale_ms: int) -> bool:
        """Own this lane, unless its owner has been active since. Return whether it is owned."""

    async def held(self, lane: str) -> list[Row]:
        """Return the rows that a lane has claimed, by number."""

    async def turn(self, turn: Turn) -> Claimed | None:
        """Settle and claim. Return None, and change nothing, if the lane has another owner."""

    async def give_back(self, lane: str, owner: str) -> None: ...

    async def close(self) -> None: ...


def cut(found: list[tuple[int, str, int]], turn: Turn) -> tuple[list[tuple[int, str]], list[str]]:
    """Of (id, topic, bytes) in order, return those to claim now, and the topics without a line."""
    taken: list[tuple[int, str]] = []
    unknown: list[str] = []
    total = 0
    for id, topic, nbytes in found:
        if topic not in turn.lines:
            if topic not in unknown:
                unknown.append(topic)
            continue
        total += nbytes or 0
        if taken and total > turn.bytes_max:
            break
        taken.append((id, topic))
    return taken, unknown


def number(taken: list[tuple[int, str]], lines: dict[str, Line]) -> dict[int, tuple[int, int]]:
    """Return (epoch, seq) for each id, and advance the lines."""
    numbers: dict[int, tuple[int, int]] = {}
    for id, topic in taken:
        line = lines[topic]
        numbers[id] = (line.epoch, line.next_seq)
        line.next_seq += 1
    return numbers
