"""`journal stats`: for whom a topic's closed segments are kept, and how far its groups are. Only reads."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, field

from heapline.cli.places import Place
from heapline.cli.reading import wall_ms
from heapline.engine.retention import Survey, held
from heapline.engine.surveying import Surveyor
from heapline.engine.topic import Topic
from heapline.journal import Disk
from heapline.journal.reader import LogReader
from heapline.journal.reclaim import read_leases


@dataclass(slots=True)
class GroupFigures:
    lag: int  # in messages
    dead: int
    holds: bool  # whether the journal is kept for it


@dataclass(slots=True)
class Holders:
    segments: Counter[str] = field(default_factory=Counter)  # by who keeps them: a segment may be kept by several
    bytes: Counter[str] = field(default_factory=Counter)
    groups: dict[str, GroupFigures] = field(default_factory=dict)


def holders(disk: Disk, place: Place, topic: Topic, snapshots: list[int]) -> Holders:
    """`snapshots` are the units of those that check."""
    found, now = Holders(), wall_ms()
    offsets = [partition.offset for partition in topic.partitions]
    survey = Surveyor().look(disk, place.folder, LogReader(disk, place.folder), offsets)
    readers: list[tuple[str, int]] = []
    with contextlib.suppress(OSError):
        leases = read_leases(disk, place.folder, now)
        readers = [(lease.name, lease.segment) for lease in leases if lease.name != f"cli-{os.getpid()}"]
    older_unit = sorted(snapshots)[-2] if len(snapshots) > 1 else 0
    for index, segment in enumerate(survey.segments):
        for name in _keep(topic, survey, index, older_unit, readers, now):
            found.segments[name] += 1
            found.bytes[name] += segment.nbytes
    for group in topic.groups:
        places = group.partitions.items()
        found.groups[group.name] = GroupFigures(
            sum(offsets.lag(topic.counts[number].total) for number, offsets in places),
            sum(len(offsets.dead) for _, offsets in places),
            any(group.holds_below(number, now) is not None for number, _ in places),
        )
    return found


def _keep(
    topic: Topic, survey: Survey, index: int, older_unit: int, readers: list[tuple[str, int]], now: int
) -> list[str]:
    segment = survey.segments[index]
    if segment.closed_at is None:
        return ["being written"]
    names = [f"reader {name}" for name, first in readers if first <= segment.number]
    if segment.last_unit > older_unit:
        names.append("two snapshots to come")
    if topic.live.count(segment.number):
        names.append("live messages")
    asking = held(topic, survey, index, now, now)
    if asking:
        names += ["retention"] * asking.retention + [f"group {name}" for name in asking.groups]
    return names
