"""The views `backlog` and `dlq`: planned as one moment of the queue, which every task, retry and later action reads.

When it is planned, the driver is told of every message that waits (or lies dead) at one moment: its id, its state and
where its record lies. That goes into the pieces, some 20 bytes a message, so nothing that happens later changes what is
read: not a lease, an ack, a move or a restart. Tasks read the records by their positions.

The journal is held for them from the first record on, as for the other views: by the plan for `leaseSeconds`, by a task
itself from when it runs. A task that comes after that, when a record has been reclaimed, fails and says so; it never
shows fewer rows.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.core.ids import partition_of
from heapline.core.position import PositionLayout, size_bound
from heapline.engine.state_rows import STATE, StateRows
from heapline.errors import RecordCorrupt
from heapline.journal.records import Records
from heapline.spark.log import DataLost, Source, TopicLog, TopicRef
from heapline.spark.marks import Place
from heapline.spark.options import ReadOptions
from heapline.spark.positions import Subscription
from heapline.spark.state_batches import Moment, StateBatches
from heapline.ulid import to_ulid

BATCH_ROWS, BATCH_BYTES = 8192, 8 << 20
PIECE_ROWS = 1 << 17
DLQ = "dlq"
Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class StateWork:
    """What one task reads."""

    topic: TopicRef
    moment: Moment
    packed: bytes
    segment_bytes: int
    hold_from: float


def pack(rows: Rows) -> bytes:
    """Column by column: most of them hold small numbers or zeros."""
    return zlib.compress(rows.view(np.uint8).reshape(len(rows), STATE.itemsize).T.tobytes(), 1)


def unpack(packed: bytes) -> Rows:
    columns = np.frombuffer(zlib.decompress(packed), dtype=np.uint8).reshape(STATE.itemsize, -1)
    return np.ascontiguousarray(columns.T).view(STATE).reshape(-1)


def plan_state(source: Source, options: ReadOptions) -> list[StateWork]:
    subscription = Subscription(source, options.which)
    work: list[StateWork] = []
    try:
        subscription.find()
        subscription.hold_all()
        for topic, log in subscription.logs.items():
            wanted = set(subscription.only(topic, log.ends()))
            found = _pieces(log, log.pin(options.view == DLQ), wanted, options)
            work += found
            log.close(let_go=not found)
    except BaseException:
        subscription.close()
        raise
    return work


def _pieces(log: TopicLog, pinned: StateRows, wanted: set[int], options: ReadOptions) -> list[StateWork]:
    if pinned.incarnation != log.ref.incarnation:
        raise DataLost(f"topic {log.ref.topic!r} was deleted and made again just now: load it again")
    rows = pinned.rows[np.isin(partition_of(pinned.rows["id"]), list(wanted))]
    if not len(rows):
        return []
    first = PositionLayout(pinned.segment_bytes).segment(int(rows["position"][0]))
    hold_from = log.hold(Place(0, first, 0))
    moment = Moment(log.ref.topic, pinned.at, pinned.ends, pinned.texts)
    nbytes = int(size_bound(rows["position"]).sum())
    count = max(options.pieces_min, -(-len(rows) // PIECE_ROWS), -(-nbytes // (2 * options.piece_bytes)))
    parts = [part for part in np.array_split(rows, min(count, len(rows))) if len(part)]
    return [StateWork(log.ref, moment, pack(part), pinned.segment_bytes, hold_from) for part in parts]


def read_state(source: Source, work: StateWork, options: ReadOptions) -> Iterator[Any]:
    """The Arrow batches of a piece."""
    into = StateBatches(work.moment, options.columns)
    rows, layout = unpack(work.packed), PositionLayout(work.segment_bytes)
    if not into.needs_records:
        for first in range(0, len(rows), BATCH_ROWS):
            yield into.make(rows[first : first + BATCH_ROWS], None)
        return
    log = source.open(work.topic)
    try:
        for part in _batches(rows):
            if time.time() >= work.hold_from:
                log.hold(Place(0, layout.segment(int(part["position"][0])), 0))
            records = log.records(part["position"].copy(), work.segment_bytes)
            _check(log, layout, part, records)
            yield into.make(part, records)
    finally:
        log.close()


def _batches(rows: Rows) -> Iterator[Rows]:
    sizes = np.cumsum(size_bound(rows["position"]))
    first = 0
    while first < len(rows):
        before = int(sizes[first - 1]) if first else 0
        last = int(np.searchsorted(sizes, before + BATCH_BYTES, side="right"))
        last = max(first + 1, min(last, first + BATCH_ROWS))
        yield rows[first:last]
        first = last


def _check(log: TopicLog, layout: PositionLayout, part: Rows, records: Records) -> None:
    """Every record must be there, and be the one of its message."""
    wrong = np.flatnonzero(records.rows["id"] != part["id"])
    if not len(wrong):
        return
    row = part[wrong[0]]
    position, message = int(row["position"]), to_ulid(int(row["id"]))
    segment = layout.segment(position)
    if segment < log.first_segment():
        raise DataLost(
            f"the records of {len(wrong)} messages of topic {log.ref.topic!r} were reclaimed since this was planned: "
            "load it again, or hold it longer with leaseSeconds"
        )
    raise RecordCorrupt(log.ref.topic, message, f"segment {segment}", layout.byte_offset(position))
