"""Dead letters: list, look at, bring back, delete them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from heapline.errors import BadRequest, MessageNotFound
from heapline.model import DlqFilter
from heapline.server.http.answers import say
from heapline.server.http.confirming import Confirmed, confirm
from heapline.server.http.openapi import documented
from heapline.server.http.queries import DlqQuery, OnMessage
from heapline.server.http.visiting import Here
from heapline.wire.json_requests import DeadAsk, ReplayAsk
from heapline.wire.json_shapes import Count, MessagesTold, MessageTold, tell_message

router = APIRouter(prefix="/v1", tags=["dead letters"])


@documented(router, "GET", "/dlq", tells=MessagesTold, summary="List dead letters")
async def dlq_list(query: Annotated[DlqQuery, Query()], house: Here) -> Response:
    async with house.visit("DlqList", query.topic):
        found = await house.broker.dlq_list(query.topic, query.limit, where=query.where())
        return say(MessagesTold(messages=[tell_message(info, query.payload_as) for info in found]))


@documented(router, "GET", "/dlq:peek", tells=MessageTold, summary="Look at one dead letter")
async def dlq_peek(query: Annotated[OnMessage, Query()], house: Here) -> Response:
    async with house.visit("DlqPeek", query.topic):
        info = await house.broker.get(query.topic, query.message_id)
        if info.state != "dead":
            raise MessageNotFound(query.topic, info.message_id)
        return say(tell_message(info, query.payload_as))


@documented(router, "POST", "/dlq:replay", asks=ReplayAsk, tells=Count, summary="Bring dead letters back")
async def dlq_replay(house: Here) -> Response:
    """With no attempts behind them; all, or those named or described, at most `rate` a second."""
    async with house.asked("DlqReplay", ReplayAsk) as (body, caller):
        count = await house.broker.dlq_replay(body.topic, body.message_ids, where=_where(body), rate=body.rate)
        caller.tell(count=count)
        return say(Count(count=count))


@documented(router, "POST", "/dlq:delete", asks=DeadAsk, tells=Count, confirmed=True, summary="Delete dead letters")
async def dlq_delete(sure: Confirmed, house: Here) -> Response:
    """Those named or described (`"where": {}` is all). Needs `force=true` and, on a second call with the same body, the
    confirmation token of the first."""
    async with house.asked("DlqDelete", DeadAsk) as (body, caller):
        if body.message_ids is None and body.where is None:
            raise BadRequest('say which: "message_ids": […], or "where": {…} (an empty one matches all)')
        await confirm(house, caller, "DlqDelete", body.topic, sure, msgspec.json.encode(body).decode())
        count = await house.broker.dlq_delete(body.topic, body.message_ids, where=_where(body))
        caller.tell(count=count)
        return say(Count(count=count))


def _where(body: DeadAsk) -> DlqFilter | None:
    return None if body.where is None else body.where.filter()
