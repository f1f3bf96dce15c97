"""A broker for tests of the server: answers each kind of command by a function, and records what it received."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Context


class FakeBroker(Broker):
    def __init__(self, **answers: Callable[[Any], Any]) -> None:
        self.answers = answers  # by the name of the command's class; a function of the command, or an async one
        self.received: list[Any] = []
        self.contexts: list[Context] = []

    async def do(self, command: Any, context: Context = HERE, /) -> Any:
        self.received.append(command)
        self.contexts.append(context)
        answer = self.answers[type(command).__name__](command)
        return await answer if hasattr(answer, "__await__") else answer

    async def stream(self, feed: Any, context: Context = HERE, /) -> AsyncIterator[Any]:  # type: ignore[override]
        self.received.append(feed)
        self.contexts.append(context)
        for item in self.answers[type(feed).__name__](feed):
            yield item

    def kinds(self) -> list[str]:
        return [type(command).__name__ for command in self.received]
