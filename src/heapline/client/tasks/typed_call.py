"""Types of `task.enqueue` and its like: the arguments of the task's function, and the options of a message.

A type checker cannot add keyword options to a ParamSpec. So a call without options is checked against the function, and
a call with an option only for the type of that option. At runtime the methods are plain functions.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from heapline.contract.message import IdempotencyScope

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class TypedCall(Protocol[P, T_co]):
    """Accepts the arguments `P`, or any arguments with at least one option."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(self, *args: Any, priority: int | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, delay: float | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, deliver_at: datetime | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, key: str | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, idempotency_key: str | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, idempotency_scope: IdempotencyScope | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, ttl: float | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, max_retries: int | None, **more: Any) -> T_co: ...
    @overload
    def __call__(self, *args: Any, fairness_key: str | None, **more: Any) -> T_co: ...


class _TypedMethod(Generic[T]):
    """What type checkers see instead of the decorated method."""

    def __get__(self, task: Callable[P, Any], owner: object = None) -> TypedCall[P, T]:
        raise NotImplementedError


def takes_arguments(method: Callable[..., T]) -> _TypedMethod[T]:
    """Declare that a method of a task takes the arguments of its function. Returns the method itself."""
    return cast("_TypedMethod[T]", method)
