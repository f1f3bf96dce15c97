"""Enqueue calls: their messages, their producer, and how much of a unit they use.

This module decides nothing; `admission.py` handles these calls turn by turn.
"""

from __future__ import annotations

from asyncio import Future
from typing import Any, NamedTuple

from heapline.contract.config import TopicConfig
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from heapline.core.record import ROW
from heapline.engine.columns import Columns, join

BATCH_BYTES_MAX = 15 << 20  # capacity of one unit
BYTES_PER_PARTITION = 768  # upper bound of what a call's share in one partition adds to its unit
ROW_BYTES = ROW.itemsize
EVENT_BYTES_PER_ROW = 64  # upper bound of what one row adds to an event: sequences, hashes, fingerprints


class Identity(NamedTuple):
    """The producer that numbered the messages of a call."""

    producer_id: str
    epoch: int
    answered_below: int


class EnqueueCall:
    """One `Enqueue`, whose fields are those of a message, or the columns of an `EnqueueBatch`."""

    __slots__ = ("atomic", "columns", "count", "future", "identity", "is_plain", "message", "nbytes", "wants_ids")

    def __init__(
        self, future: Future[Any], *, message: Any = None, columns: Columns | None = None,
        atomic: bool = True, identity: Identity | None = None, wants_ids: bool = False,
    ) -> None:  # fmt: skip
        # For a plain atomic batch: answer with a list of ids and no results; for a prepared one, with nothing.
        self.wants_ids = wants_ids
        self.future = future
        self.message = message
        self.columns = columns
        self.atomic = atomic
        self.identity = identity
        if columns is not None:
            self.count = columns.count
            self.is_plain = identity is None and columns.tokens is None
            self.nbytes = sum(map(len, columns.payloads)) + columns.count * 2 * ROW_BYTES
            if columns.keys or columns.headers or columns.fairness:
                self.nbytes += sum(map(len, columns.small_parts()[0] or ()))
        else:
            assert message is not None
            self.count = 1
            self.is_plain = identity is None and message.idempotency_key is None
            self.nbytes = len(message.payload) + 2 * ROW_BYTES
            if message.key or message.headers or message.fairness_key:
                self.nbytes += len(Columns([message]).small_parts()[0][0])  # type: ignore[index]
        if not self.is_plain:
            self.nbytes += self.count * EVENT_BYTES_PER_ROW


def gather(calls: list[EnqueueCall]) -> tuple[Columns, list[tuple[EnqueueCall, int, int]]]:
    """Return all messages of these calls as columns, and the rows of each call."""
    parts: list[Columns] = []
    singles: list[Outgoing] = []
    spans: list[tuple[EnqueueCall, int, int]] = []
    at = 0
    for call in calls:
        if call.message is not None:
            singles.append(call.message)
        else:
            if singles:
                parts.append(Columns(singles))
                singles = []
            parts.append(call.columns)  # type: ignore[arg-type]
        spans.append((call, at, at + call.count))
        at += call.count
    if singles:
        parts.append(Columns(singles))
    return join(parts), spans


def batch_bytes_max(config: TopicConfig, count: int) -> int:
    """Return the size of the largest batch of `count` messages that fits into one unit of one segment."""
    spread = min(count, config.partitions) * BYTES_PER_PARTITION
    return min(BATCH_BYTES_MAX, config.segment_bytes - (64 << 10)) - spread


def check_batch_bytes(call: EnqueueCall, config: TopicConfig) -> None:
    limit = batch_bytes_max(config, call.count)
    if call.nbytes > limit:
        raise BadRequest(
            f"an atomic batch of {call.nbytes} bytes is over the {limit} of one write; "
            "split it, or enqueue with atomic=False"
        )
