"""The table of a broker's handlers: {Command: handler} and {Feed: handler}."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

from heapline.contract.call import Call, Command, Context, Feed

B = TypeVar("B")  # what handlers work on
R = TypeVar("R")
Handler = Callable[[B, Any, Context], Awaitable[R]]
FeedHandler = Callable[[B, Any, Context], AsyncIterator[R]]


class HandlerTable(Generic[B]):
    def __init__(self) -> None:
        self.commands: dict[type[Call[Any]], Handler[B, Any]] = {}
        self.feeds: dict[type[Call[Any]], FeedHandler[B, Any]] = {}

    def handles(self, kind: Callable[..., Command[R]]) -> Callable[[Handler[B, R]], Handler[B, R]]:
        """Register a handler. mypy checks that it returns what the command promises."""

        def register(handler: Handler[B, R]) -> Handler[B, R]:
            assert isinstance(kind, type)
            self.commands[kind] = handler
            return handler

        return register

    def yields(self, kind: Callable[..., Feed[R]]) -> Callable[[FeedHandler[B, R]], FeedHandler[B, R]]:
        """Register the handler of a feed: an async generator of its items."""

        def register(handler: FeedHandler[B, R]) -> FeedHandler[B, R]:
            assert isinstance(kind, type)
            self.feeds[kind] = handler
            return handler

        return register
