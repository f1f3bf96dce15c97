"""The views `backlog` and `dlq` as Arrow batches: a message's record, and what was true of it at the pinned moment.

The columns of the record are made as in `messages`; where they are not wanted, records are not read at all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heapline.core.entries import DEAD, DELAYED, LEASED, READY
from heapline.core.ids import partition_of
from heapline.core.position import attempts_of
from heapline.core.record import ROW
from heapline.engine.state_rows import OWN_EXPIRY, OWN_PRIORITY
from heapline.journal.records import Records
from heapline.spark.buffers import I64, chosen, moments, numbers, ulids
from heapline.spark.messages import _MOMENT, _Batch
from heapline.spark.schema import Column, arrow_schema

STATES: list[str | None] = [""] * 4
STATES[READY], STATES[DELAYED], STATES[LEASED], STATES[DEAD] = "ready", "delayed", "leased", "dead"
#: Columns that need no record.
_OF_STATE = {
    "topic", "partition", "message_id", "id", "state", "due_at", "attempts", "deadline", "holder", "reason", "died_at",
    "as_of", "as_of_offset",
}  # fmt: skip


class Moment(NamedTuple):
    """What all rows of a pinned state have in common."""

    topic: str
    at: int  # wall ms
    ends: list[int]
    texts: list[str]


class StateBatches:
    def __init__(self, moment: Moment, columns: tuple[Column, ...]) -> None:
        self._moment = moment
        self._schema = arrow_schema(columns)
        self._makers = [getattr(_StateBatch, f"_{column.name}") for column in columns]
        self.needs_records = not {column.name for column in columns} <= _OF_STATE

    def make(self, state: npt.NDArray[Any], records: Records | None) -> Any:
        batch = _StateBatch(self._moment, state, records)
        return pa.RecordBatch.from_arrays([make(batch) for make in self._makers], schema=self._schema)


class _StateBatch(_Batch):
    """One method for each column of the views."""

    def __init__(self, moment: Moment, state: npt.NDArray[Any], records: Records | None) -> None:
        self.moment, self.state, self.topic = moment, state, moment.topic
        self.rows = np.zeros(len(state), dtype=ROW) if records is None else records.rows
        self.payloads = [] if records is None else records.payloads
        self.small = np.frombuffer(b"".join([] if records is None else records.smalls), dtype=np.uint8)
        self.small_lengths = self.rows["small_len"].astype(np.int64)
        self.small_starts = np.cumsum(self.small_lengths) - self.small_lengths
        self.partitions: I64 = partition_of(state["id"])

    def _partition(self) -> Any:
        return numbers(pa.int32(), self.partitions)

    def _message_id(self) -> Any:
        return ulids(self.state["id"])

    def _id(self) -> Any:
        return numbers(pa.int64(), self.state["id"])

    def _state(self) -> Any:
        return chosen(pa.string(), STATES, self.state["state"])

    def _priority(self) -> Any:
        own = (self.state["own"] & OWN_PRIORITY) != 0
        return numbers(pa.int64(), np.where(own, self.state["priority"], self.rows["priority"]))

    def _due_at(self) -> Any:
        return moments(_MOMENT, self.state["due"], self.state["state"] == DELAYED)

    def _attempts(self) -> Any:
        return numbers(pa.int32(), attempts_of(self.state["position"]))

    def _deadline(self) -> Any:
        return moments(_MOMENT, self.state["deadline"], self.state["state"] == LEASED)

    def _died_at(self) -> Any:
        return moments(_MOMENT, self.state["died_at"])

    def _holder(self) -> Any:
        return self._text("holder")

    def _reason(self) -> Any:
        return self._text("reason")

    def _text(self, column: str) -> Any:
        which = self.state[column].astype(np.int64)
        texts: list[str | None] = [*self.moment.texts, None]
        return chosen(pa.string(), texts, np.where(which < 0, len(texts) - 1, which))

    def _expires_at(self) -> Any:
        rows = self.rows
        begins = np.where(rows["due"] != 0, rows["due"], rows["enqueued_at"])
        first = np.where(rows["ttl_ms"] != 0, begins + rows["ttl_ms"], 0)
        ends = np.where((self.state["own"] & OWN_EXPIRY) != 0, self.state["expires"], first)
        return moments(_MOMENT, ends, ends != 0)

    def _as_of(self) -> Any:
        return moments(_MOMENT, np.full(len(self.state), self.moment.at))

    def _as_of_offset(self) -> Any:
        return numbers(pa.int64(), np.array(self.moment.ends, dtype=np.int64)[self.partitions])
