"""Handlers of the durable log: offsets, frames, raw units, point-in-time states, records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import numpy as np

from heapline.contract import log
from heapline.contract.check import fail
from heapline.contract.context import Context
from heapline.contract.errors import BadRequest
from heapline.contract.message import LogFrame
from heapline.engine import raw_log, state_rows
from heapline.engine.handlers.table import feeds, handles
from heapline.engine.log import first_offsets, frames

if TYPE_CHECKING:
    from heapline.engine.broker import EmbeddedBroker
    from heapline.engine.runner import TopicRunner

LOG_FRAMES = 16  # frames decoded per job in a thread
PINNED_ROWS = 16384  # rows per item of a pinned state


async def bounds(runner: TopicRunner) -> dict[int, tuple[int, int]]:
    """Return {partition: (start, end)} of the readable log."""
    ends = await runner.call(lambda now: [p.offset for p in runner.loaded.topic.partitions])
    if runner.loaded.topic.config.fsync != "commit":  # an end is durable, even where answers are not
        await runner.loaded.committer.between_commits(runner.loaded.journal.sync)
    starts = await runner.io.run(first_offsets, runner.loaded.journal.reader(), len(ends))
    pairs = zip(starts, ends, strict=True)
    return {p: (end if start is None else min(start, end), end) for p, (start, end) in enumerate(pairs)}


@handles(log.GetOffsets)
async def get_offsets(broker: EmbeddedBroker, command: log.GetOffsets, context: Context) -> log.Offsets:
    found = await bounds(broker.runner(command.topic))
    return log.Offsets([start for start, _ in found.values()], [end for _, end in found.values()])


@feeds(log.ReadLog)
async def read_log(broker: EmbeddedBroker, feed: log.ReadLog, context: Context) -> AsyncIterator[LogFrame]:
    runner = broker.runner(feed.topic)
    count = len(runner.loaded.topic.partitions)
    if feed.partition >= count:
        fail("partition", f"an integer from 0 to {count - 1}", feed.partition)
    reader = runner.loaded.journal.reader()
    if feed.start:  # 0 means from wherever the log starts
        first = (await runner.io.run(first_offsets, reader, feed.partition + 1))[feed.partition]
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
async def get_log_index(broker: EmbeddedBroker, command: log.GetLogIndex, context: Context) -> log.LogIndex:
    runner = broker.runner(command.topic)
    ends = await bounds(runner)
    found = await runner.io.run(raw_log.index_after, runner, command.after_unit, ends, command.hold)
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
async def read_units(broker: EmbeddedBroker, feed: log.ReadUnits, context: Context) -> AsyncIterator[log.RawUnits]:
    runner = broker.runner(feed.topic)
    found = raw_log.units_between(runner.loaded.journal.reader(), feed.start_unit, feed.end_unit)
    while units := await runner.io.run(raw_log.take_units, found):
        yield log.RawUnits([log.RawUnit(u.segment, u.offset, bytes(u.data)) for u in units])


@feeds(log.PinState)
async def pin_state(broker: EmbeddedBroker, feed: log.PinState, context: Context) -> AsyncIterator[log.PinnedState]:
    found = await state_rows.pin(broker.runner(feed.topic), feed.dead)
    yield log.PinnedState(found.incarnation, found.at, found.segment_bytes, found.ends, len(found.rows), found.texts)
    for first in range(0, len(found.rows), PINNED_ROWS):
        yield log.PinnedState(rows=found.rows[first : first + PINNED_ROWS].tobytes())


@handles(log.ReadRecords)
async def read_records(broker: EmbeddedBroker, command: log.ReadRecords, context: Context) -> log.RecordsRead:
    runner = broker.runner(command.topic)
    if command.positions.nbytes % 8:
        raise BadRequest(f"column positions must have 8 bytes for each record, got {command.positions.nbytes}")
    positions = np.frombuffer(command.positions, dtype="<i8")
    raw_log.check_positions(runner, command.incarnation, positions)
    found = await runner.load(positions)
    bad = np.array(sorted(found.bad), dtype=np.int64)
    return log.RecordsRead(
        found.rows.tobytes(), b"".join(found.smalls), b"".join(found.payloads), memoryview(bad.data).cast("B")
    )
