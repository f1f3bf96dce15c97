"""The consumer groups of a topic: created, changed and deleted by events, and kept in snapshots.

Version 1 of the state. To change it after a release: bump STATE_VERSION, keep `from_state` for old ones, add a fixture;
new names in a dictionary that may be missing need no new version. Callers handle requests for a group that does not
exist. An event about a missing group means that the journal is inconsistent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.contract.config import GroupConfig
from heapline.contract.errors import UnknownFormat
from heapline.core.entries import Replay
from heapline.core.events import KIND_NAMES, AnyEvent, Event, GroupCreated, GroupDeleted
from heapline.core.groups.deliveries import Columns, join_columns
from heapline.core.groups.group import Group

I64 = npt.NDArray[np.int64]
STATE_VERSION = 1


class Groups:
    def __init__(self) -> None:
        self.by_name: dict[str, Group] = {}

    def __iter__(self) -> Iterator[Group]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    @staticmethod
    def decide_create(
        name: str, config: GroupConfig, starts: Iterable[tuple[int, int, int]], now: int
    ) -> list[tuple[int, GroupCreated]]:  # fmt: skip
        """Return one event per partition. `starts` are (partition, offset, stream rows below it)."""
        config.validate()
        encoded = msgspec.json.encode(config)
        return [(number, GroupCreated(name, offset, count, encoded, now)) for number, offset, count in starts]

    def decide_rest(self, partitions: int, now: int) -> list[tuple[int, GroupCreated | GroupDeleted]]:
        """Return the events that complete work interrupted by a crash.

        A deletion begins at partition 0. Groups of a topic that has grown read the new partitions from their start.
        """
        events: list[tuple[int, GroupCreated | GroupDeleted]] = []
        for group in self:
            if 0 not in group.partitions:
                events += self.decide_delete(group.name, now)
            elif len(group.partitions) < partitions:
                missing = [(number, 0, 0) for number in range(partitions) if number not in group.partitions]
                events += self.decide_create(group.name, group.config, missing, now)
        return events

    def decide_delete(self, name: str, now: int) -> list[tuple[int, GroupDeleted]]:
        return [(number, GroupDeleted(name, now)) for number in sorted(self.by_name[name].partitions)]

    def apply(self, partition: int, event: AnyEvent) -> None:
        """Apply an event about a group, recorded in `partition`. Ignore other events."""
        name = event_group(event)
        if name is None:
            return
        if isinstance(event, GroupCreated) and name not in self.by_name:
            config = msgspec.json.decode(event.config, type=GroupConfig)
            self.by_name[name] = Group(name, config, event.at)
        try:
            group = self.by_name[name]
            group.apply(partition, event)
        except KeyError as error:
            detail = f"{KIND_NAMES[type(event)]} of group {name!r} names {error}, which does not exist"
            raise Replay(f"partition {partition}: the journal contradicts itself: {detail}") from error
        if not group.partitions:
            del self.by_name[name]

    def opened(self, now: int) -> None:
        """Start the groups. Call once after snapshot and journal are applied, before any decision."""
        for group in self:
            group.opened(now)

    def moved(self, partition: int, ids: I64, positions: I64) -> None:
        """Update the positions of moved records (`Moved`)."""
        order = np.argsort(ids)
        for group in self:
            group.moved(partition, ids[order], positions[order])

    def holds_below(self, partition: int, now: int) -> int | None:
        """Return the lowest offset that any group still needs."""
        needed = (group.holds_below(partition, now) for group in self)
        return min((offset for offset in needed if offset is not None), default=None)

    def holds(self, partition: int, now: int) -> Columns:
        """Return single messages that groups need in addition to `holds_below`."""
        held = (group.holds(partition, now) for group in self)
        return join_columns([columns for columns in held if columns is not None])

    def next_deadline(self, now: int) -> int | None:
        times = (group.next_deadline(now) for group in self)
        return min((time for time in times if time is not None), default=None)

    def to_state(self) -> dict[str, Any]:
        return {"version": STATE_VERSION, "groups": [group.to_state() for group in self]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Groups:
        if state["version"] != STATE_VERSION:
            raise UnknownFormat("the groups of a snapshot", state["version"])
        groups = cls()
        groups.by_name = {saved["name"]: Group.from_state(saved) for saved in state["groups"]}
        return groups


def event_group(event: Event) -> str | None:
    """Return the group that an event is about, or None."""
    return getattr(event, "group", None)
