"""Delayed messages: in which slots they are, and how they fire.

A slot holds the messages of one period of time. Near periods are short and far ones long: the slots of level n take
BASE_MS * RATIO^n each, and a new message goes to the lowest level whose slots reach to its time (`delayed_slot` in
migrations/). So a message is stored once and fires from where it is. When a period is over, its slot is empty and is
truncated (rings.py): the rows that were deleted from it never take more space than the messages took that waited.

Of the RATIO slots of a level, RATIO - 1 can be chosen for new messages. The other one is that of the last period.
"""

from __future__ import annotations

from typing import NamedTuple

import asyncpg

from heapline.sql.layout import Layout
from heapline.sql.statements import statement

LEVELS, RATIO, BASE_MS = 9, 4, 60_000
FOREVER = 1 << 62
SHARE = 20  # a check of all slots may take 1/this of the time


def past_slots(now: int) -> list[int]:
    """Return the slot of each level whose period has just ended."""
    return [level * RATIO + (now // (BASE_MS * RATIO**level) - 1) % RATIO for level in range(LEVELS)]


class FiredUpTo:
    """The time up to which this node has fired everything that it knows of.

    Its next check starts there, instead of stepping over what was deleted since the slot's period began. A message may
    be committed after its time: that of this node lowers the time again, and that of another node is found by a check
    from the beginning, which is due every `interval` seconds.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self.time = 0  # ms
        self._lowered_to = FOREVER  # during a check
        self._next_full = 0.0

    def start(self, monotonic: float) -> int:
        """Begin a check and return the time up to which it may skip everything."""
        self._lowered_to = FOREVER
        return 0 if monotonic >= self._next_full else self.time

    def end(self, now: int, began: float, ended: float) -> None:
        """Record that a check has fired everything up to `now`."""
        if began >= self._next_full:
            self._next_full = ended + max(self._interval, SHARE * (ended - began))
        self.time = min(now, self._lowered_to - 1)

    def lower(self, at: int) -> None:
        """Let the next check find a message that is due at this time."""
        self._lowered_to = min(self._lowered_to, at)
        self.time = min(self.time, at - 1)


class Fired(NamedTuple):
    """Messages that a transaction took out of the slots."""

    rows: int
    ready: set[int]  # topics that have new ready messages
    expired: dict[int, int]  # how many messages of which topics have expired


async def fire(connection: asyncpg.Connection, layout: Layout, after: int, limit: int) -> Fired:
    """Make messages ready that were due after `after` and are due by now, or end them if they have expired."""
    rows = await connection.fetch(statement("due_delayed"), after, layout.now, limit)
    slots: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    expired: dict[int, int] = {}
    for slot, place, topic, has_expired in rows:
        slots.setdefault((slot, has_expired), []).append(place)
        if has_expired:
            expired[topic] = expired.get(topic, 0) + 1
    for (slot, has_expired), places in slots.items():
        if has_expired:
            end = layout.to_ended("delayed_to_ended", delayed=f"delayed_{slot}")
            await connection.execute(end, places, layout.now)
        else:
            await connection.execute(layout.to_ready("delayed_to_ready", delayed=f"delayed_{slot}"), places)
    return Fired(len(rows), {row["topic"] for row in rows if not row["expired"]}, expired)
