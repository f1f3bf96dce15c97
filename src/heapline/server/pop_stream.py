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
from heapline.server.giving_back import give_back, give_back_result
from heapline.server.limiting import pop_within
from heapline.wire.columns import pack_popped, popped_items
from heapline.wire.schema import pb
from heapline.wire.shapes import given

CREDITS_MAX = 1 << 20
BATCH_DEFAULT = 1000
BATCH_BYTES_DEFAULT, BATCH_BYTES_MAX = 2 << 20, 32 << 20
LOOK_AGAIN = 10.0  # seconds after which an idle stream asks whether its caller may still call
WAIT = 3600.0  # seconds of one pop that finds nothing


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
        stopping = asyncio.ensure_future(self._front.stopping.wait())
        reader: asyncio.Future[None] | None = None
        try:
            start = await self._start(requests, stopping)
            reader = asyncio.ensure_future(self._read(requests))
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
            stopping.cancel()
            if reader is not None:
                reader.cancel()

    async def _start(self, requests: AsyncIterator[Any], stopping: asyncio.Future[Any]) -> Any:
        """What the client wants, once it says so."""
        reading = asyncio.ensure_future(_next(requests))
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
        if not reading.done():
            raise Stopping
        first = reading.result()
        if first is None or not first.HasField("start"):
            raise BadRequest("the first request of a PopStream holds `start`")
        self._caller.must(Action.CONSUME, first.start.topic)
        self._add(first.credits)
        return first.start

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
            try:
                await asyncio.wait({changed, stopping}, timeout=LOOK_AGAIN, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()

    async def _pop(self, start: Any, stopping: asyncio.Future[Any]) -> tuple[str, Popped] | None:
        """What there is, or what comes; None if something else wants attention. Waits in the engine, which wakes it:
        an idle stream looks at nothing but its caller's credential."""
        pop = asyncio.ensure_future(
            pop_within(
                self._broker, self._caller, start.topic, min(self._credits, start.max_messages or BATCH_DEFAULT),
                wait=WAIT, visibility=given(start, "visibility"), holder=given(start, "holder"),
                max_bytes=min(start.max_bytes or BATCH_BYTES_DEFAULT, BATCH_BYTES_MAX),
            )
        )  # fmt: skip
        try:
            while not pop.done() and not stopping.done() and not self._ended:
                self._caller.must_be_valid()
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait(
                        {pop, changed, stopping}, timeout=LOOK_AGAIN, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    changed.cancel()
            if not pop.done():
                return None
            name, popped = pop.result()
            return None if popped is None else (name, popped)
        except asyncio.CancelledError:
            if pop.done():
                give_back_result(self._broker, pop)
            raise
        finally:
            pop.cancel()


async def _next(requests: AsyncIterator[Any]) -> Any:
    return await anext(requests, None)


def _response(name: str, popped: Popped, as_items: bool) -> Any:
    if as_items:
        return pb.PopResponse(topic=name, items=popped_items(popped))
    return pb.PopResponse(topic=name, columns=pack_popped(popped))
