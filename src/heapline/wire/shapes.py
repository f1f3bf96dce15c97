"""The smaller things that cross the wire: settings, stats, one message, results of enqueues, frames of the log.

Settings and stats go as JSON of the structs in config.py and model.py, which grow with every version; everything that
holds a message's bytes is a protobuf message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from heapline.config import TopicConfig
from heapline.errors import BadRequest
from heapline.model import (
    BatchInfo,
    DlqFilter,
    Enqueued,
    LogEvent,
    LogFrame,
    MessageInfo,
    Outgoing,
    SinkInfo,
    TopicInfo,
    TopicStats,
)  # fmt: skip
from heapline.wire import codes
from heapline.wire.columns import cut, from_us, ints, read_ints, sizes_of, to_us, unpack
from heapline.wire.json_shapes import config_json as config_json
from heapline.wire.json_shapes import read_settings
from heapline.wire.schema import pb

_MOMENTS = ("due_at", "enqueued_at", "expires_at", "ended_at")
_OPTIONAL = ("priority", "holder", "reason", "payload", "key", "fairness_key")

# -- heaps -------------------------------------------------------------------------------------------------------------


def read_config(text: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError as error:
        raise BadRequest(f"config_json is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("config_json is an object of settings")
    return read_settings(fields)


def pack_info(info: TopicInfo) -> Any:
    config = msgspec.json.encode(info.config).decode()
    return pb.HeapInfo(topic=info.name, incarnation=info.incarnation, config_json=config)


def unpack_info(info: Any) -> TopicInfo:
    config = msgspec.json.decode(info.config_json, type=TopicConfig)
    return TopicInfo(name=info.topic, incarnation=info.incarnation, config=config)


def pack_stats(stats: TopicStats) -> Any:
    return pb.HeapStats(
        topic=stats.topic, ready=stats.ready, delayed=stats.delayed, leased=stats.leased, dead=stats.dead,
        paused=stats.paused, stats_json=msgspec.json.encode(stats).decode(),
    )  # fmt: skip


def unpack_stats(stats: Any) -> TopicStats:
    return msgspec.json.decode(stats.stats_json, type=TopicStats)


def pack_batches(batches: list[BatchInfo]) -> Any:
    return pb.BatchInfos(batches_json=msgspec.json.encode(batches).decode())


def unpack_batches(batches: Any) -> list[BatchInfo]:
    return msgspec.json.decode(batches.batches_json, type=list[BatchInfo])


def pack_sinks(sinks: list[SinkInfo]) -> Any:
    return pb.SinkInfos(sinks_json=msgspec.json.encode(sinks).decode())


def unpack_sinks(sinks: Any) -> list[SinkInfo]:
    return msgspec.json.decode(sinks.sinks_json, type=list[SinkInfo])


# -- messages ----------------------------------------------------------------------------------------------------------


def given(message: Any, field: str) -> Any:
    """An optional field's value, or None."""
    return getattr(message, field) if message.HasField(field) else None


def moment(message: Any, field: str) -> datetime | None:
    return from_us(getattr(message, field)) if message.HasField(field) else None


def unpack_item(item: Any) -> Outgoing:
    return Outgoing(
        item.payload, item.priority, given(item, "key"), given(item, "delay"), moment(item, "deliver_at_us"),
        dict(item.headers) or None, given(item, "ttl"), given(item, "max_retries"), given(item, "idempotency_key"),
        given(item, "idempotency_scope"), given(item, "seq"), given(item, "fairness_key"),
    )  # fmt: skip


def pack_item(m: Outgoing) -> Any:
    return pb.Outgoing(
        payload=m.payload, priority=m.priority, key=m.key, delay=m.delay, headers=dict(m.headers or {}), ttl=m.ttl,
        deliver_at_us=None if m.deliver_at is None else to_us(m.deliver_at), max_retries=m.max_retries,
        idempotency_key=m.idempotency_key, idempotency_scope=m.idempotency_scope, seq=m.seq,
        fairness_key=m.fairness_key,
    )  # fmt: skip


def pack_message_info(info: MessageInfo) -> Any:
    fields = {name: value for name in _OPTIONAL if (value := getattr(info, name)) is not None}
    fields |= {f"{name}_us": to_us(at) for name in _MOMENTS if (at := getattr(info, name)) is not None}
    if info.deadline is not None:
        fields["deadline_us"] = to_us(info.deadline)
    return pb.MessageInfo(
        id=info.id, topic=info.topic, partition=info.partition, state=info.state, attempts=info.attempts,
        headers=info.headers, **fields,
    )  # fmt: skip


def unpack_message_info(info: Any) -> MessageInfo:
    fields: dict[str, Any] = {name: given(info, name) for name in _OPTIONAL}
    fields |= {name: moment(info, f"{name}_us") for name in (*_MOMENTS, "deadline")}
    return MessageInfo(
        id=info.id, topic=info.topic, partition=info.partition, state=info.state, attempts=info.attempts,
        headers=dict(info.headers), **fields,
    )  # fmt: skip


def pack_filter(where: DlqFilter | None) -> Any:
    if where is None:
        return None
    return pb.DlqFilter(
        reason=where.reason, priority_min=where.priority_min, priority_max=where.priority_max, key=where.key,
        died_after_us=None if where.died_after is None else to_us(where.died_after),
        died_before_us=None if where.died_before is None else to_us(where.died_before),
    )  # fmt: skip


def unpack_filter(request: Any) -> DlqFilter | None:
    if not request.HasField("where"):
        return None
    where = request.where
    return DlqFilter(
        reason=given(where, "reason"), priority_min=given(where, "priority_min"),
        priority_max=given(where, "priority_max"), died_after=moment(where, "died_after_us"),
        died_before=moment(where, "died_before_us"), key=given(where, "key"),
    )  # fmt: skip


# -- results -----------------------------------------------------------------------------------------------------------


def pack_error(error: Any) -> Any:
    told = codes.describe(error)
    return pb.Error(error=told["error"], facts_json=json.dumps(told["facts"]), text=told["text"])


def unpack_error(error: Any) -> Any:
    return codes.rebuild({"error": error.error, "facts": json.loads(error.facts_json or "{}"), "text": error.text})


def pack_result(result: Enqueued) -> Any:
    error = None if result.error is None else pack_error(result.error)
    return pb.Enqueued(id=result.id, duplicate=result.duplicate, error=error)


def unpack_result(result: Any) -> Enqueued:
    return Enqueued(result.id, result.duplicate, unpack_error(result.error) if result.HasField("error") else None)


def pack_results(results: Sequence[Enqueued]) -> Any:
    answer = pb.EnqueueBatchResponse(ids=ints([r.id for r in results]))
    if any(r.duplicate for r in results):
        answer.duplicates = bytes([r.duplicate for r in results])
    for row, result in enumerate(results):
        if result.error is not None:
            answer.errors.append(pb.RowError(row=row, error=pack_error(result.error)))
    return answer


def unpack_results(answer: Any) -> list[Enqueued]:
    results = list(map(Enqueued, read_ints(answer.ids, "ids").tolist()))
    if answer.duplicates:
        results = [Enqueued(r.id, bool(d)) for r, d in zip(results, answer.duplicates, strict=True)]
    for row in answer.errors:
        results[row.row] = Enqueued(0, error=unpack_error(row.error))
    return results


# -- the log -----------------------------------------------------------------------------------------------------------


def pack_frame(frame: LogFrame) -> Any:
    packed = pb.LogFrame(
        topic=frame.topic, partition=frame.partition, unit=frame.unit, offset=frame.offset, row_count=frame.row_count,
        time_ms=frame.time_ms, wall_ms=frame.wall_ms,
    )  # fmt: skip
    for event in frame.events:
        payloads = event.payloads or []
        packed.events.append(
            pb.LogEvent(
                kind=event.kind, offset=event.offset, row_count=event.row_count,
                columns=[_pack_column(name, value) for name, value in event.columns.items()],
                has_payloads=event.payloads is not None, payload_sizes=sizes_of(payloads), payloads=b"".join(payloads),
            )
        )  # fmt: skip
    return packed


def unpack_frame(frame: Any) -> LogFrame:
    events = [
        LogEvent(
            kind=event.kind, offset=event.offset, row_count=event.row_count,
            columns={column.name: _unpack_column(column) for column in event.columns},
            payloads=cut(event.payloads, event.payload_sizes, len(event.payload_sizes) // 4)
            if event.has_payloads else None,
        )
        for event in frame.events
    ]  # fmt: skip
    return LogFrame(
        topic=frame.topic, partition=frame.partition, unit=frame.unit, offset=frame.offset, row_count=frame.row_count,
        time_ms=frame.time_ms, wall_ms=frame.wall_ms, events=events,
    )  # fmt: skip


def _pack_column(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        columns = [_pack_column(inner, column) for inner, column in value.items()]
        return pb.LogColumn(name=name, dtype="columns", columns=columns)
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"), copy=False)
        return pb.LogColumn(name=name, dtype=little.dtype.str, data=little.tobytes())
    kind = "tuple" if isinstance(value, tuple) else ""
    return pb.LogColumn(name=name, dtype=kind, data=msgspec.msgpack.encode(value, enc_hook=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a log column holds {type(value).__name__}, which the wire cannot carry")


def _unpack_column(column: Any) -> Any:
    if column.dtype == "columns":
        return {inner.name: _unpack_column(inner) for inner in column.columns}
    if column.dtype in ("", "tuple"):
        value = msgspec.msgpack.decode(column.data)
        return tuple(value) if column.dtype else value
    return unpack(column.data, column.dtype, column.name).copy()
