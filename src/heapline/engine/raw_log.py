"""The log as it lies in the journal: whole units and the sparse index, for readers that decode by themselves.

For those who read all partitions of a topic at once. Nothing is decoded here, so a scan costs the server hardly more
than reading its files. Runs in I/O threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.position import size_bound
from heapline.errors import BadRequest, UnavailableError
from heapline.journal.index import ENTRY, Entries
from heapline.journal.reader import LogReader
from heapline.journal.reclaim import ReaderLease, end_lease, write_lease
from heapline.journal.unit import Unit

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner

HOLD_SECONDS_MAX = 3600.0
TAKE_BYTES = 1 << 20
RECORDS_MAX, RECORDS_BYTES_MAX = 16_384, 32 << 20  # read at once; a single one may be larger


class Hold(NamedTuple):
    """Keep segments from this one on, for whoever goes by this name; for 0 seconds: no longer."""

    name: str
    segment: int
    seconds: float


class LogIndex(NamedTuple):
    incarnation: int
    first_segment: int
    last_unit: int
    segment_bytes: int
    starts: list[int]
    ends: list[int]
    marks: Entries
    mark_segments: npt.NDArray[np.int64]


def index_after(
    runner: TopicRunner, after_unit: int, offsets: dict[int, tuple[int, int]], hold: Hold | None
) -> LogIndex:
    if hold is not None:
        _keep(runner, hold)
    reader = runner.journal.reader()
    mark = reader.watermark()
    try:
        first, marks, segments = _marks(reader, after_unit, mark.visible)
    except FileNotFoundError:
        raise UnavailableError("a segment was reclaimed just now: ask again") from None
    # As of now: what was asked before the hold was taken may have been raised since.
    raised = reader.log_start()
    starts = [min(end, max(start, raised.get(p, 0))) for p, (start, end) in offsets.items()]
    ends = [end for _, end in offsets.values()]
    capacity = runner.topic.config.segment_bytes
    return LogIndex(mark.incarnation, first, mark.visible, capacity, starts, ends, marks, segments)


def _keep(runner: TopicRunner, hold: Hold) -> None:
    if not 0 <= hold.seconds <= HOLD_SECONDS_MAX:
        raise BadRequest(f"a log is held for up to {HOLD_SECONDS_MAX:g} seconds, not {hold.seconds:g}")
    if not hold.seconds:
        end_lease(runner.loader.disk, runner.loader.directory, hold.name)
        return
    expires = runner.wall_ms() + round(hold.seconds * 1000)
    lease = ReaderLease(hold.name, os.getpid(), hold.segment, expires)
    with contextlib.suppress(OSError):  # a full disk can still be read
        write_lease(runner.loader.disk, runner.loader.directory, lease)


def _marks(reader: LogReader, after: int, last: int) -> tuple[int, Entries, npt.NDArray[np.int64]]:
    """(first segment, entries of units in (after, last], their segments)."""
    numbers = reader.segments()
    parts: list[Entries] = []
    owners: list[int] = []
    for number in reversed(numbers):
        entries = reader.index(number).entries()
        parts.append(entries[(entries["unit"] > after) & (entries["unit"] <= last)])
        owners.append(number)
        if len(entries) and entries["unit"][0] <= after:
            break  # all before this segment is known already
    parts.reverse()
    owners.reverse()
    counts = [len(part) for part in parts]
    return numbers[0], np.concatenate([np.zeros(0, dtype=ENTRY), *parts]), np.repeat(np.array(owners), counts)


def units_between(reader: LogReader, start: int, end: int) -> Iterator[Unit]:
    if start < 0 or end < start:
        raise BadRequest(f"units {start} to {end} are no range: the first is 1, and the end comes after the start")
    for unit in reader.read_units(start_unit=start):
        if unit.number >= end:
            return
        yield unit


def check_positions(runner: TopicRunner, incarnation: int, positions: npt.NDArray[np.int64]) -> None:
    """Raises unless these can be positions of this topic's journal, and not too many to be read at once."""
    if incarnation != runner.loader.incarnation:
        raise BadRequest(f"topic {runner.name!r} was deleted and made again: these positions are of the one before")
    if len(positions) and positions.min() < 0:
        raise BadRequest("positions are not negative")
    too_large = len(positions) > 1 and size_bound(positions).sum() > RECORDS_BYTES_MAX
    if len(positions) > RECORDS_MAX or too_large:
        raise BadRequest(f"{len(positions)} records are more than are read at once: ask for fewer")


def take_units(found: Iterator[Unit]) -> list[Unit]:
    """The next ones, of about a megabyte; none: that was all."""
    units: list[Unit] = []
    size = 0
    for unit in found:
        units.append(unit)
        size += len(unit.data)
        if size >= TAKE_BYTES:
            break
    return units
