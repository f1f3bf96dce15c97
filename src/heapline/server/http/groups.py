"""Consumer groups: a heap read as a stream. Make, look at, reset, delete them; fetch rows and settle them.

A group belongs to its heap: `/v1/heaps/jobs:groups/billing`, and what is done to it follows another colon. (A slash
before `groups` would be a heap of that name in a namespace.) Members who poll fetch with `wait`; a member stays in its
group as long as it calls, and what it has fetched is its own until it is acked or its time is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.responses import Response

from heapline.errors import DeliveryLost
from heapline.server.front import Stopping
from heapline.server.http.answers import say
from heapline.server.http.confirming import Confirmed, confirm
from heapline.server.http.openapi import documented
from heapline.server.http.popping import GONE
from heapline.server.http.queries import As, HeapPath, Strict
from heapline.server.http.visiting import Here, House
from heapline.streams import Fetched
from heapline.wire import json_groups as shapes
from heapline.wire.json_shapes import Count, Done, read_group_settings

router = APIRouter(prefix="/v1", tags=["groups"])
FETCH_MAX, FETCH_BYTES_MAX = 10_000, 32 << 20  # of one answer: it is built in memory, an object a row
GROUPS = "/heaps/{topic:path}:groups"
ONE = GROUPS + "/{group}"
GroupPath = Annotated[str, Path(max_length=300, description="the group's name", examples=["billing"])]


class DeadQuery(Strict):
    limit: Annotated[int, Field(ge=1, le=1 << 31)] = 100
    payload_as: As = "base64"


@documented(
    router, "POST", GROUPS, asks=shapes.NewGroup, tells=shapes.GroupTold, status=201, summary="Make a consumer group"
)
async def create_group(topic: HeapPath, house: Here) -> Response:
    """It begins at `start`. Again with equal settings is fine, and leaves it where it is; with others it is refused."""
    async with house.asked("CreateGroup", shapes.NewGroup, topic) as (body, caller):
        caller.tell(about=f"group {body.group!r}")
        config, start = read_group_settings(body.config or {}), shapes.place_in(body.start)
        info = await house.broker.create_group(topic, body.group, start=start, **config)
        return say(shapes.tell_group(info), 201)


@documented(router, "GET", GROUPS, tells=shapes.GroupsTold, summary="List the groups of a heap")
async def list_groups(topic: HeapPath, house: Here) -> Response:
    async with house.visit("ListGroups", topic):
        infos = await house.broker.list_groups(topic)
        return say(shapes.GroupsTold(groups=list(map(shapes.tell_group, infos))))


@documented(router, "GET", ONE + ":offsets", tells=shapes.GroupOffsetsTold, summary="How far a group is")
async def group_offsets(topic: HeapPath, group: GroupPath, house: Here) -> Response:
    async with house.visit("GroupOffsets", topic):
        return say(shapes.GroupOffsetsTold(offsets=await house.broker.group_offsets(topic, group)))


@documented(
    router, "POST", ONE + ":reset", asks=shapes.ResetAsk, tells=shapes.GroupOffsetsTold,
    summary="Let a group go on from elsewhere",
)  # fmt: skip
async def reset_offsets(topic: HeapPath, group: GroupPath, house: Here) -> Response:
    """Back, and it sees what was once more; forward, and it skips. What is out is forgotten."""
    async with house.asked("ResetOffsets", shapes.ResetAsk, topic) as (body, caller):
        caller.tell(about=f"group {group!r}")
        to = shapes.place_in(body.to)
        offsets = await house.broker.reset_offsets(topic, group, to=to, partitions=body.partitions)
        return say(shapes.GroupOffsetsTold(offsets=offsets))


# -- members -----------------------------------------------------------------------------------------------------------


@documented(
    router, "POST", ONE + ":fetch", asks=shapes.FetchAsk, tells=shapes.FetchTold, summary="Rows for a member of a group"
)
async def group_fetch(topic: HeapPath, group: GroupPath, house: Here) -> Response:
    """The first fetch joins the group, and makes it if it is not there. Ack the rows when they are done. With `wait`
    the answer comes when there is a row or other partitions to read, or empty after so many seconds."""
    async with house.asked("GroupFetch", shapes.FetchAsk, topic) as (body, caller):
        fetch = house.broker.group_fetch(
            topic, group, body.member, session=body.session, max_messages=min(body.max_messages, FETCH_MAX),
            wait=body.wait,
            max_bytes=min(body.max_bytes, FETCH_BYTES_MAX), start=shapes.place_in(body.start),
            config=read_group_settings(body.config or {}),
        )  # fmt: skip
        if body.wait:
            with caller.while_valid():
                fetched = await _while_wanted(house, fetch)
        else:
            fetched = await fetch
        if fetched is None:
            return Response(status_code=GONE)
        return say(shapes.tell_fetched(fetched, body.payload_as))


async def _while_wanted(house: House, fetching: Coroutine[Any, Any, Fetched]) -> Fetched | None:
    """What the fetch got; None if the client has gone."""
    fetch = asyncio.ensure_future(fetching)
    gone = asyncio.ensure_future(house.request.receive())  # the body was read: the next thing said is goodbye
    stopping = asyncio.ensure_future(house.front.stopping.wait())
    try:
        await asyncio.wait({fetch, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            return None
        if not fetch.done():
            raise Stopping
        return fetch.result()
    finally:
        for task in (fetch, gone, stopping):
            task.cancel()


@documented(router, "POST", ONE + ":ack", asks=shapes.RowsAsk, tells=shapes.RowsTold, summary="Rows are done")
async def group_ack(topic: HeapPath, group: GroupPath, house: Here) -> Response:
    """In any order. It is carried out on all that the member holds; if it did not hold some, the answer is 409
    (DeliveryLost), or 200 with `lost` if the request says `tell_lost`. Rows that are done already are no error."""
    async with house.asked("GroupAck", shapes.RowsAsk, topic) as (body, _):
        return await _settle(house.broker.group_ack, topic, group, body)


@documented(router, "POST", ONE + ":nack", asks=shapes.NackRowsAsk, tells=shapes.RowsTold, summary="Rows failed")
async def group_nack(topic: HeapPath, group: GroupPath, house: Here) -> Response:
    """They come again after the group's back-off; one that failed too often is one of its dead letters."""
    async with house.asked("GroupNack", shapes.NackRowsAsk, topic) as (body, _):
        return await _settle(house.broker.group_nack, topic, group, body, reason=body.reason)


async def _settle(act: Any, topic: str, group: str, body: shapes.RowsAsk, **options: Any) -> Response:
    try:
        await act(topic, group, body.member, shapes.rows_in(body.rows), session=body.session, **options)
    except DeliveryLost as lost:
        if not body.tell_lost:
            raise
        return say(shapes.tell_lost(lost))
    return say(shapes.RowsTold())


@documented(router, "POST", ONE + ":leave", asks=shapes.OfMember, tells=Done, summary="Leave a group")
async def group_leave(topic: HeapPath, group: GroupPath, house: Here) -> Response:
    """What the member holds goes to others at once."""
    async with house.asked("GroupLeave", shapes.OfMember, topic) as (body, _):
        await house.broker.group_leave(topic, group, body.member, session=body.session)
        return say(Done(done=True))


# -- dead letters ------------------------------------------------------------------------------------------------------


@documented(router, "GET", ONE + ":dead", tells=shapes.DeadRowsTold, summary="Rows that a group gave up")
async def group_dead_list(
    topic: HeapPath, group: GroupPath, query: Annotated[DeadQuery, Query()], house: Here
) -> Response:
    async with house.visit("GroupDeadList", topic):
        found = await house.broker.group_dead_list(topic, group, query.limit)
        return say(shapes.DeadRowsTold(letters=[shapes.tell_dead(letter, query.payload_as) for letter in found]))


@documented(
    router, "POST", ONE + ":replay-dead", asks=shapes.DeadRowsAsk, optional=True, tells=Count,
    summary="Deliver a group's dead letters once more",
)  # fmt: skip
async def group_dead_replay(topic: HeapPath, group: GroupPath, house: Here) -> Response:
    async with house.asked("GroupDeadReplay", shapes.DeadRowsAsk, topic) as (body, caller):
        count = await house.broker.group_dead_replay(topic, group, _which(body))
        caller.tell(about=f"group {group!r}", count=count)
        return say(Count(count=count))


@documented(
    router, "POST", ONE + ":delete-dead", asks=shapes.DeadRowsAsk, optional=True, tells=Count, confirmed=True,
    summary="Delete a group's dead letters",
)  # fmt: skip
async def group_dead_delete(topic: HeapPath, group: GroupPath, sure: Confirmed, house: Here) -> Response:
    """All, or those named. Needs `force=true` and, on a second call with the same body, the confirmation token of the
    first."""
    async with house.asked("GroupDeadDelete", shapes.DeadRowsAsk, topic) as (body, caller):
        caller.tell(about=f"group {group!r}")
        asked = f"{group} {msgspec.json.encode(body).decode()}"
        await confirm(house, caller, "GroupDeadDelete", topic, sure, asked)
        count = await house.broker.group_dead_delete(topic, group, _which(body))
        caller.tell(about=f"group {group!r}", count=count)
        return say(Count(count=count))


def _which(body: shapes.DeadRowsAsk) -> dict[int, list[int]] | None:
    return None if body.rows is None else shapes.rows_in(body.rows)


# Verbs of a group stand before the group itself: its path would swallow them.


@documented(router, "GET", ONE, tells=shapes.GroupTold, summary="Look at one group")
async def get_group(topic: HeapPath, group: GroupPath, house: Here) -> Response:
    async with house.visit("GetGroup", topic):
        return say(shapes.tell_group(await house.broker.get_group(topic, group)))


@documented(router, "DELETE", ONE, tells=Done, confirmed=True, summary="Delete a group")
async def delete_group(topic: HeapPath, group: GroupPath, sure: Confirmed, house: Here) -> Response:
    """With its offsets and dead letters; the heap's messages stay. Needs `force=true` and, on a second call, the
    confirmation token of the first."""
    async with house.visit("DeleteGroup", topic) as caller:
        caller.tell(about=f"group {group!r}")
        await confirm(house, caller, "DeleteGroup", topic, sure, group)
        await house.broker.delete_group(topic, group)
        return say(Done(done=True))
