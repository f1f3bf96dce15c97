"""Replays on the wire: rows of the stream as columns, and what is told of replays into a topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from heapline.streams import ReplayFilter, ReplayInfo, StreamBatch
from heapline.wire.codes import without_paths
from heapline.wire.columns import cut, headers_in, ints, pack_headers, read_ints, sizes_of, texts_in
from heapline.wire.schema import pb
from heapline.wire.shapes import given


def pack_batch(batch: StreamBatch) -> Any:
    payloads = list(batch.payloads)
    columns = pb.ReplayedColumns(
        partition=batch.partition, count=len(batch), offsets=ints(batch.offsets), ids=ints(batch.ids),
        priorities=ints(batch.priorities), payload_sizes=sizes_of(payloads), payloads=b"".join(payloads),
        enqueued_ms=ints(batch.enqueued_ms),
    )  # fmt: skip
    if batch.keys is not None and any(batch.keys):
        columns.keys.extend([key or "" for key in batch.keys])
    if batch.fairness_keys is not None and any(batch.fairness_keys):
        columns.fairness_keys.extend([key or "" for key in batch.fairness_keys])
    if batch.headers is not None and any(batch.headers):
        columns.headers.extend(pack_headers(batch.headers))
    return columns


def unpack_batch(topic: str, columns: Any) -> StreamBatch:
    count = columns.count
    return StreamBatch(
        None, topic, columns.partition, read_ints(columns.offsets), read_ints(columns.ids),
        cut(columns.payloads, columns.payload_sizes, count), read_ints(columns.priorities),
        np.ones(count, dtype=np.int64), read_ints(columns.enqueued_ms), texts_in(columns.keys, "keys", count),
        headers_in(columns.headers, count), texts_in(columns.fairness_keys, "fairness_keys", count),
    )  # fmt: skip


def pack_filter(where: ReplayFilter | None) -> Any:
    if where is None:
        return None
    return pb.ReplayFilter(
        priority_min=where.priority_min, priority_max=where.priority_max, key=where.key, headers=where.headers
    )


def unpack_filter(request: Any) -> ReplayFilter | None:
    if not request.HasField("where"):
        return None
    where = request.where
    return ReplayFilter(
        priority_min=given(where, "priority_min"), priority_max=given(where, "priority_max"), key=given(where, "key"),
        headers=dict(where.headers),
    )  # fmt: skip


def tell_replay(info: ReplayInfo) -> ReplayInfo:
    """What others may know: where the server keeps its files is not their business."""
    return info if info.error is None else msgspec.structs.replace(info, error=without_paths(info.error))


def pack_replay(info: ReplayInfo) -> Any:
    return pb.ReplayTold(replay_json=msgspec.json.encode(tell_replay(info)).decode())


def unpack_replay(told: Any) -> ReplayInfo:
    return msgspec.json.decode(told.replay_json, type=ReplayInfo)


def pack_replays(infos: Sequence[ReplayInfo]) -> Any:
    return pb.ReplaysTold(replays_json=msgspec.json.encode([tell_replay(info) for info in infos]).decode())


def unpack_replays(told: Any) -> list[ReplayInfo]:
    return msgspec.json.decode(told.replays_json, type=list[ReplayInfo])
