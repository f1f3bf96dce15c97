"""The consumer groups of a topic: which there are, made, changed and ended by events, kept in snapshots.

Version 1 of the state. Ritual for changing it: bump STATE_VERSION, keep `from_state` for the old ones, add a fixture;
new names in a dictionary that may be missing need no new version.
A group that is asked for and not there is the caller's affair; an event about one is a journal that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.config import GroupConfig
from heapline.core.deliveries import Columns, join_columns
from heapline.core.entries import Replay
from heapline.core.events import KIND_NAMES, AnyEvent, Event, GroupCreated, GroupDeleted
from heapline.core.group import Group
from heapline.errors import UnknownFormat

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
        """`starts` are (partition, offset, stream rows below it). Each event goes into its partition."""
        config.validate()
        encoded = msgspec.json.encode(config)
        return [(number, GroupCreated(name, offset, count, encoded, now)) for number, offset, count in starts]

    def decide_rest(self, partitions: int, now: int) -> list[tuple[int, GroupCreated | GroupDeleted]]:
        """What a crash left half done: a deletion begins at partition 0, and a topic that has grown gives its groups
        the new partitions from their beginning on."""
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
        """An event about a group, recorded in `partition`; others are none of its business."""
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
            detail = f"{KIND_NAMES[type(event)]} of group {name!r} names {error}, which is not there"
            raise Replay(f"partition {partition}: the journal does not fit: {detail}") from error
        if not group.partitions:
            del self.by_name[name]

    def opened(self, now: int) -> None:
        """Call once when snapshot and journal have been applied, before anything is decided."""
        for group in self:
            group.opened(now)

    def moved(self, partition: int, ids: I64, positions: I64) -> None:
        """Records lie elsewhere now (`Moved`)."""
        order = np.argsort(ids)
        for group in self:
            group.moved(partition, ids[order], positions[order])

    def holds_below(self, partition: int, now: int) -> int | None:
        """The lowest offset that any group still needs."""
        needed = (group.holds_below(partition, now) for group in self)
        return min((offset for offset in needed if offset is not None), default=None)

    def holds(self, partition: int, now: int) -> Columns:
        """Single messages that groups need beside those."""
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
    """The group that an event is about, or None."""
    return getattr(event, "group", None)
