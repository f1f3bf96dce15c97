"""A short memory of how messages ended, for `get` and for acks whose response was lost.

It is bounded in rows and drops the oldest first. It keeps the columns of the events and is searched only when a message
is not found elsewhere.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from heapline.core.events import I64

ROWS_MAX = 65536
_GATHER_ROWS = 256


class Departure(NamedTuple):
    how: str
    at: int
    reason: str | None


class _Batch(NamedTuple):
    ids: I64
    ats: I64
    tokens: I64 | None
    how: str
    reason: str | None


class GoneMemory:
    def __init__(self, rows_max: int = ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._batches: deque[_Batch] = deque()
        self._rows = 0

    def add(self, ids: I64, how: str, at: int, tokens: I64 | None = None, reason: str | None = None) -> None:
        self._add(_Batch(ids, np.full(len(ids), at, dtype=np.int64), tokens, how, reason))

    def _add(self, batch: _Batch) -> None:
        last = self._batches[-1] if self._batches else None
        if last is not None and len(last.ids) < _GATHER_ROWS and last[3:] == batch[3:]:
            # Single rows are joined, so that a search stays short.
            self._batches[-1] = _join(last, batch)
        else:
            self._batches.append(batch)
        self._rows += len(batch.ids)
        while self._rows > self._rows_max and len(self._batches) > 1:
            self._rows -= len(self._batches.popleft().ids)

    def find(self, id: int) -> Departure | None:
        for batch in reversed(self._batches):
            found = np.flatnonzero(batch.ids == id)
            if len(found):
                return Departure(batch.how, batch.ats.item(found[0]), batch.reason)
        return None

    def was_acked(self, id: int, token: int) -> bool:
        for batch in reversed(self._batches):
            if batch.tokens is not None and ((batch.ids == id) & (batch.tokens == token)).any():
                return True
        return False

    def to_state(self) -> list[Any]:
        return [
            (b.ids.tobytes(), b.ats.tobytes(), None if b.tokens is None else b.tokens.tobytes(), b.how, b.reason)
            for b in self._batches
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> GoneMemory:
        memory = cls()
        for ids, ats, tokens, how, reason in state:
            memory._add(_Batch(_column(ids), _column(ats), None if tokens is None else _column(tokens), how, reason))
        return memory


def _join(a: _Batch, b: _Batch) -> _Batch:
    tokens = None if a.tokens is None or b.tokens is None else np.concatenate((a.tokens, b.tokens))
    return _Batch(np.concatenate((a.ids, b.ids)), np.concatenate((a.ats, b.ats)), tokens, a.how, a.reason)


def _column(data: bytes) -> I64:
    return np.frombuffer(data, dtype=np.int64)
