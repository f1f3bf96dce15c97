"""Stream rows whose delivery to a group has failed, as columns sorted by offset.

A row is kept from its first failure until it is acked, given up or reset, even while it is in flight again, because its
failure count must survive a crash. Only `deadlines` is not durable: 0 while the row waits, else when the delivery ends.
`back` marks replayed dead letters. The group passed their offsets in the stream earlier, so they hold the message but
not the committed offset. This module makes no decisions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from heapline.core.groups.deliveries import FAR, Columns, replaced

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_DURABLE = ("offsets", "ids", "positions", "failures", "dues", "back")
_COLUMNS = (*_DURABLE, "deadlines")


class FailedRows:
    def __init__(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        self.offsets: I64 = none
        self.ids: I64 = none
        self.positions: I64 = none
        self.failures: I64 = none
        self.dues: I64 = none
        self.back: I64 = none  # 1 = a replayed dead letter
        self.deadlines: I64 = none

    def __len__(self) -> int:
        return len(self.offsets)

    def put(self, rows: Columns, failures: I64, dues: I64, back: bool = False) -> None:
        """Add rows that now wait. A row that is already present keeps its `back` mark."""
        known = self.find(rows.offsets)
        flags = np.full(len(dues), int(back), dtype=np.int64)
        if len(self.offsets):
            flags = np.where(known >= 0, self.back[known], flags)
            self.drop(rows.offsets)
        fresh = (*rows, failures, dues, flags, np.zeros(len(dues), dtype=np.int64))
        order = np.argsort(np.concatenate((self.offsets, rows.offsets)), kind="stable")
        for name, column in zip(_COLUMNS, fresh, strict=True):
            setattr(self, name, np.concatenate((getattr(self, name), column))[order])

    def find(self, offsets: I64) -> I64:
        """Return the row of each of these offsets; -1 = not present."""
        if not len(self.offsets):
            return np.full(len(offsets), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.offsets, offsets), len(self.offsets) - 1)
        found: I64 = np.where(self.offsets[at] == offsets, at, -1)
        return found

    def keep(self, which: Mask) -> None:
        if not which.all():
            for name in _COLUMNS:
                setattr(self, name, getattr(self, name)[which])

    def drop(self, offsets: I64) -> None:
        if len(self.offsets):
            at = self.find(offsets)
            which = np.ones(len(self.offsets), dtype=np.bool_)
            which[at[at >= 0]] = False
            self.keep(which)

    def columns(self, at: I64) -> Columns:
        return Columns(self.offsets[at], self.ids[at], self.positions[at])

    # -- deliveries ------------------------------------------------------------------------------------------------

    @property
    def out(self) -> int:
        return int(np.count_nonzero(self.deadlines)) if len(self.deadlines) else 0

    def due(self, now: int, limit: int) -> I64:
        """Return the rows that may be delivered again, longest due first, at most `limit`."""
        if not len(self.offsets):
            return self.offsets
        at: I64 = np.flatnonzero((self.deadlines == 0) & (self.dues <= now))
        return np.take(at, np.argsort(self.dues[at], kind="stable")[:limit])

    def hand_out(self, at: I64, deadline: int) -> None:
        self.deadlines[at] = deadline

    def rest(self) -> None:
        """Mark all rows as not in flight."""
        self.deadlines = np.zeros(len(self.offsets), dtype=np.int64)

    def overdue(self, now: int, limit: int) -> I64:
        late: Mask = (self.deadlines != 0) & (self.deadlines <= now)
        return np.compress(late, self.offsets)[:limit]

    def next_deadline(self, now: int) -> int:
        """Return when the first delivery ends or another row becomes due. Rows already due wait for credits."""
        if not len(self.offsets):
            return FAR
        later = np.where(self.dues > now, self.dues, FAR)
        return int(np.where(self.deadlines != 0, self.deadlines, later).min())

    # -- retained rows ---------------------------------------------------------------------------------------------

    def in_stream(self) -> I64:
        """Return the offsets of rows that hold back the committed offset."""
        return self.offsets[self.back == 0] if len(self.offsets) else self.offsets

    def replace_positions(self, ids: I64, positions: I64) -> None:
        self.positions = replaced(self.ids, self.positions, ids, positions)

    def to_state(self) -> list[Any]:
        return [getattr(self, name).tobytes() for name in _DURABLE]

    @classmethod
    def from_state(cls, state: list[Any]) -> FailedRows:
        table = cls()
        for name, column in zip(_DURABLE, state, strict=True):
            setattr(table, name, np.frombuffer(column, dtype=np.int64))
        table.rest()
        return table
