"""The client that `heapline.connect` returns: a gRPC transport under wrappers that make it fast and safe to repeat.

A call goes through, in this order: this facade, Coalescing (joins single calls), Idempotent (numbers enqueues), Traced
(spans), Retrying (repeats over broken connections until a deadline), and a transport.

A client connects when it is first used, and belongs to the event loop that first used it. gRPC does not survive a
fork, and a child that touches its parent's connections crashes. If no client was used before the fork, clients work in
the child. Otherwise each of them raises an error there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

from msgspec.structs import replace

from heapline.client.backoff import DEADLINE, check_deadline
from heapline.client.consumer import PREFETCH, Consumer, Prefetcher, consume
from heapline.client.pushed_member import PushedMember
from heapline.client.target import ClientTls, parse_target
from heapline.client.transports.grpc import GrpcBroker
from heapline.client.transports.transport import PopStream, closed
from heapline.client.wrappers.coalescing import Coalescing
from heapline.client.wrappers.idempotent import Idempotent
from heapline.client.wrappers.retrying import Retrying
from heapline.client.wrappers.traced import Traced
from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.errors import BadRequest
from heapline.contract.leases import Ack, Bury, Nack, Pop, Release, messages_of
from heapline.contract.message import Message

R = TypeVar("R")
CLOSE_SECONDS = 5.0  # for prefetched messages to be returned
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
      group_dead_delete and forget_sink are not repeated, because a repeat would also affect what was added since. They
      raise UnavailableError, which says that the call may have been executed.
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
        self._prefetchers: WeakSet[Prefetcher] = WeakSet()
        self._members: WeakSet[PushedMember] = WeakSet()
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
        _check_process()
        self._loop = asyncio.get_running_loop()
        self._retrying = Retrying(self._endpoints, self._connect, self._deadline)
        idempotent = Idempotent(Traced(self._retrying), self._deadline)
        self._coalescing = Coalescing(idempotent, self._retrying.background.spawn, self._deadline)
        return self._coalescing

    def _connect(self, endpoint: str) -> GrpcBroker:
        # A starting server writes its key just before it listens. A server on a new directory has another key.
        self._credential = self._find_credential() or self._credential
        transport = GrpcBroker(endpoint, credential=self._credential, tls=self._tls, session=True)
        transport.open()
        return transport

    def forget(self) -> Any:
        """Release the parent's connections after a fork, without touching them."""
        left = self._retrying, self._loop, self._coalescing
        self._loop = self._retrying = self._coalescing = None
        return left

    async def close(self) -> None:
        """Release prefetched messages, leave groups, and end the connection. Calls in progress raise Closed."""
        self._is_closed = True
        retrying, coalescing = self._retrying, self._coalescing
        if retrying is None or coalescing is None or self._loop is not asyncio.get_running_loop():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(p.close() for p in self._prefetchers), *(m.end() for m in self._members))
        await retrying.background.close()
        coalescing.end(closed())
        await retrying.close()
        await retrying.background.close()
        self._loop = self._retrying = self._coalescing = None

    # -- calls -----------------------------------------------------------------------------------------------------

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        if self._prefetchers and type(command) in SETTLES:
            for prefetcher in self._prefetchers:
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

    def adopt(self, consumer: Consumer[Any]) -> None:
        """Close a consumer with this client, and report to it the messages that are settled through this client."""
        self._prefetchers.add(consumer.prefetcher)

    async def pop_stream(
        self, topic: str, credits: AsyncIterator[int], *, visibility: float | None = None, holder: str | None = None
    ) -> AsyncIterator[list[Message]]:
        """Messages as they become ready, one per credit. Ends when the credits end."""
        stream: Any = PopStream(Pop(topic, visibility=visibility, holder=holder), credits)
        async with contextlib.aclosing(self.stream(stream)) as answers:  # type: ignore[type-var]
            async for leased in answers:
                yield messages_of(self, leased)

    def _member(self) -> PushedMember:
        member = PushedMember(self)
        self._members.add(member)
        return member


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

    async def close(self) -> None:
        await self._client.close()

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        until = asyncio.get_running_loop().time() + self._seconds
        return self._client.do(command, replace(context, deadline=until))

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        return self._client.stream(feed, context)

    def within(self, seconds: float) -> ConnectedBroker:
        return self._client.within(seconds)

    def consume(self, topic: str, **options: Any) -> Consumer[Message]:
        return self._client.consume(topic, **options)

    def _member(self) -> PushedMember:
        return self._client._member()


# -- forks -------------------------------------------------------------------------------------------------------------

_CLIENTS: WeakSet[ConnectedBroker] = WeakSet()
_LEFT_BEHIND: list[Any] = []  # forever: even garbage collection would call gRPC
_USED_BY: list[int] = []  # the process that has used gRPC


def _check_process() -> None:
    """Raise BadRequest if gRPC was used before this process was forked. Call it before gRPC is used."""
    if not _USED_BY:
        _USED_BY.append(os.getpid())
    elif _USED_BY[0] != os.getpid():
        raise BadRequest(
            "this process was forked from one that had already used a Heapline client, and gRPC does not survive "
            "that; use clients only after the fork (connect() alone does not connect), or start processes with "
            "'spawn'"
        )


def _in_child() -> None:
    _LEFT_BEHIND.extend(client.forget() for client in list(_CLIENTS))


os.register_at_fork(after_in_child=_in_child)
