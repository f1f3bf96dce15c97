"""A short memory of how messages ended, for `get` and for acks whose response was lost.

It is bounded in rows and drops the oldest first. It keeps the columns of the events and is searched only when a message
is not found elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
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
        self._batches: deque[_Batch] = deque()  # closed ones, oldest first
        self._open: list[_Batch] = []  # pieces of the newest batch: joined when it is closed, not at each removal
        self._open_rows = self._rows = 0

    def add(self, ids: I64, how: str, at: int, tokens: I64 | None = None, reason: str | None = None) -> None:
        self._add(_Batch(ids, np.full(len(ids), at, dtype=np.int64), tokens, how, reason))

    def _add(self, piece: _Batch) -> None:
        """Add a piece to the open batch, so that a search stays short: until it is long, or something else happens."""
        if self._open and (self._open_rows >= _GATHER_ROWS or self._open[-1][3:] != piece[3:]):
            self._batches.append(_join(self._open))
            self._open, self._open_rows = [], 0
        self._open.append(piece)
        count = len(piece.ids)
        self._open_rows += count
        self._rows += count
        while self._rows > self._rows_max and self._batches:
            self._rows -= len(self._batches.popleft().ids)

    def _newest_first(self) -> Iterator[_Batch]:
        if self._open:
            self._open = [_join(self._open)]
        return chain(self._open, reversed(self._batches))

    def find(self, id: int) -> Departure | None:
        for batch in self._newest_first():
            found = np.flatnonzero(batch.ids == id)
            if len(found):
                return Departure(batch.how, batch.ats.item(found[0]), batch.reason)
        return None

    def was_acked(self, id: int, token: int) -> bool:
        for batch in self._newest_first():
            if batch.tokens is not None and ((batch.ids == id) & (batch.tokens == token)).any():
                return True
        return False

    def to_state(self) -> list[Any]:
        return [
            (b.ids.tobytes(), b.ats.tobytes(), None if b.tokens is None else b.tokens.tobytes(), b.how, b.reason)
            for b in reversed(list(self._newest_first()))
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> GoneMemory:
        memory = cls()
        for ids, ats, tokens, how, reason in state:
            memory._add(_Batch(_column(ids), _column(ats), None if tokens is None else _column(tokens), how, reason))
        return memory


def _join(pieces: list[_Batch]) -> _Batch:
    if len(pieces) == 1:
        return pieces[0]
    ids, ats, tokens, (how, *_), (reason, *_) = zip(*pieces, strict=True)
    joined = None if any(column is None for column in tokens) else np.concatenate(tokens)
    return _Batch(np.concatenate(ids), np.concatenate(ats), joined, how, reason)


def _column(data: bytes) -> I64:
    return np.frombuffer(data, dtype=np.int64)
