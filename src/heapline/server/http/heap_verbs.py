"""What is done to a whole heap: purge, pause, resume, throttle a partition, snapshot."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from heapline.server.http.answers import say
from heapline.server.http.confirming import Confirmed, confirm
from heapline.server.http.openapi import documented
from heapline.server.http.queries import HeapPath
from heapline.server.http.visiting import Here
from heapline.wire.json_requests import PauseAsk, ThrottleAsk
from heapline.wire.json_shapes import Count, Done

router = APIRouter(prefix="/v1", tags=["heaps"])


@documented(router, "POST", "/heaps/{topic:path}:purge", tells=Count, confirmed=True, summary="Remove what waits")
async def purge(topic: HeapPath, sure: Confirmed, house: Here) -> Response:
    """Everything ready and delayed; what is leased stays. Needs `force=true` and, on a second call, the confirmation
    token of the first."""
    async with house.visit("Purge", topic) as caller:
        await confirm(house, caller, "Purge", topic, sure)
        count = await house.broker.purge(topic)
        caller.tell(count=count)
        return say(Count(count=count))


@documented(
    router, "POST", "/heaps/{topic:path}:pause", asks=PauseAsk, optional=True, tells=Done, summary="Stop delivery"
)
async def pause(topic: HeapPath, house: Here) -> Response:
    """Only that: enqueues and acks go on. For good, or until a moment."""
    async with house.asked("Pause", PauseAsk, topic) as (body, _):
        await house.broker.pause_topic(topic, body.until)
        return say(Done(done=True))


@documented(router, "POST", "/heaps/{topic:path}:resume", tells=Done, summary="Deliver again")
async def resume(topic: HeapPath, house: Here) -> Response:
    async with house.visit("Resume", topic):
        await house.broker.resume_topic(topic)
        return say(Done(done=True))


@documented(
    router, "POST", "/heaps/{topic:path}:throttle", asks=ThrottleAsk, tells=Done,
    summary="Leave a partition out of pops, or no longer",
)  # fmt: skip
async def throttle(topic: HeapPath, house: Here) -> Response:
    """Survives a restart. Its messages wait, all else goes on."""
    async with house.asked("SetPartitionThrottled", ThrottleAsk, topic) as (body, caller):
        caller.tell(about=f"partition {body.partition}, throttled={body.throttled}")
        await house.broker.set_partition_throttled(topic, body.partition, body.throttled, body.reason)
        return say(Done(done=True))


@documented(router, "POST", "/heaps/{topic:path}:snapshot", tells=Done, summary="Write a snapshot now")
async def snapshot(topic: HeapPath, house: Here) -> Response:
    """So that the next start has less to read."""
    async with house.visit("Snapshot", topic):
        await house.broker.snapshot(topic)
        return say(Done(done=True))
