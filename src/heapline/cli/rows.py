"""`journal dump`: the events of a journal, one message in one event at a time, as plain values and as lines to read.

Which columns an event has is decided in heapline.core.events; here they are only taken apart by row.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from heapline.cli.places import Place
from heapline.cli.present import moment
from heapline.cli.reading import held_for_reading, units_of
from heapline.engine.delivery import split_small
from heapline.engine.log import decode_frame
from heapline.journal import Disk, LogReader, Unit
from heapline.model import LogEvent, LogFrame
from heapline.ulid import to_ulid

Row = dict[str, Any]
#: Columns by row, and what one row's value is called.
_ONE = {
    "ids": "id", "dues": "due", "deadlines": "deadline", "holders": "holder", "tokens": "token", "keys": "heap_key",
    "positions": "position", "priorities": "priority",
}  # fmt: skip
_MOMENTS = {"due", "deadline", "enqueued_at", "at", "until", "expires"}
_UNSAID_WHEN_ZERO = {"due", "expires", "ttl_ms", "flags", "delayed", "turn"}
_INTERNAL = {"position", "heap_key", "seq", "token", "limit", "flags"}
_FIRST = ("topic", "partition", "offset", "unit", "time_ms", "kind", "id", "message_id")


def rows(
    disk: Disk, place: Place, *, running: bool, partition: int | None, start: int, end: int | None,
    kinds: frozenset[str], payloads: bool,
) -> Iterator[Row]:  # fmt: skip
    """Rows with offsets in [start, end), in the order in which they happened."""
    with held_for_reading(disk, place.folder, running):
        for unit in _units(disk, place, running, partition, start):
            for frame in unit.frames:
                if partition is not None and frame.partition != partition:
                    continue
                if frame.first_offset + frame.row_count <= start or (end is not None and frame.first_offset >= end):
                    continue
                for row in _of_frame(decode_frame(unit, frame, place.topic), kinds, payloads):
                    if row["offset"] >= start and (end is None or row["offset"] < end):
                        yield row


def _units(disk: Disk, place: Place, running: bool, partition: int | None, start: int) -> Iterator[Unit]:
    if partition is None or not start:
        return units_of(disk, place, running)
    reader = LogReader(disk, place.folder)
    found = reader.locate(partition, offset=start)
    # A closed journal may hold whole units beyond its watermark: opening would count them.
    return reader.read_units(place=found, durable_only=running) if found is not None else units_of(disk, place, running)


def _of_frame(frame: LogFrame, kinds: frozenset[str], payloads: bool) -> Iterator[Row]:
    for event in frame.events:
        if kinds and event.kind not in kinds:
            continue
        for index in range(event.row_count):
            row: Row = {
                "topic": frame.topic, "partition": frame.partition, "offset": event.offset + index,
                "unit": frame.unit, "time_ms": frame.time_ms, "kind": event.kind,
            }  # fmt: skip
            row.update(_facts(event, index))
            if event.payloads is not None and payloads:
                shown = [base64.b64encode(payload).decode("ascii") for payload in event.payloads]
                row |= {"payloads": shown} if event.kind == "batch_prepared" else {"payload": shown[index]}
            yield row


def _facts(event: LogEvent, index: int) -> Row:
    facts: Row = {}
    for column, value in event.columns.items():
        name, cell = _ONE.get(column, column), value
        if isinstance(value, np.ndarray):
            cell = value[index].item()
        elif isinstance(value, list) or (column == "delayed" and isinstance(value, bytes)):
            cell = value[index]
        elif column == "messages":
            name, cell = "ids", value["ids"].tolist()
        elif column == "config":
            cell = msgspec.json.decode(value)
        facts[name] = cell
    if "smalls" in facts:
        lengths = facts.pop("key_len"), facts.pop("fairness_len")
        key, fairness_key, headers = split_small(facts.pop("smalls"), *lengths, facts["flags"])
        if key is not None:
            facts["key"] = key
        if fairness_key is not None:
            facts["fairness_key"] = fairness_key
        if headers:
            facts["headers"] = headers
    if "id" in facts:
        facts["message_id"] = to_ulid(facts["id"])
    return facts


def as_json(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


def as_line(row: Row) -> str:
    """For people: where, when, what, which message, and whatever else is worth a look."""
    head = f"{row['partition']}:{row['offset']:<8} {moment(row['time_ms'])} {row['kind']:<15}"
    parts = [row.get("message_id", "")]
    for name, value in row.items():
        unsaid = value is None or name in _FIRST or name in _INTERNAL or (name in _UNSAID_WHEN_ZERO and not value)
        if unsaid or (name == "max_retries" and value == 0xFFFF):
            continue
        if name in _MOMENTS and isinstance(value, int):
            value = moment(value)
        elif isinstance(value, dict):
            value = json.dumps(value, ensure_ascii=False)
        parts.append(f"{name}={value}")
    return f"{head} {' '.join(part for part in parts if part)}".rstrip()
