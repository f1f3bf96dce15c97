"""Repeat calls over broken connections: with backoff, over several endpoints, until a deadline.

A call whose connection broke may have been executed. `facts.repeat` says whether it can be sent again: calls that carry
an identity (a sequence number, a request id) or set a state can; those of class ONCE are repeated only while it is
certain that no try was sent. RECONCILE corrects what a repeated call reports if an earlier try was executed.

Errors that are not transient are answers. They are raised immediately, marked `repeated` if an earlier try may have
been executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, TypeVar

from msgspec.structs import replace

from heapline.client.backoff import (
    IN_DOUBT,
    UNSENT,
    deadline_exceeded,
    is_transient,
    log,
    not_repeated,
    pauses,
    unreached,
)
from heapline.client.transports.transport import LeaseReturn, Transport, closed
from heapline.contract.call import HERE, Command, Context, Feed, Repeat
from heapline.contract.columns import pick, unpack
from heapline.contract.errors import (
    Closed,
    DeadlineExceeded,
    HeaplineError,
    MessageNotFound,
    TopicReloading,
    UnavailableError,
)
from heapline.contract.groups import GroupNack, Position
from heapline.contract.leases import Bury, Extend, LeaseKeys, Nack, Pop, Release
from heapline.contract.log import ReadLog
from heapline.contract.messages import Cancel, EnqueueBatch, GetMessage
from heapline.contract.replays import Replay
from heapline.owned_tasks import OwnedTasks

R = TypeVar("R")


class _Link:
    """A transport to one endpoint. Abandoned when it fails, and closed when its last call has ended."""

    def __init__(self, endpoint: str, transport: Transport) -> None:
        self.endpoint, self.transport = endpoint, transport
        self.in_flight = 0
        self.is_abandoned = False


class Retrying:
    """`connect` returns an open transport to an endpoint. `deadline` is in seconds, for calls that have none."""

    def __init__(self, endpoints: Sequence[str], connect: Callable[[str], Transport], deadline: float) -> None:
        self._endpoints, self._connect, self._deadline = endpoints, connect, deadline
        self._turn = 0
        self._link: _Link | None = None
        self._links: set[_Link] = set()
        self._closing = OwnedTasks()
        self._is_closed = False
        self._name, self._pops = secrets.token_hex(8), count(1)
        self.leases = LeaseReturn(self.do)

    # -- calls -----------------------------------------------------------------------------------------------------

    async def do(self, command: Command[R], context: Context = HERE, /) -> R:
        if type(command) is Pop and command.request_id is None:
            return await self._pop(command, context)  # type: ignore[no-any-return]
        reconcile = RECONCILE.get(type(command))
        try:
            result, is_repeated = await self._try_until_deadline(command, context)
        except HeaplineError as error:
            if not error.repeated or reconcile is None:
                raise
            result = await reconcile(self, command, context, error)
        else:
            if is_repeated and reconcile is not None:
                result = await reconcile(self, command, context, result)
        return result  # type: ignore[no-any-return]

    async def _pop(self, command: Pop, context: Context) -> Any:
        """Repeat a pop under one request id. If its caller gives up, return what it leased."""
        command = replace(command, request_id=f"{self._name}-{next(self._pops)}")
        try:
            return await self.do(command, context)
        except (asyncio.CancelledError, DeadlineExceeded) as error:
            if getattr(error, "reached", True):
                self.leases.abandon(command)
            raise

    async def _try_until_deadline(self, command: Any, context: Context) -> tuple[Any, bool]:
        """Return the result, and whether an earlier try may have been executed."""
        loop, facts = asyncio.get_running_loop(), type(command).facts
        began, wait = loop.time(), command.wait if facts.waits else 0.0
        until = (began + self._deadline if context.deadline is None else context.deadline) + wait

        def too_late(known: str) -> DeadlineExceeded:
            return deadline_exceeded(facts.rpc, self._nominal(until - began, wait), known)

        if began >= until:
            raise too_late(UNSENT)
        context = replace(context, deadline=until)
        is_repeated = False
        tries: Iterator[float] | None = None
        while True:
            link = self._link or self._open_link()
            link.in_flight += 1
            try:
                return await link.transport.do(command, context), is_repeated
            except DeadlineExceeded as error:
                self._failed(link, error)
                raise too_late(IN_DOUBT) from None
            except HeaplineError as error:
                self._failed(link, error)
                if not is_transient(error):
                    error.repeated = error.repeated or is_repeated
                    raise
                if self._is_closed:  # whatever the connection reported when it was closed
                    raise closed() from None
                is_repeated = is_repeated or getattr(error, "reached", True)
                if is_repeated and facts.repeat is Repeat.ONCE:
                    raise not_repeated(facts.rpc, error) from None
                tries = tries or pauses()
                pause = next(tries)
                if loop.time() + pause >= until:
                    known = f"{IN_DOUBT} (last error: {error})" if is_repeated else unreached(self._endpoints, error)
                    raise too_late(known) from None
            finally:
                link.in_flight -= 1
                if link.is_abandoned:
                    self._close_unused(link)
            await asyncio.sleep(pause)
            if wait:
                command = replace(command, wait=max(0.0, began + wait - loop.time()))

    def _nominal(self, seconds: float, wait: float) -> float:
        """Return the time that a call had, for its error: the client's deadline if little of it had passed before."""
        deadline = self._deadline + wait
        return deadline if seconds <= 0 or 0.8 * deadline < seconds < deadline else seconds

    # -- feeds -----------------------------------------------------------------------------------------------------

    async def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        """Items of a feed. One that can resume continues after its last item when the connection breaks."""
        resume = RESUME.get(type(feed))
        loop, tries = asyncio.get_running_loop(), pauses()
        until = loop.time() + self._deadline
        while True:
            try:
                async with aclosing(self._stream_once(feed, context)) as items:
                    async for item in items:
                        yield item
                        if resume is not None:
                            feed = resume(feed, item)
                            tries, until = pauses(), loop.time() + self._deadline
                return
            except HeaplineError as error:
                pause = next(tries)
                if resume is None or not is_transient(error) or self._is_closed:
                    raise
                if loop.time() + pause >= until:
                    known = f"the connection broke ({error})"
                    raise deadline_exceeded(type(feed).facts.rpc, self._deadline, known) from None
            await asyncio.sleep(pause)

    async def _stream_once(self, feed: Feed[R], context: Context) -> AsyncGenerator[R, None]:
        link = self._link or self._open_link()
        link.in_flight += 1
        try:
            async with aclosing(link.transport.stream(feed, context)) as items:  # type: ignore[type-var]
                async for item in items:
                    yield item
        except HeaplineError as error:
            self._failed(link, error)
            if isinstance(error, Closed) and not self._is_closed:
                raise UnavailableError(str(error)) from None  # the server's broker was closed, not this client
            raise
        finally:
            link.in_flight -= 1
            if link.is_abandoned:
                self._close_unused(link)

    # -- endpoints -------------------------------------------------------------------------------------------------

    def _open_link(self) -> _Link:
        if self._is_closed:
            raise closed()
        endpoint = self._endpoints[self._turn % len(self._endpoints)]
        self._link = link = _Link(endpoint, self._connect(endpoint))
        self._links.add(link)
        return link

    def _close_unused(self, link: _Link) -> None:
        """Close an abandoned link when its last call has ended."""
        if not link.in_flight and link in self._links:
            self._links.discard(link)
            self._closing.spawn(link.transport.close())

    def _failed(self, link: _Link, error: HeaplineError) -> None:
        """After a transient error, send the next call over a new connection to the next endpoint."""
        if self._link is link and is_transient(error) and not isinstance(error, TopicReloading):
            is_only = len(self._endpoints) == 1
            event = "connection failed; reconnecting" if is_only else "connection failed; trying the next endpoint"
            log.info(event, endpoint=link.endpoint, error=str(error))
            link.is_abandoned = True
            self._link = None
            self._turn += 1

    async def renew(self, credential: str) -> None:
        """Renew the credential of the current connections. Connections that are opened later get it from `connect`."""
        for link in list(self._links):
            with contextlib.suppress(UnavailableError):  # broken: the next call opens another one
                await link.transport.renew(credential)

    async def close(self) -> None:
        await self.leases.wait()
        self._is_closed = True
        self._link = None
        links, self._links = self._links, set()
        for link in links:
            await link.transport.close()
        await self._closing.join()


# -- repeated calls ----------------------------------------------------------------------------------------------------

Reconcile = Callable[[Retrying, Any, Context, Any], Awaitable[Any]]


async def _returned(retrying: Retrying, command: Any, context: Context, outcome: Any) -> Any:
    """The first try ended the lease, or it expired. Either way the message is back in the topic: no error."""
    if isinstance(outcome, HeaplineError):
        raise outcome
    return replace(outcome, lost=[])


async def _buried(retrying: Retrying, command: Bury, context: Context, outcome: Any) -> Any:
    """A message whose lease is lost was buried by the first try if it is dead now."""
    if isinstance(outcome, HeaplineError):
        raise outcome
    lost = []
    for id in outcome.lost:
        try:
            state = (await retrying.do(GetMessage(command.topic, id), context)).state
        except MessageNotFound:
            state = None
        if state not in ("dead", "dropped"):
            lost.append(id)
    return replace(outcome, lost=lost)


async def _cancelled(retrying: Retrying, command: Cancel, context: Context, outcome: Any) -> Any:
    """A message that is not found was cancelled by the first try if that is how it ended."""
    if not isinstance(outcome, HeaplineError):
        return outcome
    if not isinstance(outcome, MessageNotFound):
        raise outcome
    info = await retrying.do(GetMessage(command.topic, command.message_id), context)
    if info.state != "cancelled":
        raise outcome
    return None


async def _renewed(retrying: Retrying, command: Pop, context: Context, outcome: Any) -> Any:
    """Leases of the first try are as old as that. Renew them, and leave out those that have expired."""
    if isinstance(outcome, HeaplineError):
        raise outcome
    if outcome.messages is None or command.visibility is None:
        return outcome
    m = outcome.messages
    extended = await retrying.do(Extend(command.topic, LeaseKeys(m.ids, m.tokens), command.visibility), context)
    m = replace(m, deadline_ms=extended.deadline_ms)
    if extended.lost:
        held = [row for row, deadline in enumerate(unpack(extended.deadline_ms)) if deadline >= 0]
        m = pick(m, held) if held else None
    return replace(outcome, messages=m)


async def _marked(retrying: Retrying, command: EnqueueBatch, context: Context, outcome: Any) -> Any:
    """Errors of single rows carry the mark too."""
    if isinstance(outcome, HeaplineError):
        raise outcome
    for row in outcome.errors or ():
        row.error.repeated = True
    return outcome


#: How the outcome of a repeated call is corrected, if an earlier try may have been executed. An ack needs nothing: the
#: server remembers the tokens of acks, and repeats its answer.
RECONCILE: dict[type[Any], Reconcile] = {
    Nack: _returned,
    Release: _returned,
    GroupNack: _returned,
    Bury: _buried,
    Cancel: _cancelled,
    Pop: _renewed,
    EnqueueBatch: _marked,
}


def _after_frame(feed: ReadLog, frame: Any) -> ReadLog:
    return replace(feed, start=frame.offset + frame.row_count)


def _after_step(feed: Replay, step: Any) -> Replay:
    start, end = Position(offsets=step.positions), Position(offsets=step.ends)
    return replace(feed, start=start, end=end, partitions=sorted(step.ends), checkpoint=None)


#: The feed that continues after an item.
RESUME: dict[type[Any], Callable[[Any, Any], Any]] = {ReadLog: _after_frame, Replay: _after_step}
