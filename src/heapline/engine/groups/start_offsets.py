"""Resolve "earliest", a timestamp or a number to an offset in each partition, and count the stream rows below it.

Rows are counted from the nearest mark (core/groups/stream.py), so a count reads a few thousand rows. Durable rows do
not change, so the result is still valid when a later turn decides, unless the log's start has advanced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from heapline.contract.check import fail, instant_to_ms
from heapline.contract.errors import BadRequest
from heapline.contract.stream import Place
from heapline.core.events import AnyEvent, Enqueued, decode_events
from heapline.core.groups.stream import STREAM_KINDS, stream_of
from heapline.core.now import Now
from heapline.engine.loaded_topic import RunningTopic
from heapline.journal.reader import LogReader
from heapline.journal.unit import Unit

Start = tuple[int, int, int]  # partition, offset, stream rows below it


def check_place(name: str, place: Place, partitions: int) -> None:
    """Raise BadRequest if a position names a partition that the topic does not have."""
    if isinstance(place, Mapping):
        for partition in place:
            if partition >= partitions:
                fail(f"a partition of {name}", f"an integer from 0 to {partitions - 1}", partition)


async def resolve(runner: RunningTopic, place: Place, partitions: Sequence[int]) -> list[Start]:
    """Return the start of each of these partitions. Partitions that a mapping omits start at the earliest offset."""
    ends, totals = await runner.call(lambda now: _ends(runner))
    if place == "latest":
        return [(p, ends[p], totals[p]) for p in partitions]
    await make_seen(runner)
    firsts = await runner.read(runner.loaded.journal.reader().first_offsets, len(ends))
    found = []
    for p in partitions:
        first = ends[p] if (known := firsts[p]) is None else known
        first = max(first, runner.loaded.topic.following.floors[p])  # rows below are being deleted
        offset = await _offset(runner, place, p, first, ends[p])
        found.append((p, offset, totals[p] if offset == ends[p] else await count_below(runner, p, offset)))
    return found


def _ends(runner: RunningTopic) -> tuple[list[int], list[int]]:
    topic = runner.loaded.topic
    return [p.state.offset for p in topic.partitions], [count.total for count in topic.counts]


async def _offset(runner: RunningTopic, place: Place, partition: int, first: int, end: int) -> int:
    if place == "earliest":
        return first
    if isinstance(place, datetime):
        found = await runner.read(
            partial(runner.loaded.journal.reader().offset_at, partition, wall=instant_to_ms(place))
        )
        return max(first, min(end, found))
    offset = place.get(partition, first) if isinstance(place, Mapping) else place
    assert isinstance(offset, int)
    if offset > end:
        raise BadRequest(f"offset {offset} is beyond the end of partition {partition}; use {end} or less")
    return max(first, offset)


async def count_below(runner: RunningTopic, partition: int, offset: int) -> int:
    """Return how many stream rows are below a durable offset, counted as the partition's StreamCount counts."""

    def look(now: Now) -> tuple[int, int]:
        counts = runner.loaded.topic.counts[partition]
        return counts.mark_after(offset) or (runner.loaded.topic.partitions[partition].state.offset, counts.total)

    # Count backward from the mark: rows before the offset may be deleted.
    mark, count = await runner.call(look)
    if mark == offset:
        return count
    await make_seen(runner)
    return count - await runner.read(_count, runner.loaded.journal.reader(), partition, offset, mark)


def is_there(runner: RunningTopic, starts: Sequence[Start]) -> bool:
    """Return whether these starts still exist: the log's start may have advanced since. Runs in a turn."""
    floors = runner.loaded.topic.following.floors
    return all(offset >= floors[number] for number, offset, _ in starts)


def goes_on_at(reader: LogReader, partition: int, offset: int) -> int | None:
    """Return the first offset at or after `offset` that has a row in the log, or None. Blocking. The result differs
    from `offset` only if the log starts above it."""
    place = reader.locate(partition, offset=offset)
    for unit in () if place is None else reader.read_units(place=place):
        for frame in unit.frames:
            if frame.partition == partition and frame.first_offset + frame.row_count > offset:
                return max(offset, frame.first_offset)
    return None


async def make_seen(runner: RunningTopic) -> None:
    """Sync the journal so that file readers see all answered rows; under the relaxed policies they see fewer before."""
    journal = runner.loaded.journal
    if journal.durable_unit < journal.written_unit:
        await runner.loaded.committer.between_commits(journal.sync)


def _count(reader: LogReader, partition: int, start: int, end: int) -> int:
    place = reader.locate(partition, offset=start)
    if place is None:
        return 0
    total = 0
    for unit in reader.read_units(place=place):
        for frame in unit.frames:
            if frame.partition != partition:
                continue
            offset = frame.first_offset
            if offset >= end:
                return total
            for event in decode_events(frame.events, f"unit {unit.number}"):
                if type(event) in STREAM_KINDS:
                    offsets = _offsets(unit, event, offset)
                    total += int(np.count_nonzero((offsets >= start) & (offsets < end)))
                offset += event.rows()
    return total


def _offsets(unit: Unit, event: AnyEvent, offset: int) -> Any:
    if not isinstance(event, Enqueued):
        return stream_of(event, offset).offsets
    rows = unit.rows(unit.blocks[event.block])[event.start : event.start + event.count]
    return offset + np.flatnonzero(rows["due"] == 0)
