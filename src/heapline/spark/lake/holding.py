"""Keeping the journal until it is in the lake: a consumer group of the archive's own, moved on after every commit.

A group holds the journal from its place on, so retention takes nothing that is not archived (docs/guide/streams.md).
Needs a server: a directory has one writer, which is not us; there only a reader's lease holds what is being read, and
nothing holds what comes later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from heapline.errors import GroupNotFound
from heapline.spark.options import Target
from heapline.spark.sources import client_of

#: A group that is not used for some days holds nothing any more (GroupConfig.unused_after), so one that has nothing to
#: do is put where it is once more.
RENEW_SECONDS = 12 * 3600.0


class GroupHold:
    def __init__(self, target: Target, group: str) -> None:
        self.group = group
        self._client: Any = client_of(target).__enter__()
        self._places: dict[str, dict[int, int]] = {}
        self._used: dict[str, float] = {}  # by topic, as time.time() counts
        #: By topic and partition: rows that moving the group has added to the log since it was last archived.
        self.echo: dict[str, dict[int, int]] = {}

    def move(self, topic: str, places: Mapping[int, int]) -> None:
        """Hold the topic from here on. Where the group was before does not count, it may have been further on: the lake
        says from where rows are needed, and a lake may be begun anew."""
        if topic not in self._places:
            self._places[topic] = self._made(topic, places)
        self._put(topic, {p: place for p, place in places.items() if self._places[topic].get(p) != place})

    def renew(self) -> None:
        """Stay in use. Cheap to call often."""
        for topic, places in self._places.items():
            if time.time() - self._used[topic] >= RENEW_SECONDS:
                self._put(topic, places)

    def _put(self, topic: str, places: Mapping[int, int]) -> None:
        if places:
            self._client.reset_offsets(topic, self.group, to=dict(places))
            self._used[topic] = time.time()
        self.echo[topic] = dict.fromkeys(places, 1)
        self._places[topic] = {**self._places[topic], **places}

    def _made(self, topic: str, places: Mapping[int, int]) -> dict[int, int]:
        try:
            found = self._client.get_group(topic, self.group)
        except GroupNotFound:
            found = self._client.create_group(topic, self.group, start=dict(places))
        used = 0.0 if found.used_at is None else found.used_at.timestamp()
        self._used[topic] = used
        if not found.holding or time.time() - used >= RENEW_SECONDS:
            return {}  # so that it is put where it belongs, even if it is there
        return {offset.partition: offset.committed for offset in found.offsets}

    def __enter__(self) -> GroupHold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
