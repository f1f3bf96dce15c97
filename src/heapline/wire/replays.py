"""Replays on the wire: what is asked of them and told about them. Their rows are those of stream_rows.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from heapline.streams import ReplayFilter, ReplayInfo
from heapline.wire.codes import without_paths
from heapline.wire.schema import pb
from heapline.wire.shapes import given


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
