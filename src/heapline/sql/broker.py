"""The Postgres broker: it executes commands by the table in handlers.py, which the modules imported here fill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import msgspec

import heapline
from heapline.contract.admin import Describe, Description
from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.errors import Unsupported
from heapline.sql import (
    batches,
    dead_letters,
    enqueue,
    event_log,
    leases,
    messages,
    namespace_keys,
    rates,
    scan,
    schedules,
    stats,
    topics,
)
from heapline.sql.config import FEATURES, MQUEUE_K, SqlConfig
from heapline.sql.document import Document
from heapline.sql.handlers import FEEDS, HANDLERS, handles
from heapline.sql.metrics import Depths, Row, rows_of
from heapline.sql.migrations import all_migrations
from heapline.sql.node import Node

R = TypeVar("R")
HANDLER_MODULES = (batches, dead_letters, enqueue, event_log, leases, messages, scan, schedules, stats, topics)


class SqlBroker(Broker):
    """The broker returned by `heapline.sql.open`; use it as an async context manager."""

    features: ClassVar[frozenset[str]] = FEATURES
    mqueue_k: ClassVar[int] = MQUEUE_K
    is_shared: ClassVar[bool] = True  # other processes serve the same topics

    def __init__(self, config: SqlConfig) -> None:
        self.node = Node(config)
        self._depths = Depths(self.node)
        self._scheduler = schedules.Scheduler(self.node)
        self._sweeper = batches.Sweeper(self.node)

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        handler = HANDLERS.get(type(command))
        if handler is None:
            raise Unsupported(type(command).__name__, type(command).facts.feature)
        return handler(self.node, command, context)

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        handler = FEEDS.get(type(feed))
        if handler is None:
            raise Unsupported(type(feed).__name__, type(feed).facts.feature)
        return handler(self.node, feed, context)

    def document(self, name: str) -> Document:
        """Return a document that all nodes share, for `async with`."""
        return Document(self.node.shards[0], name)

    async def claim_keys(
        self, namespace: str, rows: Sequence[tuple[str, str, bytes]]
    ) -> tuple[list[int | None], dict[str, int]]:
        """Claim idempotency keys in a namespace for (key, topic, payload); see namespace_keys.py."""
        return await namespace_keys.claim(self.node, namespace, [namespace_keys.Wanted(*row) for row in rows])

    async def take_rates(self, limits: Mapping[str, tuple[float, float]]) -> tuple[str, float] | None:
        """Count a request in namespaces with these rates and bursts, over all nodes; see rates.py."""
        return await rates.take(self.node, limits)

    async def metric_rows(self) -> list[Row]:
        """Return this node's metrics."""
        return rows_of(self.node, await self._depths.read())

    def why_unready(self) -> str | None:
        """Return why this node can serve no topic now, or None if it can."""
        return None if any(shard.is_up for shard in self.node.shards) else "no shard can be reached"

    async def __aenter__(self) -> Self:
        try:
            await self.node.open()
            self._scheduler.start()
            self._sweeper.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._scheduler.close()
        await self._sweeper.close()
        await self.node.close()

    async def fire_schedules(self) -> None:
        """Fire everything that is due by now; for clocks that tests advance."""
        await self._scheduler.fire_due()


@handles(Describe)
async def describe(node: Node, command: Describe, context: Context) -> Description:
    """Return the features, the settings and the versions. URLs may hold passwords, so only their number is shown."""
    settings: dict[str, Any] = msgspec.to_builtins(node.config)
    del settings["postgres"]
    settings["redis"] = node.config.redis is not None
    settings |= {
        "shards": len(node.shards),
        "durability": node.config.policy,
        "schema_version": len(all_migrations()),
        "servers": [shard.settings for shard in node.shards],
    }
    return Description("sql", heapline.__version__, sorted(FEATURES), settings)
