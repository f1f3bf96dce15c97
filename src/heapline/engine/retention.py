"""Decide which journal segments to keep, and for whom. Only closed segments at the start of the journal can be deleted.

These hold a segment, checked in this order:

* *retention*: it is younger than `retention`, and the journal is no larger than `retention_bytes`; or a row that is as
  young has its record there;
* *groups*: one that holds the journal (it is in use and not an observer) has not passed one of its rows, or one within
  `retention_margin` rows below its position, or a later row whose record is there;
* live messages, and dead letters of groups: maintenance.py rewrites them at the journal's end; they hold no more.

Past `retention_hard_bytes` or `retention_hard_age` neither retention nor groups count. A group whose position is
deleted, for that reason or because it does not hold the journal, continues after it. Decisions do not know snapshots
and readers of the directory. They read and change nothing: a survey of the files is passed in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from heapline.core.events import EMPTY, I64, GroupAcked, GroupReset
from heapline.core.groups.group import Groups
from heapline.engine.groups.group_index import Following
from heapline.engine.topic import Topic
from heapline.journal.survey import Survey


class Held(NamedTuple):
    """The holders of a segment."""

    retention: bool
    groups: tuple[str, ...]
    past_limit: bool  # the holders do not count

    def __bool__(self) -> bool:
        return (self.retention or bool(self.groups)) and not self.past_limit

    @property
    def by(self) -> str:
        names = ["retention"] if self.retention else []
        return ", ".join(names + [f"group {name}" for name in self.groups])


def held(topic: Topic, survey: Survey, index: int, now: int, wall: int) -> Held:
    """Return what holds a closed segment."""
    return Held(
        _is_retained(topic, survey, index, wall),
        tuple(group.name for group in topic.groups if _asks(topic, survey, index, group.name, now)),
        _is_past_limit(topic, survey, index, wall),
    )


def _is_past_limit(topic: Topic, survey: Survey, index: int, wall: int) -> bool:
    config, closed_at = topic.config, survey.segments[index].closed_at
    too_old = config.retention_hard_age > 0 and closed_at is not None
    return bool(
        (config.retention_hard_bytes and survey.bytes_from(index) > config.retention_hard_bytes)
        or (too_old and closed_at <= wall - round(config.retention_hard_age * 1000))  # type: ignore[operator]
    )


def _is_young(topic: Topic, survey: Survey, index: int, wall: int) -> bool:
    """Return whether the segment is younger than `retention`, whatever the journal's size."""
    closed_at = survey.segments[index].closed_at
    return closed_at is None or closed_at > wall - round(topic.config.retention * 1000)


def _is_retained(topic: Topic, survey: Survey, index: int, wall: int) -> bool:
    config = topic.config
    if config.retention_bytes:
        if survey.bytes_from(index) > config.retention_bytes:
            return False
        if not config.retention:
            return True
    if _is_young(topic, survey, index, wall):
        return True
    if not config.retention:
        return False
    young = next(i for i in range(index, len(survey.segments)) if _is_young(topic, survey, i, wall))
    number = survey.segments[index].number
    return any(topic.following.needed(p, number, survey.start(p, young)) for p in survey.segments[index].firsts)


def _asks(topic: Topic, survey: Survey, index: int, name: str, now: int) -> bool:
    group = topic.groups.by_name[name]
    for partition, end in survey.ends(index):
        place = group.holds_below(partition, now)
        if place is not None:
            needed = place - topic.config.retention_margin
            if needed < end or topic.following.needed(partition, survey.segments[index].number, needed):
                return True
    return False


def starts_without(topic: Topic, survey: Survey, index: int) -> list[int]:
    """Return the offsets from which every row is readable after this segment and those before it are deleted. By
    partition; 0: from where the next segment starts."""
    number = survey.segments[index].number
    behind_commits = [commits.last(number) + 1 for commits in topic.following.commits]
    # A partition added after the survey has nothing in these segments, and the survey does not contain it.
    return [at if at and at > survey.start(p, index + 1) else 0 for p, at in enumerate(behind_commits)]


def letters_in(topic: Topic, segment: int, now: int) -> I64:
    """Return the positions, without attempts, of group dead letters in a segment, even those of live messages."""
    found = [EMPTY]
    for partition in topic.partitions if topic.groups else ():
        positions = topic.groups.holds(partition.number, now).positions
        found.append(positions[topic.layout.segment(positions) == segment])
    return np.unique(np.concatenate(found) & ~0xFF)


def behind(groups: Groups, floors: dict[int, int]) -> set[int]:
    """Return the partitions in which some group's position is below the floor."""
    return {
        partition
        for group in groups
        for partition, floor in floors.items()
        if partition in group.partitions and group.partitions[partition].committed < floor
    }


def decide_move_on(
    following: Following, floors: dict[int, int], counts: dict[int, int]
) -> list[tuple[str, int, GroupReset | GroupAcked]]:
    """Return (group, partition, event) for each position that is below a floor, or was recorded below it and has passed
    it since; `counts` are the stream rows below the floors. All events have the time of the group's last use: a move is
    not a use of the group, and must not make it hold the journal."""
    events: list[tuple[str, int, GroupReset | GroupAcked]] = []
    for group in following.groups:
        for partition, floor in floors.items():
            place = group.partitions.get(partition)
            if place is not None and place.committed < floor:
                event = GroupReset(group.name, floor, counts[partition], group.used_at)
                events.append((group.name, partition, event))
            elif place is not None and place.recorded < floor:
                events.append((group.name, partition, place.decide_record(group.used_at)))
    return events
