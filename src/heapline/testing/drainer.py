"""`drain`: process all due messages immediately, as workers would.

The work is a function of a message, or an app whose tasks are run. Each message is leased, handled in the calling task,
and acked. A message that fails is nacked, or handled by its task's rules; by default its error is raised immediately,
so that the test sees it. Delayed and backed-off messages are not due and stay: advance the clock, and drain again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple

from heapline.contract.broker import Broker
from heapline.contract.errors import LeaseLost, TopicNotFound
from heapline.engine.broker import SyncBroker
from heapline.testing.memory import run_in_one_step

LIMIT = 1000  # messages; more in one test usually mean a handler that enqueues its own input
REASON_CHARACTERS = 500
_TOO_MANY = "{} messages were handled and more is due: does a handler enqueue its own input? (limit=…)"

Outcome = Literal["ack", "nack", "bury"]
OnError = Literal["raise", "answer"]


class Done(NamedTuple):
    """One message that was handled."""

    topic: str
    payload: bytes
    outcome: Outcome
    result: Any = None  # the handler's return value
    error: Exception | None = None  # the handler's exception


class _Work:
    """The handler of messages: a function, or the tasks of an app."""

    def __init__(self, work: Any, topics: Sequence[str]) -> None:
        self._app = work if hasattr(work, "find") and hasattr(work, "topics") else None
        if self._app is None and not callable(work):
            raise TypeError(f"drain needs a function of a message, or an app, not {work!r}")
        self._function = work
        self.topics = list(topics) or (list(self._app.topics()) if self._app is not None else [])

    def call(self, message: Any) -> Any:
        """Return the handler's result, or an awaitable of it."""
        if self._app is None:
            return self._function(message)
        task = self._app.find(message)
        if task is None:
            raise LookupError(f"no task of the app matches a message of {message.topic!r}")
        return _through_layers(self._app.layers, task, message)

    def failed(self, message: Any, error: Exception) -> tuple[Done, dict[str, Any]]:
        """Return the outcome of a message that failed, and the arguments for it."""
        outcome: Outcome = "nack"
        answer: dict[str, Any] = {"reason": f"{type(error).__qualname__}: {error}"[:REASON_CHARACTERS]}
        task = self._app.find(message) if self._app is not None else None
        if task is not None:
            decided = task.rules.decide(error, message.attempts, 0.5)
            outcome, answer = "bury" if decided.act == "bury" else "nack", {"reason": decided.reason}
            if outcome == "nack":
                answer["backoff"] = decided.backoff
        return Done(message.topic, message.payload, outcome, None, error), answer


def _through_layers(layers: Sequence[Any], task: Any, message: Any) -> Any:
    """Return a task's result, or an awaitable if it has middleware."""
    arguments = task.codec.decode(message.payload)
    if not layers:
        return task.codec.call(arguments)
    from heapline.client.tasks.task import Call, chain  # type: ignore[import-not-found,unused-ignore]

    async def innermost(call: Any) -> Any:
        result = call.task.codec.call(call.arguments)
        return await result if inspect.isawaitable(result) else result

    return chain(layers, innermost)(Call(task, message, arguments))


async def drain(broker: Broker, work: Any, *topics: str, limit: int = LIMIT, on_error: OnError = "raise") -> list[Done]:
    """Handle due messages until none is left, including those that handlers enqueue; return the handled messages.

    `work` is a function of a message (plain or async) or an app. Without `topics`, all topics of the broker, or of the
    app, are drained. A handler's error is raised after its message was nacked; with `on_error="answer"` it is only
    in the result. At most `limit` messages are handled.

    >>> async def scenario():
    ...     async with memory_broker() as hl:
    ...         await hl.create_topic("jobs")
    ...         await hl.enqueue("jobs", b"2")
    ...         return [done.result for done in await drain(hl, lambda m: int(m.payload) * 2)]
    >>> asyncio.run(scenario())
    [4]
    """
    return await _drain(broker, work, topics, limit, on_error, _awaited)


def drain_sync(
    broker: SyncBroker, work: Any, *topics: str, limit: int = LIMIT, on_error: OnError = "raise"
) -> list[Done]:
    """`drain` for a blocking broker. Handlers are called outside any event loop; async ones get their own loop."""
    return run_in_one_step(_drain(broker, work, topics, limit, on_error, _finished))


async def _drain(
    broker: Any,
    work: Any,
    topics: Sequence[str],
    limit: int,
    on_error: OnError,
    result_of: Callable[[Any], Awaitable[Any]],
) -> list[Done]:
    """Drain a broker of either kind. `result_of` returns what a call on it, or on a handler, results in."""
    handlers, done = _Work(work, topics), list[Done]()
    while True:
        before = len(done)
        for topic in handlers.topics or [info.name for info in await result_of(broker.list_topics())]:
            try:
                leased = await result_of(broker.pop(topic))
            except TopicNotFound:  # an app's topic that nothing was enqueued to yet
                continue
            for message in leased:
                if len(done) >= limit:
                    await result_of(broker.release(message))
                    raise AssertionError(_TOO_MANY.format(limit))
                arguments: dict[str, Any] = {}
                try:
                    end = Done(topic, message.payload, "ack", await result_of(handlers.call(message)))
                except Exception as error:
                    end, arguments = handlers.failed(message, error)
                with contextlib.suppress(LeaseLost):  # the handler has settled the message itself
                    await result_of(getattr(broker, end.outcome)(message, **arguments))
                done.append(end)
                if end.error is not None and on_error == "raise":
                    raise end.error
        if len(done) == before:
            return done


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _finished(result: Any) -> Any:
    """Return a result without waiting: an awaitable runs in an event loop of its own."""
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
