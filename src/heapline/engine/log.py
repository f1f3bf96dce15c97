"""The durable log: offsets, frames as columns, raw units with their sparse index, point-in-time states, and records.

Only durable units are read, in I/O threads. Raw units are for readers of all partitions that decode them themselves, so
a scan costs the server little more than reading its files.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.contract import log
from heapline.contract.call import Context
from heapline.contract.check import fail
from heapline.contract.errors import BadRequest, UnavailableError
from heapline.contract.message import LogEvent, LogFrame
from heapline.core.events import (
    KIND_NAMES,
    AnyEvent,
    BatchCommitted,
    BatchPrepared,
    Enqueued,
    Expired,
    Leased,
    Moved,
    decode_events,
)
from heapline.core.record import size_bound
from heapline.engine import state_rows
from heapline.engine.handlers import feeds, handles
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper
from heapline.journal.index import ENTRY, Entries
from heapline.journal.reader import LogReader
from heapline.journal.unit import Frame, Unit

_MESSAGE_COLUMNS = (
    "id", "priority", "enqueued_at", "due", "ttl_ms", "max_retries", "flags", "key_len", "payload_len",
    "fairness_len", "turn",
)  # fmt: skip
#: Columns that some kinds of events have only sometimes. Other fields may be None, which then has a meaning.
_OPTIONAL = frozenset(("ids", "positions", "keys", "ready", "count"))
HOLD_SECONDS_MAX = 3600.0
TAKE_BYTES = 1 << 20
RECORDS_MAX, RECORDS_BYTES_MAX = 16_384, 32 << 20  # per read; a single record may be larger
LOG_FRAMES = 16  # frames decoded per job in a thread
PINNED_ROWS = 16384  # rows per item of a pinned state


def frames(
    reader: LogReader, topic: str, id_suffix: int, partition: int, start: int, end: int | None
) -> Iterator[LogFrame]:
    """Yield the complete frames of a partition that have rows of [start, end)."""
    place = reader.locate(partition, offset=start)
    if place is None:
        return
    for unit in reader.read_units(place=place):
        for frame in unit.frames:
            if frame.partition != partition or frame.first_offset + frame.row_count <= start:
                continue
            if end is not None and frame.first_offset >= end:
                return
            yield decode_frame(unit, frame, topic, id_suffix)


def decode_frame(unit: Unit, frame: Frame, topic: str, id_suffix: int) -> LogFrame:
    events: list[LogEvent] = []
    offset = frame.first_offset
    for event in decode_events(frame.events, f"unit {unit.number}"):
        rows = event.rows()
        columns, payloads = _columns(unit, event, offset)
        events.append(
            LogEvent(kind=KIND_NAMES[type(event)], offset=offset, row_count=rows, columns=columns, payloads=payloads)
        )
        offset += rows
    return LogFrame(
        topic=topic,
        partition=frame.partition,
        unit=unit.number,
        offset=frame.first_offset,
        row_count=frame.row_count,
        time_ms=unit.time,
        wall_ms=unit.wall,
        events=events,
        id_suffix=id_suffix,
    )


def _columns(unit: Unit, event: AnyEvent, offset: int) -> tuple[dict[str, Any], list[bytes] | None]:
    if isinstance(event, Enqueued | Moved):
        return _message_columns(unit, event)
    if isinstance(event, BatchPrepared):
        return _prepared_columns(unit, event)
    columns = {name: getattr(event, name) for name in event.__struct_fields__}
    for name in _OPTIONAL & columns.keys():
        if columns[name] is None:
            del columns[name]
    if isinstance(event, BatchCommitted):
        columns["parts"] = list(event.parts)
        if not len(event.ids):
            del columns["ids"]  # its one row concerns no message
        for name in ("positions", "ready"):  # positions are internal, and the due times are in the records
            columns.pop(name, None)
    columns.pop("again", None)  # internal to streams
    if isinstance(event, Leased):
        columns["tokens"] = np.arange(offset, offset + len(event.ids))
        columns["attempts"] = np.frombuffer(event.attempts, dtype=np.uint8)
        counts = [g.count for g in event.grants]
        columns["deadlines"] = np.repeat([g.deadline for g in event.grants], counts)
        columns["holders"] = [g.holder for g in event.grants for _ in range(g.count)]
        del columns["grants"]
    if isinstance(event, Expired):
        columns["ids"] = np.concatenate((event.ids, event.leased))
        columns["returned"] = np.arange(len(columns["ids"])) < len(event.ids)
        del columns["leased"], columns["positions"], columns["delayed"]
    return columns, None


def _prepared_columns(unit: Unit, event: BatchPrepared) -> tuple[dict[str, Any], list[bytes] | None]:
    """Return one row whose `messages` are columns; a later batch_committed names the ids that became visible."""
    messages: dict[str, Any] = {"ids": event.index[:0]}
    payloads: list[bytes] | None = []
    if event.count:
        messages, payloads = _message_columns(unit, event)
    columns = {name: getattr(event, name) for name in ("batch_id", "part", "at", "count")}
    return {**columns, "topics": tuple(event.topics), "messages": messages}, payloads


def _message_columns(unit: Unit, event: Enqueued | Moved | BatchPrepared) -> tuple[dict[str, Any], list[bytes]]:
    ref = unit.blocks[event.block]
    rows = unit.rows(ref)[event.start : event.start + event.count]
    columns: dict[str, Any] = {name: np.array(rows[name]) for name in _MESSAGE_COLUMNS}
    columns["ids"] = columns.pop("id")
    data = unit.data
    base = ref.offset + (event.start + np.arange(event.count)) * rows.dtype.itemsize
    payload_at = (base + rows["payload_at"]).tolist()
    small_at = (base + rows["small_at"]).tolist()
    lengths, small_lengths = rows["payload_len"].tolist(), rows["small_len"].tolist()
    columns["smalls"] = [bytes(data[a : a + n]) for a, n in zip(small_at, small_lengths, strict=True)]
    if isinstance(event, Enqueued):
        columns["seq"] = event.seq
    return columns, [bytes(data[a : a + n]) for a, n in zip(payload_at, lengths, strict=True)]


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
        runner.loaded.journal.release(hold.name)
        return
    with contextlib.suppress(OSError):  # a full disk can still be read
        runner.loaded.journal.hold(hold.name, hold.segment, runner.wall_ms() + round(hold.seconds * 1000))


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
        raise BadRequest(f"{len(positions)} records are more than one read returns; request fewer")


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


async def bounds(runner: TopicRunner) -> dict[int, tuple[int, int]]:
    """Return {partition: (start, end)} of the readable log."""
    ends = await runner.call(lambda now: [p.state.offset for p in runner.loaded.topic.partitions])
    if runner.loaded.topic.config.fsync != "commit":  # an end is durable, even where answers are not
        await runner.loaded.committer.between_commits(runner.loaded.journal.sync)
    starts = await runner.io.run(runner.loaded.journal.reader().first_offsets, len(ends))
    pairs = zip(starts, ends, strict=True)
    return {p: (end if start is None else min(start, end), end) for p, (start, end) in enumerate(pairs)}


@handles(log.GetOffsets)
async def get_offsets(broker: TopicKeeper, command: log.GetOffsets, context: Context) -> log.Offsets:
    found = await bounds(broker.runner(command.topic))
    return log.Offsets([start for start, _ in found.values()], [end for _, end in found.values()])


@feeds(log.ReadLog)
async def read_log(broker: TopicKeeper, feed: log.ReadLog, context: Context) -> AsyncIterator[LogFrame]:
    runner = broker.runner(feed.topic)
    count = len(runner.loaded.topic.partitions)
    if feed.partition >= count:
        fail("partition", f"an integer from 0 to {count - 1}", feed.partition)
    reader = runner.loaded.journal.reader()
    if feed.start:  # 0 means from wherever the log starts
        first = (await runner.io.run(reader.first_offsets, feed.partition + 1))[feed.partition]
        if first is not None and feed.start < first:
            raise BadRequest(
                f"offset {feed.start} of partition {feed.partition} was reclaimed; the log starts at {first}"
            )
    found = frames(reader, runner.name, runner.loaded.topic.id_suffix, feed.partition, feed.start, feed.end)
    while True:
        batch = await runner.io.run(_take, found)
        for frame in batch:
            yield frame
        if len(batch) < LOG_FRAMES:
            return


def _take(found: Iterator[LogFrame]) -> list[LogFrame]:
    batch: list[LogFrame] = []
    for frame in found:
        batch.append(frame)
        if len(batch) == LOG_FRAMES:
            break
    return batch


@handles(log.GetLogIndex)
async def get_log_index(broker: TopicKeeper, command: log.GetLogIndex, context: Context) -> log.LogIndex:
    runner = broker.runner(command.topic)
    ends = await bounds(runner)
    found = await runner.io.run(index_after, runner, command.after_unit, ends, command.hold)
    return log.LogIndex(
        found.incarnation,
        found.first_segment,
        found.last_unit,
        found.segment_bytes,
        found.starts,
        found.ends,
        found.marks.tobytes(),
        memoryview(np.ascontiguousarray(found.mark_segments, dtype=np.int64).data).cast("B"),
    )


@feeds(log.ReadUnits)
async def read_units(broker: TopicKeeper, feed: log.ReadUnits, context: Context) -> AsyncIterator[log.RawUnits]:
    runner = broker.runner(feed.topic)
    found = units_between(runner.loaded.journal.reader(), feed.start_unit, feed.end_unit)
    while units := await runner.io.run(take_units, found):
        yield log.RawUnits([log.RawUnit(u.segment, u.offset, bytes(u.data)) for u in units])


@feeds(log.PinState)
async def pin_state(broker: TopicKeeper, feed: log.PinState, context: Context) -> AsyncIterator[log.PinnedState]:
    found = await state_rows.pin(broker.runner(feed.topic), feed.dead)
    yield log.PinnedState(found.incarnation, found.at, found.segment_bytes, found.ends, len(found.rows), found.texts)
    for first in range(0, len(found.rows), PINNED_ROWS):
        yield log.PinnedState(rows=found.rows[first : first + PINNED_ROWS].tobytes())


@handles(log.ReadRecords)
async def read_records(broker: TopicKeeper, command: log.ReadRecords, context: Context) -> log.RecordsRead:
    runner = broker.runner(command.topic)
    if command.positions.nbytes % 8:
        raise BadRequest(f"column positions must have 8 bytes for each record, got {command.positions.nbytes}")
    positions = np.frombuffer(command.positions, dtype="<i8")
    check_positions(runner, command.incarnation, positions)
    found = await runner.load(positions)
    bad = np.array(sorted(found.bad), dtype=np.int64)
    return log.RecordsRead(
        found.rows.tobytes(), b"".join(found.smalls), b"".join(found.payloads), memoryview(bad.data).cast("B")
    )
