"""The tables of handlers of the Postgres broker: {Command: handler} and {Feed: handler}."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from heapline.contract.call import Call, Command, Context, Feed

if TYPE_CHECKING:
    from heapline.sql.node import Node

R = TypeVar("R")
Handler = Callable[["Node", Any, Context], Awaitable[R]]
FeedHandler = Callable[["Node", Any, Context], AsyncIterator[R]]
HANDLERS: dict[type[Call[Any]], Handler[Any]] = {}
FEEDS: dict[type[Call[Any]], FeedHandler[Any]] = {}


def handles(kind: Callable[..., Command[R]]) -> Callable[[Handler[R]], Handler[R]]:
    """Register a handler. mypy checks that it returns what the command promises."""

    def register(handler: Handler[R]) -> Handler[R]:
        assert isinstance(kind, type)
        HANDLERS[kind] = handler
        return handler

    return register


def feeds(kind: Callable[..., Feed[R]]) -> Callable[[FeedHandler[R]], FeedHandler[R]]:
    """Register the handler of a feed: an async generator of its items."""

    def register(handler: FeedHandler[R]) -> FeedHandler[R]:
        assert isinstance(kind, type)
        FEEDS[kind] = handler
        return handler

    return register
