"""Places in a stream: which offset of each partition "earliest", a moment or a number means, and what lies below.

How many rows do is counted from the nearest mark (core/stream.py): a look costs a few thousand of them. What is durable
does not change, so what is found here holds when it is decided upon later, unless the log's start has moved on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from heapline.core.events import AnyEvent, Enqueued, decode_events
from heapline.core.stream import STREAM_KINDS, stream_of
from heapline.engine.columns import check_moment, to_ms
from heapline.engine.log import first_offsets
from heapline.engine.requests import check_int
from heapline.errors import BadRequest
from heapline.journal.reader import LogReader
from heapline.journal.unit import Unit
from heapline.model import Now
from heapline.streams import Place

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner

Start = tuple[int, int, int]  # partition, offset, stream rows below it


def check_place(name: str, place: Any, partitions: int) -> None:
    if isinstance(place, str) and place in ("earliest", "latest"):
        return
    if isinstance(place, datetime):
        check_moment(name, place)
    elif isinstance(place, Mapping):
        for partition, offset in place.items():
            check_int(f"a partition of {name}", partition, 0, partitions - 1)
            check_int(f"an offset of {name}", offset, 0, 1 << 62)
    elif type(place) is int:
        check_int(name, place, 0, 1 << 62)
    else:
        raise BadRequest(
            f'{name} is "earliest", "latest", an offset, a datetime or {{partition: offset}}, not {str(place)[:80]!r}'
        )


async def resolve(runner: TopicRunner, place: Place, partitions: Sequence[int]) -> list[Start]:
    """Where each of these partitions begins. Those that a mapping leaves out begin at the earliest."""
    ends, totals = await runner.call(lambda now: _ends(runner))
    if place == "latest":
        return [(p, ends[p], totals[p]) for p in partitions]
    await make_seen(runner)
    firsts = await runner.read(first_offsets, runner.journal.reader(), len(ends))
    found = []
    for p in partitions:
        first = ends[p] if (known := firsts[p]) is None else known
        first = max(first, runner.topic.following.floors[p])  # what lies below is being deleted
        offset = await _offset(runner, place, p, first, ends[p])
        found.append((p, offset, totals[p] if offset == ends[p] else await count_below(runner, p, offset)))
    return found


def _ends(runner: TopicRunner) -> tuple[list[int], list[int]]:
    topic = runner.topic
    return [p.offset for p in topic.partitions], [count.total for count in topic.counts]


async def _offset(runner: TopicRunner, place: Place, partition: int, first: int, end: int) -> int:
    if place == "earliest":
        return first
    if isinstance(place, datetime):
        found = await runner.read(partial(runner.journal.reader().offset_at, partition, wall=to_ms(place)))
        return max(first, min(end, found))
    offset = place.get(partition, first) if isinstance(place, Mapping) else place
    assert isinstance(offset, int)
    if offset > end:
        raise BadRequest(f"offset {offset} lies beyond the end of partition {partition}, {end}: give that, or less")
    return max(first, offset)


async def count_below(runner: TopicRunner, partition: int, offset: int) -> int:
    """How many stream rows lie below an offset that is durable, counted as the partition's StreamCount counts."""

    def look(now: Now) -> tuple[int, int]:
        counts = runner.topic.counts[partition]
        return counts.mark_after(offset) or (runner.topic.partitions[partition].offset, counts.total)

    # From behind: what lies before the offset may be gone.
    mark, count = await runner.call(look)
    if mark == offset:
        return count
    await make_seen(runner)
    return count - await runner.read(_count, runner.journal.reader(), partition, offset, mark)


def is_there(runner: TopicRunner, starts: Sequence[Start]) -> bool:
    """In a turn: whether these places, found before, still are: the log's start may have moved on since."""
    floors = runner.topic.following.floors
    return all(offset >= floors[number] for number, offset, _ in starts)


def goes_on_at(reader: LogReader, partition: int, offset: int) -> int | None:
    """Blocking: the first offset from this one on that the log holds a row for; None if there is none. It is another
    one only where the log begins above."""
    place = reader.locate(partition, offset=offset)
    for unit in () if place is None else reader.read_units(place=place):
        for frame in unit.frames:
            if frame.partition == partition and frame.first_offset + frame.row_count > offset:
                return max(offset, frame.first_offset)
    return None


async def make_seen(runner: TopicRunner) -> None:
    """Readers of the journal's files see what is synced: under the relaxed policies less than was answered."""
    journal = runner.journal
    if journal.durable_unit < journal.written_unit:
        await runner.committer.between_commits(journal.sync)


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
