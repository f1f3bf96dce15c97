"""What still matters of a topic: which messages are not gone, and how they stand now. What a fast replay goes by.

Taken in one turn of the topic, so that it waits until it is durable: what was skipped as gone stays gone, also after a
crash. It is columns (8 bytes a living message, 16 more for one that waits for its time), not a table of all that ever
was; a partition's messages are sorted by id, so a page is judged by a binary search. A dead letter is not gone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.events import EMPTY, I64
from heapline.core.partition import Partition
from heapline.core.wheel import Timers
from heapline.engine.runner import TopicRunner
from heapline.model import Now

Mask = npt.NDArray[np.bool_]


class _Standing(NamedTuple):
    """Of one partition, each pair of columns sorted by id."""

    ids: I64
    delayed: I64  # ids of those that wait for their time
    dues: I64  # and that time, wall ms
    changed: I64  # ids of those whose place or priority was ever changed by hand: they may stand in the stream twice
    priorities: I64  # and their priority
    has_priority: Mask  # or else it is their record's


class Living:
    def __init__(self, partitions: dict[int, _Standing]) -> None:
        self._partitions = partitions

    def among(self, partition: int, ids: I64) -> Mask:
        """Which of these are not gone."""
        return _found(self._partitions[partition].ids, ids)[0]

    def changed(self, partition: int, ids: I64) -> Mask:
        """Which of these were moved by hand."""
        return _found(self._partitions[partition].changed, ids)[0]

    def dues(self, partition: int, ids: I64) -> I64:
        """When each falls due, in wall ms; 0 for those that do not wait."""
        standing = self._partitions[partition]
        waits, at = _found(standing.delayed, ids)
        dues = np.zeros(len(ids), dtype=np.int64)
        dues[waits] = standing.dues[at[waits]]
        return dues

    def priorities(self, partition: int, ids: I64, recorded: I64) -> I64:
        """Their present priorities, given those of their records."""
        standing = self._partitions[partition]
        moved, at = _found(standing.changed, ids)
        moved[moved] = standing.has_priority[at[moved]]
        if not moved.any():
            return recorded
        priorities = recorded.copy()
        priorities[moved] = standing.priorities[at[moved]]
        return priorities


def _found(sorted_ids: I64, ids: I64) -> tuple[Mask, I64]:
    """Which ids are among the sorted ones, and where."""
    if not len(sorted_ids):
        return np.zeros(len(ids), dtype=np.bool_), np.zeros(len(ids), dtype=np.int64)
    at = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return sorted_ids[at] == ids, at


async def look(runner: TopicRunner, partitions: list[int]) -> Living:
    taken = await runner.call(lambda now: [_take(runner.topic.partitions[p], now) for p in partitions])
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
