"""The dead letters of one partition, in the order in which they died.

Rows are columns in chunks, sorted by (at, id). So the cost of a page or a slice depends only on its content, and a
million dead letters are only a thousand objects to the garbage collector. A chunk never changes: a change replaces it.
So a snapshot keeps references, and no reader needs a copy.

`_died` returns when a letter died, and with that its place in the order. It is split into small dictionaries, because
growing one of a million entries takes 26 ms in one step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby, repeat
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.core.events import EMPTY, I64
from heapline.core.record import attempts_of, size_bound

CHUNK_ROWS: Final = 1024
DICTIONARIES: Final = 64
PIECE_ROWS: Final = 64  # rows that a reader gets per read from a chunk
Place = tuple[int, int]  # (at, id): the order of dead letters
Letter = tuple[int, int, int]  # (at, id, position)
BEFORE_ALL: Place = (-1, -1)


class Dead(NamedTuple):
    position: int
    key: int
    reason: str
    at: int


class DeadRows(NamedTuple):
    """Dead letters as columns."""

    ats: I64
    ids: I64
    positions: I64
    keys: I64
    reasons: npt.NDArray[np.object_]

    def only(self, rows: Any) -> DeadRows:
        return DeadRows(*(column[rows] for column in self))

    def place(self, row: int) -> Place:
        return self.ats.item(row), self.ids.item(row)

    def up_to(self, place: Place) -> int:
        """Return the number of rows up to this place, if the rows are in order."""
        at, id = place
        start, end = self.ats.searchsorted((at, at + 1)).tolist()
        rows: int = start + self.ids[start:end].searchsorted(id, "right").item()
        return rows


class DeadLetters:
    def __init__(self) -> None:
        self._chunks: list[DeadRows] = []
        self._firsts: list[Place] = []  # of the first row of each chunk
        self._died: defaultdict[int, dict[int, int]] = defaultdict(dict)  # id % DICTIONARIES -> id -> at
        self._count = 0
        self.nbytes = 0  # of their records, about: a position has the size rounded up

    def __len__(self) -> int:
        return self._count

    def __contains__(self, id: int) -> bool:
        return self._count > 0 and id in self._died[id % DICTIONARIES]

    def get(self, id: int) -> Dead | None:
        place = self.place_of(id)
        if place is None:
            return None
        chunk = self._chunks[self._chunk_of(place)]
        row = chunk.up_to(place) - 1
        return Dead(chunk.positions.item(row), chunk.keys.item(row), chunk.reasons[row], place[0])

    def __getitem__(self, id: int) -> Dead:
        found = self.get(id)
        if found is None:
            raise KeyError(id)
        return found

    def place_of(self, id: int) -> Place | None:
        return (self._died[id % DICTIONARIES][id], id) if id in self else None

    def last(self) -> Place:
        """Return the place of the newest dead letter; BEFORE_ALL if there is none."""
        return self._chunks[-1].place(-1) if self._chunks else BEFORE_ALL

    def at(self, place: Place) -> Letter | None:
        """Return the letter at this place; None if it is not dead, or died again since."""
        if self.place_of(place[1]) != place:
            return None
        chunk = self._chunks[self._chunk_of(place)]
        return (*place, chunk.positions.item(chunk.up_to(place) - 1))

    def after(self, place: Place) -> Iterator[Letter]:
        """Yield the dead letters after this place, oldest first.

        Reads only as far as the caller does. Valid until the next change.
        """
        start = None
        for number in range(self._chunk_of(place), len(self._chunks)):
            chunk = self._chunks[number]
            start = chunk.up_to(place) if start is None else 0
            for first in range(start, len(chunk.ids), PIECE_ROWS):
                piece = slice(first, first + PIECE_ROWS)
                yield from zip(*(c[piece].tolist() for c in (chunk.ats, chunk.ids, chunk.positions)), strict=True)

    def chunks_after(self, place: Place) -> Iterator[DeadRows]:
        """Yield the dead letters after this place as columns, at most CHUNK_ROWS at a time, oldest first."""
        for chunk in self._chunks[self._chunk_of(place) :]:
            yield chunk.only(slice(chunk.up_to(place), None))
            place = BEFORE_ALL

    def rows(self) -> DeadRows:
        """Return all dead letters."""
        return _join(self._chunks)

    # -- changes ---------------------------------------------------------------------------------------------------

    def add(self, ids: I64, positions: I64, keys: I64, reason: str, at: int) -> None:
        order = ids.argsort()
        reasons = np.full(len(ids), reason, dtype=np.object_)
        self._note(ids.tolist(), [at] * len(ids), positions)
        self._insert(DeadRows(np.full(len(ids), at), ids[order], positions[order], keys[order], reasons))

    def _note(self, ids: list[int], ats: list[int], positions: I64) -> None:
        for id, at in zip(ids, ats, strict=True):
            self._died[id % DICTIONARIES][id] = at
        self._count += len(ids)
        self.nbytes += _size(positions)

    def _insert(self, rows: DeadRows) -> None:
        """Insert rows that are in order. They come after all others, except those that died in the same instant."""
        start, end = self._chunk_of(rows.place(0)), bisect_right(self._firsts, rows.place(-1))
        before = self._chunks[start:end]
        merged = _join([*before, rows])
        if before and before[-1].place(-1) > rows.place(0):
            merged = merged.only(np.lexsort((merged.ids, merged.ats)))
        chunks = list(_cut(merged))
        self._chunks[start:end] = chunks
        self._firsts[start:end] = [chunk.place(0) for chunk in chunks]

    def take(self, ids: I64) -> tuple[I64, I64]:
        """Remove dead letters and return their keys and positions. Raise KeyError if one does not exist."""
        taken: list[DeadRows] = []
        for number, wanted in self._by_chunk(ids.tolist()):
            chunk = self._chunks[number]
            among = np.isin(chunk.ids, wanted)
            taken.append(chunk.only(among))
            if len(wanted) < len(chunk.ids):
                self._chunks[number] = rest = chunk.only(~among)
                self._firsts[number] = rest.place(0)
            else:
                del self._chunks[number], self._firsts[number]
        for id in ids.tolist():
            del self._died[id % DICTIONARIES][id]
        self._count -= len(ids)
        found = _join(taken)
        self.nbytes -= _size(found.positions)
        order = found.ids.argsort()
        rows = order[found.ids.searchsorted(ids, sorter=order)]
        return found.keys[rows], found.positions[rows]

    def replace_positions(self, ids: I64, positions: I64) -> None:
        """Replace the positions of those that are dead; `ids` are sorted. Each keeps its attempts."""
        for number, wanted in self._by_chunk([id for id in ids.tolist() if id in self]):
            chunk = self._chunks[number]
            among = np.isin(chunk.ids, wanted)
            column = chunk.positions.copy()
            self.nbytes -= _size(column[among])
            column[among] = positions[ids.searchsorted(chunk.ids[among])] | attempts_of(column[among])
            self.nbytes += _size(column[among])
            self._chunks[number] = chunk._replace(positions=column)

    def _by_chunk(self, ids: Iterable[int]) -> list[tuple[int, list[int]]]:
        """Return the chunks that contain these ids, the last chunk first, each with its ids."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for id in ids:
            found[self._chunk_of((self._died[id % DICTIONARIES][id], id))].append(id)
        return sorted(found.items(), reverse=True)

    def _chunk_of(self, place: Place) -> int:
        """Return the number of the chunk that has or would have this place."""
        return max(0, bisect_right(self._firsts, place) - 1)

    # -- snapshots -------------------------------------------------------------------------------------------------

    def to_state(self) -> list[Any]:
        """Return references to the chunks; `reason_runs` encodes their reasons."""
        return [list(chunk) for chunk in self._chunks]

    @classmethod
    def from_state(cls, state: list[Any]) -> DeadLetters:
        letters = cls()
        for *columns, runs in state:
            ats, ids, positions, keys = (np.frombuffer(column, np.int64) for column in columns)
            reasons = [reason for reason, count in runs for _ in range(count)]
            chunk = DeadRows(ats, ids, positions, keys, np.array(reasons, dtype=np.object_))
            letters._chunks.append(chunk)
            letters._firsts.append(chunk.place(0))
            letters._note(chunk.ids.tolist(), chunk.ats.tolist(), chunk.positions)
        return letters


def reason_runs(reasons: npt.NDArray[np.object_]) -> list[tuple[str, int]]:
    """Return (reason, count) of each range of equal reasons: most letters that died together share one."""
    return [(reason, len(list(run))) for reason, run in groupby(reasons.tolist())]


def _size(positions: I64) -> int:
    return int(size_bound(positions).sum())


def outdated(
    partitions: Sequence[DeadLetters], died_until: int, max_letters: int, max_bytes: int, limit: int
) -> list[list[int]]:
    """Return the ids of the letters to delete, by partition, at most `limit`: the oldest of them all.

    These are the letters that died up to this time, and as many more as exceed the number and the size; 0 = no limit.
    """
    count, nbytes = sum(map(len, partitions)), sum(letters.nbytes for letters in partitions)
    found: list[list[int]] = [[] for _ in partitions]
    numbered = (zip(letters.after(BEFORE_ALL), repeat(number)) for number, letters in enumerate(partitions))
    for (at, id, position), number in merge(*numbered):
        too_many = 0 < max_letters < count or 0 < max_bytes < nbytes
        if limit == 0 or not (at <= died_until or too_many):
            break
        found[number].append(id)
        count, nbytes, limit = count - 1, nbytes - _size(np.array([position])), limit - 1
    return found


def _cut(rows: DeadRows) -> Iterator[DeadRows]:
    """Yield chunks with columns of their own, which no deleted row keeps in memory."""
    for start in range(0, len(rows.ids), CHUNK_ROWS):
        columns: list[Any] = [column[start : start + CHUNK_ROWS].copy() for column in rows]
        yield DeadRows(*columns)


def _join(parts: list[DeadRows]) -> DeadRows:
    if not parts:
        return DeadRows(EMPTY, EMPTY, EMPTY, EMPTY, np.empty(0, dtype=np.object_))
    columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return DeadRows(*columns)
