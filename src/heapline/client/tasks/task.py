"""A task: a function that can be called directly, or enqueued to be called by a worker.

Builds the messages of a task: payload (arguments.py), headers and options. The app knows the broker. Middleware goes
around runs and hooks around enqueues; the objects that they receive are here too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from heapline.client.tasks.arguments import Arguments
from heapline.client.tasks.outcomes import Rules
from heapline.contract.config import parse_topic
from heapline.contract.message import Enqueued, IdempotencyScope, Message, Outgoing
from heapline.contract.payload_codec import CONTENT_TYPE, JSON

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

TASK = "heapline-task"  # the header that names the task
OPTIONS = frozenset(Outgoing.__struct_fields__) - {"payload", "headers", "seq"}


class Sender(Protocol):
    """Sends the messages of tasks to a broker. An `App` is one."""

    def hooks(self) -> list[Hook]: ...
    async def send(self, topic: str, fields: dict[str, Any]) -> Enqueued: ...
    async def send_batch(self, topic: str, messages: list[Outgoing]) -> list[Enqueued]: ...
    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]], what: str) -> T: ...


class Item:
    """One call of a task with its own options, for `enqueue_many` and the outbox. Created by `Task.item`."""

    __slots__ = ("arguments", "options", "task")

    def __init__(self, task: Task[..., Any], arguments: dict[str, Any], options: dict[str, Any]) -> None:
        self.task = task
        self.arguments = arguments
        self.options = options

    def fields(self, shared: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the fields of its message: payload, headers and options."""
        return self.task._fields(self, shared)


class TypedCall(Protocol[P, T_co]):
    """The type of `task.enqueue` and its like: accepts the arguments `P`, or any arguments with at least one option.

    A type checker cannot add keyword options to a ParamSpec. So a call without options is checked against the function,
    and a call with an option only for the type of that option. At runtime the methods are plain functions.
    """

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(self, *args: Any, priority: int | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, delay: float | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, deliver_at: datetime | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, key: str | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, idempotency_key: str | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, idempotency_scope: IdempotencyScope | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, ttl: float | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, max_retries: int | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, fairness_key: str | None, **more: Any) -> T_co: ...


class _TypedMethod(Generic[T]):
    """The decorated method, as type checkers see it."""

    def __get__(self, task: Callable[P, Any], owner: object = None) -> TypedCall[P, T]:
        raise NotImplementedError


def takes_arguments(method: Callable[..., T]) -> _TypedMethod[T]:
    """Declare that a method of a task takes the arguments of its function. Returns the method itself."""
    return cast("_TypedMethod[T]", method)


class Task(Generic[P, R]):
    def __init__(
        self,
        app: Sender,
        function: Callable[P, R],
        *,
        name: str,
        topic: str,
        timeout: float,
        rules: Rules,
        max_retries: int | None,
        priority: int,
    ) -> None:
        parse_topic(topic)
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"timeout of task {name!r} must be a number of seconds over 0, got {timeout!r}")
        functools.update_wrapper(self, function)
        self.app = app
        self.function = function
        self.name = name
        self.topic = topic
        self.timeout = timeout
        self.rules = rules
        self.is_async = inspect.iscoroutinefunction(function)
        self.codec = Arguments(name, function, OPTIONS)
        self._defaults: dict[str, Any] = {"priority": priority, "max_retries": max_retries}
        self._headers = {CONTENT_TYPE: JSON, TASK: name}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly: in tests, and in code that needs the result."""
        return self.function(*args, **kwargs)

    @takes_arguments
    async def enqueue(
        self,
        *args: Any,
        priority: int | None = None,
        delay: float | None = None,
        deliver_at: datetime | None = None,
        key: str | None = None,
        idempotency_key: str | None = None,
        idempotency_scope: IdempotencyScope | None = None,
        ttl: float | None = None,
        max_retries: int | None = None,
        fairness_key: str | None = None,
        **kwargs: Any,
    ) -> Enqueued:
        """Enqueue a call. Returns when it is durable. Keywords that are not options are arguments of the function."""
        options = _given(
            priority=priority,
            delay=delay,
            deliver_at=deliver_at,
            key=key,
            idempotency_key=idempotency_key,
            idempotency_scope=idempotency_scope,
            ttl=ttl,
            max_retries=max_retries,
            fairness_key=fairness_key,
        )
        fields = self._fields(Item(self, self.codec.bind(args, kwargs), options))
        return await self.app.send(self.topic, fields)

    @takes_arguments
    def enqueue_sync(self, *args: Any, **options_and_kwargs: Any) -> Enqueued:
        """`enqueue` for code without an event loop. Blocks until the message is durable."""
        return self.app.run_sync(lambda: self.enqueue(*args, **options_and_kwargs), f"{self.name}.enqueue")

    @takes_arguments
    def item(self, *args: Any, **options_and_kwargs: Any) -> Item:
        """Return one call for `enqueue_many` or the outbox, with the arguments and options of `enqueue`."""
        options = {k: v for k, v in options_and_kwargs.items() if k in OPTIONS}
        kwargs = {k: v for k, v in options_and_kwargs.items() if k not in OPTIONS}
        return Item(self, self.codec.bind(args, kwargs), options)

    async def enqueue_many(self, calls: Iterable[Any], **options: Any) -> list[Enqueued]:
        """Enqueue many calls as one batch, all or none. Each is the function's only argument, or `task.item(…)`.

        `options` apply to all of them; an item's own options take precedence.
        """
        for name in options:
            if name not in OPTIONS:
                raise TypeError(f"enqueue_many has no option {name!r}; it has {', '.join(sorted(OPTIONS))}")
        items = [c if isinstance(c, Item) else Item(self, self.codec.bind((c,), {}), {}) for c in calls]
        if not items:
            return []
        messages = [Outgoing(**self._fields(item, options)) for item in items]
        return await self.app.send_batch(self.topic, messages)

    def enqueue_many_sync(self, calls: Iterable[Any], **options: Any) -> list[Enqueued]:
        return self.app.run_sync(lambda: self.enqueue_many(calls, **options), f"{self.name}.enqueue_many")

    def _fields(self, item: Item, shared: dict[str, Any] | None = None) -> dict[str, Any]:
        options = {**self._defaults, **(shared or {}), **item.options}
        headers = self._headers
        if hooks := self.app.hooks():
            sending = Sending(self, item.arguments, dict(headers), options)
            for hook in hooks:
                hook(sending)
            headers = sending.headers
        return {"payload": self.codec.encode(item.arguments), "headers": headers, **options}

    def __repr__(self) -> str:
        return f"<Task {self.name!r} on topic {self.topic!r}>"


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


# -- middleware and hooks ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """One run of a task, as middleware sees it."""

    task: Task[..., Any]
    message: Message
    arguments: dict[str, Any]  # by parameter; middleware may change them

    @property
    def attempt(self) -> int:
        return self.message.attempts


@dataclass(slots=True)
class Sending:
    """One message that is about to be enqueued, as `on_enqueue` hooks see it. They may change headers and options."""

    task: Task[..., Any]
    arguments: dict[str, Any]
    headers: dict[str, str]
    options: dict[str, Any]


Next = Callable[[Call], Awaitable[Any]]
Middleware = Callable[[Call, Next], Awaitable[Any]]
Hook = Callable[[Sending], None]


def chain(layers: Sequence[Middleware], innermost: Next) -> Next:
    """Join the layers. The first one is the outermost."""
    following = innermost
    for layer in reversed(layers):
        following = _wrapped(layer, following)
    return following


def _wrapped(layer: Middleware, following: Next) -> Next:
    def run(call: Call) -> Awaitable[Any]:
        return layer(call, following)

    return run
