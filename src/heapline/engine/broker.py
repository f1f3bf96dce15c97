"""The embedded broker: the engine on a directory, in this process. `SyncBroker` is for code that does not await.

It executes commands by the table in handlers.py, which the modules imported here fill. Decisions are made in `core/`;
`runner.py` determines when to answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from types import TracebackType
from typing import ClassVar, Self, TypeVar, Unpack

import msgspec

import heapline
from heapline.clock import Clock
from heapline.contract.admin import Describe, Description
from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.config import BrokerConfig
from heapline.contract.errors import Unsupported
from heapline.contract.sync_broker import SyncBroker as _SyncBroker
from heapline.engine import dead_letters, explanation, held_leases, history, leases, log, messages, search, topic_calls
from heapline.engine.batches import handlers as batches
from heapline.engine.groups import handlers as groups
from heapline.engine.handlers import FEEDS, HANDLERS, handles
from heapline.engine.metrics_source import Measures, measure
from heapline.engine.replays import handlers as replays
from heapline.engine.schedules import handlers as schedules
from heapline.engine.topics import KeeperOptions, TopicKeeper

R = TypeVar("R")
HANDLER_MODULES = (
    batches,
    dead_letters,
    explanation,
    groups,
    held_leases,
    history,
    leases,
    log,
    messages,
    replays,
    schedules,
    search,
    topic_calls,
)


class EmbeddedBroker(Broker):
    """The broker returned by `heapline.open`; use it as an async context manager."""

    topics: TopicKeeper

    features: ClassVar[frozenset[str]] = frozenset((
        "queue", "partitions", "events", "log", "groups", "replay", "schedules", "batches", "fairness", "explain",
        "leases", "series", "history", "search", "due_times", "dlq_groups",
        "purge_count",
    ))  # fmt: skip

    def __init__(self, path: str, **options: Unpack[KeeperOptions]) -> None:
        self.topics = TopicKeeper(path, **options)

    @property
    def path(self) -> str:
        """The data directory."""
        return self.topics.path

    @property
    def clock(self) -> Clock:
        return self.topics.clock

    async def __aenter__(self) -> Self:
        await self.topics.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.topics.close()

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        handler = HANDLERS.get(type(command))
        if handler is None:
            raise Unsupported(type(command).__name__, type(command).facts.feature)
        return handler(self.topics, command, context)

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        handler = FEEDS.get(type(feed))
        if handler is None:
            raise Unsupported(type(feed).__name__, type(feed).facts.feature)
        return handler(self.topics, feed, context)

    async def fire_schedules(self) -> None:
        """Fire everything due by now and wait for it; for clocks that are moved manually."""
        await self.topics.fire_schedules()

    async def metrics(self) -> Measures:
        """Return the broker's measurements, for a server's metrics."""
        return await measure(self.topics)


@handles(Describe)
async def describe(broker: TopicKeeper, command: Describe, context: Context) -> Description:
    settings = msgspec.to_builtins(broker.config)
    return Description("log", heapline.__version__, sorted(EmbeddedBroker.features), settings)


class SyncBroker(_SyncBroker):
    """The broker returned by `heapline.open_sync`; use it with `with`. Safe to call from several threads."""

    def __init__(self, path: str, config: BrokerConfig) -> None:
        async def open() -> Broker:
            return await EmbeddedBroker(path, config=config).__aenter__()

        super().__init__(open)
