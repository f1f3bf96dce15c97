"""Heaps, which are topics: make, change, list, look at, delete them.

A heap is a path, `/v1/heaps/jobs` or `/v1/heaps/billing/jobs` (its slash may be escaped); what is done to it follows a
colon, which no name can hold (heap_verbs.py). Everything about messages is a verb with the topic beside it.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from heapline.server.auth.principal import Action
from heapline.server.front import Caller
from heapline.server.http.answers import say
from heapline.server.http.confirming import Confirmed, confirm
from heapline.server.http.openapi import documented, settings_schema
from heapline.server.http.queries import HeapPath, MaybeOnTopic
from heapline.server.http.visiting import Here, House
from heapline.wire.json_shapes import Done, HeapsTold, HeapTold, StatsTold, read_settings, tell_heap

router = APIRouter(prefix="/v1", tags=["heaps"])
Settings = dict[str, Any]  # of a topic, by name: the broker says what they may be


@documented(
    router, "POST", "/heaps", asks=settings_schema(with_topic=True), tells=HeapTold, status=201, summary="Make a heap"
)
async def make_heap(house: Here) -> Response:
    """Again with equal settings is fine; with others it is refused (409): see PATCH."""
    async with house.asked("MakeHeap", Settings) as (body, _):
        topic = body.pop("topic")
        info = await house.broker.create_topic(topic, **read_settings(body))
        return say(tell_heap(info), 201)


@documented(router, "GET", "/heaps", tells=HeapsTold, summary="List heaps")
async def list_heaps(house: Here) -> Response:
    """Those on which the caller may do something."""
    async with house.visit("ListHeaps") as caller:
        infos = await house.broker.list_topics()
        return say(HeapsTold(heaps=[tell_heap(info) for info in infos if may_see(caller, info.name)]))


@documented(router, "GET", "/heaps/{topic:path}", tells=HeapTold, summary="Look at one heap")
async def get_heap(topic: HeapPath, house: Here) -> Response:
    async with house.visit("ListHeaps", topic) as caller:
        if not may_see(caller, topic):
            caller.must(Action.CONSUME, topic)
        return say(tell_heap(await house.info(topic)))


@documented(
    router, "PATCH", "/heaps/{topic:path}", asks=settings_schema(with_topic=False), tells=HeapTold,
    summary="Change a heap's settings",
)  # fmt: skip
async def update_heap(topic: HeapPath, house: Here) -> Response:
    """What is not given stays. Some settings are fixed when a heap is made."""
    async with house.asked("UpdateHeapConfig", Settings, topic) as (body, _):
        return say(tell_heap(await house.broker.update_topic(topic, **read_settings(body))))


@documented(router, "DELETE", "/heaps/{topic:path}", tells=Done, confirmed=True, summary="Delete a heap")
async def delete_heap(topic: HeapPath, sure: Confirmed, house: Here) -> Response:
    """With all its messages. Needs `force=true` and, on a second call, the confirmation token of the first."""
    async with house.visit("DeleteHeap", topic) as caller:
        await confirm(house, caller, "DeleteHeap", topic, sure)
        await house.broker.delete_topic(topic)
        return say(Done(done=True))


@documented(router, "GET", "/stats", tells=StatsTold, summary="Figures of a heap, or of all")
async def stats(query: Annotated[MaybeOnTopic, Query()], house: Here) -> Response:
    if query.topic is not None:
        async with house.visit("Stats", query.topic):
            return say(StatsTold(heaps=[await house.broker.stats(query.topic)]))
    async with house.visit("ListHeaps") as caller:
        return say(StatsTold(heaps=await _all_stats(house, caller)))


async def _all_stats(house: House, caller: Caller) -> list[Any]:
    infos = await house.broker.list_topics()
    return [await house.broker.stats(info.name) for info in infos if caller.may(Action.CONSUME, info.name)]


def may_see(caller: Caller, topic: str) -> bool:
    return any(caller.may(action, topic) for action in Action)
