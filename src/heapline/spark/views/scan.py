"""The views `backlog` and `dlq` of a broker that has no journal: messages in pages of ids, as they are when read.

The plan divides the ids of the messages into ranges, one per task. A task pages through its range, so it holds one page
at a time. Messages move, arrive and leave meanwhile: `as_of` is the time of a row's page, and a repeated read may
differ. A message that is there from the planning to the end of the read is returned exactly once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa

from heapline.contract.message import MessageInfo, from_ms
from heapline.contract.messages import MessageScan, ScanMessages, SplitMessages
from heapline.spark.options import ReadOptions
from heapline.spark.schema import DLQ, arrow_schema
from heapline.spark.target import calls_of
from heapline.spark.topic_log import DataLost, TopicRef

RANGE_ROWS = 1 << 17
PAGE_ROWS = 2000
UNKNOWN_OFFSET = -1  # as_of_offset: there is no position in a log at which the rows are exactly this


@dataclass(frozen=True)
class ScanTask:
    """A range of ids of one topic."""

    topic: TopicRef
    first_id: int
    end_id: int


def plan_scan(topic: TopicRef, options: ReadOptions) -> list[ScanTask]:
    with contextlib.closing(calls_of(options.target)) as calls:
        found = calls.do(SplitMessages(topic.topic, options.view == DLQ, RANGE_ROWS, min(1000, options.pieces_min)))
    _check_incarnation(topic, found.incarnation)
    return [ScanTask(topic, *pair) for pair in pairwise(found.bounds)]


def read_scan(task: ScanTask, options: ReadOptions) -> Iterator[Any]:
    """Yield the Arrow batches of a task."""
    schema = arrow_schema(options.columns)
    makers = [_COLUMNS[column.name] for column in options.columns]
    needs_payloads = any(column.name == "value" for column in options.columns)
    first_id: int | None = task.first_id
    with contextlib.closing(calls_of(options.target)) as calls:
        while first_id is not None:
            scan = ScanMessages(
                task.topic.topic, options.view == DLQ, first_id, task.end_id, needs_payloads, limit=PAGE_ROWS
            )
            page = calls.do(scan)
            _check_incarnation(task.topic, page.incarnation)
            if page.items:
                columns = zip(makers, schema.types, strict=True)
                arrays = [pa.array([make(info, page) for info in page.items], kind) for make, kind in columns]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            first_id = page.next_id


def _check_incarnation(topic: TopicRef, incarnation: int) -> None:
    if incarnation != topic.incarnation:
        raise DataLost(f"topic {topic.topic!r} was deleted and created again during the read; load it again")


def _headers(info: MessageInfo) -> list[dict[str, Any]] | None:
    return [{"key": name, "value": value.encode()} for name, value in info.headers.items()] or None


#: How columns are built. The broker does not report the others: they are null.
_COLUMNS: dict[str, Callable[[MessageInfo, MessageScan], Any]] = {
    "key": lambda m, _: None if m.key is None else m.key.encode(),
    "value": lambda m, _: m.payload,
    "topic": lambda m, _: m.topic,
    "partition": lambda m, _: m.partition,
    "headers": lambda m, _: _headers(m),
    "message_id": lambda m, _: m.message_id,
    "id": lambda m, _: m.id,
    "state": lambda m, _: m.state,
    "priority": lambda m, _: m.priority,
    "due_at": lambda m, _: m.due_at if m.state == "delayed" else None,
    "attempts": lambda m, _: m.attempts,
    "deadline": lambda m, _: m.deadline,
    "holder": lambda m, _: m.holder,
    "reason": lambda m, _: m.reason if m.state != "dead" else m.reason or "",
    "died_at": lambda m, _: m.ended_at,
    "deliver_at": lambda m, _: None,
    "enqueued_at": lambda m, _: m.enqueued_at,
    "expires_at": lambda m, _: m.expires_at,
    "max_retries": lambda m, _: None,
    "fairness_key": lambda m, _: m.fairness_key,
    "as_of": lambda m, page: from_ms(page.at_ms),
    "as_of_offset": lambda m, _: UNKNOWN_OFFSET,
}
