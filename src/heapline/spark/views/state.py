"""The views `backlog` and `dlq`: the state of a queue at one time, which every task, retry and later action reads.

The plan lists every waiting (or dead) message at one time: its id, its state and the position of its record. The list
travels with the tasks, packed to a few bytes per message, so later leases, acks, moves and restarts do not change the
result. Tasks read the records by position, and only if a requested column needs them.

The journal is held from the first record on: by the plan for `leaseSeconds`, and by each task while it runs. If a
record was reclaimed before its task started, the task fails with DataLost; it never returns fewer rows.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heapline.contract.errors import RecordCorrupt
from heapline.contract.ids import to_ulid
from heapline.core.entries import DEAD, DELAYED, LEASED, READY
from heapline.core.ids import partition_of
from heapline.core.record import ROW, PositionLayout, attempts_of, size_bound
from heapline.engine.state_rows import OWN_EXPIRY, OWN_PRIORITY, STATE, StateRows
from heapline.journal.records import Records
from heapline.spark.arrow import I64, chosen, moments, numbers, ulids
from heapline.spark.offsets import Subscription
from heapline.spark.options import ReadOptions
from heapline.spark.schema import DLQ, Column, arrow_schema
from heapline.spark.topic_log import DataLost, Source, TopicLog, TopicRef, UnitPosition
from heapline.spark.views.messages import COLUMNS, Batch, expiry_of
from heapline.spark.views.scan import ScanTask, plan_scan

STATES: list[str | None] = [""] * 4
STATES[READY], STATES[DELAYED], STATES[LEASED], STATES[DEAD] = "ready", "delayed", "leased", "dead"


class StateContext(NamedTuple):
    """Values that all rows of a state share."""

    topic: TopicRef
    at: int  # ms, by the wall clock
    ends: list[int]
    texts: list[str]


class StateBatches:
    def __init__(self, context: StateContext, columns: tuple[Column, ...]) -> None:
        self._context = context
        self._schema = arrow_schema(columns)
        self._makers = [_COLUMNS[column.name] for column in columns]
        self.needs_records = not {column.name for column in columns} <= _FROM_STATE.keys()

    def make(self, state: npt.NDArray[Any], records: Records | None) -> Any:
        batch = _StateBatch(self._context, state, records)
        return pa.RecordBatch.from_arrays([make(batch) for make in self._makers], schema=self._schema)


class _StateBatch(Batch):
    """The rows of a batch: their state, and their records if a column needs them."""

    def __init__(self, context: StateContext, state: npt.NDArray[Any], records: Records | None) -> None:
        self.context, self.state, self.topic = context, state, context.topic.topic
        self.rows = np.zeros(len(state), dtype=ROW) if records is None else records.rows
        self.payloads = [] if records is None else records.payloads
        self.small = np.frombuffer(b"".join([] if records is None else records.smalls), dtype=np.uint8)
        self.small_lengths = self.rows["small_len"].astype(np.int64)
        self.small_starts = np.cumsum(self.small_lengths) - self.small_lengths
        self.partitions: I64 = partition_of(state["id"])

    def _text(self, column: str) -> Any:
        which = self.state[column].astype(np.int64)
        texts: list[str | None] = [*self.context.texts, None]
        return chosen(pa.string(), texts, np.where(which < 0, len(texts) - 1, which))

    def _priority(self) -> Any:
        own = (self.state["own"] & OWN_PRIORITY) != 0
        return numbers(pa.int64(), np.where(own, self.state["priority"], self.rows["priority"]))

    def _expires_at(self) -> Any:
        first, has_ttl = expiry_of(self.rows)
        own = (self.state["own"] & OWN_EXPIRY) != 0
        ends = np.where(own, self.state["expires"], np.where(has_ttl, first, 0))
        return moments(ends, ends != 0)


#: How columns are built from the state alone, without the record.
_FROM_STATE: dict[str, Callable[[Any], Any]] = {
    "topic": COLUMNS["topic"],
    "partition": lambda b: numbers(pa.int32(), b.partitions),
    "message_id": lambda b: ulids(b.state["id"], b.context.topic.id_suffix),
    "id": lambda b: numbers(pa.int64(), b.state["id"]),
    "state": lambda b: chosen(pa.string(), STATES, b.state["state"]),
    "due_at": lambda b: moments(b.state["due"], b.state["state"] == DELAYED),
    "attempts": lambda b: numbers(pa.int32(), attempts_of(b.state["position"])),
    "deadline": lambda b: moments(b.state["deadline"], b.state["state"] == LEASED),
    "holder": lambda b: b._text("holder"),
    "reason": lambda b: b._text("reason"),
    "died_at": lambda b: moments(b.state["died_at"]),
    "as_of": lambda b: moments(np.full(len(b.state), b.context.at)),
    "as_of_offset": lambda b: numbers(pa.int64(), np.array(b.context.ends, dtype=np.int64)[b.partitions]),
}
#: How all columns are built; those of the record as in `messages`.
_COLUMNS = {**COLUMNS, **_FROM_STATE, "priority": _StateBatch._priority, "expires_at": _StateBatch._expires_at}


BATCH_ROWS, BATCH_BYTES = 8192, 8 << 20
PIECE_ROWS = 1 << 17
Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class StateTask:
    """The rows that one task reads."""

    context: StateContext
    packed: bytes
    segment_bytes: int
    hold_from: float


def pack(rows: Rows) -> bytes:
    """Compress rows column by column, because most columns hold small numbers or zeros."""
    return zlib.compress(rows.view(np.uint8).reshape(len(rows), STATE.itemsize).T.tobytes(), 1)


def unpack(packed: bytes) -> Rows:
    columns = np.frombuffer(zlib.decompress(packed), dtype=np.uint8).reshape(STATE.itemsize, -1)
    return np.ascontiguousarray(columns.T).view(STATE).reshape(-1)


def plan_state(source: Source, options: ReadOptions) -> list[StateTask | ScanTask]:
    subscription = Subscription(source, options.selection)
    tasks: list[StateTask | ScanTask] = []
    try:
        subscription.find()
        subscription.hold_all()
        for topic, log in subscription.logs.items():
            if not log.ref.has_journal:
                subscription.only(topic, {0: 0})  # raises if other partitions are selected
                tasks += plan_scan(log.ref, options)
                continue
            wanted = set(subscription.only(topic, log.ends()))
            found = _pieces(log, log.state_rows(options.view == DLQ), wanted, options)
            tasks += found
            log.close(release=not found)
    except BaseException:
        subscription.close()
        raise
    return tasks


def _pieces(log: TopicLog, pinned: StateRows, wanted: set[int], options: ReadOptions) -> list[StateTask]:
    if pinned.incarnation != log.ref.incarnation:
        raise DataLost(f"topic {log.ref.topic!r} was deleted and created again during planning; load it again")
    rows = pinned.rows[np.isin(partition_of(pinned.rows["id"]), list(wanted))]
    if not len(rows):
        return []
    first = PositionLayout(pinned.segment_bytes).segment(int(rows["position"][0]))
    hold_from = log.hold(UnitPosition(0, first, 0))
    context = StateContext(log.ref, pinned.at, pinned.ends, pinned.texts)
    nbytes = int(size_bound(rows["position"]).sum())
    count = max(options.pieces_min, -(-len(rows) // PIECE_ROWS), -(-nbytes // (2 * options.piece_bytes)))
    parts = [part for part in np.array_split(rows, min(count, len(rows))) if len(part)]
    return [StateTask(context, pack(part), pinned.segment_bytes, hold_from) for part in parts]


def read_state(source: Source, task: StateTask, options: ReadOptions) -> Iterator[Any]:
    """Yield the Arrow batches of a task."""
    into = StateBatches(task.context, options.columns)
    rows, layout = unpack(task.packed), PositionLayout(task.segment_bytes)
    if not into.needs_records:
        for first in range(0, len(rows), BATCH_ROWS):
            yield into.make(rows[first : first + BATCH_ROWS], None)
        return
    log = source.open(task.context.topic)
    try:
        for part in _batches(rows):
            if time.time() >= task.hold_from:
                log.hold(UnitPosition(0, layout.segment(int(part["position"][0])), 0))
            records = log.records(part["position"].copy(), task.segment_bytes)
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
    """Raise an error unless every record exists and belongs to its message."""
    wrong = np.flatnonzero(records.rows["id"] != part["id"])
    if not len(wrong):
        return
    row = part[wrong[0]]
    position, message = int(row["position"]), to_ulid(int(row["id"]), log.ref.id_suffix)
    segment = layout.segment(position)
    if segment < log.first_segment():
        raise DataLost(
            f"the records of {len(wrong)} messages of topic {log.ref.topic!r} were reclaimed after the read was "
            "planned; load it again, or increase leaseSeconds"
        )
    raise RecordCorrupt(log.ref.topic, message, f"segment {segment}", layout.byte_offset(position))
