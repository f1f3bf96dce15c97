"""The client that `heapline.connect` returns: a transport under wrappers that make it fast and safe to repeat.

A call goes through, in this order: this facade, Coalescing (joins single calls), Idempotent (numbers enqueues), Traced
(spans), Retrying (repeats over broken connections until a deadline), and a transport.

A client connects when it is first used, and belongs to the event loop that first used it. After a fork the child opens
connections of its own and never touches its parent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import ReferenceType, WeakSet, ref

from msgspec.structs import replace

from heapline.client.backoff import DEADLINE, check_deadline
from heapline.client.batch_consumer import BATCH, consume_batches
from heapline.client.consumer import PREFETCH, Consumer, Prefetcher, consume
from heapline.client.target import ClientTls, parse_target
from heapline.client.transports.native import NativeBroker
from heapline.client.transports.transport import Transport, closed
from heapline.client.wrappers.coalescing import Coalescing
from heapline.client.wrappers.idempotent import Idempotent
from heapline.client.wrappers.retrying import Retrying
from heapline.client.wrappers.traced import Traced
from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.errors import BadRequest
from heapline.contract.leased_batch import LeasedBatch
from heapline.contract.leases import Ack, Bury, Nack, Release
from heapline.contract.message import Message

R = TypeVar("R")
CLOSE_SECONDS = 5.0  # for prefetched messages to be returned, and for calls in progress to be answered
SETTLES = (Ack, Nack, Release, Bury)


class ConnectedBroker(Broker):
    """Created by `heapline.connect`. Use it with `async with`, or call `close` when you are done.

    If the response to a call is lost:

    - enqueue, enqueue_batch, prepare_batch, commit_batch, pop, ack, extend and cancel are repeated, and count once.
    - nack, release and bury are repeated. A lease that has ended by then is not an error, except that bury raises
      LeaseLost if the message is not a dead letter.
    - group_ack, group_nack, group_leave, and calls that only read or that set a state (create_topic, pause_topic and
      the like) are repeated, which has the effect of one call. abort_batch may then report that no parts were left. The
      `delay` of a repeated reschedule counts from the last try. Rows that a lost group_fetch took are redelivered after
      the group's ack_timeout.
    - purge, delete_topic, delete_schedule, dlq_replay, dlq_delete, delete_group, reset_offsets, group_dead_replay,
      group_dead_delete, forget_sink and end_leases are not repeated, because a repeat would also affect what was added
      since. They raise UnavailableError, which says that the call may have been executed.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        credential: str | None = None,
        tls: ClientTls | None = None,
        deadline: float = DEADLINE,
        find_credential: Callable[[], str | None] = lambda: None,
    ) -> None:
        for endpoint in endpoints:
            parse_target(endpoint, tls)
        check_deadline("deadline", deadline)
        self._endpoints, self._credential, self._tls = tuple(endpoints), credential, tls
        self._deadline = deadline
        self._find_credential = find_credential
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retrying: Retrying | None = None
        self._coalescing: Coalescing | None = None
        # A tuple, replaced as a whole: every ack reads it, and a WeakSet would take half of the time of an ack.
        self._prefetchers: tuple[ReferenceType[Prefetcher], ...] = ()
        _CLIENTS.add(self)

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.reopen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def reopen(self) -> None:
        """Allow calls after `close`. The next call connects."""
        self._is_closed = False

    def _begin(self) -> Coalescing:
        """Create the wrappers, for the running event loop."""
        if self._is_closed:
            raise closed()
        if self._loop is not None and not self._loop.is_closed():
            raise BadRequest(
                "this client belongs to another event loop, which is still open; connect once per event loop, or use "
                "heapline.connect_sync from several threads"
            )
        self._loop = asyncio.get_running_loop()
        self._retrying = Retrying(self._endpoints, self._connect, self._deadline)
        idempotent = Idempotent(Traced(self._retrying), self._deadline)
        self._coalescing = Coalescing(idempotent, self._deadline)
        return self._coalescing

    def _connect(self, endpoint: str) -> Transport:
        # A starting server writes its key just before it listens. A server on a new directory has another key.
        self._credential = self._find_credential() or self._credential
        transport = self._transport(endpoint)
        transport.open()
        return transport

    def _transport(self, endpoint: str) -> Transport:
        if not parse_target(endpoint, self._tls).is_http:
            return NativeBroker(endpoint, credential=self._credential, tls=self._tls)
        try:
            from heapline.client.transports.http import HttpBroker
        except ModuleNotFoundError as error:
            if error.name != "httpx":
                raise
            raise BadRequest(
                f"{endpoint} needs httpx; run pip install 'heapline[client-http]', or name the server as host:port"
            ) from None
        return HttpBroker(endpoint, credential=self._credential, tls=self._tls)

    def forget(self) -> Any:
        """Release the parent's connections after a fork, without touching them."""
        left = self._retrying, self._loop, self._coalescing
        self._loop = self._retrying = self._coalescing = None
        return left

    async def close(self) -> None:
        """Release prefetched messages and end the connection. Calls in progress raise Closed."""
        self._is_closed = True
        retrying, coalescing = self._retrying, self._coalescing
        if retrying is None or coalescing is None or self._loop is not asyncio.get_running_loop():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(p.close() for found in self._prefetchers if (p := found()) is not None))
        await coalescing.sent(CLOSE_SECONDS)
        coalescing.end(closed())
        await retrying.close()
        await coalescing.sent(CLOSE_SECONDS)
        self._loop = self._retrying = self._coalescing = None

    async def leases_returned(self) -> None:
        if self._retrying is not None and self._loop is asyncio.get_running_loop():
            await self._retrying.leases.wait()

    async def renew(self, api_key: str) -> None:
        """Replace the key or token before the old one expires. Calls and consumers in progress continue.

        Raises Unauthenticated, and changes nothing, if the server refuses it or it belongs to another caller. Over HTTP
        the next call shows whether it is valid.
        """
        credential = check_key(api_key)
        if self._retrying is not None and self._loop is asyncio.get_running_loop():
            await self._retrying.renew(credential)
        self._credential, self._find_credential = credential, lambda: None

    # -- calls -----------------------------------------------------------------------------------------------------

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        if self._prefetchers and type(command) in SETTLES:
            for found in self._prefetchers:
                if (prefetcher := found()) is not None:
                    prefetcher.settled(command)
        wrapped = self._coalescing
        if wrapped is None or self._loop is not asyncio.get_running_loop():
            wrapped = self._begin()
        return wrapped.do(command, context)

    async def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        """Items of a feed. Begins when it is first iterated over, in the event loop that does so."""
        wrapped = self._coalescing
        if wrapped is None or self._loop is not asyncio.get_running_loop():
            wrapped = self._begin()
        async with contextlib.aclosing(wrapped.stream(feed, context)) as items:  # type: ignore[type-var]
            async for item in items:
                yield item

    def within(self, seconds: float) -> ConnectedBroker:
        """This client with another deadline: `await hl.within(2).enqueue(…)`."""
        check_deadline("seconds", seconds)
        return _Within(self, seconds)

    # -- out -------------------------------------------------------------------------------------------------------

    def consume(
        self, topic: str, *, prefetch: int = PREFETCH, visibility: float | None = None, holder: str | None = None
    ) -> Consumer[Message]:
        """`async for message in hl.consume("jobs"): …`; see heapline.consume."""
        consumer = consume(self, topic, prefetch=prefetch, visibility=visibility, holder=holder)
        self.adopt(consumer)
        return consumer

    def consume_batches(
        self,
        topic: str,
        max_messages: int = BATCH,
        *,
        prefetch: int = PREFETCH,
        visibility: float | None = None,
        holder: str | None = None,
    ) -> Consumer[LeasedBatch]:
        """`async for batch in hl.consume_batches("jobs"): …`; see heapline.consume_batches."""
        consumer = consume_batches(self, topic, max_messages, prefetch=prefetch, visibility=visibility, holder=holder)
        self.adopt(consumer)
        return consumer

    def adopt(self, consumer: Consumer[Any]) -> None:
        """Close a consumer with this client, and report to it the messages that are settled through this client."""
        alive = [found for found in self._prefetchers if found() is not None]
        self._prefetchers = (*alive, ref(consumer.prefetcher))


def check_key(api_key: str) -> str:
    """Return the key without the white space around it, such as the line break at the end of a file."""
    key = api_key.strip() if isinstance(api_key, str) else ""
    if not key or not key.isascii() or not key.isprintable():
        raise BadRequest("api_key must be the text that `heapline keys create` printed, without line breaks")
    return key


class _Within(ConnectedBroker):
    """A client with another deadline. Its calls are not joined with others."""

    def __init__(self, client: ConnectedBroker, seconds: float) -> None:
        self._client, self._seconds = client, seconds
        self.origin = client  # see Producer.line

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    def reopen(self) -> None:
        self._client.reopen()

    def forget(self) -> Any:
        return self._client.forget()

    async def renew(self, api_key: str) -> None:
        await self._client.renew(api_key)

    async def close(self) -> None:
        await self._client.close()

    async def leases_returned(self) -> None:
        await self._client.leases_returned()

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        until = asyncio.get_running_loop().time() + self._seconds
        return self._client.do(command, replace(context, deadline=until))

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        return self._client.stream(feed, context)

    def within(self, seconds: float) -> ConnectedBroker:
        return self._client.within(seconds)

    def consume(self, topic: str, **options: Any) -> Consumer[Message]:
        return self._client.consume(topic, **options)

    def consume_batches(self, topic: str, *size: Any, **options: Any) -> Consumer[LeasedBatch]:
        return self._client.consume_batches(topic, *size, **options)


# -- forks -------------------------------------------------------------------------------------------------------------

_CLIENTS: WeakSet[ConnectedBroker] = WeakSet()
_LEFT_BEHIND: list[Any] = []  # forever: garbage collection would close the parent's TLS sessions


def _in_child() -> None:
    _LEFT_BEHIND.extend(client.forget() for client in list(_CLIENTS))


os.register_at_fork(after_in_child=_in_child)
