"""Messages out: pop, which may wait long.

A wait ends when there is something, when its time is over, when the client goes away, when the server stops, or when
the caller's credential no longer holds. What was popped and not yet sent then goes back at once, unless the pop has a
name (`request_id`): whoever repeats it may have the same leases by now. What was handed to the connection may have
arrived, and stays leased until its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from heapline.model import Popped
from heapline.server.front import Stopping
from heapline.server.giving_back import give_back
from heapline.server.http.answers import say
from heapline.server.http.openapi import documented
from heapline.server.http.visiting import Here, House
from heapline.server.limiting import pop_within
from heapline.wire.json_requests import PopAsk
from heapline.wire.json_shapes import PopTold, tell_popped

router = APIRouter(prefix="/v1", tags=["out"])
POP_BYTES_MAX = 32 << 20  # of one answer: it is built in memory
GONE = 499  # what the log of a proxy calls it; nobody reads it

Got = tuple[str, Popped | None]


@documented(router, "POST", "/pop", asks=PopAsk, tells=PopTold, summary="Lease the best messages that are due")
async def pop(house: Here) -> Response:
    """A popped message is yours until its deadline: ack it when the work is done. With `wait` the answer comes when
    there is a message, or empty after so many seconds."""
    async with house.asked("Pop", PopAsk) as (body, caller):
        popping = pop_within(
            house.broker, caller, body.topic, body.max_messages, visibility=body.visibility, wait=body.wait,
            holder=body.holder, request_id=body.request_id, max_bytes=min(body.max_bytes, POP_BYTES_MAX),
        )  # fmt: skip
        if body.wait:
            with caller.while_valid():
                got = await _while_wanted(house, popping, body.request_id is not None)
        else:
            got = await _while_wanted(house, popping, body.request_id is not None)
        if got is None:
            return Response(status_code=GONE)
        name, popped = got
        return say(PopTold(topic=name, messages=[] if popped is None else tell_popped(popped, body.payload_as)))


async def _while_wanted(house: House, popping: Coroutine[Any, Any, Got], is_named: bool) -> Got | None:
    """What the pop got; None if the client has gone."""
    pop = asyncio.ensure_future(popping)
    gone = asyncio.ensure_future(house.request.receive())  # the body was read: the next thing said is goodbye
    stopping = asyncio.ensure_future(house.front.stopping.wait())
    try:
        await asyncio.wait({pop, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            _undo(house, pop, is_named)
            return None
        if not pop.done():
            raise Stopping
        return pop.result()
    except BaseException:
        _undo(house, pop, is_named)
        raise
    finally:
        for task in (pop, gone, stopping):
            task.cancel()


def _undo(house: House, pop: asyncio.Future[Got], is_named: bool) -> None:
    """A pop under way is cancelled by its owner, and the broker keeps what it had found; one that is done goes back."""
    if pop.done() and not pop.cancelled() and pop.exception() is None:
        name, popped = pop.result()
        if popped is not None and not is_named:
            give_back(house.broker, name, popped)
