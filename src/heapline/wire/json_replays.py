"""Replays as JSON: what may be asked, and what is told of rows and of replays into a topic.

A place in the log is "earliest", "latest", an offset of each partition, offsets by partition, or a moment.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from heapline.errors import BadRequest
from heapline.model import EPOCH, from_ms
from heapline.streams import Place, ReplayFilter, ReplayInfo, StreamBatch
from heapline.ulid import to_ulids
from heapline.wire.json_requests import AS, Ask, Seconds
from heapline.wire.json_shapes import Int64, Moment, Natural, OneTold, PayloadAs, Shape, Text, Topic, shown

_MS = timedelta(milliseconds=1)
_PLACE = '"earliest", "latest", a moment, an offset, or offsets by partition'
PlaceAsk = Annotated[str, Meta(max_length=64)] | Natural | dict[str, Natural]
Positions = dict[str, Natural]
ReplayName = Annotated[str, Meta(min_length=1, max_length=128, examples=["monday-again"])]
Partitions = Annotated[list[Natural], Meta(max_length=1024)]
Rate = Annotated[float, Meta(gt=0, le=1e6, description="messages a second")]


class ReplayWhere(Ask, kw_only=True):
    """Which messages; what is not given matches all."""

    priority_min: Int64 | None = None
    priority_max: Int64 | None = None
    key: Text | None = None
    headers: Annotated[dict[str, str] | None, Meta(description="all of these, with these values")] = None

    def filter(self) -> ReplayFilter:
        return ReplayFilter(
            priority_min=self.priority_min, priority_max=self.priority_max, key=self.key, headers=self.headers or {}
        )


class RowsAsk(Ask, kw_only=True):
    """Which rows of which stream."""

    topic: Topic
    start: Annotated[PlaceAsk, Meta(description=_PLACE, examples=["earliest", "2030-01-31T12:00:00Z"])] = "earliest"
    end: Annotated[PlaceAsk | None, Meta(description=f"{_PLACE}; without it, what is durable now")] = None
    partitions: Annotated[Partitions | None, Meta(description="without it, all")] = None
    mode: Annotated[Literal["all", "fast"], Meta(description="fast: last states, of what is not gone")] = "all"
    where: ReplayWhere | None = None
    rate: Rate | None = None

    def rows(self) -> tuple[Any, ...]:
        """Start, end, partitions, mode, filter and rate."""
        end = None if self.end is None else read_place(self.end)
        where = None if self.where is None else self.where.filter()
        return read_place(self.start), end, self.partitions, self.mode, where, self.rate


class ReplayReadAsk(RowsAsk, kw_only=True):
    checkpoint: Annotated[ReplayName | None, Meta(description="go on where replays:keep said last")] = None
    payload_as: Annotated[PayloadAs, AS] = "base64"


class KeepReplayAsk(Ask, kw_only=True):
    topic: Topic
    checkpoint: ReplayName
    positions: Annotated[Positions, Meta(description="by partition: all below is done", max_length=1024)]


class StartReplayAsk(RowsAsk, kw_only=True):
    name: ReplayName
    into: Annotated[Topic | None, Meta(description="without it, the same heap")] = None
    priority: Annotated[Int64 | None, Meta(description="instead of their own")] = None
    delay: Annotated[Seconds | None, Meta(description="one of these three, or none: due at once")] = None
    deliver_at: Moment | None = None
    keep_due: Annotated[bool, Meta(description="fast: what waits for its time waits for it there too")] = False


class StreamRowTold(OneTold, kw_only=True):
    """A message at the place where it fell due."""

    partition: Natural
    offset: Natural
    priority: Int64
    enqueued_at: Moment
    key: str | None = None
    fairness_key: str | None = None
    headers: dict[str, str] | None = None


class ReplayStepTold(Shape, kw_only=True):
    """Some rows in order. The first step has none."""

    topic: Topic
    rows: list[StreamRowTold]
    positions: Annotated[Positions, Meta(description="by partition: where the replay stands after these rows")]
    ends: Annotated[Positions, Meta(description="by partition: where it ends")]


class ReplaysTold(Shape, kw_only=True):
    replays: list[ReplayInfo]


# -- both ways ---------------------------------------------------------------------------------------------------------


def tell_place(place: Any) -> Any:
    if isinstance(place, datetime):
        return place.isoformat()
    return {str(p): offset for p, offset in place.items()} if isinstance(place, dict) else place


def read_place(place: Any) -> Place:
    if isinstance(place, dict):
        return read_positions(place)
    if isinstance(place, str) and place not in ("earliest", "latest"):
        try:
            return msgspec.convert(place, datetime)
        except msgspec.ValidationError:
            raise BadRequest(f"{place!r} is no place in the log: give {_PLACE}") from None
    found: Place = place
    return found


def read_positions(positions: dict[str, int]) -> dict[int, int]:
    for partition in positions:
        if not (partition.isascii() and partition.isdigit() and len(partition) < 10):
            raise BadRequest(f"{partition!r} is no partition: they are numbers, in digits")
    return {int(partition): offset for partition, offset in positions.items()}


def tell_batch(batch: StreamBatch, wanted: PayloadAs) -> list[StreamRowTold]:
    ids, none = batch.ids.tolist(), [None] * len(batch)
    rows = zip(
        to_ulids(ids), ids, batch.offsets.tolist(), batch.payloads, batch.priorities.tolist(),
        batch.enqueued_ms.tolist(), batch.keys or none, batch.fairness_keys or none, batch.headers or none, strict=True,
    )  # fmt: skip
    return [
        StreamRowTold(
            message_id=ulid, id=str(id), partition=batch.partition, offset=offset, priority=priority,
            enqueued_at=from_ms(enqueued_ms), key=key, fairness_key=fairness_key, headers=headers,
            **shown(payload, wanted),
        )
        for ulid, id, offset, payload, priority, enqueued_ms, key, fairness_key, headers in rows
    ]  # fmt: skip


def read_batches(topic: str, rows: list[StreamRowTold]) -> list[StreamBatch]:
    """Neighbours of one partition become a batch again."""
    runs: list[list[StreamRowTold]] = []
    for row in rows:
        if runs and runs[-1][0].partition == row.partition:
            runs[-1].append(row)
        else:
            runs.append([row])
    return [_read_run(topic, run) for run in runs]


def _read_run(topic: str, rows: list[StreamRowTold]) -> StreamBatch:
    def numbers(values: list[int]) -> Any:
        return np.array(values, dtype=np.int64)

    def used(values: list[Any]) -> list[Any] | None:
        return values if any(value is not None for value in values) else None

    return StreamBatch(
        None, topic, rows[0].partition, numbers([row.offset for row in rows]), numbers([int(row.id) for row in rows]),
        [row.payload or b"" for row in rows], numbers([row.priority for row in rows]), numbers([1] * len(rows)),
        numbers([(row.enqueued_at - EPOCH) // _MS for row in rows]), used([row.key for row in rows]),
        used([row.headers for row in rows]), used([row.fairness_key for row in rows]),
    )  # fmt: skip
