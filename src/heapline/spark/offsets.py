"""Resolve options to offsets: which topics and partitions are read, and from where to where. The rules are Kafka's.

Spark and its checkpoints receive offsets as {"orders": {"0": 23, "1": 7, "incarnation": 2}}. This is the form of
startingOffsets plus the topic's incarnation, which reveals a topic that was deleted and created again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from heapline.contract.errors import BadRequest, GroupNotFound, TopicNotFound
from heapline.logs import Log
from heapline.spark.options import BEGIN, EARLIEST, END, INCARNATION, Positions, TopicSelection
from heapline.spark.topic_log import DataLost, Source, TopicLog, TopicRef

log_ = Log("heapline.spark")
Offsets = dict[str, dict[int, int]]  # topic -> partition -> offset
PUBLISH_DEADLINE = 2.0  # seconds that a batch may wait for its progress to be published


class Subscription:
    """The logs of the topics that a read selects."""

    def __init__(self, source: Source, selection: TopicSelection, fail_on_loss: bool = True) -> None:
        self._source, self._selection, self._fail_on_loss = source, selection, fail_on_loss
        self.logs: dict[str, TopicLog] = {}

    def find(self) -> None:
        """Open the logs of selected topics that are not open yet. Raises TopicNotFound if one does not exist."""
        there = {ref.topic: ref for ref in self._source.topics()}
        for topic in self._chosen(there):
            if topic not in there:
                raise TopicNotFound(topic)
            if topic not in self.logs:
                self.logs[topic] = self._source.open(there[topic])
                self.logs[topic].refresh()

    def _chosen(self, there: Mapping[str, TopicRef]) -> list[str]:
        if self._selection.pattern is not None:
            pattern = re.compile(self._selection.pattern)
            return [topic for topic in there if pattern.fullmatch(topic)]
        return list(self._selection.topics or self._selection.assign or ())

    def hold_all(self) -> None:
        """Hold the complete logs until the plan holds what it needs of them.

        Otherwise the earliest row could be reclaimed between planning and reading.
        """
        for log in self.logs.values():
            log.hold(None)

    @property
    def may_grow(self) -> bool:
        """Whether topics that are created later belong to the selection."""
        return self._selection.pattern is not None

    def refresh(self) -> None:
        """Find the current end of each log.

        A deleted topic raises DataLost. If loss is allowed, the topic is left out from then on, and a new topic with
        the same name does not replace it.
        """
        for topic, log in list(self.logs.items()):
            try:
                log.refresh()
            except DataLost as loss:
                if self._fail_on_loss:
                    raise
                log_.warning("topic was deleted; reading continues without it", topic=topic, error=str(loss))
                del self.logs[topic]

    def only(self, topic: str, offsets: Mapping[int, int]) -> dict[int, int]:
        """Return the offsets of the selected partitions."""
        wanted = None if self._selection.assign is None else self._selection.assign[topic]
        if wanted is None:
            return dict(offsets)
        missing = [p for p in wanted if p not in offsets]
        if missing:
            raise BadRequest(
                f"topic {topic!r} does not have partition {missing[0]}; its partitions are 0 to {len(offsets) - 1}"
            )
        return {p: offsets[p] for p in wanted}

    def ends(self) -> Offsets:
        return {topic: self.only(topic, log.ends()) for topic, log in self.logs.items()}

    def starts(self) -> Offsets:
        return {topic: self.only(topic, log.starts()) for topic, log in self.logs.items()}

    def resolve(self, positions: Positions, name: str, *, late: str) -> Offsets:
        """Return the offsets that the option `name` selects.

        `late` says what a time means after which nothing was written: "latest" or "error".
        """
        starts, ends = self.starts(), self.ends()
        if positions.word is not None:
            return starts if positions.word == EARLIEST else ends
        given = positions.offsets if positions.offsets is not None else positions.times
        if given is not None:
            self._check_all_given(given, ends, name)
        resolved: Offsets = {}
        for topic, last in ends.items():
            resolved[topic] = {}
            for partition, end in last.items():
                if positions.offsets is not None:
                    offset = positions.offsets[topic][partition]
                    words = {BEGIN: starts[topic][partition], END: end}
                    resolved[topic][partition] = words.get(offset, offset)
                else:
                    time = positions.time if positions.times is None else positions.times[topic][partition]
                    at = self._at_time(topic, partition, time or 0, end, name, late)
                    # The first segment may hold rows that can no longer be read (journal/log_bounds.py).
                    resolved[topic][partition] = max(at, starts[topic][partition])
        return resolved

    def _at_time(self, topic: str, partition: int, time: int, end: int, name: str, late: str) -> int:
        offset = self.logs[topic].offset_at(partition, time)
        if offset is not None:
            return offset
        if late == "error":
            raise BadRequest(
                f"{name}: nothing was written to partition {partition} of {topic!r} at or after {time}; "
                "set startingOffsetsByTimestampStrategy=latest to start at its end"
            )
        return end

    @staticmethod
    def _check_all_given(given: Offsets, ends: Offsets, name: str) -> None:
        wanted = {(t, p) for t, parts in ends.items() for p in parts}
        named = {(t, p) for t, parts in given.items() for p in parts}
        if wanted != named:
            missing, extra = sorted(wanted - named), sorted(named - wanted)
            raise BadRequest(
                f"{name} must name exactly the partitions that are read"
                + (f"; missing: {_listed(missing)}" if missing else "")
                + (f"; not read: {_listed(extra)}" if extra else "")
                + f". {BEGIN} means earliest, {END} means latest"
            )

    def close(self, *, release: bool = True) -> None:
        for log in self.logs.values():
            log.close(release=release)


def _listed(partitions: list[tuple[str, int]]) -> str:
    shown = ", ".join(f"{topic}-{partition}" for topic, partition in partitions[:5])
    return shown + (" and more" if len(partitions) > 5 else "")


def pack_offsets(offsets: Offsets, logs: Mapping[str, TopicLog]) -> dict[str, Any]:
    return {
        topic: {**{str(p): o for p, o in sorted(parts.items())}, INCARNATION: logs[topic].ref.incarnation}
        for topic, parts in sorted(offsets.items())
    }


def unpack_offsets(packed: Mapping[str, Any]) -> tuple[Offsets, dict[str, int]]:
    """Return the offsets and the incarnations that `pack_offsets` packed."""
    offsets = {topic: {int(p): o for p, o in parts.items() if p != INCARNATION} for topic, parts in packed.items()}
    return offsets, {topic: parts[INCARNATION] for topic, parts in packed.items() if INCARNATION in parts}


def check_incarnations(incarnations: Mapping[str, int], logs: Mapping[str, TopicLog]) -> None:
    for topic, incarnation in incarnations.items():
        if topic in logs and logs[topic].ref.incarnation != incarnation:
            raise DataLost(
                f"topic {topic!r} was deleted and created again since this query started, so its offsets mean other "
                "rows now; start the query again with a new checkpoint"
            )


class ObserverGroup:
    """Publishes a stream's progress to an observer group, for people and dashboards.

    Only the query's checkpoint decides what was read. So a failure here is logged and not raised, and every call has a
    short deadline. Spark reports that a batch is done when it plans the next one. So the group is one batch behind, and
    stays there if no more rows arrive.

    Moving a group is itself an event in the log, which the stream reads next. So the group is moved only where messages
    lie between its position and the end of the log. Otherwise a stream would run forever on its own moves, or two
    streams of one topic on each other's. A group of this name that is not an observer belongs to consumers and is never
    moved.
    """

    def __init__(self, group: str, connect: Callable[[float], Any]) -> None:
        self._group, self._connect = group, connect
        self._client: Any = None
        self._is_ours: dict[str, bool] = {}  # by topic: whether the group exists and is an observer

    def publish(self, end: Mapping[str, Any]) -> None:
        """Record that all rows below these packed offsets were processed."""
        offsets, _ = unpack_offsets(end)
        for topic, parts in offsets.items():
            try:
                self._move(topic, parts)
            except Exception as error:
                log_.warning("progress not published", topic=topic, group=self._group, error=str(error))

    def _move(self, topic: str, parts: dict[int, int]) -> None:
        if self._client is None:
            self._client = self._connect(PUBLISH_DEADLINE)
        if topic not in self._is_ours:
            self._is_ours[topic] = self._find(topic, parts)
        if not self._is_ours[topic]:
            return
        try:
            places = self._client.group_offsets(topic, self._group)
            behind = {o.partition for o in places if o.lag and o.committed < parts.get(o.partition, 0)}
            if behind:
                self._client.reset_offsets(topic, self._group, to={p: parts[p] for p in sorted(behind)})
        except GroupNotFound:  # it was deleted meanwhile
            del self._is_ours[topic]
            raise

    def _find(self, topic: str, parts: dict[int, int]) -> bool:
        try:
            found = self._client.get_group(topic, self._group)
        except GroupNotFound:
            found = self._client.create_group(topic, self._group, start=parts, observer=True)
        if not found.config.observer:
            log_.warning("progress not published: the group is not an observer", topic=topic, group=self._group)
        return bool(found.config.observer)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
