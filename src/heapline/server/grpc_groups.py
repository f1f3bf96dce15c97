"""The methods of consumer groups: from a request to the contract's call and back. Subscribe is subscribe_stream.py's.

Rows go from the broker to the wire as columns.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from heapline.engine.embedded import EmbeddedBroker
from heapline.errors import BadRequest, DeliveryLost
from heapline.server.front import Caller, Front, Stopping
from heapline.server.subscribe_stream import (
    FETCH_BYTES_DEFAULT,
    FETCH_BYTES_MAX,
    FETCH_MAX,
    Name,
    SubscribeStream,
    name_in,
)  # fmt: skip
from heapline.streams import Fetched
from heapline.wire import stream_rows as rows
from heapline.wire.schema import pb
from heapline.wire.shapes import given

FETCH_DEFAULT = 1000
DEAD_DEFAULT = 100


class GroupCalls:
    """A part of GrpcService."""

    _broker: EmbeddedBroker
    _front: Front
    _waiting: set[asyncio.Task[Any]]
    _subscribed: dict[Name, SubscribeStream]

    async def CreateGroup(self, request: Any, caller: Caller) -> Any:
        caller.tell(about=_about(request))
        start = rows.unpack_place(request, "start")
        config = rows.read_group_config(request.config_json)
        place = {} if start is None else {"start": start}
        return rows.pack_group(await self._broker.create_group(request.topic, request.group, **place, **config))

    async def GetGroup(self, request: Any, caller: Caller) -> Any:
        return rows.pack_group(await self._broker.get_group(request.topic, request.group))

    async def ListGroups(self, request: Any, caller: Caller) -> Any:
        return pb.GroupInfos(groups=map(rows.pack_group, await self._broker.list_groups(request.topic)))

    async def DeleteGroup(self, request: Any, caller: Caller) -> Any:
        caller.tell(about=_about(request))
        caller.confirm("DeleteGroup", request.topic, request.confirmation, request.group)
        await self._broker.delete_group(request.topic, request.group)
        return pb.Done()

    async def GroupOffsets(self, request: Any, caller: Caller) -> Any:
        return rows.pack_offsets(await self._broker.group_offsets(request.topic, request.group))

    async def ResetOffsets(self, request: Any, caller: Caller) -> Any:
        caller.tell(about=_about(request))
        to = rows.unpack_place(request, "to")
        if to is None:
            raise BadRequest("say where the group goes on: `to` is missing")
        partitions = list(request.partitions.partitions) if request.HasField("partitions") else None
        offsets = await self._broker.reset_offsets(request.topic, request.group, to=to, partitions=partitions)
        return rows.pack_offsets(offsets)

    # -- members ---------------------------------------------------------------------------------------------------

    async def GroupFetch(self, request: Any, caller: Caller) -> Any:
        start, limit = rows.unpack_place(request, "start"), given(request, "max_messages")
        fetch = self._broker.group_fetch(
            request.topic, request.group, request.member, session=request.session,
            max_messages=FETCH_DEFAULT if limit is None else min(limit, FETCH_MAX), wait=request.wait,
            max_bytes=min(request.max_bytes or FETCH_BYTES_DEFAULT, FETCH_BYTES_MAX),
            start="earliest" if start is None else start, config=rows.read_group_config(request.config_json),
        )  # fmt: skip
        if not request.wait:
            return rows.pack_fetched(request.topic, await fetch)
        with caller.while_valid():
            return rows.pack_fetched(request.topic, await self._while_serving(fetch))

    async def _while_serving(self, fetch: Coroutine[Any, Any, Fetched]) -> Fetched:
        """A server that stops does not wait for those who wait for rows."""
        task = asyncio.ensure_future(fetch)
        self._waiting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and not current.cancelling():
                raise Stopping from None
            raise
        finally:
            self._waiting.discard(task)

    async def GroupAck(self, request: Any, caller: Caller) -> Any:
        return await self._settle(request, self._broker.group_ack)

    async def GroupNack(self, request: Any, caller: Caller) -> Any:
        return await self._settle(request, self._broker.group_nack, reason=given(request, "reason"))

    async def _settle(self, request: Any, act: Any, **options: Any) -> Any:
        offsets = rows.unpack_rows(request.rows)
        try:
            await act(request.topic, request.group, request.member, offsets, session=request.session, **options)
        except DeliveryLost as lost:
            if not request.tell_lost:
                raise
            return pb.GroupRowsResponse(lost=rows.pack_lost(lost))
        return pb.GroupRowsResponse()

    async def GroupLeave(self, request: Any, caller: Caller) -> Any:
        if (stream := self._subscribed.get(name_in(request))) is not None:
            stream.end()  # its next fetch would join again
        await self._broker.group_leave(request.topic, request.group, request.member, session=request.session)
        return pb.Done()

    def Subscribe(self, requests: AsyncIterator[Any], caller: Caller) -> AsyncIterator[Any]:
        return SubscribeStream(self._broker, self._front, caller, self._subscribed).run(requests)

    # -- dead letters ----------------------------------------------------------------------------------------------

    async def GroupDeadList(self, request: Any, caller: Caller) -> Any:
        found = await self._broker.group_dead_list(request.topic, request.group, request.limit or DEAD_DEFAULT)
        return pb.GroupDeadLetters(letters=map(rows.pack_dead, found))

    async def GroupDeadReplay(self, request: Any, caller: Caller) -> Any:
        count = await self._broker.group_dead_replay(request.topic, request.group, _which(request))
        caller.tell(about=_about(request), count=count)
        return pb.Count(count=count)

    async def GroupDeadDelete(self, request: Any, caller: Caller) -> Any:
        caller.tell(about=_about(request))
        caller.confirm("GroupDeadDelete", request.topic, request.confirmation, _arguments(request))
        count = await self._broker.group_dead_delete(request.topic, request.group, _which(request))
        caller.tell(about=_about(request), count=count)
        return pb.Count(count=count)


def _about(request: Any) -> str:
    """For the audit log; a name that is none is refused by the broker, and is not written as it stands."""
    return f"group {request.group[:128]!r}"


def _which(request: Any) -> Any:
    return rows.unpack_rows(request.rows.partitions) if request.HasField("rows") else None


def _arguments(request: Any) -> str:
    """All that was asked for but the confirmation itself, in few bytes."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("confirmation")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()
