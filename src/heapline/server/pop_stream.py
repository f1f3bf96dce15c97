"""PopStream: messages flow as long as the client gives credits, one credit a message.

At most one response is under way, and the next pop starts when gRPC has taken the last one: what a slow client does not
read stays in the heap, where others can have it, and costs this process one batch at most.

When a stream breaks: what was handed to gRPC may have arrived, so it stays leased until its deadline. What was popped
and not handed over goes back at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from heapline.engine.embedded import EmbeddedBroker
from heapline.errors import BadRequest
from heapline.model import Popped
from heapline.server.auth.principal import Action
from heapline.server.front import Caller, Front, Stopping
from heapline.server.giving_back import give_back
from heapline.server.limiting import pop_within
from heapline.wire.columns import pack_popped, popped_items
from heapline.wire.schema import pb
from heapline.wire.shapes import given

CREDITS_MAX = 1 << 20
BATCH_DEFAULT = 1000
BATCH_BYTES_DEFAULT, BATCH_BYTES_MAX = 2 << 20, 32 << 20
LOOK_AGAIN = 10.0  # seconds after which an idle stream asks whether its caller may still call


class PopStream:
    def __init__(self, broker: EmbeddedBroker, front: Front, caller: Caller) -> None:
        self._broker = broker
        self._front = front
        self._caller = caller
        self._credits = 0
        self._changed = asyncio.Event()  # credits came, or the client will send no more
        self._problem: Exception | None = None
        self._ended = False

    async def run(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        first = await anext(requests, None)
        if first is None or not first.HasField("start"):
            raise BadRequest("the first request of a PopStream holds `start`")
        start = first.start
        self._caller.must(Action.CONSUME, start.topic)
        self._add(first.credits)
        reader = asyncio.ensure_future(self._read(requests))
        stopping = asyncio.ensure_future(self._front.stopping.wait())
        try:
            while await self._has_credits(stopping):
                got = await self._pop(start, stopping)
                if got is None:
                    continue
                if self._ended or self._caller.context.done():
                    give_back(self._broker, *got)
                    return
                self._credits -= len(got[1].ids)
                yield _response(*got, start.as_items)
        finally:
            reader.cancel()
            stopping.cancel()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                if request.HasField("start"):
                    raise BadRequest("a PopStream starts once: open another one")
                self._add(request.credits)
        except Exception as error:
            self._problem = error
        self._ended = True
        self._changed.set()

    def _add(self, credits: int) -> None:
        if credits < 0 or self._credits + credits > CREDITS_MAX:
            raise BadRequest(f"credits={credits}: they are not negative, and at most {CREDITS_MAX} may be open")
        self._credits += credits
        self._changed.set()

    async def _has_credits(self, stopping: asyncio.Future[Any]) -> bool:
        """Wait until something may be sent; False when the client wants no more."""
        while True:
            if self._problem is not None:
                raise self._problem
            if stopping.done():
                raise Stopping
            self._caller.must_be_valid()
            if self._credits > 0 or self._ended:
                return not self._ended
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({changed, stopping}, timeout=LOOK_AGAIN, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    async def _pop(self, start: Any, stopping: asyncio.Future[Any]) -> tuple[str, Popped] | None:
        """What there is within a while; None if there is nothing, or something else wants attention."""
        pop = asyncio.ensure_future(
            pop_within(
                self._broker, self._caller, start.topic, min(self._credits, start.max_messages or BATCH_DEFAULT),
                wait=LOOK_AGAIN, visibility=given(start, "visibility"), holder=given(start, "holder"),
                max_bytes=min(start.max_bytes or BATCH_BYTES_DEFAULT, BATCH_BYTES_MAX),
            )
        )  # fmt: skip
        try:
            while not pop.done() and not stopping.done() and not self._ended:
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({pop, changed, stopping}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            if not pop.done():
                return None
            name, popped = pop.result()
            return None if popped is None else (name, popped)
        except asyncio.CancelledError:
            if pop.done() and not pop.cancelled() and pop.exception() is None:
                name, popped = pop.result()
                if popped is not None:
                    give_back(self._broker, name, popped)
            raise
        finally:
            pop.cancel()


def _response(name: str, popped: Popped, as_items: bool) -> Any:
    if as_items:
        return pb.PopResponse(topic=name, items=popped_items(popped))
    return pb.PopResponse(topic=name, columns=pack_popped(popped))
