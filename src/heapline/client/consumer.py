"""`async for message in consume(broker, "jobs")`: messages as they become ready, for as long as someone iterates.

They are fetched by pops that wait. Few are prefetched: a prefetched message is leased, so a more urgent one that is
enqueued later waits behind it. Leases are extended while a message waits here and
while it is processed: until it is acked, nacked, released or buried, or the program no longer holds it. On close,
messages that were not started are returned immediately.

If a connection breaks, messages that have arrived stay valid, and the next pop is tried, however long that takes.
Errors that are not transient (a revoked key, a deleted topic) end the iteration.

Several coroutines may iterate over one `Consumer`; each message goes to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from heapline.client.backoff import log, pauses
from heapline.client.transports.transport import closed
from heapline.contract.broker import Broker
from heapline.contract.columns import unpack
from heapline.contract.errors import BadRequest, HeaplineError, LeaseLost, PermissionDenied, UnavailableError
from heapline.contract.leases import Pop
from heapline.contract.message import Message

T = TypeVar("T")
PREFETCH = 1
PREFETCH_MAX = 100_000
POP_WAIT = 20.0  # seconds that one pop waits
CLOSE_SECONDS = 2.0  # for messages that the server has already sent, and for leases of the last pop to be returned
EXTEND_BATCH = 1000
ASKERS_PER_MESSAGE = 32  # coroutines per prefetched message; with more of them prefetching does not help
VISIBILITY = 30.0  # seconds, for a topic whose settings the caller may not read


def consume(
    broker: Broker, topic: str, *, prefetch: int = PREFETCH, visibility: float | None = None, holder: str | None = None
) -> Consumer[Message]:
    """Consume the messages of a topic, from any broker.

    `prefetch` counts messages that wait here beside those being processed. `visibility` is in seconds; it defaults to
    the topic's setting, and leases are renewed automatically. Close the consumer to return prefetched messages
    immediately: `async with consume(…) as messages`.
    """
    return Consumer(Prefetcher(broker, Pop(topic, visibility=visibility, holder=holder), prefetch))


class Consumer(Generic[T]):
    """Iterate over it. When the program no longer holds it, for example after a `break`, its prefetcher is closed."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.prefetcher = prefetcher
        weakref.finalize(self, prefetcher.abandon).atexit = False

    def __aiter__(self) -> Consumer[T]:
        return self

    async def __anext__(self) -> T:
        message = await self.prefetcher.next()
        if message is None:
            raise StopAsyncIteration
        found: T = message
        return found

    @contextlib.asynccontextmanager
    async def item(self) -> AsyncIterator[T]:
        """The next message, for one block: `async with consumer.item() as message: …`.

        Nacks the message if the block raises. Releases it if the block ends, or is cancelled, without having settled
        it. Raises Closed when the consumer is closed.
        """
        message = await self.prefetcher.next()
        if message is None:
            raise closed("consumer")
        try:
            yield message
        except Exception as error:
            with contextlib.suppress(HeaplineError):  # the block's error matters more; the lease ends by itself
                await self.prefetcher.settle(message, failure=f"{type(error).__name__}: {error}"[:REASON_MAX])
            raise
        except BaseException:  # cancelled: the message did not fail
            with contextlib.suppress(HeaplineError):
                await self.prefetcher.settle(message)
            raise
        await self.prefetcher.settle(message)

    async def __aenter__(self) -> Consumer[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release messages that were not started, and end the iteration. Stop extending the others."""
        await self.prefetcher.close()


REASON_MAX = 1000  # characters of an error that a nack reports


class Lease:
    """A message that waits here or is being processed. Held weakly, so the lease of a forgotten one expires."""

    __slots__ = ("good_until", "held", "id")

    def __init__(self, id: int, held: Any, good_until: float) -> None:
        self.id = id
        self.held = weakref.ref(held)
        self.good_until = good_until  # in the loop's time


class Prefetcher:
    """Fetches, keeps and extends messages. They act through it, so it learns when they are settled.

    `bind` replaces each message by an object that acts elsewhere.
    """

    def __init__(self, broker: Broker, pop: Pop, prefetch: int, bind: Callable[[Any], Any] | None = None) -> None:
        if type(prefetch) is not int or not 0 <= prefetch <= PREFETCH_MAX:
            raise BadRequest(f"prefetch must be an integer from 0 to {PREFETCH_MAX}, got {prefetch!r}")
        self._broker, self._pop, self._prefetch, self._bind = broker, pop, prefetch, bind
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seconds = pop.visibility or VISIBILITY  # that a lease lasts
        self._here: deque[Any] = deque()
        self._leases: dict[int, Lease] = {}
        self._askers: deque[asyncio.Future[None]] = deque()
        self._granted = 0  # messages that the server may send and has not sent yet
        self._wanted = asyncio.Event()
        self._closing = asyncio.Event()
        self._error: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None

    # -- handing out -----------------------------------------------------------------------------------------------

    async def next(self) -> Any:
        """Return the next message, or None when the consumer is closed."""
        while not self._closing.is_set():
            if self._loop is None:
                self._begin()
            message = self._take()
            if message is not None:
                return message
            if self._error is not None:
                raise copy.copy(self._error) if isinstance(self._error, HeaplineError) else self._error
            await self._change()
        return None

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.ensure_future(self._fetch()), asyncio.ensure_future(self._keep_extending())]

    def _take(self) -> Any:
        while self._here:
            message = self._here.popleft()
            self._wanted.set()
            lease = self._lease_of(message)
            if lease is not None and lease.good_until > self._now():
                return message
            self.done(message)  # its lease ended while it waited, so another consumer may have it
        return None

    def _lease_of(self, message: Any) -> Lease | None:
        """Return the lease of this very delivery: a message may have been lost and delivered here again."""
        lease = self._leases.get(message.id)
        return lease if lease is not None and lease.held() is message else None

    async def _change(self) -> None:
        """Wait until there may be a message or an error, or the consumer is closed."""
        assert self._loop is not None
        asker = self._loop.create_future()
        self._askers.append(asker)
        self._wanted.set()
        try:
            await asker
        except asyncio.CancelledError:
            if asker.done() and not asker.cancelled():
                self._wake(1)  # it was woken for a message, which it leaves to another
            else:
                with contextlib.suppress(ValueError):  # _wake removes those that it wakes
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
        tries, has_failed = pauses(), False
        while not self._closing.is_set():
            try:
                if self._pop.visibility is None:
                    self._seconds = await self._visibility_of_topic()
                async for messages in self._messages():
                    if has_failed:
                        log.info("consumer reconnected", topic=self._pop.topic)
                    tries, has_failed = pauses(), False
                    self._arrived(messages)
            except UnavailableError as error:
                if not has_failed:
                    log.warning("consumer disconnected; will retry", topic=self._pop.topic, error=str(error))
                has_failed = True
            except Exception as error:  # including a bug here: waiting callers must not wait forever
                self._error = error
                break
            self._granted = 0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), next(tries))
        self._wake(len(self._askers))

    async def _visibility_of_topic(self) -> float:
        try:
            return (await self._broker.get_topic(self._pop.topic)).config.visibility_default
        except PermissionDenied:
            return VISIBILITY

    async def _pop_next(self, count: int) -> list[Any]:
        """Return what the next pop leases: at most `count` messages."""
        pop = self._pop
        return await self._broker.pop(pop.topic, count, visibility=pop.visibility, wait=POP_WAIT, holder=pop.holder)

    async def _messages(self) -> AsyncIterator[list[Any]]:
        async for count in self._credits():
            popping = asyncio.ensure_future(self._pop_next(count))
            closing = asyncio.ensure_future(self._closing.wait())
            try:
                await asyncio.wait({popping, closing}, return_when=asyncio.FIRST_COMPLETED)
                if popping.done():
                    yield popping.result()
            finally:
                closing.cancel()
                popping.cancel()
                await asyncio.wait({popping})  # it may leave leases to return
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
        """Return how many messages to prefetch: those that no coroutine waits for.

        None for many coroutines: a message that arrives before the others would be taken, acked and followed by the
        next one in calls of its own, forever.
        """
        askers = len(self._leases) + len(self._askers)
        return self._prefetch if self._prefetch * ASKERS_PER_MESSAGE >= askers else 0

    def _arrived(self, messages: list[Any]) -> None:
        good_until = self._now() + self._seconds
        messages = [self._hold(message, good_until) for message in messages]
        self._here.extend(messages)
        self._granted -= len(messages)
        self._wake(len(messages))

    def _hold(self, message: Any, good_until: float) -> Any:
        """Keep the lease of a message, and return the message as it is delivered."""
        if self._bind is not None:
            message = self._bind(message)
        else:
            message._broker = self
        self._leases[message.id] = Lease(message.id, message, good_until)
        return message

    # -- extending -------------------------------------------------------------------------------------------------

    async def _keep_extending(self) -> None:
        """Renew each lease when a third of it has passed, so that two more tries remain if one fails."""
        while True:
            await asyncio.sleep(self._seconds / 6)
            for id in [id for id, lease in self._leases.items() if lease.held() is None]:
                del self._leases[id]
            soon = self._now() + self._seconds * 2 / 3
            due = [lease for lease in list(self._leases.values()) if lease.good_until <= soon]
            for start in range(0, len(due), EXTEND_BATCH):
                with contextlib.suppress(HeaplineError):  # they stay due
                    await self._extend(due[start : start + EXTEND_BATCH])

    async def _extend(self, leases: list[Lease]) -> None:
        messages = [m for lease in leases if (m := lease.held()) is not None and self._lease_of(m) is lease]
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

    # -- calls of messages -----------------------------------------------------------------------------------------

    def done(self, message: Any) -> None:
        """Stop extending its lease."""
        lease = self._lease_of(message)
        if lease is not None:
            del self._leases[lease.id]

    def settled(self, command: Any) -> None:
        """Stop extending leases that this command, which was made through the broker, settles."""
        ids = command.leases.ids
        if not self._leases or (ids.nbytes == 8 and int.from_bytes(ids, "little") not in self._leases):
            return  # the usual case: a message that was settled through this prefetcher
        for id, token in zip(unpack(ids), unpack(command.leases.tokens), strict=True):
            lease = self._leases.get(id)
            message = None if lease is None else lease.held()
            if message is not None and message.token == token and message.topic == command.topic:
                del self._leases[id]

    async def settle(self, message: Any, failure: str | None = None) -> None:
        """Nack a message that failed, or release it, unless it is settled or lost."""
        if self._lease_of(message) is None:
            return
        if failure is None:
            await self.release(message)
        else:
            await self.nack(message, reason=failure)

    def ack(self, message: Any) -> Coroutine[Any, Any, None]:
        self.done(message)
        return self._broker.ack(message)

    async def nack(self, message: Any, *, backoff: float | None = None, reason: str | None = None) -> None:
        self.done(message)
        await self._broker.nack(message, backoff=backoff, reason=reason)

    async def release(self, message: Any) -> None:
        self.done(message)
        await self._broker.release(message)

    async def bury(self, message: Any, *, reason: str | None = None) -> None:
        self.done(message)
        await self._broker.bury(message, reason=reason)

    async def extend(self, message: Any, seconds: float) -> None:
        await self._broker.extend(message, seconds)
        lease = self._lease_of(message)
        if lease is not None:
            lease.good_until = max(lease.good_until, self._now() + seconds)

    # -- closing ---------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Close in the background: the program no longer holds the consumer, so it cannot wait for the end."""
        if self._loop is not None and not self._closing.is_set() and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop is being closed
                self._loop.call_soon_threadsafe(lambda: self._tasks.append(asyncio.ensure_future(self.close())))

    async def close(self) -> None:
        """Close, even if the caller is cancelled meanwhile, so that no message stays leased."""
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            self._closing.set()  # its loop has ended, with everything that it held
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
        await asyncio.wait({fetching}, timeout=CLOSE_SECONDS)  # messages already sent still arrive
        for task in (fetching, extending):
            task.cancel()
        await asyncio.wait({fetching, extending})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._broker.leases_returned()
        unstarted = list(self._here)
        self._here.clear()
        self._leases.clear()
        if unstarted:
            with contextlib.suppress(HeaplineError):  # their leases end by themselves
                await self._return(unstarted)

    async def _return(self, unstarted: list[Any]) -> None:
        await self._broker.release(unstarted)
