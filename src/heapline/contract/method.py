"""Methods of brokers: a descriptor that both kinds of broker share, and how to make one from a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    get_type_hints,
    overload,
)

import msgspec

from heapline.contract.call import Command, Page
from heapline.contract.leased_batch import LeasedBatch
from heapline.contract.message import Message

if TYPE_CHECKING:
    from heapline.contract.broker import Broker
    from heapline.contract.sync_broker import SyncBroker, SyncLeasedBatch, SyncMessage

A = TypeVar("A")
S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")
L = TypeVar("L", covariant=True)
B = TypeVar("B", covariant=True)


class method(Generic[P, A, S]):
    """A method of a broker: a coroutine on a `Broker`, a plain function on a `SyncBroker`."""

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, A]]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.function.__name__ = self._name = name
        self.function.__qualname__ = f"Broker.{name}"

    @overload
    def __get__(self, broker: Broker, owner: type) -> Callable[P, Coroutine[Any, Any, A]]: ...

    @overload
    def __get__(self, broker: SyncBroker, owner: type) -> Callable[P, S]: ...

    @overload
    def __get__(self, broker: None, owner: type) -> Callable[..., Any]: ...

    def __get__(self, broker: Any, owner: type) -> Any:
        if broker is None:
            return self.function  # a function, so that help() and inspect.signature() show the arguments
        return broker._blocking(self._name, self.function)


def plain(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, A]]) -> method[P, A, A]:
    """A method that returns the same on both kinds of broker."""
    return method(function)


class PopMethod(Protocol[L, B]):
    """The type of `pop`: with lazy=True it returns a batch instead of a list."""

    @overload
    def __call__(
        self,
        topic: str,
        max_messages: int = 1,
        *,
        visibility: float | None = None,
        wait: float = 0.0,
        holder: str | None = None,
        max_bytes: int = 2 << 20,
        request_id: str | None = None,
        lazy: Literal[False] = False,
    ) -> L: ...

    @overload
    def __call__(
        self,
        topic: str,
        max_messages: int = 1,
        *,
        visibility: float | None = None,
        wait: float = 0.0,
        holder: str | None = None,
        max_bytes: int = 2 << 20,
        request_id: str | None = None,
        lazy: Literal[True],
    ) -> B: ...


class leasing(method[..., Any, Any]):
    """A method that returns leased messages."""

    @overload
    def __get__(
        self, broker: Broker, owner: type
    ) -> PopMethod[Coroutine[Any, Any, list[Message]], Coroutine[Any, Any, LeasedBatch]]: ...

    @overload
    def __get__(self, broker: SyncBroker, owner: type) -> PopMethod[list[SyncMessage], SyncLeasedBatch]: ...

    @overload
    def __get__(self, broker: None, owner: type) -> Callable[..., Any]: ...

    def __get__(self, broker: Any, owner: type) -> Any:
        return super().__get__(broker, owner)


@overload
def command(kind: Callable[P, Command[R]]) -> method[P, R, R]: ...


@overload
def command(kind: Callable[P, Command[R]], shape: Callable[[R], A]) -> method[P, A, A]: ...


def command(kind: Callable[P, Command[Any]], shape: Callable[[Any], Any] | None = None) -> method[P, Any, Any]:
    """The method of a command, with its arguments and its help. `shape` turns the result into what is returned."""

    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        result = await self.do(kind(*args, **kwargs))
        return result if shape is None else shape(result)

    first, types = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), get_type_hints(kind)
    fields = [
        p.replace(annotation=types[p.name]) for p in inspect.signature(kind).parameters.values()
    ]  # without bounds
    run.__signature__ = inspect.Signature([first, *fields])  # type: ignore[attr-defined]
    run.__doc__ = kind.__doc__
    return method(run)


def listing(kind: Callable[..., Command[Page[R]]]) -> method[[], list[R], list[R]]:
    """The method of a command that lists, without arguments. Returns the items of all pages."""

    async def run(self: Any) -> list[R]:
        return await every(self, kind())

    run.__doc__ = kind.__doc__
    return method(run)


async def every(broker: Any, ask: Any, limit: int | None = None) -> list[Any]:
    """All items of a list, or the first `limit`, page by page."""
    items: list[Any] = []
    while True:
        page: Page[Any] = await broker.do(ask)
        items += page.items
        if page.cursor is None or (limit is not None and len(items) >= limit):
            return items if limit is None else items[:limit]
        ask = msgspec.structs.replace(ask, cursor=page.cursor)
