"""The durable log as columns, for `offsets` and `read_log`. Reads only durable units. Blocking; runs in I/O threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

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
from heapline.journal.reader import LogReader
from heapline.journal.unit import Frame, Unit

_MESSAGE_COLUMNS = (
    "id", "priority", "enqueued_at", "due", "ttl_ms", "max_retries", "flags", "key_len", "payload_len",
    "fairness_len", "turn",
)  # fmt: skip
#: Columns that some kinds of events have only sometimes. Other fields may be None, which then has a meaning.
_OPTIONAL = frozenset(("ids", "positions", "keys", "ready", "count"))


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
        topic=topic, partition=frame.partition, unit=unit.number, offset=frame.first_offset,
        row_count=frame.row_count, time_ms=unit.time, wall_ms=unit.wall, events=events, id_suffix=id_suffix,
    )  # fmt: skip


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
        columns["parts"] = tuple(event.parts)
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


def first_offsets(reader: LogReader, partitions: int) -> list[int | None]:
    """Return the first readable offset of each partition, or None if it has none."""
    starts: list[int | None] = [None] * partitions
    missing = set(range(partitions))
    for segment in reader.segments():
        index = reader.index(segment)
        for partition in sorted(missing):
            entries = index.of(partition)
            if len(entries):
                starts[partition] = int(entries["first_offset"][0])
                missing.discard(partition)
        if not missing:
            break
    raised = reader.log_start()
    return [start if start is None else max(start, raised.get(p, 0)) for p, start in enumerate(starts)]
