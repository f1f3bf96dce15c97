"""Replay requests, and the start and end offsets that they select in each partition.

A request is validated once, and normalized so that two requests can be compared, stored and sent. The end of a range is
fixed at what is durable when it is resolved, so a replay into its own topic does not read its own output. A timestamp
refers to the wall time of the unit that contains a row: a range between two timestamps has the rows of all units from
the first that was written at or after the start, up to the first at or after the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from heapline.contract.check import instant_to_ms
from heapline.contract.errors import BadRequest
from heapline.contract.groups import Position
from heapline.contract.message import from_ms
from heapline.contract.replays import Replay, StartReplay
from heapline.contract.stream import ReplayFilter
from heapline.engine.runner import TopicRunner
from heapline.journal.reader import LogReader
from heapline.journal.unit import Unit

Ranges = dict[int, tuple[int, int]]  # partition -> first offset, and the offset after the last


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A requested position in the log: exactly one field is set."""

    end_of_log: Literal["earliest", "latest"] | None = None
    offset: int | None = None
    offsets: dict[int, int] | None = None  # by partition
    wall_ms: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requested rows of a topic. If `end` is None, the replay ends at what is durable when it starts."""

    topic: str
    start: Mark = Mark(end_of_log="earliest")
    end: Mark | None = None
    partitions: list[int] | None = None
    mode: Literal["all", "fast"] = "all"
    where: ReplayFilter | None = None
    rate: float | None = None
    allow_gaps: bool = False
    count: int | None = None


class Selection(NamedTuple):
    """The ranges of a request, and where the log starts in each partition in which it omits reclaimed rows."""

    ranges: Ranges
    gaps: dict[int, int]


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields to replace in a message on its way into a topic. It keeps the others, but is due immediately."""

    priority: int | None = None
    delay: float | None = None
    deliver_at_ms: int | None = None
    keep_due: bool = False


def request_of(command: Replay | StartReplay) -> Request:
    """Return a command's request in the form that is compared and stored."""
    where = None if command.where == ReplayFilter() else command.where
    return Request(
        topic=command.topic,
        start=_mark(command.start),
        end=None if command.end is None else _mark(command.end),
        partitions=None if command.partitions is None else sorted(set(command.partitions)),
        mode=command.mode,
        where=where,
        rate=command.rate,
        allow_gaps=command.allow_gaps,
        count=command.count,
    )


def _mark(position: Position) -> Mark:
    return Mark(
        end_of_log=position.edge,
        offset=position.offset,
        offsets=position.offsets,
        wall_ms=None if position.at is None else instant_to_ms(position.at),
    )


async def find_ranges(runner: TopicRunner, request: Request, kept: Mapping[int, int] | None = None) -> Selection:
    """Return the ranges of a request. `kept` has offsets, by partition, that replace the requested start."""
    if not runner.loaded.topic.config.streams:
        raise BadRequest(f"topic {runner.name!r} was created with streams=False, so it cannot be replayed")
    ends = await runner.call(lambda now: [p.state.offset for p in runner.loaded.topic.partitions])
    if runner.loaded.topic.config.fsync != "commit":  # an end is durable, even where answers are not
        await runner.loaded.committer.between_commits(runner.loaded.journal.sync)
    chosen = _chosen(request, len(ends), runner.name)
    return await runner.io.run(_find, runner.loaded.journal.reader(), request, chosen, ends, kept or {})


async def check_there(runner: TopicRunner, ranges: Ranges) -> None:
    """Raise unless the log still starts at or before these ranges. For replays that continue after a pause."""
    found = await runner.io.run(runner.loaded.journal.reader().first_offsets, len(runner.loaded.topic.partitions))
    for partition, (start, end) in ranges.items():
        first = found[partition]
        if start < end and (first is None or start < first):
            begins = "no longer contains any of it" if first is None else f"starts at {first}"
            raise BadRequest(
                f"offset {start} of partition {partition} was reclaimed before it was read: the log {begins}"
            )


def _chosen(request: Request, count: int, topic: str) -> list[int]:
    """Return the requested partitions, or those that `start` names."""
    chosen = request.partitions
    if chosen is None:
        chosen = sorted(request.start.offsets) if request.start.offsets else list(range(count))
    named = [*chosen, *(request.start.offsets or ()), *(request.end.offsets or () if request.end else ())]
    for partition in named:
        if partition >= count:
            raise BadRequest(f"topic {topic!r} has no partition {partition}: it has 0 to {count - 1}")
    return chosen


def _find(
    reader: LogReader, request: Request, chosen: list[int], ends: list[int], kept: Mapping[int, int]
) -> Selection:
    found = reader.first_offsets(len(ends))
    firsts = {p: end if (first := found[p]) is None else first for p, end in enumerate(ends)}
    lasts = {p: ends[p] for p in chosen}
    starts = _offsets(reader, request.start, firsts, lasts)
    stops = lasts if request.end is None else _offsets(reader, request.end, firsts, lasts)
    begin = None if request.start.wall_ms is None else reader.first_unit()
    gaps: dict[int, int] = {}
    for partition in chosen:
        first = firsts[partition]
        asked = _asked(request.start, partition)
        is_gap = begin is not None and _misses_time(
            request.start, begin, first, first if found[partition] is None else starts[partition]
        )
        if partition in kept:
            asked = starts[partition] = kept[partition]
            is_gap = False
        elif kept and partition > max(kept) and request.partitions is None and request.start.offsets is None:
            asked, starts[partition], is_gap = None, first, False  # the topic has grown since
        if is_gap or (asked is not None and asked < first):
            if not request.allow_gaps:
                raise BadRequest(_reclaimed(partition, first, asked, partition in kept, begin))
            gaps[partition] = starts[partition] = first
    # A range that ends before it starts is empty and stays at its start.
    ranges = {p: (min(starts[p], lasts[p]), max(min(starts[p], lasts[p]), min(stops[p], lasts[p]))) for p in chosen}
    return Selection(ranges, gaps)


def _misses_time(start: Mark, begin: Unit, first: int, offset: int) -> bool:
    """Return whether rows of a partition that were written at or after the start may have been reclaimed.

    The wall times of reclaimed units are unknown. None is beyond the later of the two times of `begin`, the log's first
    unit: steady time includes what the wall clock was set back by. Only rows that were written while it was ahead of
    steady time, and corrected later, are not recognized. A log start that was raised (log_bounds.py) can be inside the
    first segment.
    """
    assert start.wall_ms is not None
    return first > 0 and (start.wall_ms <= max(begin.wall, begin.time) or offset < first)


def _reclaimed(partition: int, first: int, asked: int | None, is_kept: bool, begin: Unit | None) -> str:
    if asked is None:
        assert begin is not None
        written = from_ms(begin.wall).isoformat(timespec="milliseconds")
        return (
            f"rows after the requested time were reclaimed: the log of partition {partition} starts at offset {first}, "
            f"written after {written} (allow_gaps begins there)"
        )
    begins = f"offset {asked} of partition {partition} was reclaimed: the log starts at {first}"
    if is_kept:
        return begins + (
            f', and this checkpoint cannot continue; use another one (start="earliest", or from {first}), or allow_gaps'
        )
    return begins + ' (start="earliest" or allow_gaps begins there)'


def _asked(start: Mark, partition: int) -> int | None:
    """Return the exact offset that was requested, or None."""
    return (start.offsets or {}).get(partition) if start.offsets is not None else start.offset


def _offsets(reader: LogReader, mark: Mark, firsts: dict[int, int], lasts: dict[int, int]) -> dict[int, int]:
    if mark.end_of_log is not None:
        return {p: firsts[p] if mark.end_of_log == "earliest" else last for p, last in lasts.items()}
    if mark.offset is not None:
        return dict.fromkeys(lasts, mark.offset)
    if mark.wall_ms is not None:
        return {p: min(reader.offset_at(p, wall=mark.wall_ms), last) for p, last in lasts.items()}
    offsets = mark.offsets or {}
    return {p: offsets.get(p, last) for p, last in lasts.items()}
