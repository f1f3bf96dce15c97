"""The calls of `GroupBroker` on an embedded broker: each checks its arguments and asks the topic's runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heapline.config import NAME
from heapline.engine.columns import check_seconds
from heapline.engine.requests import check_int, check_reason, check_text
from heapline.engine.streams import admin
from heapline.engine.streams.fetching import FetchCall, SettleCall
from heapline.errors import BadName, BadRequest
from heapline.streams import Fetched, GroupDeadLetter, GroupInfo, GroupOffset, Offsets, Place
from heapline.subscribing import Subscribes

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner

FETCH_MESSAGES_MAX = 1_000_000
MEMBER_BYTES_MAX = 256
_OFFSET_MAX = 1 << 62


class GroupCalls(Subscribes):
    """Mixed into the embedded broker."""

    takes_columns = True  # offsets may be arrays: see heapline.subscribing

    def _runner(self, topic: str) -> TopicRunner:
        raise NotImplementedError

    # -- groups ----------------------------------------------------------------------------------------------------

    async def create_group(self, topic: str, group: str, *, start: Place = "earliest", **config: Any) -> GroupInfo:
        check_group(group)
        return await admin.create(self._runner(topic), group, start, config)

    async def get_group(self, topic: str, group: str) -> GroupInfo:
        runner = self._runner(topic)
        return await runner.call(lambda now: admin.info(runner, runner.streams.group(group), now))

    async def list_groups(self, topic: str) -> list[GroupInfo]:
        runner = self._runner(topic)
        found = await runner.call(lambda now: [admin.info(runner, group, now) for group in runner.topic.groups])
        return sorted(found, key=lambda info: info.name)

    async def delete_group(self, topic: str, group: str) -> None:
        runner = self._runner(topic)
        await runner.call(partial(admin.delete, runner, group))

    async def group_offsets(self, topic: str, group: str) -> list[GroupOffset]:
        runner = self._runner(topic)
        return await runner.call(lambda now: admin.offsets_of(runner, runner.streams.group(group)))

    async def reset_offsets(
        self, topic: str, group: str, *, to: Place, partitions: Sequence[int] | None = None
    ) -> list[GroupOffset]:
        runner = self._runner(topic)
        if partitions is not None:
            partitions = list(partitions)
            for partition in partitions:
                check_int("a partition", partition, 0, len(runner.topic.partitions) - 1)
        return await admin.reset(runner, group, to, partitions)

    # -- members ---------------------------------------------------------------------------------------------------

    async def group_fetch(
        self, topic: str, group: str, member: str, *, session: str, max_messages: int = 1000,
        max_bytes: int = 2 << 20, wait: float = 0.0, start: Place = "earliest", config: Mapping[str, Any] | None = None,
    ) -> Fetched:  # fmt: skip
        runner = self._runner(topic)
        check_member(group, member, session)
        check_int("max_messages", max_messages, 0, FETCH_MESSAGES_MAX)
        check_int("max_bytes", max_bytes, 1, 1 << 40)
        if wait != 0.0:
            check_seconds("wait", wait)
        await admin.ensure(runner, group, session, start, config)
        call = FetchCall(runner.future(), group, member, session, max_messages, max_bytes, wait > 0)
        return await runner.streams.fetch(call, wait)

    async def group_ack(self, topic: str, group: str, member: str, offsets: Offsets, *, session: str) -> None:
        await self._settle(topic, group, member, offsets, session, False, "")

    async def group_nack(
        self, topic: str, group: str, member: str, offsets: Offsets, *, session: str, reason: str | None = None
    ) -> None:
        check_reason(reason)
        await self._settle(topic, group, member, offsets, session, True, reason or "nacked")

    async def _settle(
        self, topic: str, group: str, member: str, offsets: Offsets, session: str, nacks: bool, reason: str
    ) -> None:
        runner = self._runner(topic)
        check_member(group, member, session)
        columns = offset_columns(offsets)
        if columns:
            call = SettleCall(runner.future(), group, member, session, columns, nacks, reason)
            await runner.streams.settle(call)

    async def group_leave(self, topic: str, group: str, member: str, *, session: str) -> None:
        runner = self._runner(topic)
        check_member(group, member, session)
        await runner.call(partial(runner.streams.leave, group, member, session))

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def group_dead_list(self, topic: str, group: str, limit: int = 100) -> list[GroupDeadLetter]:
        check_int("limit", limit, 1, 1 << 31)
        return await admin.dead_letters(self._runner(topic), group, limit)

    async def group_dead_replay(self, topic: str, group: str, offsets: Offsets | None = None) -> int:
        runner = self._runner(topic)
        columns = None if offsets is None else offset_columns(offsets)
        return await runner.call(partial(admin.replay_dead, runner, group, columns))  # type: ignore[arg-type]

    async def group_dead_delete(self, topic: str, group: str, offsets: Offsets | None = None) -> int:
        runner = self._runner(topic)
        columns = None if offsets is None else offset_columns(offsets)
        return await runner.call(partial(admin.delete_dead, runner, group, columns))  # type: ignore[arg-type]


def check_group(group: Any) -> None:
    if not isinstance(group, str) or not NAME.match(group):
        raise BadName("group", str(group))


def check_member(group: Any, member: Any, session: Any) -> None:
    check_group(group)
    if member is None or session is None:
        raise BadRequest("a member of a group has a name and a session: give both")
    check_text("member", member, MEMBER_BYTES_MAX)
    if len(member.encode()) > MEMBER_BYTES_MAX:
        raise BadRequest(f"member is {len(member.encode())} bytes long; at most {MEMBER_BYTES_MAX} are allowed")
    check_text("session", session, 256)


def offset_columns(offsets: Any) -> dict[int, npt.NDArray[np.int64]]:
    """{partition: offsets} as columns; partitions without offsets are left out."""
    if not isinstance(offsets, Mapping):
        raise BadRequest(f"offsets are {{partition: [offset, …]}}, not {str(offsets)[:80]!r}")
    columns = {}
    for partition, some in offsets.items():
        check_int("a partition", partition, 0, _OFFSET_MAX)
        try:
            column = np.asarray(some)
        except (TypeError, ValueError, OverflowError):
            column = np.zeros((0, 0))
        if column.ndim != 1 or (len(column) and column.dtype.kind not in "iu"):
            raise BadRequest(f"offsets of partition {partition} are a list of int")
        column = column.astype(np.int64)
        if len(column):
            if column.min() < 0 or column.max() > _OFFSET_MAX:
                raise BadRequest(f"offsets of partition {partition} are from 0 to {_OFFSET_MAX}")
            columns[partition] = column
    return columns
