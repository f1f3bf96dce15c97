"""The dispatcher: runs commands for every interface, on the server's own handlers or on the broker.

It knows no command by name. Keys and users are commands that the server handles itself; all others go to the broker.
A call that waits ends when the server stops, when its credential ends, or when its client is gone. Leases that were
granted for an answer that its caller does not receive are returned, unless the command has a `request_id`: then the
caller that repeats it may already have the same leases.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from typing import Any

import msgspec

from heapline.contract.broker import Broker
from heapline.contract.call import BY_RPC, Access, Command, Count, Feed, Page
from heapline.contract.errors import HeaplineError, ReplayNotFound
from heapline.contract.leases import LeaseKeys, Release
from heapline.contract.stream import ReplayInfo
from heapline.contract.topics import GetTopic
from heapline.owned_tasks import OwnedTasks
from heapline.server.gate import Gate, Request, Stopping
from heapline.server.limits import bounds_of
from heapline.wire.compressed_topics import CompressedTopics

Handler = Callable[[Any, Request], Awaitable[Any]]
SEARCHED_ROWS = 1000  # of one page while no row is visible; every list accepts this limit
#: The error for a single result that the caller may not see: the same as if it did not exist.
HIDDEN: dict[type, Callable[[Any], HeaplineError]] = {ReplayInfo: lambda replay: ReplayNotFound(replay.name)}


class WaitingCall:
    """A call that waits on the broker's own future, without a task."""

    __slots__ = ("_answer", "request")

    def __init__(self, request: Request, answer: asyncio.Future[Any]) -> None:
        self.request, self._answer = request, answer

    def end(self, error: HeaplineError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error.with_traceback(None))


class Dispatcher:
    def __init__(self, broker: Broker, own: Mapping[type[Command[Any]], Handler], gate: Gate) -> None:
        self.broker, self.gate = broker, gate
        self._own = own
        self._waiting: set[asyncio.Future[Any] | WaitingCall] = set()  # with a task, and without
        self._returns = OwnedTasks()  # they outlive their requests
        self.compressed = CompressedTopics(lambda topic: broker.do(GetTopic(topic)))

    async def run(self, command: Command[Any], request: Request, confirmation: str | None = None) -> Any:
        """Admit a command, run it and return its result."""
        if _takes_steps(type(command)):
            return await self._run_in_steps(command, request, confirmation)
        self.gate.admit(request, command)
        answer = self._do(command, request)
        return await (self._wait(command, request, answer) if request.waits else answer)

    def start(self, command: Command[Any], request: Request, confirmation: str | None = None) -> Awaitable[Any]:
        """Admit a command and start it. Return its result as an awaitable: the broker's own future where it can.

        If the command waits, the caller must check the request's credential again when it has the result.
        """
        if _takes_steps(type(command)):
            return self._run_in_steps(command, request, confirmation)
        self.gate.admit(request, command)
        answer = self._do(command, request)
        if not request.waits:
            return answer
        if not asyncio.isfuture(answer):
            return self._wait(command, request, answer)
        waiting = WaitingCall(request, answer)
        self._waiting.add(waiting)
        self.gate.credentials.add(waiting)
        answer.add_done_callback(partial(self._waited, waiting))
        return answer

    def _waited(self, waiting: WaitingCall, answer: asyncio.Future[Any]) -> None:
        self._waiting.discard(waiting)
        self.gate.credentials.discard(waiting)

    async def _run_in_steps(self, command: Command[Any], request: Request, confirmation: str | None) -> Any:
        facts = type(command).facts
        self.gate.admit(request, command, await self._look_up(command, request) if facts.lookup else None)
        if facts.destroys:
            await self._confirm(command, request, confirmation)
        answer = self._execute(command, request)
        result = await (self._wait(command, request, answer) if request.waits else answer)
        if facts.audit is not None and isinstance(result, Count):
            request.count = result.count
        return result

    async def paced_step(self, command: Command[Any], request: Request) -> Any:
        """Run one more command of a stream, at its caller's rate."""
        await self.gate.pace(request, command)
        return await self.step(command, request)

    async def step(self, command: Command[Any], request: Request) -> Any:
        """Run one more command of a request that was admitted before, such as one of a stream."""
        self.gate.check(request, command)
        return await self._execute(command, request)

    async def feed(self, feed: Feed[Any], request: Request, send: Callable[[Any], Awaitable[None]]) -> None:
        """Admit a feed and send its items, until it ends, the server stops or the credential ends."""
        self.gate.admit(request, feed)
        with self.gate.credentials.hold(request):
            items = self.broker.stream(feed, request.context())
            async with contextlib.aclosing(items):  # type: ignore[type-var]
                async for item in items:
                    if self.gate.stopping.is_set():
                        raise Stopping
                    await send(item)

    def stop_waiting(self) -> None:
        """End the calls that only wait, because the server stops."""
        for waiting in list(self._waiting):
            if isinstance(waiting, WaitingCall):
                waiting.end(Stopping())
            else:
                waiting.cancel()

    # -- how a command runs ----------------------------------------------------------------------------------------

    def _execute(self, command: Command[Any], request: Request) -> Awaitable[Any]:
        rows = type(command).facts.rows
        if rows is not None and not request.caller.may(rows.right, None):
            return self._visible(command, request)
        return self._do(command, request)

    def _do(self, command: Command[Any], request: Request) -> Awaitable[Any]:
        for name, limit in bounds_of(type(command)):
            if getattr(command, name) > limit:
                command = msgspec.structs.replace(command, **{name: limit})
        handler = self._own.get(type(command))
        if handler is not None:
            return handler(command, request)
        return self.broker.do(command, request.context())

    async def _wait(self, command: Command[Any], request: Request, answer: Awaitable[Any]) -> Any:
        task: asyncio.Future[Any] = asyncio.ensure_future(answer)
        self._waiting.add(task)
        try:
            with self.gate.credentials.hold(request):
                return await task
        except BaseException as error:
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                self.return_leases(command, task.result(), request)  # granted, but the caller is gone
            elif isinstance(error, asyncio.CancelledError) and not _is_cancelled():
                raise Stopping from None  # it was stop_waiting that cancelled the task
            raise
        finally:
            self._waiting.discard(task)

    async def _look_up(self, command: Any, request: Request) -> Any:
        """Return the answer of the call that says what this one is about. The caller must be able to see it."""
        kind = BY_RPC[type(command).facts.lookup]
        asked: Any = kind(**{name: getattr(command, name) for name in kind.__struct_fields__})
        access = kind.facts.rows
        found = await self._do(asked, request)
        if access is not None and not _may_see(request, found, access):
            raise HIDDEN[type(found)](found)
        return found

    async def _visible(self, command: Any, request: Request) -> Any:
        """Run a command whose answer has rows that the caller may not see, and leave those out.

        While all rows of a page are hidden, the next page is twice as large: a broker may look at all its rows to
        return one page.
        """
        facts = type(command).facts
        access, rpc, wanted = facts.rows, facts.rpc, getattr(command, "limit", 0)
        if getattr(command, "cursor", None):
            command = msgspec.structs.replace(command, cursor=self.gate.unseal(command.cursor, request, rpc))
        while True:
            result = await self._do(command, request)
            if not isinstance(result, Page):
                if not _may_see(request, result, access):
                    raise HIDDEN[type(result)](result)
                return result
            items = [row for row in result.items if _may_see(request, row, access)]
            is_page = len(items) <= wanted or command.limit <= wanted
            if is_page and (items or result.cursor is None):
                return Page(items, None if result.cursor is None else self.gate.seal(result.cursor, request, rpc))
            await asyncio.sleep(0)  # let other requests run
            if items:  # more than were asked for: the page was too large
                command = msgspec.structs.replace(command, limit=max(wanted, command.limit // 2))
            else:
                limit = max(command.limit, min(2 * command.limit, SEARCHED_ROWS))
                command = msgspec.structs.replace(command, cursor=result.cursor, limit=limit)

    async def _confirm(self, command: Any, request: Request, token: str | None) -> None:
        if not token and hasattr(command, "topic"):
            await self.broker.do(GetTopic(command.topic), request.context())  # nothing to confirm if it does not exist
        self.gate.confirm(request, command, token)

    # -- leases that no caller receives ------------------------------------------------------------------------------

    def return_leases(self, command: Command[Any], result: Any, request: Request) -> None:
        """Return the leases that a result grants, because its caller will not receive it."""
        messages = getattr(result, "messages", None)
        if not type(command).facts.leases or messages is None or getattr(command, "request_id", None) is not None:
            return
        release = Release(result.topic, LeaseKeys(messages.ids, messages.tokens))
        try:
            answer = self.broker.do(release, request.context())
        except HeaplineError:  # the topic was deleted, and its leases with it
            return
        self._returns.spawn(_finish(answer))


@cache
def _takes_steps(kind: type[Command[Any]]) -> bool:
    """Return whether more is done for a command than to check its rights and limits and pass it on."""
    facts = kind.facts
    return facts.lookup is not None or facts.rows is not None or facts.destroys or facts.audit is not None


async def _finish(answer: Awaitable[Any]) -> None:
    await answer


def _may_see(request: Request, row: Any, access: Access) -> bool:
    return request.caller.may(access.right, getattr(row, access.on))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())
