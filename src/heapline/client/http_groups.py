"""Consumer groups over HTTP: a part of that client, call by call. Subscriptions are made of these calls alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any
from urllib.parse import quote

import numpy as np

from heapline.client.checks import checked_topic
from heapline.client.group_checks import check_fetch, checked_place, rows_of
from heapline.config import NAME
from heapline.engine.requests import check_int, check_name, check_reason
from heapline.errors import BadName, DeliveryLost
from heapline.model import EPOCH
from heapline.streams import Fetched, GroupDeadLetter, GroupInfo, GroupOffset, Offsets, Place, StreamBatch
from heapline.subscribing import Subscribes
from heapline.wire import json_groups as shapes
from heapline.wire.json_shapes import Count, Done, config_json

_MS = timedelta(milliseconds=1)


class HttpGroups(Subscribes):
    """`calls` and `_twice` are the HTTP client's."""

    calls: Any

    async def _twice(self, method: str, path: str, kind: Any, body: Any = None) -> Any:
        raise NotImplementedError

    async def create_group(self, topic: str, group: str, *, start: Place = "earliest", **config: Any) -> GroupInfo:
        body = {"group": _named(group), "start": shapes.told_place(checked_place(start)), "config": config}
        spelled = config_json(body, "group").encode()
        return _info(await self.calls("POST", _groups(topic), shapes.GroupTold, spelled))

    async def get_group(self, topic: str, group: str) -> GroupInfo:
        return _info(await self.calls("GET", _group(topic, group), shapes.GroupTold))

    async def list_groups(self, topic: str) -> list[GroupInfo]:
        return list(map(_info, (await self.calls("GET", _groups(topic), shapes.GroupsTold)).groups))

    async def delete_group(self, topic: str, group: str) -> None:
        await self._twice("DELETE", _group(topic, group), Done)

    async def group_offsets(self, topic: str, group: str) -> list[GroupOffset]:
        found = await self.calls("GET", f"{_group(topic, group)}:offsets", shapes.GroupOffsetsTold)
        return list(found.offsets)

    async def reset_offsets(
        self, topic: str, group: str, *, to: Place, partitions: Sequence[int] | None = None
    ) -> list[GroupOffset]:
        for partition in partitions or ():
            check_int("partition", partition, 0, 1 << 31)
        some = None if partitions is None else list(partitions)
        body = shapes.ResetAsk(to=shapes.told_place(checked_place(to)), partitions=some)
        return list((await self.calls("POST", f"{_group(topic, group)}:reset", shapes.GroupOffsetsTold, body)).offsets)

    # -- members ---------------------------------------------------------------------------------------------------

    async def group_fetch(
        self, topic: str, group: str, member: str, *, session: str, max_messages: int = 1000,
        max_bytes: int = 2 << 20, wait: float = 0.0, start: Place = "earliest", config: Mapping[str, Any] | None = None,
    ) -> Fetched:  # fmt: skip
        check_fetch(max_messages, max_bytes, wait)
        _check(member, session)
        body = {
            "member": member, "session": session, "max_messages": max_messages, "max_bytes": max_bytes, "wait": wait,
            "start": shapes.told_place(checked_place(start)), "config": dict(config or {}),
        }  # fmt: skip
        spelled = config_json(body, "group").encode()
        return _fetched(topic, await self.calls("POST", f"{_group(topic, group)}:fetch", shapes.FetchTold, spelled))

    async def group_ack(self, topic: str, group: str, member: str, offsets: Offsets, *, session: str) -> None:
        _check(member, session)
        body = shapes.RowsAsk(member=member, session=session, rows=_rows(offsets), tell_lost=True)
        await self._settle("ack", topic, group, body)

    async def group_nack(
        self, topic: str, group: str, member: str, offsets: Offsets, *, session: str, reason: str | None = None
    ) -> None:
        _check(member, session)
        check_reason(reason)
        body = shapes.NackRowsAsk(member=member, session=session, rows=_rows(offsets), reason=reason, tell_lost=True)
        await self._settle("nack", topic, group, body)

    async def _settle(self, verb: str, topic: str, group: str, body: Any) -> None:
        lost = (await self.calls("POST", f"{_group(topic, group)}:{verb}", shapes.RowsTold, body)).lost or {}
        pairs = [(int(p), offset) for p, offsets in lost.items() for offset in offsets]
        if pairs:
            raise DeliveryLost([p for p, _ in pairs], [offset for _, offset in pairs], topic, group)

    async def group_leave(self, topic: str, group: str, member: str, *, session: str) -> None:
        _check(member, session)
        body = shapes.OfMember(member=member, session=session)
        await self.calls("POST", f"{_group(topic, group)}:leave", Done, body)

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def group_dead_list(self, topic: str, group: str, limit: int = 100) -> list[GroupDeadLetter]:
        check_int("limit", limit, 1, 1 << 31)
        path = f"{_group(topic, group)}:dead"
        return list(map(_dead, (await self.calls("GET", path, shapes.DeadRowsTold, query={"limit": limit})).letters))

    async def group_dead_replay(self, topic: str, group: str, offsets: Offsets | None = None) -> int:
        count: int = (
            await self.calls("POST", f"{_group(topic, group)}:replay-dead", Count, _which(offsets))
        ).count  # fmt: skip
        return count

    async def group_dead_delete(self, topic: str, group: str, offsets: Offsets | None = None) -> int:
        count: int = (await self._twice("POST", f"{_group(topic, group)}:delete-dead", Count, _which(offsets))).count
        return count


def _groups(topic: str) -> str:
    return f"/v1/heaps/{quote(checked_topic(topic))}:groups"


def _group(topic: str, group: str) -> str:
    return f"{_groups(topic)}/{_named(group)}"


def _named(group: str) -> str:
    """A group's name stands in the path, where not everything can."""
    if not isinstance(group, str) or not NAME.match(group):
        raise BadName("group", str(group))
    return group


def _check(member: str, session: str) -> None:
    check_name("member", member)
    check_name("session", session)


def _rows(offsets: Offsets) -> dict[str, list[int]]:
    return {str(p): column.tolist() for p, column in rows_of(offsets).items()}


def _which(offsets: Offsets | None) -> shapes.DeadRowsAsk:
    return shapes.DeadRowsAsk(rows=None if offsets is None else _rows(offsets))


def _info(told: shapes.GroupTold) -> GroupInfo:
    return GroupInfo(
        name=told.group, topic=told.topic, config=told.config, generation=told.generation, members=told.members,
        offsets=list(told.offsets), used_at=told.used_at, holding=told.holding,
    )  # fmt: skip


def _fetched(topic: str, told: shapes.FetchTold) -> Fetched:
    batches = [_batch(topic, p, list(rows)) for p, rows in groupby(told.rows, lambda row: row.partition)]
    return Fetched(batches, told.partitions, told.generation)


def _batch(topic: str, partition: int, rows: list[shapes.StreamRow]) -> StreamBatch:
    def column(values: Any) -> Any:
        return np.fromiter(values, dtype=np.int64, count=len(rows))

    return StreamBatch(
        None, topic, partition, column(r.offset for r in rows), column(int(r.id) for r in rows),
        [r.payload or b"" for r in rows], column(r.priority for r in rows), column(r.attempts for r in rows),
        column(_ms(r.enqueued_at) for r in rows), _texts([r.key for r in rows]), _texts([r.headers for r in rows]),
        _texts([r.fairness_key for r in rows]),
    )  # fmt: skip


def _texts(values: list[Any]) -> list[Any] | None:
    return values if any(values) else None


def _dead(row: shapes.DeadRow) -> GroupDeadLetter:
    return GroupDeadLetter(
        partition=row.partition, offset=row.offset, id=int(row.id), attempts=row.attempts, reason=row.reason,
        died_at=row.died_at, payload=row.payload, priority=row.priority, key=row.key, headers=row.headers or {},
    )  # fmt: skip


def _ms(moment: datetime) -> int:
    return (moment - EPOCH) // _MS
