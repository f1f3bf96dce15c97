"""Showing how far a stream has come: its offsets are published to an observer group, which holds nothing.

What a query has read is decided by its checkpoint, and by nothing else: the group is for people and dashboards. So
whatever goes wrong here is logged and not raised, and no call takes long. Spark says that a batch is done when it plans
the next one, so the group is a batch behind, and on a stream where nothing more comes it stays there.

Moving a group is itself an event of the log, which the stream comes upon next. So a group is moved only where messages
lie between its place and the log's end: otherwise a stream would run for ever on nothing but news of itself, or two
streams of one topic on news of each other.

A group of that name that is no observer is somebody's work: it is never moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from heapline.errors import GroupNotFound
from heapline.logs import Log
from heapline.spark.positions import unpack_offsets

log_ = Log("heapline.spark")
DEADLINE = 2.0  # seconds that a batch may wait for it


class Progress:
    def __init__(self, group: str, connect: Callable[[float], Any]) -> None:
        self._group, self._connect = group, connect
        self._client: Any = None
        self._is_ours: dict[str, bool] = {}  # by topic: whether the group is there and an observer

    def publish(self, end: Mapping[str, Any]) -> None:
        """All rows below these offsets (as positions.py packs them) have been processed."""
        offsets, _ = unpack_offsets(end)
        for topic, parts in offsets.items():
            try:
                self._move(topic, parts)
            except Exception as error:
                log_.warning("progress was not published", topic=topic, group=self._group, error=str(error))

    def _move(self, topic: str, parts: dict[int, int]) -> None:
        if self._client is None:
            self._client = self._connect(DEADLINE)
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
            log_.warning("progress is not published: the group is no observer", topic=topic, group=self._group)
        return bool(found.config.observer)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
