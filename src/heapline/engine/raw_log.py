"""The log as stored in the journal: complete units and the sparse index, for readers that decode it themselves.

For readers of all partitions of a topic. Nothing is decoded here, so a scan costs the server little more than reading
its files. Runs in I/O threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import BadRequest, UnavailableError
from heapline.core.position import size_bound
from heapline.journal.index import ENTRY, Entries
from heapline.journal.reader import LogReader
from heapline.journal.reader_lease import ReaderLease, end_lease, write_lease
from heapline.journal.unit import Unit

if TYPE_CHECKING:
    from heapline.engine.runner import TopicRunner

HOLD_SECONDS_MAX = 3600.0
TAKE_BYTES = 1 << 20
RECORDS_MAX, RECORDS_BYTES_MAX = 16_384, 32 << 20  # per read; a single record may be larger


class Hold(NamedTuple):
    """A request to keep segments from this one on under this name; 0 seconds releases them."""

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
    id_suffix: int


def index_after(
    runner: TopicRunner, after_unit: int, offsets: dict[int, tuple[int, int]], hold: Hold | None
) -> LogIndex:
    if hold is not None:
        _keep(runner, hold)
    reader = runner.loaded.journal.reader()
    mark = reader.watermark()
    try:
        first, marks, segments = _marks(reader, after_unit, mark.visible)
    except FileNotFoundError:
        raise UnavailableError("a segment was reclaimed just now: ask again") from None
    # Read again now: the start may have been raised since it was read before the hold was taken.
    raised = reader.log_start()
    starts = [min(end, max(start, raised.get(p, 0))) for p, (start, end) in offsets.items()]
    ends = [end for _, end in offsets.values()]
    capacity = runner.loaded.topic.config.segment_bytes
    suffix = runner.loaded.topic.id_suffix
    return LogIndex(mark.incarnation, first, mark.visible, capacity, starts, ends, marks, segments, suffix)


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
    """Return (first segment, entries of units in (after, last], their segments)."""
    numbers = reader.segments()
    parts: list[Entries] = []
    owners: list[int] = []
    for number in reversed(numbers):
        entries = reader.index(number).entries()
        parts.append(entries[(entries["unit"] > after) & (entries["unit"] <= last)])
        owners.append(number)
        if len(entries) and entries["unit"][0] <= after:
            break  # everything before this segment is already known
    parts.reverse()
    owners.reverse()
    counts = [len(part) for part in parts]
    return numbers[0], np.concatenate([np.zeros(0, dtype=ENTRY), *parts]), np.repeat(np.array(owners), counts)


def units_between(reader: LogReader, start: int, end: int) -> Iterator[Unit]:
    if start < 0 or end < start:
        raise BadRequest(f"units {start} to {end} are not a range; the end must not be before the start")
    for unit in reader.read_units(start_unit=start):
        if unit.number >= end:
            return
        yield unit


def check_positions(runner: TopicRunner, incarnation: int, positions: npt.NDArray[np.int64]) -> None:
    """Raise unless these can be positions of this topic's journal, and few enough for one read."""
    if incarnation != runner.loader.incarnation:
        raise BadRequest(f"topic {runner.name!r} was deleted and created again; the positions belong to the old topic")
    if len(positions) and positions.min() < 0:
        raise BadRequest("positions are not negative")
    too_large = len(positions) > 1 and size_bound(positions).sum() > RECORDS_BYTES_MAX
    if len(positions) > RECORDS_MAX or too_large:
        raise BadRequest(f"{len(positions)} records are too many for one call; request fewer")


def take_units(found: Iterator[Unit]) -> list[Unit]:
    """Return the next units, about a megabyte; empty at the end."""
    units: list[Unit] = []
    size = 0
    for unit in found:
        units.append(unit)
        size += len(unit.data)
        if size >= TAKE_BYTES:
            break
    return units
