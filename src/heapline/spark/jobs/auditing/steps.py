"""The events of messages as columns of numbers: what the audit looks at, and nothing else of an event.

Kinds that do the same to a message share a number. What changes no message's state (a lease that is extended, a record
that is moved, whatever groups do) is no step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.ids import partition_of

I64 = npt.NDArray[np.int64]

#: Steps. Those from OPEN_WAITING on are no events: what was there when the events begin.
(NEW, FIRED, LEASED, ACKED, RETURNED, RELEASED, DEAD, DROPPED, REPLAYED, DELETED, CANCELLED, EXPIRED, RESCHEDULED,
 OPEN_WAITING, OPEN_DELAYED, OPEN_LEASED, OPEN_DEAD) = range(17)  # fmt: skip
#: Kinds of events -> steps; `dead_lettered` without `kept` is DROPPED, `expired` counts if it was `returned`.
STEPS = {
    "enqueued": NEW, "batch_committed": NEW, "fired": FIRED, "leased": LEASED, "acked": ACKED, "nacked": RETURNED,
    "lease_expired": RETURNED, "released": RELEASED, "dead_lettered": DEAD, "replayed": REPLAYED,
    "dead_deleted": DELETED, "cancelled": CANCELLED, "expired": EXPIRED, "rescheduled": RESCHEDULED,
}  # fmt: skip
OPENINGS = {"waiting": OPEN_WAITING, "delayed": OPEN_DELAYED, "leased": OPEN_LEASED, "dead": OPEN_DEAD}
NO_SEQ = -1
NO_DUE = -(1 << 62)
NO_KEY = -(1 << 63)  # a priority may be that as well: such a message is not ranked, nothing else
#: Columns of the view that `from_arrow` needs, and the audit reads.
NEEDS = (
    "topic", "partition", "offset", "timestamp", "wall_time", "unit", "kind", "id", "at", "priority", "due", "seq",
    "heap_key", "returned", "kept", "count", "batch_id", "details", "enqueued_at", "due_wall",
)  # fmt: skip


class Steps(NamedTuple):
    """Columns of one length; times are ms. `key`: of NEW the priority, of RESCHEDULED the heap key, else NO_KEY."""

    topic: I64  # a number
    id: I64
    offset: I64
    unit: I64
    step: I64
    at: I64
    due: I64  # NO_DUE: at once
    wall: I64  # 1: due is a time of the machine's clock
    seq: I64
    key: I64
    since: I64  # of NEW: from when on it ages

    @property
    def partition(self) -> I64:
        return partition_of(self.id)

    def take(self, which: Any) -> Steps:
        return Steps(*(column[which] for column in self))


def joined(parts: list[Steps]) -> Steps:
    return Steps(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def from_arrow(table: Any, topics: dict[str, int]) -> Steps:
    """Of a table with the columns that are needed."""
    import pyarrow as pa
    import pyarrow.compute as pc

    step = _coded(table["kind"], STEPS, -1)
    kept = pc.fill_null(table["kept"], True).to_numpy(zero_copy_only=False)
    returned = pc.fill_null(table["returned"], True).to_numpy(zero_copy_only=False)
    step[(step == DEAD) & ~kept] = DROPPED
    good = (step >= 0) & returned & pc.is_valid(table["id"]).to_numpy(zero_copy_only=False)

    def column(name: str, null: int) -> I64:
        values = table[name]
        if pa.types.is_timestamp(values.type):
            values = pc.divide(values.cast(pa.int64()), 1000)
        elif pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        found: I64 = pc.fill_null(values.cast(pa.int64()), null).to_numpy(zero_copy_only=False)
        return found

    key = np.where(step == RESCHEDULED, column("heap_key", NO_KEY), column("priority", NO_KEY))
    key = np.where((step == RESCHEDULED) | (step == NEW), key, NO_KEY)
    number = _coded(table["topic"], topics)
    made = Steps(
        number, column("id", 0), column("offset", 0), column("unit", 0), step, column("at", 0), column("due", NO_DUE),
        column("due_wall", 0), column("seq", NO_SEQ), key, column("enqueued_at", 0),
    )  # fmt: skip
    return made.take(good)


def _coded(column: Any, numbers: Mapping[Any, int], default: int | None = None) -> I64:
    """A number for each text."""
    words = column.combine_chunks().dictionary_encode(null_encoding="encode")
    known = [numbers[word] if default is None else numbers.get(word, default) for word in words.dictionary.to_pylist()]
    found: I64 = np.array(known, dtype=np.int64)[words.indices.to_numpy(zero_copy_only=False)]
    return found
