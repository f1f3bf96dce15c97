"""A group by itself: one member, one partition, every event recorded."""

from __future__ import annotations

import numpy as np

from heapline.contract.config import Backoff, GroupConfig
from heapline.core.events import AnyEvent
from heapline.core.groups.deliveries import Columns
from heapline.core.groups.group import Group, Groups
from heapline.core.groups.stream import StreamRows
from tests.unit.core.group_model import i64, spread

NOW = 1_000_000
DAY = 86_400_000
FIRM = GroupConfig(ack_timeout=1.0, max_retries=1, backoff=Backoff(base=0.1, jitter=0.0))


def page(*offsets: int, end: int | None = None) -> StreamRows:
    columns = Columns(i64(offsets), i64(o + 100 for o in offsets), i64(o << 13 for o in offsets))
    return StreamRows(columns, 0, max(offsets, default=-1) + 1 if end is None else end)


class Rig:
    """One group with one member on one partition."""

    def __init__(self, config: GroupConfig = FIRM, partitions: int = 1, member: str | None = "m") -> None:
        self.groups, self.log = Groups(), list[tuple[int, AnyEvent]]()
        for p, event in Groups.decide_create("g", config, [(p, 0, 0) for p in range(partitions)], NOW):
            self.record(p, event)
        if member is not None:
            self.record(0, self.group.decide_join(member, spread, NOW))

    @property
    def group(self) -> Group:
        return self.groups.by_name["g"]

    def record(self, partition: int, event: AnyEvent | None) -> None:
        assert event is not None
        self.log.append((partition, event))
        self.groups.apply(partition, event)

    def take(self, rows: StreamRows, credits: int = 100, now: int = NOW) -> list[tuple[int, int]]:
        shares = self.group.take("m", credits, {0: rows}, now)
        return [(o, a) for s in shares for o, a in zip(s.rows.offsets.tolist(), s.attempts.tolist(), strict=True)]

    def ack(self, *offsets: int, now: int = NOW) -> list[int]:
        event, lost = self.group.decide_ack("m", 0, i64(offsets), now)
        if event is not None:
            self.record(0, event)
        return lost.tolist()

    def nack(self, *offsets: int, now: int = NOW) -> list[AnyEvent]:
        events, lost = self.group.decide_nack("m", 0, i64(offsets), np.full(len(offsets), 0.5), "boom", now)
        assert not len(lost)
        for event in events:
            self.record(0, event)
        return list(events)

    def reopen(self, now: int = NOW) -> None:
        self.groups = Groups()
        for partition, event in self.log:
            self.groups.apply(partition, event)
        self.groups.opened(now)


def offsets_of(rig: Rig) -> tuple[int, int]:
    return rig.group.partitions[0].committed, rig.group.partitions[0].cursor
