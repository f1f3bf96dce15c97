"""Consumer groups over gRPC: a part of the wire client, call by call. Subscriptions of the SDK are subscribing.py's.

What cannot be spelled on the wire is refused here; all else is the server's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heapline.client.checks import checked_topic
from heapline.client.group_checks import check_fetch, checked_place, rows_of, spelled
from heapline.engine.requests import check_int, check_reason
from heapline.streams import Fetched, GroupDeadLetter, GroupInfo, GroupOffset, Offsets, Place
from heapline.subscribing import Subscribes
from heapline.wire import stream_rows as rows
from heapline.wire.schema import pb


class WireGroups(Subscribes):
    """`calls`, `_confirmed` and `_act` are the wire client's."""

    calls: Any

    async def _confirmed(self, method: str, request: Any) -> Any:
        raise NotImplementedError

    async def _act(self, method: str, request: Any) -> Any:
        raise NotImplementedError

    async def create_group(self, topic: str, group: str, *, start: Place = "earliest", **config: Any) -> GroupInfo:
        request = spelled(
            pb.GroupConfig, topic=checked_topic(topic), group=group, start=rows.pack_place(checked_place(start)),
            config_json=rows.group_config_json(config),
        )  # fmt: skip
        return rows.unpack_group(await self.calls("CreateGroup", request))

    async def get_group(self, topic: str, group: str) -> GroupInfo:
        return rows.unpack_group(await self.calls("GetGroup", _group(topic, group)))

    async def list_groups(self, topic: str) -> list[GroupInfo]:
        found = await self.calls("ListGroups", pb.Heap(topic=checked_topic(topic)))
        return list(map(rows.unpack_group, found.groups))

    async def delete_group(self, topic: str, group: str) -> None:
        await self._confirmed("DeleteGroup", _group(topic, group))

    async def group_offsets(self, topic: str, group: str) -> list[GroupOffset]:
        return _offsets(await self.calls("GroupOffsets", _group(topic, group)))

    async def reset_offsets(
        self, topic: str, group: str, *, to: Place, partitions: Sequence[int] | None = None
    ) -> list[GroupOffset]:
        request = spelled(
            pb.ResetOffsetsRequest, topic=checked_topic(topic), group=group, to=rows.pack_place(checked_place(to)),
            partitions=None if partitions is None else spelled(pb.Partitions, partitions=partitions),
        )  # fmt: skip
        return _offsets(await self.calls("ResetOffsets", request))

    # -- members ---------------------------------------------------------------------------------------------------

    async def group_fetch(
        self, topic: str, group: str, member: str, *, session: str, max_messages: int = 1000,
        max_bytes: int = 2 << 20, wait: float = 0.0, start: Place = "earliest", config: Mapping[str, Any] | None = None,
    ) -> Fetched:  # fmt: skip
        check_fetch(max_messages, max_bytes, wait)
        request = spelled(
            pb.GroupFetchRequest, topic=checked_topic(topic), group=group, member=member, session=session,
            max_messages=max_messages, max_bytes=max_bytes, wait=wait, start=rows.pack_place(checked_place(start)),
            config_json=rows.group_config_json(config or {}),
        )  # fmt: skip
        return rows.unpack_fetched(None, topic, await self.calls("GroupFetch", request))

    async def group_ack(self, topic: str, group: str, member: str, offsets: Offsets, *, session: str) -> None:
        await self._settle("GroupAck", topic, group, member, offsets, session)

    async def group_nack(
        self, topic: str, group: str, member: str, offsets: Offsets, *, session: str, reason: str | None = None
    ) -> None:
        check_reason(reason)
        await self._settle("GroupNack", topic, group, member, offsets, session, reason)

    async def _settle(
        self, method: str, topic: str, group: str, member: str, offsets: Offsets, session: str,
        reason: str | None = None,
    ) -> None:  # fmt: skip
        request = spelled(
            pb.GroupRowsRequest, topic=checked_topic(topic), group=group, member=member, session=session,
            rows=rows.pack_rows(rows_of(offsets)), reason=reason, tell_lost=True,
        )  # fmt: skip
        lost = rows.unpack_lost((await self._act(method, request)).lost, topic, group)
        if lost is not None:
            raise lost

    async def group_leave(self, topic: str, group: str, member: str, *, session: str) -> None:
        request = spelled(pb.Member, topic=checked_topic(topic), group=group, member=member, session=session)
        await self.calls("GroupLeave", request)

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def group_dead_list(self, topic: str, group: str, limit: int = 100) -> list[GroupDeadLetter]:
        check_int("limit", limit, 1, 1 << 31)
        request = spelled(pb.GroupListRequest, topic=checked_topic(topic), group=group, limit=limit)
        return list(map(rows.unpack_dead, (await self.calls("GroupDeadList", request)).letters))

    async def group_dead_replay(self, topic: str, group: str, offsets: Offsets | None = None) -> int:
        return _count(await self.calls("GroupDeadReplay", _dead(topic, group, offsets)))

    async def group_dead_delete(self, topic: str, group: str, offsets: Offsets | None = None) -> int:
        return _count(await self._confirmed("GroupDeadDelete", _dead(topic, group, offsets)))


def _group(topic: str, group: str) -> Any:
    return spelled(pb.Group, topic=checked_topic(topic), group=group)


def _dead(topic: str, group: str, offsets: Offsets | None) -> Any:
    which = None if offsets is None else pb.RowsByPartition(partitions=rows.pack_rows(rows_of(offsets)))
    return spelled(pb.GroupDeadRequest, topic=checked_topic(topic), group=group, rows=which)


def _offsets(answer: Any) -> list[GroupOffset]:
    return list(map(rows.unpack_offset, answer.offsets))


def _count(answer: Any) -> int:
    count: int = answer.count
    return count
