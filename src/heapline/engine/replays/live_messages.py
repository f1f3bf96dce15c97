"""The live messages of a topic and their current state, as used by fast replays.

Read in one turn of the topic, so that it waits until the state is durable: a message skipped as deleted stays deleted,
even after a crash. The state is columns (8 bytes per live message, 16 more for a delayed one), not a table of all past
messages. A partition's messages are sorted by id, so a page is matched by binary search. A dead letter counts as live.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.events import EMPTY, I64
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.wheel.timing_wheel import Timers
from heapline.engine.runner import TopicRunner

Mask = npt.NDArray[np.bool_]


class _Standing(NamedTuple):
    """The state of one partition. Each pair of columns is sorted by id."""

    ids: I64
    delayed: I64  # ids of delayed messages
    dues: I64  # their due times, wall ms
    changed: I64  # ids of messages that were ever rescheduled: they may appear in the stream twice
    priorities: I64  # their priorities
    has_priority: Mask  # where False, the priority is that of the record


class Living:
    def __init__(self, partitions: dict[int, _Standing]) -> None:
        self._partitions = partitions

    def among(self, partition: int, ids: I64) -> Mask:
        """Return which of these messages are live."""
        return _found(self._partitions[partition].ids, ids)[0]

    def changed(self, partition: int, ids: I64) -> Mask:
        """Return which of these messages were rescheduled."""
        return _found(self._partitions[partition].changed, ids)[0]

    def dues(self, partition: int, ids: I64) -> I64:
        """Return when each message is due, in wall ms; 0 for messages that are not delayed."""
        standing = self._partitions[partition]
        waits, at = _found(standing.delayed, ids)
        dues = np.zeros(len(ids), dtype=np.int64)
        dues[waits] = standing.dues[at[waits]]
        return dues

    def priorities(self, partition: int, ids: I64, recorded: I64) -> I64:
        """Return the current priorities, given those of the records."""
        standing = self._partitions[partition]
        moved, at = _found(standing.changed, ids)
        moved[moved] = standing.has_priority[at[moved]]
        if not moved.any():
            return recorded
        priorities = recorded.copy()
        priorities[moved] = standing.priorities[at[moved]]
        return priorities


def _found(sorted_ids: I64, ids: I64) -> tuple[Mask, I64]:
    """Return which ids are among the sorted ones, and at which index."""
    if not len(sorted_ids):
        return np.zeros(len(ids), dtype=np.bool_), np.zeros(len(ids), dtype=np.int64)
    at = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return sorted_ids[at] == ids, at


async def look(runner: TopicRunner, partitions: list[int]) -> Living:
    taken = await runner.call(lambda now: [_take(runner.loaded.topic.partitions[p], now) for p in partitions])
    standing = await runner.io.run(lambda: [_sorted(each) for each in taken])
    return Living(dict(zip(partitions, standing, strict=True)))


def _take(partition: Partition, now: Now) -> _Standing:
    waiting, _ = partition.waiting()
    ids = np.concatenate((waiting, _ids(partition.leases.by_id), _ids(partition.dead)))
    delayed, dues = [EMPTY], [EMPTY]
    seen: set[int] = set()
    for wheel, wall in ((partition.delays, False), (partition.calendar, True)):
        for chunk in wheel.chunks():
            rows = Timers(*(column[chunk.start :] for column in chunk.columns()))
            good = partition.good_delayed(rows, wall, seen)
            delayed.append(rows.ids[good])
            dues.append(rows.dues[good] + (0 if wall else now.wall - now.steady))
    touched = partition.touched
    priorities = [0 if t.priority is None else t.priority for t in touched.values()]
    has_priority = np.array([t.priority is not None for t in touched.values()], dtype=np.bool_)
    return _Standing(
        ids, np.concatenate(delayed), np.concatenate(dues), _ids(touched), np.array(priorities, dtype=np.int64),
        has_priority,
    )  # fmt: skip


def _ids(table: Collection[int]) -> I64:
    return np.fromiter(table, np.int64, len(table))


def _sorted(standing: _Standing) -> _Standing:
    delayed, changed = standing.delayed.argsort(), standing.changed.argsort()
    return _Standing(
        np.sort(standing.ids), standing.delayed[delayed], standing.dues[delayed], standing.changed[changed],
        standing.priorities[changed], standing.has_priority[changed],
    )  # fmt: skip
