"""The log as JSON: one frame a line, its events in columns.

A column is one value that holds for all rows, or `{"dtype", "values"}` with one each; numbers of 64 bits are digits in
strings, as ids are. Columns within columns, bytes and tuples are marked by what they are, so that a client gets back
what the broker read.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from heapline.model import LogEvent, LogFrame
from heapline.wire.json_shapes import Natural, Shape, Topic

_WIDE = ("i8", "u8")


class EventTold(Shape, kw_only=True):
    kind: Annotated[str, Meta(description="what happened", examples=["enqueued"])]
    offset: Natural
    row_count: Natural
    columns: Annotated[dict[str, Any], Meta(description="by name: one value for all rows, or {dtype, values}")]
    payloads: Annotated[list[bytes] | None, Meta(description="of messages that this event brings, in base64")] = None


class FrameTold(Shape, kw_only=True):
    """The events of one partition in one durable unit."""

    topic: Topic
    partition: Natural
    unit: Natural
    offset: Natural
    row_count: Natural
    time_ms: int
    wall_ms: int
    events: list[EventTold]


def tell_frame(frame: LogFrame) -> FrameTold:
    events = [
        EventTold(
            kind=e.kind, offset=e.offset, row_count=e.row_count, payloads=e.payloads,
            columns={name: _out(value) for name, value in e.columns.items()},
        )
        for e in frame.events
    ]  # fmt: skip
    return FrameTold(
        topic=frame.topic, partition=frame.partition, unit=frame.unit, offset=frame.offset, row_count=frame.row_count,
        time_ms=frame.time_ms, wall_ms=frame.wall_ms, events=events,
    )  # fmt: skip


def read_frame(told: FrameTold) -> LogFrame:
    events = [
        LogEvent(
            kind=e.kind, offset=e.offset, row_count=e.row_count, payloads=e.payloads,
            columns={name: _in(value) for name, value in e.columns.items()},
        )
        for e in told.events
    ]  # fmt: skip
    return LogFrame(
        topic=told.topic, partition=told.partition, unit=told.unit, offset=told.offset, row_count=told.row_count,
        time_ms=told.time_ms, wall_ms=told.wall_ms, events=events,
    )  # fmt: skip


def _out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        values = value.tolist()
        wide = value.dtype.str[1:] in _WIDE
        return {"dtype": value.dtype.str[1:], "values": list(map(str, values)) if wide else values}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {"columns": {name: _out(inner) for name, inner in value.items()}}
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"tuple": [_out(inner) for inner in value]}
    if isinstance(value, list):
        return [_out(inner) for inner in value]
    return msgspec.to_builtins(value)


def _in(value: Any) -> Any:
    if isinstance(value, list):
        return [_in(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        values = map(int, value["values"]) if value["dtype"] in _WIDE else value["values"]
        return np.array(list(values), dtype=value["dtype"])
    if "columns" in value:
        return {name: _in(inner) for name, inner in value["columns"].items()}
    if "base64" in value:
        return base64.b64decode(value["base64"])
    return tuple(_in(inner) for inner in value["tuple"])
