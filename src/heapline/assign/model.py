"""The words of `heapline.assign`: a partition, what one worker has been given, and the states of worker and crowd.

Plain values; nothing here knows of time, of the store, or of who decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import pairwise
from operator import attrgetter

from heapline.assign.errors import BadPartition

WEIGHT_MAX = (1 << 63) - 1
#: A partition's keys become tokens of a NATS subject, where these mean something else.
RESERVED = frozenset(".*>")


class State(IntEnum):
    """What a worker is doing. The numbers are those of the metric `parti_worker_state`; the table is in states.py."""

    INIT = 0
    CLAIMING_ID = 1
    ELECTION = 2
    WAITING_ASSIGNMENT = 3
    STABLE = 4
    SCALING = 5
    REBALANCING = 6
    EMERGENCY = 7
    SHUTDOWN = 8


class Lifecycle(StrEnum):
    """How settled the crowd is, as the assignment says."""

    COLD_START = "cold_start"  # a first deployment, or a restart was detected
    POST_COLD_START = "post_cold_start"  # the first assignment after that
    STABLE = "stable"


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One piece of work that one worker holds at a time, named by hierarchical keys.

    Two are the same if their keys are: a weight that has changed makes no other partition of it.

    >>> Partition(("tool001", "chamber1"), weight=100).subject("work")
    'work.tool001.chamber1'
    """

    keys: tuple[str, ...]
    weight: int = 1  # its share of a worker's load, next to those of the others; 0 = costs nothing
    id: str = field(init=False, repr=False)  # the keys with dots between them

    def __post_init__(self) -> None:
        keys = (self.keys,) if isinstance(self.keys, str) else tuple(self.keys)
        for key in keys:
            check_token(key)
        if not keys:
            raise BadPartition("a partition needs at least one key")
        if type(self.weight) is not int or not 0 <= self.weight <= WEIGHT_MAX:
            raise BadPartition(
                f"partition {'.'.join(keys)!r} has weight {self.weight!r}: use a whole number from 0 to {WEIGHT_MAX}"
            )
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "id", ".".join(keys))

    def subject(self, prefix: str = "", suffix: str = "") -> str:
        """The NATS subject of this partition: prefix, keys and suffix with dots between them."""
        return ".".join(part for part in (prefix, self.id, suffix) if part)

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Partition) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __lt__(self, other: Partition) -> bool:
        return self.id < other.id


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one worker may hold now. `fences` has for each partition's id a number that rises whenever it is granted
    anew: pass it to whatever the work writes to, and have that refuse lower ones."""

    version: int = 0  # of the document that says so; 0 = there was none yet
    lifecycle: Lifecycle = Lifecycle.COLD_START
    partitions: tuple[Partition, ...] = ()
    fences: Mapping[str, int] = field(default_factory=dict)

    def fence(self, partition: Partition) -> int:
        return self.fences[partition.id]


def check_token(key: object) -> None:
    """Refuse a key that cannot be one token of a NATS subject."""
    if not isinstance(key, str):
        raise BadPartition(f"{key!r} is not a partition key: use a string")
    if key.isalnum() and key.isascii():
        return
    if not key or not key.isprintable() or any(letter in RESERVED or letter.isspace() for letter in key):
        raise BadPartition(
            f"{key!r} is not a partition key: it becomes a token of a subject, so it must not be empty nor hold white "
            "space, control characters or any of . * >"
        )
    try:
        key.encode()
    except UnicodeEncodeError:
        raise BadPartition(f"{key!r} is not a partition key: it cannot be written as UTF-8") from None


def distinct(partitions: Iterable[Partition]) -> tuple[Partition, ...]:
    """The partitions in the order of their ids; one that is there twice is refused."""
    ordered = sorted(partitions, key=attrgetter("id"))
    for before, after in pairwise(ordered):
        if before.id == after.id:
            raise BadPartition(f"partition {after.id!r} is there twice: name each one once")
    return tuple(ordered)
