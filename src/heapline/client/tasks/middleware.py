"""Middleware around runs, hooks around enqueues, and the objects that they receive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heapline.contract.message import Message

if TYPE_CHECKING:
    from heapline.client.tasks.task import Task


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
