"""Keeping the journal until it is in the lake: a consumer group of the archive's own, moved on after every commit.

A group holds the journal from its place on, so retention takes nothing that is not archived (docs/guide/streams.md).
Needs a server: a directory has one writer, which is not us; there only a reader's lease holds what is being read, and
nothing holds what comes later.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from heapline.errors import GroupNotFound
from heapline.spark.options import Target


class GroupHold:
    def __init__(self, target: Target, group: str) -> None:
        from heapline.client.connecting import connect_sync
        from heapline.client.target import ClientTls

        tls = None if target.ca_file is None else ClientTls(ca=target.ca_file)
        self.group = group
        endpoints = (target.url or "").split(",")
        self._client: Any = connect_sync(endpoints=endpoints, api_key=target.api_key, tls=tls).__enter__()
        self._places: dict[str, dict[int, int]] = {}
        #: By topic: rows that moving the group has added to partitions' logs since they were last archived.
        self.echo: dict[str, dict[int, int]] = {}

    def move(self, topic: str, places: Mapping[int, int]) -> None:
        """Hold the topic from here on. What was there before may have been elsewhere, also further on: the lake says
        where to hold, and a lake may be begun anew."""
        known = self._places.get(topic) or self._made(topic, places)
        moved = {p: place for p, place in places.items() if known.get(p) != place}
        if moved:
            self._client.reset_offsets(topic, self.group, to=moved, partitions=sorted(moved))
        self.echo[topic] = dict.fromkeys(moved, 1)
        self._places[topic] = {**known, **moved}

    def _made(self, topic: str, places: Mapping[int, int]) -> dict[int, int]:
        try:
            found = self._client.get_group(topic, self.group)
        except GroupNotFound:
            found = self._client.create_group(topic, self.group, start=dict(places))
        return {offset.partition: offset.committed for offset in found.offsets}

    def __enter__(self) -> GroupHold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
