"""What stands around every run and every enqueue: the app's middleware, its hooks, and what they are shown."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heapline.model import Message

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
    """One message on its way in, as `on_enqueue` hooks see it; they may change headers and options."""

    task: Task[..., Any]
    arguments: dict[str, Any]
    headers: dict[str, str]
    options: dict[str, Any]


Next = Callable[[Call], Awaitable[Any]]
Middleware = Callable[[Call, Next], Awaitable[Any]]
Hook = Callable[[Sending], None]


def chain(layers: Sequence[Middleware], innermost: Next) -> Next:
    """The first layer is the outermost."""
    following = innermost
    for layer in reversed(layers):
        following = _wrapped(layer, following)
    return following


def _wrapped(layer: Middleware, following: Next) -> Next:
    def run(call: Call) -> Awaitable[Any]:
        return layer(call, following)

    return run
