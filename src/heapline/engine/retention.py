"""What of a topic's journal must stay, and for whom. Segments go from the journal's start only, closed ones.

What asks for a segment, one after the other:

* *retention*: it is younger than `retention`, and the journal is no larger than `retention_bytes`; or a row that is as
  young has its record there;
* *groups*: one that holds the journal (it is in use and no observer) has not passed a row of it, or one within
  `retention_margin` rows below its place, or further on a row whose record lies there;
* live messages, and dead letters of groups: those are written again further on (upkeep.py), and do not ask for more.

Past `retention_hard_bytes` or `retention_hard_age` neither retention nor groups are heard. A group whose place goes,
for that reason or because it does not hold the journal, goes on behind it. Snapshots and readers of the directory are
not known here. Nothing is read and nothing is changed: a survey of the files is passed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import and_
from typing import NamedTuple

import numpy as np

from heapline.core.events import EMPTY, I64, GroupAcked, GroupReset
from heapline.core.groups import Groups
from heapline.engine.following import Following
from heapline.engine.topic import Topic


class Segment(NamedTuple):
    """A segment file."""

    number: int
    nbytes: int
    closed_at: int | None  # wall ms, when the next one was begun; None: it is the last
    last_unit: int  # 0 if it is the last
    firsts: dict[int, int]  # partition -> the offset of its first row here


class Survey:
    """The segments of a journal, oldest first, and where the partitions ended when they were looked at."""

    def __init__(self, segments: Sequence[Segment], ends: Sequence[int]) -> None:
        self.segments, self._ends = segments, ends

    def bytes_from(self, index: int) -> int:
        return sum(segment.nbytes for segment in self.segments[index:])

    def start(self, partition: int, index: int = 0) -> int:
        """The partition's first row in this segment or a later one; its end, if it has none there."""
        for segment in self.segments[index:]:
            if partition in segment.firsts:
                return segment.firsts[partition]
        return self._ends[partition]

    def start_from(self, partition: int, number: int) -> int:
        """The same by the segment's number; one that came later than the survey counts as its end."""
        return self.start(partition, sum(segment.number < number for segment in self.segments))

    def below(self, unit: int) -> list[Segment]:
        """Those from the journal's start that are closed and hold no unit above this one."""
        whole = (segment.closed_at is not None and segment.last_unit <= unit for segment in self.segments)
        return [segment for segment, is_whole in zip(self.segments, accumulate(whole, and_), strict=True) if is_whole]

    def ends(self, index: int) -> Iterator[tuple[int, int]]:
        """(partition, where its rows in this segment end) of those that have rows there."""
        return ((partition, self.start(partition, index + 1)) for partition in self.segments[index].firsts)


class Held(NamedTuple):
    """Who asks for a segment."""

    retention: bool
    groups: tuple[str, ...]
    past_limit: bool  # and is not heard

    def __bool__(self) -> bool:
        return (self.retention or bool(self.groups)) and not self.past_limit

    @property
    def by(self) -> str:
        names = ["retention"] if self.retention else []
        return ", ".join(names + [f"group {name}" for name in self.groups])


def held(topic: Topic, survey: Survey, index: int, now: int, wall: int) -> Held:
    """Who asks for a closed segment."""
    return Held(
        _is_retained(topic, survey, index, wall),
        tuple(group.name for group in topic.groups if _asks(topic, survey, index, group.name, now)),
        _is_past_limit(topic, survey, index, wall),
    )  # fmt: skip


def _is_past_limit(topic: Topic, survey: Survey, index: int, wall: int) -> bool:
    config, closed_at = topic.config, survey.segments[index].closed_at
    too_old = config.retention_hard_age > 0 and closed_at is not None
    return bool(
        (config.retention_hard_bytes and survey.bytes_from(index) > config.retention_hard_bytes)
        or (too_old and closed_at <= wall - round(config.retention_hard_age * 1000))  # type: ignore[operator]
    )


def _is_young(topic: Topic, survey: Survey, index: int, wall: int) -> bool:
    """By age alone."""
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
    """From where on every row can be shown once this segment and those before it are gone. By partition; 0: from where
    the next segment starts."""
    number = survey.segments[index].number
    behind_commits = [commits.last(number) + 1 for commits in topic.following.commits]
    # A partition that came after the survey has nothing in these segments, and the survey knows nothing of it.
    return [at if at and at > survey.start(p, index + 1) else 0 for p, at in enumerate(behind_commits)]


def read_with(starts: Sequence[int], survey: Survey, lease: int) -> bool:
    """Whether a reader that holds the journal from segment `lease` on has rows below these starts to read."""
    return any(start and start > survey.start_from(p, lease) for p, start in enumerate(starts))


def letters_in(topic: Topic, segment: int, now: int) -> I64:
    """Where the records of dead letters of groups lie in a segment, without attempts; of messages that live, too."""
    found = [EMPTY]
    for partition in topic.partitions if topic.groups else ():
        positions = topic.groups.holds(partition.number, now).positions
        found.append(positions[topic.layout.segment(positions) == segment])
    return np.unique(np.concatenate(found) & ~0xFF)


def behind(groups: Groups, floors: dict[int, int]) -> set[int]:
    """Partitions in which some group's place lies below the floor."""
    return {
        partition for group in groups for partition, floor in floors.items()
        if partition in group.partitions and group.partitions[partition].committed < floor
    }  # fmt: skip


def decide_move_on(
    following: Following, floors: dict[int, int], counts: dict[int, int]
) -> list[tuple[str, int, GroupReset | GroupAcked]]:
    """(group, partition, event) for each place that lies below a floor, or was recorded below it and has passed it
    since; `counts` are the stream rows below the floors. All at the time of the group's last use: this is no use of it,
    and must not make it hold the journal."""
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
