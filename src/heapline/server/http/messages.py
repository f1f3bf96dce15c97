"""Single messages by their id, and a look at what comes next."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from heapline.server.http.answers import say
from heapline.server.http.openapi import documented
from heapline.server.http.queries import OnMessage, PeekQuery
from heapline.server.http.visiting import Here
from heapline.wire.json_requests import MessageAsk, RescheduleAsk
from heapline.wire.json_shapes import Done, MessagesTold, MessageTold, tell_message

router = APIRouter(prefix="/v1", tags=["messages"])


@documented(router, "GET", "/peek", tells=MessagesTold, summary="The next messages, without leasing them")
async def peek(query: Annotated[PeekQuery, Query()], house: Here) -> Response:
    async with house.visit("Peek", query.topic):
        found = await house.broker.peek(query.topic, query.limit)
        return say(MessagesTold(messages=[tell_message(info, query.payload_as) for info in found]))


@documented(router, "GET", "/get", tells=MessageTold, summary="What is known of one message")
async def get(query: Annotated[OnMessage, Query()], house: Here) -> Response:
    async with house.visit("Get", query.topic):
        return say(tell_message(await house.broker.get(query.topic, query.message_id), query.payload_as))


@documented(router, "POST", "/cancel", asks=MessageAsk, tells=Done, summary="Take back a message that waits")
async def cancel(house: Here) -> Response:
    async with house.asked("Cancel", MessageAsk) as (body, _):
        await house.broker.cancel(body.topic, body.message_id)
        return say(Done(done=True))


@documented(
    router, "POST", "/reschedule", asks=RescheduleAsk, tells=Done, summary="Change when or how urgently it is served"
)
async def reschedule(house: Here) -> Response:
    """Of a message that waits; what is not given stays."""
    async with house.asked("Reschedule", RescheduleAsk) as (body, _):
        await house.broker.reschedule(
            body.topic, body.message_id, delay=body.delay, deliver_at=body.deliver_at, priority=body.priority
        )
        return say(Done(done=True))
