"""A short memory of how messages went: for `get`, and for acks whose answer was lost.

Bounded in rows, oldest forgotten first. Kept as the columns the events brought; looked through only when a message
is not found elsewhere.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
ROWS_MAX = 65536
_GATHER_ROWS = 256


class Departure(NamedTuple):
    how: str
    at: int
    reason: str | None


class _Batch(NamedTuple):
    ids: I64
    tokens: I64 | None
    how: str
    at: int
    reason: str | None


class GoneMemory:
    def __init__(self, rows_max: int = ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._batches: deque[_Batch] = deque()
        self._rows = 0

    def add(self, ids: I64, how: str, at: int, tokens: I64 | None = None, reason: str | None = None) -> None:
        last = self._batches[-1] if self._batches else None
        if last is not None and len(last.ids) < _GATHER_ROWS and last.how == how and last.reason == reason:
            # Singles gather, so that a look through the memory stays short.
            self._batches[-1] = _Batch(
                np.concatenate((last.ids, ids)),
                None if tokens is None or last.tokens is None else np.concatenate((last.tokens, tokens)),
                how, at, reason,
            )  # fmt: skip
        else:
            self._batches.append(_Batch(ids, tokens, how, at, reason))
        self._rows += len(ids)
        while self._rows > self._rows_max and len(self._batches) > 1:
            self._rows -= len(self._batches.popleft().ids)

    def find(self, id: int) -> Departure | None:
        for batch in reversed(self._batches):
            if (batch.ids == id).any():
                return Departure(batch.how, batch.at, batch.reason)
        return None

    def was_acked(self, id: int, token: int) -> bool:
        for batch in reversed(self._batches):
            if batch.tokens is not None and ((batch.ids == id) & (batch.tokens == token)).any():
                return True
        return False

    def to_state(self) -> list[Any]:
        return [
            (b.ids.tobytes(), None if b.tokens is None else b.tokens.tobytes(), b.how, b.at, b.reason)
            for b in self._batches
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> GoneMemory:
        memory = cls()
        for ids, tokens, how, at, reason in state:
            columns = np.frombuffer(ids, dtype=np.int64)
            memory.add(columns, how, at, None if tokens is None else np.frombuffer(tokens, dtype=np.int64), reason)
        return memory
