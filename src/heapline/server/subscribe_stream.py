"""Subscribe: the rows of one member of a group, as long as it gives credits, and what it says of them.

One fetch is under way at a time, and the next one starts when gRPC has taken what the last one brought: what a slow
member does not read stays in the journal, and costs this process one batch at most. Acks are carried out as they come,
whether the member reads or not; how many may wait for their answers is bounded, and then the stream is not read on.

The membership is the broker's: a stream that breaks ends nothing but itself. What was handed to gRPC may have arrived,
so it stays out until it is acked or its time is over; the member goes on with another stream of the same session. That
one ends the former, of whose end this process may not have heard yet: it would take rows and send them nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from heapline.broker import GroupBroker
from heapline.errors import BadRequest, DeliveryLost, HeaplineError, MemberReplaced
from heapline.server.auth.principal import Action
from heapline.server.front import Caller, Front, Stopping
from heapline.streams import Fetched
from heapline.wire import stream_rows as rows
from heapline.wire.schema import pb
from heapline.wire.shapes import given, pack_error

CREDITS_MAX = 1 << 20
FETCH_MAX = 100_000  # rows of one response
FETCH_BYTES_DEFAULT, FETCH_BYTES_MAX = 2 << 20, 32 << 20  # of one response: it is built in memory
WAIT = 10.0  # seconds of one fetch that finds nothing; then the caller's credential is looked at again
SETTLES_MAX = 1024  # under way, or carried out and not answered
SETTLES_BYTES_MAX = 16 << 20  # of those


#: Topic, group, member, session.
Name = tuple[str, str, str, str]


class SubscribeStream:
    def __init__(self, broker: GroupBroker, front: Front, caller: Caller, streams: dict[Name, SubscribeStream]) -> None:
        self._broker, self._front, self._caller = broker, front, caller
        self._streams = streams  # all of this server that are open
        self._open: Any = None
        self._credits = 0
        self._changed = asyncio.Event()  # credits came, a fetch ended, something was settled, or the client is done
        self._room = asyncio.Event()
        self._fetch: asyncio.Task[Fetched] | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self._settled_bytes = 0  # of what is under way, or carried out and not answered
        self._unanswered_bytes = 0  # of the latter: an answer that rows are lost is as long as what named them
        self._settled: list[Any] = []
        self._told: tuple[list[int], int] | None = None  # the assignment that the client knows
        self._problem: Exception | None = None
        self._idle = False  # the fetch under way may bring no rows
        self._leaving = False
        self._ended = False  # the client says no more

    async def run(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        stopping = self._watched(self._front.stopping.wait())
        reading = self._watched(self._read(requests))
        try:
            while not self._is_over():
                if self._problem is not None:
                    raise self._problem
                if stopping.done():
                    raise Stopping
                self._caller.must_be_valid()
                response = self._response()
                if response is not None:
                    yield response
                    continue
                self._begin_fetch()
                self._changed.clear()
                await self._changed.wait()
        finally:
            for task in (stopping, reading, self._fetch, *self._settling):
                if task is not None:
                    task.cancel()
            if self._open is not None and self._streams.get(name_in(self._open)) is self:
                del self._streams[name_in(self._open)]

    def _watched(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._changed.set())
        return task

    def end(self) -> None:
        """Another stream has taken its place, or its member leaves: it fetches nothing more."""
        self._leaving = True
        if self._fetch is not None:
            self._fetch.cancel()
        if self._problem is None:
            self._problem = MemberReplaced(self._open.topic, self._open.group, self._open.member)
        self._changed.set()

    def _is_over(self) -> bool:
        return self._ended and not self._settling and not self._settled and self._problem is None

    # -- rows ------------------------------------------------------------------------------------------------------

    def _begin_fetch(self) -> None:
        """Also without credits: it is the member's sign of life, and tells when partitions change hands."""
        if self._fetch is not None or self._open is None or self._leaving or self._ended:
            return
        opened, place = self._open, rows.unpack_place(self._open, "start")
        self._idle = not self._credits
        fetch = self._broker.group_fetch(
            opened.topic, opened.group, opened.member, session=opened.session,
            max_messages=min(self._credits, opened.max_messages or FETCH_MAX, FETCH_MAX),
            max_bytes=min(opened.max_bytes or FETCH_BYTES_DEFAULT, FETCH_BYTES_MAX),
            wait=0.0 if self._told is None else WAIT,  # a new member hears at once what it reads
            start="earliest" if place is None else place, config=rows.read_group_config(opened.config_json),
        )  # fmt: skip
        self._fetch = self._watched(fetch)

    def _response(self) -> Any:
        """What there is to say, or None."""
        batches: list[Any] = []
        response = None
        fetch = self._fetch
        if fetch is not None and fetch.done():
            self._fetch = None
            if not fetch.cancelled():  # by ourselves, because something has changed
                fetched = fetch.result()
                self._credits -= sum(map(len, fetched.batches))
                batches = list(map(rows.pack_batch, fetched.batches))
                response = self._assignment(fetched)
        if not batches and not self._settled:
            return response
        response = response or pb.SubscribeResponse()
        response.batches.extend(batches)
        response.settled.extend(self._settled)
        self._settled = []
        self._settled_bytes -= self._unanswered_bytes
        self._unanswered_bytes = 0
        self._room.set()
        return response

    def _assignment(self, fetched: Fetched) -> Any:
        """None if the client knows it."""
        if self._told == (fetched.partitions, fetched.generation):
            return None
        topic = self._open.topic if self._told is None else ""
        self._told = fetched.partitions, fetched.generation
        return pb.SubscribeResponse(topic=topic, assignment=rows.pack_assignment(*self._told))

    # -- what the client says --------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                self._take_open(request)
                self._add(request.credits)
                for settle in request.settle:
                    await self._begin_settling(settle)
                if request.leave:
                    await self._leave()
                    break
        except Exception as error:
            self._problem = error
        self._ended = True

    def _take_open(self, request: Any) -> None:
        if request.HasField("open") == (self._open is not None):
            raise BadRequest("the first request of a Subscribe holds `open`, and no other one does")
        if self._open is None:
            self._caller.visit.topic = request.open.topic
            self._caller.must(Action.CONSUME, request.open.topic)
            if request.open.max_messages < 0 or request.open.max_bytes < 0:
                raise BadRequest("max_messages and max_bytes are not negative")
            self._open = request.open
            former, self._streams[name_in(request.open)] = self._streams.get(name_in(request.open)), self
            if former is not None:
                former.end()
            self._changed.set()

    def _add(self, credits: int) -> None:
        if credits < 0 or self._credits + credits > CREDITS_MAX:
            raise BadRequest(f"credits={credits}: they are not negative, and at most {CREDITS_MAX} may be open")
        self._credits += credits
        if credits and self._idle and self._fetch is not None:
            self._fetch.cancel()  # the next one asks for rows

    async def _begin_settling(self, settle: Any) -> None:
        size = settle.ByteSize()
        while len(self._settling) + len(self._settled) >= SETTLES_MAX or (
            self._settled_bytes and self._settled_bytes + size > SETTLES_BYTES_MAX
        ):
            self._room.clear()
            await self._room.wait()
        self._settled_bytes += size
        task = self._watched(self._settle(settle))
        self._settling.add(task)
        task.add_done_callback(partial(self._has_settled, size))

    def _has_settled(self, size: int, task: asyncio.Task[None]) -> None:
        self._settling.discard(task)
        self._unanswered_bytes += size

    async def _settle(self, settle: Any) -> None:
        opened, answer = self._open, pb.Settled(number=settle.number)
        member = opened.topic, opened.group, opened.member
        try:
            offsets = rows.unpack_rows(settle.rows)
            if settle.nack:
                reason = given(settle, "reason")
                await self._broker.group_nack(*member, offsets, session=opened.session, reason=reason)
            else:
                await self._broker.group_ack(*member, offsets, session=opened.session)
        except DeliveryLost as lost:
            answer.lost.extend(rows.pack_lost(lost))
        except HeaplineError as error:
            answer.error.CopyFrom(pack_error(error))
        except Exception as error:
            self._problem = error  # ends the stream: an answer without an error would say that it is done
            return
        self._settled.append(answer)

    async def _leave(self) -> None:
        self._leaving = True
        if self._settling:
            await asyncio.wait(set(self._settling))
        opened = self._open
        if (fetch := self._fetch) is not None:
            fetch.cancel()  # it would join again
            await asyncio.wait({fetch})
        await self._broker.group_leave(opened.topic, opened.group, opened.member, session=opened.session)


def name_in(request: Any) -> Name:
    return request.topic, request.group, request.member, request.session
