"""Subscribe: the rows of one member of a group as long as it gives credits, and how it settles them.

One fetch is in progress at a time, and the next one starts when gRPC has taken the rows of the last. What a slow member
does not read stays in the journal, and costs this process one batch at most. Acks are executed as they arrive, whether
the member reads or not. The number that may wait for an answer is bounded; beyond it the stream is not read further.

The broker keeps the membership: a stream that breaks ends nothing but itself. Rows that were handed to gRPC may have
arrived, so the member holds them until they are acked or time out; it continues with another stream of the same
session. That stream ends the former one, which this process may still believe to be open: it would take rows and send
them nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

from heapline.contract.errors import BadRequest, HeaplineError, MemberReplaced
from heapline.contract.groups import FetchedRows, GroupAck, GroupFetch, GroupLeave, GroupNack, PartitionRows
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request, Stopping
from heapline.server.protocols.message_streams import credits_after
from heapline.wire.descriptors import pb
from heapline.wire.protobuf import pack_error, request_of, response_of, struct_codec

ROWS_MAX = 100_000  # of one response
WAIT = 10.0  # seconds of one fetch that finds nothing; then the credential is checked again
SETTLES_MAX = 1024  # in progress, or executed and not answered
SETTLES_BYTES_MAX = 16 << 20  # of those


#: Topic, group, member, session.
Name = tuple[str, str, str, str]


class Subscriptions:
    """The open streams of a server."""

    def __init__(self) -> None:
        self._streams: dict[Name, SubscribeStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, dispatcher: Dispatcher, request: Request) -> SubscribeStream:
        return SubscribeStream(dispatcher, request, self)

    def replace(self, stream: SubscribeStream, name: Name) -> None:
        """Register a stream and end the former one of the same session."""
        former, self._streams[name] = self._streams.get(name), stream
        if former is not None:
            former.end()

    def remove(self, stream: SubscribeStream, name: Name) -> None:
        if self._streams.get(name) is stream:
            del self._streams[name]

    def end(self, command: GroupLeave) -> None:
        """End the stream of a member that leaves the group by another call: its next fetch would join again."""
        stream = self._streams.get(name_of(command))
        if stream is not None:
            stream.end()


class SubscribeStream:
    def __init__(self, dispatcher: Dispatcher, request: Request, streams: Subscriptions) -> None:
        self._dispatcher, self._request, self._streams = dispatcher, request, streams
        self._open: GroupFetch | None = None
        self._rows_max = ROWS_MAX  # of one response
        self._as_columns = True
        self._credits = 0
        self._changed = asyncio.Event()  # credits came, a fetch ended, rows were settled, or the client has ended
        self._room = asyncio.Event()
        self._fetch: asyncio.Task[FetchedRows] | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self._settled_bytes = 0  # of acks in progress, or executed and not answered
        self._unanswered_bytes = 0  # of the latter: a result with lost rows is as long as the ack
        self._settled: list[dict[str, Any]] = []
        self._known: tuple[list[int], int] | None = None  # the assignment that the client knows
        self._error: Exception | None = None
        self._is_idle = False  # the fetch in progress may return no rows
        self._is_leaving = False
        self._has_ended = False  # the client sends no more

    async def run(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        stopping = self._watched(self._dispatcher.gate.stopping.wait())
        reading = self._watched(self._read(messages))
        try:
            while not self._is_over():
                if self._error is not None:
                    raise self._error
                if stopping.done():
                    raise Stopping
                self._request.check_credential()
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
            if self._open is not None:
                self._streams.remove(self, name_of(self._open))

    def _watched(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._changed.set())
        return task

    def end(self) -> None:
        """End the stream, because another one replaces it or its member leaves. It fetches nothing more."""
        assert self._open is not None
        self._is_leaving = True
        if self._fetch is not None:
            self._fetch.cancel()
        if self._error is None:
            self._error = MemberReplaced(self._open.topic, self._open.group, self._open.member)
        self._changed.set()

    def _is_over(self) -> bool:
        return self._has_ended and not self._settling and not self._settled and self._error is None

    # -- rows ------------------------------------------------------------------------------------------------------

    def _begin_fetch(self) -> None:
        """Start a fetch, even without credits: it renews the member's lease and reports changed partitions."""
        if self._fetch is not None or self._open is None or self._is_leaving or self._has_ended:
            return
        self._is_idle = not self._credits
        command = msgspec.structs.replace(
            self._open,
            max_messages=min(self._credits, self._rows_max),
            wait=0.0 if self._known is None else WAIT,  # a new member learns immediately which partitions it reads
        )
        self._fetch = self._watched(self._dispatcher.paced_step(command, self._request))

    def _response(self) -> Any:
        """Return what there is to send, or None."""
        fetched: FetchedRows | None = None
        if (fetch := self._fetch) is not None and fetch.done():
            self._fetch = None
            if not fetch.cancelled():  # it is cancelled when credits arrive
                fetched = self._news(fetch.result())
        if fetched is None and not self._settled:
            return None
        fields: dict[str, Any] = {"settled": self._settled}
        if fetched is not None:
            fields["fetched"] = response_of(GroupFetch).fields(fetched, self._as_columns)
        self._settled = []
        self._settled_bytes -= self._unanswered_bytes
        self._unanswered_bytes = 0
        self._room.set()
        return pb.SubscribeResponse(**fields)

    def _news(self, fetched: FetchedRows) -> FetchedRows | None:
        """Return what a fetch brought, or None if it has no rows and the client knows its partitions."""
        self._credits -= sum(len(batch.rows) for batch in fetched.batches)
        assignment = fetched.partitions, fetched.generation
        if not fetched.batches and self._known == assignment:
            return None
        self._known = assignment
        return fetched

    # -- requests of the client ------------------------------------------------------------------------------------

    async def _read(self, messages: AsyncIterator[Any]) -> None:
        try:
            async for message in messages:
                self._take_open(message)
                self._add(message.credits)
                for settle in message.settle:
                    await self._begin_settling(settle)
                if message.leave:
                    await self._leave()
                    break
        except Exception as error:
            self._error = error
        self._has_ended = True

    def _take_open(self, message: Any) -> None:
        if message.HasField("open") == (self._open is not None):
            raise BadRequest("the first request of a Subscribe must have `open`, and no other one may")
        if self._open is not None:
            return
        opened = request_of(GroupFetch).unpack(message.open)
        self._request.topic = opened.topic
        self._dispatcher.gate.check(self._request, opened)
        if message.open.HasField("max_messages"):
            self._rows_max = min(opened.max_messages or ROWS_MAX, ROWS_MAX)
        self._as_columns = message.open.as_columns
        self._open = opened
        self._streams.replace(self, name_of(opened))
        self._changed.set()

    def _add(self, credits: int) -> None:
        self._credits = credits_after(self._credits, credits)
        if credits and self._is_idle and self._fetch is not None:
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
        opened = self._open
        assert opened is not None
        codec = struct_codec(PartitionRows, pb.PartitionRows, "GroupAck")
        result: dict[str, Any] = {"number": settle.number}
        try:
            rows = [codec.unpack(share) for share in settle.rows]
            of = opened.topic, opened.group, opened.member, rows, opened.session
            if settle.nack:
                reason = settle.reason if settle.HasField("reason") else None
                answer = await self._dispatcher.paced_step(GroupNack(*of, reason), self._request)
            else:
                answer = await self._dispatcher.paced_step(GroupAck(*of), self._request)
            result["lost"] = [codec.fields(share) for share in answer.lost]
        except HeaplineError as error:
            result["error"] = pack_error(error)
        except Exception as error:
            self._error = error  # ends the stream: a result without an error would mean success
            return
        self._settled.append(result)

    async def _leave(self) -> None:
        opened = self._open
        assert opened is not None
        self._is_leaving = True
        if self._settling:
            await asyncio.wait(set(self._settling))
        if (fetch := self._fetch) is not None:
            fetch.cancel()  # it would join again
            await asyncio.wait({fetch})
        self._streams.remove(self, name_of(opened))
        leave = GroupLeave(opened.topic, opened.group, opened.member, opened.session)
        await self._dispatcher.step(leave, self._request)


def name_of(command: GroupFetch | GroupLeave) -> Name:
    return command.topic, command.group, command.member, command.session
