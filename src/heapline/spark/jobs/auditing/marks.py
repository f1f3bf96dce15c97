"""What concerns a topic and not one of its messages: purges, throttling, settings, prepared batches, and how far the
events go. Small, however many events there are: gathered before the messages are judged, and known to all tasks then.

`Mark` is one event of these kinds (the rows of a commit are one event), `Reach` what a partition's rows add up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from heapline.config import TopicConfig
from heapline.spark.jobs.auditing.ranks import NEVER, Spell

KINDS = ("purged", "throttled", "config_changed", "batch_prepared", "batch_committed", "batch_aborted")


class Mark(NamedTuple):
    topic: str
    partition: int
    kind: str
    batch_id: str | None
    details: str | None
    unit: int
    offset: int  # of its first row
    rows: int
    named: int  # rows that name a message
    messages: int  # that it speaks of without naming them

    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.details or "{}")
        return found


class Reach(NamedTuple):
    topic: str
    partition: int
    rows: int
    first: int  # offset
    last: int
    last_unit: int
    first_lease: int  # unit; NEVER: there is none
    wall_ahead: int  # ms


def spells_of(marks: Sequence[Mark], reaches: Sequence[Reach]) -> list[Spell]:
    """When partitions of a topic may have been left out of pops. Whether one was when the events begin is not known,
    unless they begin with the topic: it was not when it gave something, or was told to take part."""
    found: list[Spell] = []
    for reach in reaches:
        mine = sorted((m for m in marks if m.kind == "throttled" and m.partition == reach.partition), key=_offset)
        since = None if reach.first == 0 else -1
        if since is not None and reach.first_lease < NEVER and (not mine or reach.first_lease < mine[0].unit):
            found.append(Spell(reach.partition, since, reach.first_lease))
            since = None
        for mark in mine:
            if mark.said()["throttled"]:
                since = mark.unit if since is None else since
            else:
                found.append(Spell(reach.partition, mark.unit if since is None else since, mark.unit))
                since = None
        if since is not None:
            found.append(Spell(reach.partition, since, NEVER - 1))
    return found


def _offset(mark: Mark) -> int:
    return mark.offset


def settings_of(marks: Sequence[Mark], now: TopicConfig | None) -> tuple[list[TopicConfig], int]:
    """All settings that were in force, as far as they are known, and from which unit on they are: what was in force
    before the first change that the events tell of is not."""
    changes = sorted((m for m in marks if m.kind == "config_changed"), key=lambda m: m.unit)
    found = [msgspec.convert(m.said()["config"], TopicConfig) for m in changes]
    since = changes[0].unit + 1 if changes else -1
    return ([*found, now] if now is not None and not found else found) or [], since
