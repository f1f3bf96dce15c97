"""The app: its tasks, their middleware and hooks, and the broker that they use.

Creating an app or declaring a task does not connect, so both can be at the top of any module. Within a topic, messages
are run by priority; an app's topics take turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, overload

from heapline.client.tasks import tracing
from heapline.client.tasks.broker_binding import Home
from heapline.client.tasks.outcomes import Delay, Rules
from heapline.client.tasks.task import TASK, Hook, Middleware, Task
from heapline.client.tasks.worker import Worker
from heapline.contract.broker import Broker
from heapline.contract.config import canonical_topic
from heapline.contract.errors import PermissionDenied, TopicExists, TopicNotFound
from heapline.contract.message import Enqueued, Message, Outgoing, TopicInfo

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

TIMEOUT = 30 * 60.0  # seconds a handler may take, unless its task has a timeout
TOPIC = "tasks"


class App:
    """`app = heapline.App()`, then `@app.task(topic=…)`.

    `target` is a server (`"localhost:7400"`, `"heapline+tls://queue:7400"`), a directory (`"./data"`, any Path) that
    this process alone has open, a broker (in tests), or None for the server and key that the environment names
    (HEAPLINE_URL, HEAPLINE_API_KEY_FILE). Topics that do not exist are created, with the settings given in `topics`.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Broker | None = None,
        *,
        api_key: str | None = None,
        create_topics: bool = True,
        topics: Mapping[str, Mapping[str, Any]] | None = None,
        unknown: Literal["retry", "bury"] = "retry",
    ) -> None:
        if unknown not in ("retry", "bury"):
            raise ValueError(f'unknown must be "retry" or "bury", got {unknown!r}')
        self.home = Home(target, api_key)
        self.tasks: dict[str, Task[..., Any]] = {}
        self.unknown = unknown  # what to do with a message that belongs to no task of this app
        self.layers: list[Middleware] = []
        self._hooks: list[Hook] = []
        self._create_topics = create_topics
        self._topics = {name: dict(config) for name, config in (topics or {}).items()}

    # -- tasks -----------------------------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[P, R]) -> Task[P, R]: ...
    @overload
    def task(
        self,
        *,
        topic: str = TOPIC,
        name: str | None = None,
        timeout: float = TIMEOUT,
        retry_on: Mapping[type[BaseException], Delay] | Iterable[type[BaseException]] = (),
        bury_on: Iterable[type[BaseException]] | type[BaseException] = (),
        max_retries: int | None = None,
        priority: int = 0,
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        *,
        topic: str = TOPIC,
        name: str | None = None,
        timeout: float = TIMEOUT,
        retry_on: Mapping[type[BaseException], Delay] | Iterable[type[BaseException]] = (),
        bury_on: Iterable[type[BaseException]] | type[BaseException] = (),
        max_retries: int | None = None,
        priority: int = 0,
    ) -> Any:
        """Declare a function as a task. It can still be called directly. Its name defaults to the function's."""
        rules = Rules(retry_on, bury_on)

        def declare(function: Callable[..., Any]) -> Task[..., Any]:
            return self._add(
                Task(
                    self,
                    function,
                    name=name or function.__name__,
                    topic=topic,
                    timeout=timeout,
                    rules=rules,
                    max_retries=max_retries,
                    priority=priority,
                )
            )

        return declare if function is None else declare(function)

    def _add(self, task: Task[..., Any]) -> Task[..., Any]:
        there = self.tasks.get(task.name)
        if there is not None and _place(there) != _place(task):  # not a cell or module that runs again
            raise ValueError(
                f"task {task.name!r} already exists ({_place(there)}); give this one a name, @app.task(name=…)"
            )
        self.tasks[task.name] = task
        return task

    def find(self, message: Message) -> Task[..., Any] | None:
        """Return the task of a message. One that names no task belongs to the only task of its topic."""
        name = message.headers.get(TASK)
        if name is not None:
            return self.tasks.get(name)
        topic = canonical_topic(message.topic)
        of_topic = [task for task in self.tasks.values() if canonical_topic(task.topic) == topic]
        return of_topic[0] if len(of_topic) == 1 else None

    def topics(self) -> list[str]:
        return list(dict.fromkeys(task.topic for task in self.tasks.values()))

    # -- middleware -----------------------------------------------------------------------------------------------

    def middleware(self, layer: Middleware) -> Middleware:
        """`@app.middleware async def around(call, next): … return await next(call)`; the first one is outermost."""
        self.layers.append(layer)
        return layer

    def on_enqueue(self, hook: Hook) -> Hook:
        """`@app.on_enqueue def stamp(sending): sending.headers["tenant"] = …`"""
        self._hooks.append(hook)
        return hook

    def hooks(self) -> list[Hook]:
        return [*self._hooks, tracing.inject] if tracing.is_on() else self._hooks

    # -- the broker ------------------------------------------------------------------------------------------------

    async def broker(self) -> Broker:
        """Return the broker of the running event loop. Connects on first use."""
        return await self.home.broker()

    @contextmanager
    def using(self, target: str | os.PathLike[str] | Broker) -> Iterator[App]:
        """Use another broker in a block: `with app.using(heapline_broker): …` in a test of code that enqueues."""
        before, self.home = self.home, Home(target)
        try:
            yield self
        finally:
            self.home = before

    async def send(self, topic: str, fields: dict[str, Any]) -> Enqueued:
        broker = await self.home.broker()
        try:
            return await broker.enqueue(topic, **fields)
        except TopicNotFound:
            await self.make_or_raise(broker, topic)
        return await broker.enqueue(topic, **fields)

    async def send_batch(self, topic: str, messages: list[Outgoing]) -> list[Enqueued]:
        broker = await self.home.broker()
        try:
            return await broker.enqueue_batch(topic, messages)
        except TopicNotFound:
            await self.make_or_raise(broker, topic)
        return await broker.enqueue_batch(topic, messages)

    async def make_or_raise(self, broker: Broker, topic: str) -> None:
        """Create a missing topic, or raise TopicNotFound if this app must not create any."""
        if not self._create_topics:
            raise TopicNotFound(topic)
        await self.make_topic(broker, topic)

    async def make_topic(self, broker: Broker, topic: str) -> None:
        """Create a topic of this app. A topic that exists keeps its settings."""
        with suppress(TopicExists):
            await broker.create_topic(topic, **self._topics.get(topic, {}))

    async def make_topics(self, broker: Broker, topics: list[str]) -> list[TopicInfo]:
        """Create the topics that do not exist, and return those that did."""
        listed = await broker.list_topics()
        there = {canonical_topic(info.name) for info in listed}
        for topic in topics:
            if canonical_topic(topic) not in there:
                with suppress(
                    PermissionDenied
                ):  # it may exist but not be listed for this caller; the first pop shows it
                    await self.make_or_raise(broker, topic)
        return listed

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]], what: str) -> T:
        return self.home.run_sync(make, what)

    def worker(self, **settings: Any) -> Worker:
        """`await app.worker(concurrency=16).run()`: see Worker for the settings."""
        return Worker(self, **settings)

    async def __aenter__(self) -> App:
        """Connect now, in this event loop, and close at the end."""
        await self.home.open_here()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.home.close()


def _place(task: Task[..., Any]) -> str:
    return f"{task.function.__module__}.{task.function.__qualname__}"
