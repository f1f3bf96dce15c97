"""The embedded broker: the engine on a directory, in this process.

It executes commands by the table in `handlers/`. Decisions are made in `core/`; `runner.py` determines when to answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec

import heapline
from heapline.contract.admin import Description
from heapline.contract.broker import Broker
from heapline.contract.call import Command, Feed
from heapline.contract.context import HERE, Context
from heapline.contract.errors import Unsupported
from heapline.engine.handlers import FEEDS, HANDLERS
from heapline.engine.topics import TopicKeeper

if TYPE_CHECKING:
    from heapline.engine.metrics_source import Measures

R = TypeVar("R")


class EmbeddedBroker(TopicKeeper, Broker):
    """The broker returned by `heapline.open`; use it as an async context manager."""

    features: ClassVar[frozenset[str]] = frozenset(
        {"queue", "log", "groups", "replay", "schedules", "batches", "fairness"}
    )

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        handler = HANDLERS.get(type(command))
        if handler is None:
            raise Unsupported(type(command).__name__, type(command).facts.feature)
        return handler(self, command, context)

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        handler = FEEDS.get(type(feed))
        if handler is None:
            raise Unsupported(type(feed).__name__, type(feed).facts.feature)
        return handler(self, feed, context)

    def description(self) -> Description:
        settings = msgspec.to_builtins(self._config)
        return Description("log", heapline.__version__, sorted(self.features), settings)

    async def metrics(self) -> Measures:
        """Return the broker's measurements, for a server's metrics."""
        from heapline.engine.metrics_source import measure  # imported here because metrics_source imports this class

        return await measure(self)
