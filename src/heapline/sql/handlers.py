"""The table of handlers of the Postgres broker: {Command: handler}."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from heapline.contract.call import Call, Command, Context

if TYPE_CHECKING:
    from heapline.sql.node import Node

R = TypeVar("R")
Handler = Callable[["Node", Any, Context], Awaitable[R]]
HANDLERS: dict[type[Call[Any]], Handler[Any]] = {}


def handles(kind: Callable[..., Command[R]]) -> Callable[[Handler[R]], Handler[R]]:
    """Register a handler. mypy checks that it returns what the command promises."""

    def register(handler: Handler[R]) -> Handler[R]:
        assert isinstance(kind, type)
        HANDLERS[kind] = handler
        return handler

    return register
