"""From options to offsets: which topics and partitions are read, and from where to where. The rules are Kafka's.

Offsets go to Spark, and into checkpoints, as {"orders": {"0": 23, "1": 7, "incarnation": 2}}: the form of
startingOffsets, with the topic's incarnation, so that a topic that was deleted and made again is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from heapline.errors import BadRequest, TopicNotFound
from heapline.logs import Log
from heapline.spark.log import DataLost, Source, TopicLog, TopicRef
from heapline.spark.options import BEGIN, EARLIEST, END, INCARNATION, Positions, Which

log_ = Log("heapline.spark")
Offsets = dict[str, dict[int, int]]  # topic -> partition -> offset


class Subscription:
    """The logs of the topics that a read is about."""

    def __init__(self, source: Source, which: Which, fail_on_loss: bool = True) -> None:
        self._source, self._which, self._fail_on_loss = source, which, fail_on_loss
        self.logs: dict[str, TopicLog] = {}

    def find(self) -> None:
        """Look which topics there are, and open the logs of those that are new."""
        there = {ref.topic: ref for ref in self._source.topics()}
        for topic in self._chosen(there):
            if topic not in there:
                raise TopicNotFound(topic)
            if topic not in self.logs:
                self.logs[topic] = self._source.open(there[topic])
                self.logs[topic].look()

    def _chosen(self, there: Mapping[str, TopicRef]) -> list[str]:
        if self._which.pattern is not None:
            found = re.compile(self._which.pattern)
            return [topic for topic in there if found.fullmatch(topic)]
        return list(self._which.topics or self._which.assign or ())

    def hold_all(self) -> None:
        """Nothing of them is reclaimed from now on, until what is needed of them is known and held instead. Otherwise
        what is the earliest row might be gone before it is read."""
        for log in self.logs.values():
            log.hold(None)

    @property
    def may_grow(self) -> bool:
        """Whether topics that are made later belong to it."""
        return self._which.pattern is not None

    def look(self) -> None:
        """Look how far each goes. A topic that was deleted is a loss; where that is allowed, it is left out from then
        on, and one that was made again under its name is not taken for it."""
        for topic, log in list(self.logs.items()):
            try:
                log.look()
            except DataLost as loss:
                if self._fail_on_loss:
                    raise
                log_.warning("a topic is gone", topic=topic, told=str(loss))
                del self.logs[topic]

    def only(self, topic: str, offsets: Mapping[int, int]) -> dict[int, int]:
        """Those of the partitions that were asked for."""
        wanted = None if self._which.assign is None else self._which.assign[topic]
        if wanted is None:
            return dict(offsets)
        missing = [p for p in wanted if p not in offsets]
        if missing:
            raise BadRequest(f"topic {topic!r} has no partition {missing[0]}: it has {len(offsets)}")
        return {p: offsets[p] for p in wanted}

    def ends(self) -> Offsets:
        return {topic: self.only(topic, log.ends()) for topic, log in self.logs.items()}

    def starts(self) -> Offsets:
        return {topic: self.only(topic, log.starts()) for topic, log in self.logs.items()}

    def resolve(self, asked: Positions, name: str, *, late: str) -> Offsets:
        """Offsets of all that was asked for. `late`: "latest" or "error", for times after which nothing was written."""
        starts, ends = self.starts(), self.ends()
        if asked.word is not None:
            return starts if asked.word == EARLIEST else ends
        given = asked.offsets if asked.offsets is not None else asked.times
        if given is not None:
            self._check_all_given(given, ends, name)
        found: Offsets = {}
        for topic, last in ends.items():
            found[topic] = {}
            for partition, end in last.items():
                if asked.offsets is not None:
                    offset = asked.offsets[topic][partition]
                    words = {BEGIN: starts[topic][partition], END: end}
                    found[topic][partition] = words.get(offset, offset)
                else:
                    time = asked.time if asked.times is None else asked.times[topic][partition]
                    at = self._at_time(topic, partition, time or 0, end, name, late)
                    # The first segment may hold rows that cannot be shown any more (journal/log_start.py).
                    found[topic][partition] = max(at, starts[topic][partition])
        return found

    def _at_time(self, topic: str, partition: int, time: int, end: int, name: str, late: str) -> int:
        offset = self.logs[topic].offset_at(partition, time)
        if offset is not None:
            return offset
        if late == "error":
            raise BadRequest(
                f"{name}: nothing was written to partition {partition} of {topic!r} at or after {time}; "
                "startingOffsetsByTimestampStrategy=latest would start at its end"
            )
        return end

    @staticmethod
    def _check_all_given(given: Offsets, ends: Offsets, name: str) -> None:
        wanted = {(t, p) for t, parts in ends.items() for p in parts}
        told = {(t, p) for t, parts in given.items() for p in parts}
        if wanted != told:
            missing, strange = sorted(wanted - told), sorted(told - wanted)
            raise BadRequest(
                f"{name} must name every partition that is read and no other"
                + (f"; missing: {_listed(missing)}" if missing else "")
                + (f"; not among them: {_listed(strange)}" if strange else "")
                + f". {BEGIN} stands for earliest, {END} for latest"
            )

    def close(self, *, let_go: bool = True) -> None:
        for log in self.logs.values():
            log.close(let_go=let_go)


def _listed(places: list[tuple[str, int]]) -> str:
    shown = ", ".join(f"{topic}-{partition}" for topic, partition in places[:5])
    return shown + (" and more" if len(places) > 5 else "")


def pack_offsets(offsets: Offsets, logs: Mapping[str, TopicLog]) -> dict[str, Any]:
    return {
        topic: {**{str(p): o for p, o in sorted(parts.items())}, INCARNATION: logs[topic].ref.incarnation}
        for topic, parts in sorted(offsets.items())
    }


def unpack_offsets(told: Mapping[str, Any]) -> tuple[Offsets, dict[str, int]]:
    """(offsets, incarnations) of what `pack_offsets` made."""
    offsets = {topic: {int(p): o for p, o in parts.items() if p != INCARNATION} for topic, parts in told.items()}
    return offsets, {topic: parts[INCARNATION] for topic, parts in told.items() if INCARNATION in parts}


def check_incarnations(incarnations: Mapping[str, int], logs: Mapping[str, TopicLog]) -> None:
    for topic, incarnation in incarnations.items():
        if topic in logs and logs[topic].ref.incarnation != incarnation:
            raise DataLost(
                f"topic {topic!r} was deleted and made again since this query began: its offsets mean other rows now; "
                "start the query anew with another checkpoint"
            )
