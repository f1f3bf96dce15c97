"""`async for message in consume(broker, "jobs")`: messages as they come, for as long as somebody asks for them.

Over the wire they flow on a PopStream, from other brokers by pops that wait. Few are fetched ahead: what is prefetched
is out of the queue, so something more urgent that comes later has to wait behind it. Leases are extended while a
message waits here, and while it is being handled: until it is acked, nacked, released or buried, or nobody holds it any
more. On close what nobody has started goes back to the queue at once.

When a connection breaks, what had arrived stays good and a new stream is opened, however long that takes: outages end
by themselves. Whatever does not (a revoked key, a topic that is gone) ends the iteration with its error.

Several coroutines may iterate over one `Consumption`; each message goes to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import weakref
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from heapline.broker import Broker
from heapline.client.patience import log, pauses
from heapline.engine.columns import check_seconds
from heapline.engine.requests import check_int, check_text
from heapline.errors import HeaplineError, LeaseLost, UnavailableError
from heapline.model import Message

PREFETCH = 1
PREFETCH_MAX = 100_000
POP_WAIT = 20.0  # seconds that one pop waits, where there are no streams
CLOSE_SECONDS = 2.0  # for what the server had on its way
EXTEND_BATCH = 1000
CROWD = 32  # asking or at work, for each that is fetched ahead; for more than that it would be no help
VISIBILITY = 30.0  # of a topic that is not listed for this caller


def consume(
    broker: Broker, topic: str, *, prefetch: int = PREFETCH, visibility: float | None = None, holder: str | None = None
) -> Consumption:
    """Messages of a topic, from any broker.

    `prefetch` counts those that wait here beside the ones being handled; `visibility` is in seconds, the topic's
    default if it is not given, and is renewed by itself. To be sure that what was prefetched goes back at once, close
    it: `async with consume(…) as messages`.
    """
    check_int("prefetch", prefetch, 0, PREFETCH_MAX)
    if visibility is not None:
        check_seconds("visibility", visibility, 0.001)
    check_text("holder", holder)
    return Consumption(Feed(broker, topic, prefetch, visibility, holder))


class Consumption:
    """The end that is iterated over. When nobody holds it any more, as after a `break`, its feed is closed."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        weakref.finalize(self, feed.abandon).atexit = False

    def __aiter__(self) -> Consumption:
        return self

    async def __anext__(self) -> Message:
        message = await self.feed.next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def __aenter__(self) -> Consumption:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release what was not started, and end the iteration. Messages being handled are no longer extended."""
        await self.feed.close()


class _Lease:
    """One message that is here or being handled; held weakly, so one that everybody has forgotten runs out."""

    __slots__ = ("good_until", "message")

    def __init__(self, message: Message, good_until: float) -> None:
        self.message = weakref.ref(message)
        self.good_until = good_until  # in the loop's time


class Feed:
    """Fetches, keeps and extends. Messages act through it, so that it knows when they are done."""

    def __init__(self, broker: Broker, topic: str, prefetch: int, visibility: float | None, holder: str | None) -> None:
        self._broker, self._topic, self._prefetch = broker, topic, prefetch
        self._visibility, self._holder = visibility, holder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seconds = visibility or VISIBILITY  # that a lease lasts
        self._here: deque[Message] = deque()
        self._leases: dict[int, _Lease] = {}
        self._askers: deque[asyncio.Future[None]] = deque()
        self._granted = 0  # messages that the server may send and has not sent yet
        self._wanted = asyncio.Event()
        self._closing = asyncio.Event()
        self._error: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None

    # -- giving ----------------------------------------------------------------------------------------------------

    async def next(self) -> Message | None:
        """The next message; None when it was closed."""
        while not self._closing.is_set():
            if self._loop is None:
                self._begin()
            message = self._take()
            if message is not None:
                return message
            if self._error is not None:
                raise copy.copy(self._error) if isinstance(self._error, HeaplineError) else self._error
            await self._something()
        return None

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.ensure_future(self._fetch()), asyncio.ensure_future(self._extend_for_ever())]

    def _take(self) -> Message | None:
        while self._here:
            message = self._here.popleft()
            self._wanted.set()
            lease = self._lease_of(message)
            if lease is not None and lease.good_until > self._now():
                return message
            self.done(message)  # its lease has ended while it waited: it is somebody else's
        return None

    def _lease_of(self, message: Message) -> _Lease | None:
        """Of this very delivery: a message whose lease was lost may have come here again, under another."""
        lease = self._leases.get(message.id)
        return lease if lease is not None and lease.message() is message else None

    async def _something(self) -> None:
        """Wait until there may be a message, an error, or the end."""
        assert self._loop is not None
        asker = self._loop.create_future()
        self._askers.append(asker)
        self._wanted.set()
        try:
            await asker
        except asyncio.CancelledError:
            if asker.done() and not asker.cancelled():
                self._wake(1)  # it was told of a message, and leaves it to another
            else:
                with contextlib.suppress(ValueError):  # whoever is told, _wake takes out
                    self._askers.remove(asker)
            raise

    def _wake(self, count: int) -> None:
        while self._askers and count:
            asker = self._askers.popleft()
            if not asker.done():
                asker.set_result(None)
                count -= 1

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    # -- fetching --------------------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        tries, failed = pauses(), False
        while not self._closing.is_set():
            try:
                if self._visibility is None:
                    self._seconds = await self._visibility_of_topic()
                async for messages in self._messages():
                    if failed:
                        log.info("consuming again", topic=self._topic)
                    tries, failed = pauses(), False
                    self._arrived(messages)
            except UnavailableError as error:
                if not failed:
                    log.warning("consuming was interrupted", topic=self._topic, why=str(error))
                failed = True
            except Exception as error:  # also a fault of our own: whoever waits must not wait for ever
                self._error = error
                break
            self._granted = 0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), next(tries))
        self._wake(len(self._askers))

    async def _visibility_of_topic(self) -> float:
        for info in await self._broker.list_topics():
            if info.name == self._topic or f"default/{info.name}" == self._topic:
                return info.config.visibility_default
        return VISIBILITY

    def _messages(self) -> AsyncIterator[list[Message]]:
        stream: Any = getattr(self._broker, "pop_stream", None)
        if stream is None:
            return self._by_pops()
        found: AsyncIterator[list[Message]] = stream(
            self._topic, self._credits(), visibility=self._visibility, holder=self._holder
        )
        return found

    async def _by_pops(self) -> AsyncIterator[list[Message]]:
        async for count in self._credits():
            popping = asyncio.ensure_future(
                self._broker.pop(self._topic, count, visibility=self._visibility, wait=POP_WAIT, holder=self._holder)
            )
            closing = asyncio.ensure_future(self._closing.wait())
            try:
                await asyncio.wait({popping, closing}, return_when=asyncio.FIRST_COMPLETED)
                if popping.done():
                    yield popping.result()
            finally:
                closing.cancel()
                popping.cancel()
            self._granted = 0

    async def _credits(self) -> AsyncIterator[int]:
        while not self._closing.is_set():
            self._wanted.clear()
            count = self._ahead() + len(self._askers) - len(self._here) - self._granted
            if count > 0:
                self._granted += count
                yield count
            else:
                await self._wanted.wait()

    def _ahead(self) -> int:
        """How many to fetch that nobody asks for yet. For a crowd none: one that came before the others would be taken,
        acked and followed by the next in calls of its own, for ever."""
        crowd = len(self._leases) + len(self._askers)
        return self._prefetch if self._prefetch * CROWD >= crowd else 0

    def _arrived(self, messages: list[Message]) -> None:
        good_until = self._now() + self._seconds
        for message in messages:
            message._broker = self  # type: ignore[assignment]
            self._leases[message.id] = _Lease(message, good_until)
        self._here.extend(messages)
        self._granted -= len(messages)
        self._wake(len(messages))

    # -- extending -------------------------------------------------------------------------------------------------

    async def _extend_for_ever(self) -> None:
        """Each lease is renewed when a third of it has passed: two more tries remain if one fails."""
        while True:
            await asyncio.sleep(self._seconds / 6)
            for id in [id for id, lease in self._leases.items() if lease.message() is None]:
                del self._leases[id]
            soon = self._now() + self._seconds * 2 / 3
            due = [lease for lease in list(self._leases.values()) if lease.good_until <= soon]
            for start in range(0, len(due), EXTEND_BATCH):
                with contextlib.suppress(HeaplineError):  # they stay due
                    await self._extend(due[start : start + EXTEND_BATCH])

    async def _extend(self, leases: list[_Lease]) -> None:
        messages = [m for lease in leases if (m := lease.message()) is not None and self._lease_of(m) is lease]
        good_until = self._now() + self._seconds
        lost: set[int] = set()
        try:
            async with asyncio.timeout(self._seconds / 3):
                await self._broker.extend(messages, self._seconds)
        except TimeoutError:
            return
        except LeaseLost as error:
            lost = set(error.lost)
        for message in messages:
            lease = self._lease_of(message)
            if message.id in lost:
                self.done(message)
            elif lease is not None:
                lease.good_until = max(lease.good_until, good_until)

    # -- what messages ask for ---------------------------------------------------------------------------------------

    def done(self, message: Message) -> None:
        """Its lease is not extended any more."""
        if self._lease_of(message) is not None:
            del self._leases[message.id]

    async def ack(self, message: Message) -> None:
        self.done(message)
        await self._broker.ack(message)

    async def nack(self, message: Message, *, backoff: float | None = None, reason: str | None = None) -> None:
        self.done(message)
        await self._broker.nack(message, backoff=backoff, reason=reason)

    async def release(self, message: Message) -> None:
        self.done(message)
        await self._broker.release(message)

    async def bury(self, message: Message, *, reason: str | None = None) -> None:
        self.done(message)
        await self._broker.bury(message, reason=reason)

    async def extend(self, message: Message, seconds: float) -> None:
        await self._broker.extend(message, seconds)
        lease = self._lease_of(message)
        if lease is not None:
            lease.good_until = max(lease.good_until, self._now() + seconds)

    # -- the end ---------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Nobody iterates any more, and nobody can wait for the end."""
        if self._loop is not None and not self._closing.is_set() and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it closes in this very moment
                self._loop.call_soon_threadsafe(lambda: self._tasks.append(asyncio.ensure_future(self.close())))

    async def close(self) -> None:
        """Ends it to the end, also if whoever waits for that is cancelled: nothing may stay leased for nobody."""
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            self._closing.set()  # its loop is gone, and all that it held with it
            return
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._closing.set()
        self._wanted.set()
        self._wake(len(self._askers))
        if not self._tasks:
            return
        fetching, extending = self._tasks[:2]
        await asyncio.wait({fetching}, timeout=CLOSE_SECONDS)  # what is on its way still arrives
        for task in (fetching, extending):
            task.cancel()
        await asyncio.wait({fetching, extending})
        unstarted = list(self._here)
        self._here.clear()
        self._leases.clear()
        if unstarted:
            with contextlib.suppress(HeaplineError):  # their leases end by themselves
                await self._broker.release(unstarted)
