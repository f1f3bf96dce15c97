"""Convert stream rows to messages for a topic: fields that they keep, fields that are replaced, and origin headers."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np

from heapline.contract.config import TopicConfig
from heapline.contract.ids import to_ulid
from heapline.contract.message import Outgoing, from_ms
from heapline.core.record import DEFAULT_RETRIES
from heapline.engine.replays.portions import Portion, Rows
from heapline.engine.replays.replay_request import Change

#: Headers of a replayed message: the replay's name, `topic/partition/offset` of its row, and the id that it had.
REPLAY, REPLAYED_FROM, REPLAYED_ID = "heapline-replay", "heapline-replayed-from", "heapline-replayed-id"
OVERHEAD_BYTES = 640  # upper bound per message, without payload and small parts


def outgoing(portion: Portion, name: str, change: Change, target: TopicConfig, first_seq: int) -> list[Outgoing]:
    """Return numbered messages in the order of the rows. Does not read the clock, so the call can be repeated."""
    messages: list[Outgoing] = []
    for rows in portion.rows:
        messages += _of_rows(rows, name, change, target, first_seq + len(messages))
    return messages


def _of_rows(rows: Rows, name: str, change: Change, target: TopicConfig, first_seq: int) -> list[Outgoing]:
    batch, count = rows.batch, len(rows.batch)
    none: list[Any] = [None] * count
    fair = batch.fairness_keys if target.fairness == "keys" else None
    dues: list[int] = rows.dues.tolist() if change.keep_due and rows.dues is not None else [0] * count
    columns = zip(
        batch.offsets.tolist(), batch.ids.tolist(), batch.payloads, batch.priorities.tolist(), batch.keys or none,
        batch.headers or none, fair or none, rows.records["ttl_ms"].tolist(), rows.records["max_retries"].tolist(),
        dues, strict=True,
    )  # fmt: skip
    return [
        Outgoing(
            payload, priority if change.priority is None else change.priority, key, change.delay,
            _moment(due or change.deliver_at_ms), {
                **(headers or {}), REPLAY: name, REPLAYED_FROM: f"{batch.topic}/{batch.partition}/{offset}",
                REPLAYED_ID: to_ulid(id, batch.id_suffix),
            }, ttl_ms / 1000 if ttl_ms else None, None if retries == DEFAULT_RETRIES else retries,
            seq=first_seq + i, fairness_key=fair_key,
        )
        for i, (offset, id, payload, priority, key, headers, fair_key, ttl_ms, retries, due) in enumerate(columns)
    ]  # fmt: skip


def _moment(ms: int | None) -> datetime | None:
    return from_ms(ms) if ms else None


def rows_within(portion: Portion, bytes_max: int) -> int:
    """Return how many of the first rows fit into `bytes_max`, at least one."""
    sizes = [rows.records["payload_len"].astype(np.int64) + rows.records["small_len"] for rows in portion.rows]
    total = np.cumsum(np.concatenate(sizes) + OVERHEAD_BYTES)
    return max(1, int(np.searchsorted(total, bytes_max, side="right")))
