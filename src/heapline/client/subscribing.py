"""A member of a group whose rows are pushed: the calls that a subscription makes, on a Subscribe stream.

A subscription (heapline.subscribing) asks for rows and says how many it may have; here that becomes credits, and rows
flow ahead of the asking as far as these reach. When the connection breaks, what had arrived stays good, and a new
stream of the same session goes on, however long that takes. What was on its way comes again when its time is over.

Acks and nacks are calls of their own, which the client repeats until they are answered: an ack of rows that are done is
no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from heapline.client.checks import checked_topic
from heapline.client.group_checks import check_fetch, checked_place, spelled
from heapline.client.patience import log, pauses
from heapline.errors import Closed, HeaplineError, ResourceExhausted, UnavailableError
from heapline.streams import Fetched, GroupInfo, Offsets, Place, StreamBatch
from heapline.wire import stream_rows as rows
from heapline.wire.schema import pb


class PushedMember:
    """Has the four calls of a subscription's member, for one member and session."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker  # a ConnectedBroker
        self._open: Any = None
        self._batches: deque[tuple[StreamBatch, float]] = deque()  # and when they came, in the loop's time
        self._here = 0  # rows in them
        self._granted = 0  # rows that the server may send and has not sent yet
        self._wanted = 0  # rows that may be here or on their way
        self._more = asyncio.Event()  # credits to be given
        self._news = asyncio.Event()  # rows, other partitions, or an error
        self._partitions: list[int] = []
        self._generation = 0
        self._opened = False  # the server has answered
        self._error: Exception | None = None
        self._reader: asyncio.Task[None] | None = None

    async def get_group(self, topic: str, group: str) -> GroupInfo:
        found: GroupInfo = await self._broker.get_group(topic, group)
        return found

    # -- rows ------------------------------------------------------------------------------------------------------

    async def group_fetch(
        self, topic: str, group: str, member: str, *, session: str, max_messages: int = 1000,
        max_bytes: int = 2 << 20, wait: float = 0.0, start: Place = "earliest", config: Mapping[str, Any] | None = None,
    ) -> Fetched:  # fmt: skip
        if self._open is None:
            check_fetch(max_messages, max_bytes, wait)
            self._open = spelled(
                pb.SubscribeOpen, topic=checked_topic(topic), group=group, member=member, session=session,
                start=rows.pack_place(checked_place(start)), config_json=rows.group_config_json(config or {}),
                max_bytes=max_bytes,
            )  # fmt: skip
        self._wanted = max_messages
        if self._reader is None and self._error is None:
            self._reader = asyncio.ensure_future(self._read())
        self._grant()
        if not self._news.is_set() and (wait or not self._opened):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait if self._opened else None):  # what is wrong is told by the first call
                    await self._news.wait()
        return self._taken(max_messages)

    def _taken(self, limit: int) -> Fetched:
        if self._error is not None and not self._batches:
            raise copy.copy(self._error) if isinstance(self._error, HeaplineError) else self._error
        found: list[StreamBatch] = []
        first = now = asyncio.get_running_loop().time()
        while self._batches and (len(self._batches[0][0]) <= limit or (limit > 0 and not found)):
            batch, came_at = self._batches.popleft()
            limit -= len(batch)
            first = min(first, came_at)
            found.append(batch)
        self._here -= sum(map(len, found))
        if not self._batches and self._error is None:
            self._news.clear()
        return Fetched(found, list(self._partitions), self._generation, now - first)

    def _grant(self) -> None:
        """Not for every row: when half of what may come has come."""
        if self._more.is_set() or 2 * (self._here + self._granted) <= self._wanted:
            self._more.set()

    def _credits(self) -> int:
        """Those to be given now."""
        credits = max(0, self._wanted - self._here - self._granted)
        self._granted += credits
        return credits

    async def _requests(self) -> AsyncIterator[Any]:
        self._granted = 0
        self._more.clear()
        yield pb.SubscribeRequest(open=self._open, credits=self._credits())
        while True:
            await self._more.wait()
            self._more.clear()
            if credits := self._credits():
                yield pb.SubscribeRequest(credits=credits)

    async def _read(self) -> None:
        tries, failed, topic = pauses(), False, self._open.topic
        while True:
            try:
                async for answer in self._broker.calls.stream("Subscribe", self._requests()):
                    if failed:
                        log.info("subscribed again", topic=topic, group=self._open.group)
                    tries, failed = pauses(), False
                    self._arrived(answer)
            except UnavailableError as error:
                if isinstance(error, ResourceExhausted) and not self._opened:
                    self._error = error  # a limit is an answer
                    self._news.set()
                    return
                if not failed:
                    log.warning("a subscription was interrupted", topic=topic, group=self._open.group, why=str(error))
                failed = True
            except Exception as error:  # also a fault of our own: whoever waits must not wait for ever
                self._error = error
                self._news.set()
                return
            if self._reader is not asyncio.current_task():
                return  # it was told to stop just as its connection broke
            await asyncio.sleep(next(tries))

    def _arrived(self, answer: Any) -> None:
        self._opened = True
        for columns in answer.batches:
            batch = rows.unpack_batch(None, self._open.topic, columns)
            self._batches.append((batch, asyncio.get_running_loop().time()))
            self._here += len(batch)
            self._granted = max(0, self._granted - len(batch))
        if answer.HasField("assignment"):
            self._partitions = list(answer.assignment.partitions)
            self._generation = answer.assignment.generation
        if answer.batches or answer.HasField("assignment"):
            self._news.set()

    # -- what is said of them --------------------------------------------------------------------------------------

    async def group_ack(self, topic: str, group: str, member: str, offsets: Offsets, *, session: str) -> None:
        await self._broker.group_ack(topic, group, member, offsets, session=session)

    async def group_nack(
        self, topic: str, group: str, member: str, offsets: Offsets, *, session: str, reason: str | None = None
    ) -> None:
        await self._broker.group_nack(topic, group, member, offsets, session=session, reason=reason)

    async def group_leave(self, topic: str, group: str, member: str, *, session: str) -> None:
        await self.stop_pushing()
        await self._broker.group_leave(topic, group, member, session=session)

    async def stop_pushing(self) -> None:
        """End the stream, and leave the member where it is; the next fetch opens another."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait({reader})
        self._opened, self._partitions = False, []
        self._batches.clear()
        self._here = 0

    async def end(self) -> None:
        """For good: the client is closed, and who waits for rows is told so."""
        self._error = self._error or Closed()
        self._news.set()
        await self.stop_pushing()
