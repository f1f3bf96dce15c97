"""Partitions, and the sources that list them.

A partition is a plain value. A source lists the partitions that exist now. The leader reads it when its term begins and
whenever a worker calls `refresh_partitions()`; it alone decides which worker gets which partition.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Protocol, runtime_checkable

from heapline.assign.errors import BadPartition

WEIGHT_MAX = (1 << 63) - 1
#: A partition's keys become tokens of a NATS subject, where these characters have a meaning.
RESERVED = frozenset(".*>")


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One unit of work, held by one worker at a time and named by hierarchical keys.

    Partitions with the same keys are equal, whatever their weights.

    >>> Partition(("tool001", "chamber1"), weight=100).subject("work")
    'work.tool001.chamber1'
    """

    keys: tuple[str, ...]
    weight: int = 1  # its load relative to other partitions; 0 = none
    id: str = field(init=False, repr=False)  # the keys joined with dots

    def __post_init__(self) -> None:
        keys = (self.keys,) if isinstance(self.keys, str) else tuple(self.keys)
        for key in keys:
            check_token(key)
        if not keys:
            raise BadPartition("a partition needs at least one key")
        if type(self.weight) is not int or not 0 <= self.weight <= WEIGHT_MAX:
            raise BadPartition(
                f"partition {'.'.join(keys)!r} has weight {self.weight!r}; use a whole number from 0 to {WEIGHT_MAX}"
            )
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "id", ".".join(keys))

    def subject(self, prefix: str = "", suffix: str = "") -> str:
        """Return the NATS subject of this partition: prefix, keys and suffix joined with dots."""
        return ".".join(part for part in (prefix, self.id, suffix) if part)

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Partition) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __lt__(self, other: Partition) -> bool:
        return self.id < other.id


def check_token(key: object) -> None:
    """Raise BadPartition if the key cannot be one token of a NATS subject."""
    if not isinstance(key, str):
        raise BadPartition(f"{key!r} is not a partition key; use a string")
    if key.isalnum() and key.isascii():
        return
    if not key or not key.isprintable() or any(letter in RESERVED or letter.isspace() for letter in key):
        raise BadPartition(
            f"{key!r} is not a partition key; it becomes a token of a subject, so it cannot be empty or contain "
            "white space, control characters or any of . * >"
        )
    try:
        key.encode()
    except UnicodeEncodeError:
        raise BadPartition(f"{key!r} is not a partition key; it cannot be encoded as UTF-8") from None


def distinct(partitions: Iterable[Partition]) -> tuple[Partition, ...]:
    """Return the partitions sorted by id. Raise BadPartition if one is listed twice."""
    ordered = sorted(partitions, key=attrgetter("id"))
    for before, after in pairwise(ordered):
        if before.id == after.id:
            raise BadPartition(f"partition {after.id!r} is listed twice; list each partition once")
    return tuple(ordered)


@runtime_checkable
class PartitionSource(Protocol):
    """Lists the partitions that exist."""

    async def list_partitions(self) -> Iterable[Partition]:
        """Return all partitions. Cancelled after `operation_timeout` and retried as `RetryConfig` says."""
        ...


class StaticSource:
    """A fixed list. After `replace`, call `refresh_partitions()` on a manager."""

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self.replace(partitions)

    def replace(self, partitions: Iterable[Partition]) -> None:
        self._partitions = validated(partitions)

    async def list_partitions(self) -> tuple[Partition, ...]:
        return self._partitions


class CallableSource:
    """Partitions from a function or a coroutine function.

    A plain function runs in a thread, because it may query a database and heartbeats must not wait for that.

    >>> source = CallableSource(lambda: [Partition(("tool001", "chamber1"), weight=100)])
    """

    def __init__(self, function: Callable[[], Iterable[Partition] | Awaitable[Iterable[Partition]]]) -> None:
        if not callable(function):
            raise BadPartition(f"{function!r} is not callable; pass a function, or use StaticSource for a list")
        self._function = function

    async def list_partitions(self) -> tuple[Partition, ...]:
        function = self._function
        answer = function() if inspect.iscoroutinefunction(function) else await asyncio.to_thread(function)
        return validated(await answer if inspect.isawaitable(answer) else answer)


def validated(partitions: object) -> tuple[Partition, ...]:
    """Return a source's partitions sorted. Raise BadPartition unless they are distinct partitions."""
    if isinstance(partitions, (str, bytes)) or not isinstance(partitions, Iterable):
        raise BadPartition(f"a source returned {type(partitions).__name__}, not a list of partitions")
    found = list(partitions)
    for each in found:
        if not isinstance(each, Partition):
            raise BadPartition(f"a source returned {each!r}; return Partition(keys, weight)")
    return distinct(found)
