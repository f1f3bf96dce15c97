"""What is said of popped messages: ack, nack, release, extend, bury; one at a time or many."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from heapline.errors import LeaseLost
from heapline.model import LeaseRef, Message
from heapline.server.http.answers import say
from heapline.server.http.openapi import documented
from heapline.server.http.visiting import Here
from heapline.wire.json_requests import BuryAsk, ExtendAsk, LeasesAsk, NackAsk
from heapline.wire.json_shapes import DeadlineTold, LeasesTold

router = APIRouter(prefix="/v1", tags=["out"])


@documented(router, "POST", "/ack", asks=LeasesAsk, tells=LeasesTold, summary="The work is done")
async def ack(house: Here) -> Response:
    """The messages are gone. As with all calls on leases: it is carried out on all that are held; if some are not, the
    answer is 409 with their ids in `facts.lost`, or 200 with `lost` if the request says `tell_lost`."""
    async with house.asked("Ack", LeasesAsk) as (body, _):
        ids, tokens = body.pairs()
        lost = await house.broker.ack_columns(body.topic, ids, tokens) if ids else []
        return say(_told(body, len(ids), lost))


@documented(router, "POST", "/nack", asks=NackAsk, tells=LeasesTold, summary="The work failed: try again later")
async def nack(house: Here) -> Response:
    """After the heap's back-off, or `backoff` seconds; a message that failed too often is dead."""
    async with house.asked("Nack", NackAsk) as (body, _):
        return await _act(body, lambda held: house.broker.nack(held, backoff=body.backoff, reason=body.reason))


@documented(router, "POST", "/release", asks=LeasesAsk, tells=LeasesTold, summary="Put it back, untouched")
async def release(house: Here) -> Response:
    """At its own place, and without counting as an attempt."""
    async with house.asked("Release", LeasesAsk) as (body, _):
        return await _act(body, house.broker.release)


@documented(router, "POST", "/bury", asks=BuryAsk, tells=LeasesTold, summary="Move it to the dead letters")
async def bury(house: Here) -> Response:
    async with house.asked("MoveToDLQ", BuryAsk) as (body, _):
        return await _act(body, lambda held: house.broker.bury(held, reason=body.reason))


@documented(router, "POST", "/extend", asks=ExtendAsk, tells=LeasesTold, summary="Keep it longer")
async def extend(house: Here) -> Response:
    """The lease ends `seconds` from now; the answer tells the new deadlines."""
    async with house.asked("Extend", ExtendAsk) as (body, _):
        # Messages instead of references, because these are told their new deadlines.
        held = [
            Message(house.broker, body.topic, 0, id, token, b"", 0, 0, None, None, 0, -1)
            for id, token in zip(*body.pairs(), strict=True)
        ]
        lost: list[int] = []
        try:
            await house.broker.extend(held, body.seconds)
        except LeaseLost as error:
            lost = error.lost
        told = _told(body, len(held), lost)
        told.deadlines = [
            DeadlineTold(message_id=m.message_id, deadline=m.deadline) for m in held if m._deadline_ms >= 0
        ]
        return say(told)


async def _act(body: LeasesAsk, act: Callable[[Any], Awaitable[None]]) -> Response:
    held = [LeaseRef(body.topic, id, token) for id, token in zip(*body.pairs(), strict=True)]
    try:
        await act(held)
    except LeaseLost as error:
        return say(_told(body, len(held), error.lost))
    return say(_told(body, len(held), []))


def _told(body: LeasesAsk, count: int, lost: list[int]) -> LeasesTold:
    if lost and not body.tell_lost:
        raise LeaseLost(lost, body.topic)
    return LeasesTold(count=count - len(lost), lost=list(map(str, lost)) if body.tell_lost else None)
