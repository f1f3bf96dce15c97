"""Where partitions come from: a list, a function, or whatever has a `list_partitions`.

A source says what there is now. The leader asks it when it starts to lead and whenever somebody calls
`refresh_partitions()`; who gets what is not the source's affair.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, runtime_checkable

from heapline.assign.errors import BadPartition
from heapline.assign.model import Partition, distinct


@runtime_checkable
class PartitionSource(Protocol):
    async def list_partitions(self) -> Iterable[Partition]:
        """All partitions that there are. Cancelled after `operation_timeout`, and tried again by `RetryConfig`."""
        ...


class StaticSource:
    """A fixed list; `replace` it, and tell the manager to look again."""

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self.replace(partitions)

    def replace(self, partitions: Iterable[Partition]) -> None:
        self._partitions = listed(partitions)

    async def list_partitions(self) -> tuple[Partition, ...]:
        return self._partitions


class CallableSource:
    """A function that gives the partitions, or a coroutine function that does. A plain function is called in a thread:
    it may ask a database, and heartbeats must not wait for that.

    >>> source = CallableSource(lambda: [Partition(("tool001", "chamber1"), weight=100)])
    """

    def __init__(self, function: Callable[[], Iterable[Partition] | Awaitable[Iterable[Partition]]]) -> None:
        if not callable(function):
            raise BadPartition(f"{function!r} cannot be called: CallableSource takes a function, StaticSource a list")
        self._function = function

    async def list_partitions(self) -> tuple[Partition, ...]:
        function = self._function
        answer = function() if inspect.iscoroutinefunction(function) else await asyncio.to_thread(function)
        return listed(await answer if inspect.isawaitable(answer) else answer)


def listed(partitions: object) -> tuple[Partition, ...]:
    """What a source gave, in order; anything but partitions, each of them once, is refused."""
    if isinstance(partitions, (str, bytes)) or not isinstance(partitions, Iterable):
        raise BadPartition(f"a source gave {type(partitions).__name__}, not a list of partitions")
    found = list(partitions)
    for each in found:
        if not isinstance(each, Partition):
            raise BadPartition(f"a source gave {each!r}: give Partition(keys, weight)")
    return distinct(found)
