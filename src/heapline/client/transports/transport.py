"""The base of transports: a broker that answers each command with one request over a connection.

A transport repeats nothing and joins nothing; the wrappers do that. Three commands take more than one request: a call
that destroys is repeated with the confirmation token of its refusal, because a program that calls `purge` has decided
already; a batch over 16 MB that is not atomic is sent in pieces; and a pop that is cancelled returns its leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from heapline.client import message_rows
from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Command, Context
from heapline.contract.columns import part
from heapline.contract.errors import Closed, ConfirmationNeeded, DeadlineExceeded, HeaplineError
from heapline.contract.leases import LeaseKeys, Pop, Release
from heapline.contract.messages import EnqueueBatch, EnqueuedBatch
from heapline.owned_tasks import OwnedTasks

R = TypeVar("R")
NO_KEY = (
    "the server requires an API key; pass api_key=… to heapline.connect, or name a file with the key in "
    "HEAPLINE_API_KEY_FILE and use heapline.connect_from_env. The first admin key is in admin.key in the server's data "
    "directory; on this machine it is found if HEAPLINE_DATA names that directory"
)
RETURN_SECONDS = 5.0  # that is waited for leases to be returned, when a consumer or the broker closes
BATCH_BYTES = 16 << 20  # of payloads in one request; larger batches that need not be atomic are sent in pieces


class LeaseReturn:
    """Returns the leases of a pop whose caller is gone, so that its messages do not wait until their deadline."""

    def __init__(self, do: Callable[[Any], Awaitable[Any]]) -> None:
        self._do, self._tasks = do, OwnedTasks()

    def abandon(self, pop: Pop) -> None:
        """Return what this pop, which has a request id, has leased or still leases."""
        self._tasks.spawn(self._release(pop))

    async def _release(self, pop: Pop) -> None:
        """Repeat the pop to learn what it leased: a repeat under the same request id returns the same leases."""
        with contextlib.suppress(HeaplineError):
            leased = await self._do(replace(pop, max_messages=1, wait=0.0, visibility=None))
            if (m := leased.messages) is not None:
                await self._do(Release(pop.topic, LeaseKeys(m.ids, m.tokens)))

    async def wait(self) -> None:
        """Wait for those that are being returned, for some seconds at most."""
        await self._tasks.join(RETURN_SECONDS)


class Transport(Broker):
    """Use it with `async with`."""

    def __init__(self) -> None:
        self._name, self._pops = secrets.token_hex(8), count(1)
        self._leases = LeaseReturn(self.do)

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def open(self) -> None:
        """Be ready for calls. Connects when the first call is made."""
        raise NotImplementedError

    async def leases_returned(self) -> None:
        await self._leases.wait()

    async def renew(self, credential: str) -> None:
        """Use another credential of the same caller from now on, on open connections too."""
        raise NotImplementedError

    async def _request(self, command: Command[R], context: Context) -> R:
        """Make one request."""
        raise NotImplementedError

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        kind: Any = type(command)
        if kind is EnqueueBatch and not command.atomic:  # type: ignore[attr-defined]
            payloads = command.messages.payloads  # type: ignore[attr-defined]
            if len(payloads) > 1 and sum(map(len, payloads)) > BATCH_BYTES:
                return self._enqueue_parts(command, context)  # type: ignore[arg-type,return-value]
        if kind is Pop and command.request_id is None:  # type: ignore[attr-defined]
            return self._pop(command, context)  # type: ignore[arg-type]
        if kind.facts.destroys:
            return self._confirm(command, context)
        return self._request(command, context)

    async def _confirm(self, command: Command[R], context: Context) -> R:
        try:
            return await self._request(command, context)
        except ConfirmationNeeded as needed:
            if context.confirmation is not None:
                raise
            context = replace(context, confirmation=needed.token)
        return await self._request(command, context)

    async def _enqueue_parts(self, command: EnqueueBatch, context: Context) -> EnqueuedBatch:
        """Enqueue a batch in two halves, which may be cut again."""
        messages, results = command.messages, []
        half = len(messages) // 2
        for start, end in ((0, half), (half, len(messages))):
            first_seq = None if command.first_seq is None else command.first_seq + start
            piece = replace(command, messages=part(messages, start, end), first_seq=first_seq)
            results.append(await self.do(piece, context))
        return message_rows.join_results(results)

    async def _pop(self, command: Pop, context: Context) -> Any:
        """Give the pop a request id, so that its leases can be found if its caller gives up."""
        command = replace(command, request_id=f"{self._name}-{next(self._pops)}")
        try:
            return await self._request(command, context)
        except (asyncio.CancelledError, DeadlineExceeded):
            self._leases.abandon(command)
            raise


def closed(what: str = "client") -> Closed:
    """The error of a call on a client, or a part of one, that is closed."""
    error = Closed()
    advice = "; use it inside `with` or `async with`, or connect again" if what == "client" else ""
    error.args = (f"this {what} is closed{advice}",)
    return error


def seconds_left(context: Context, default: float | None) -> float | None:
    """Seconds until a context's deadline."""
    if context.deadline is None:
        return default
    return max(0.0, context.deadline - asyncio.get_running_loop().time())
