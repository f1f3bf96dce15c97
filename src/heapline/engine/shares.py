"""The part of a call that goes to one partition, judged against the identities that the partition remembers.

A row is new, or it repeats a known row or another row of its call, or it must be refused. New rows are built into
records and an event here. `admission.py` places rows and decides whether all may be enqueued.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from heapline.contract.errors import BatchInDoubt, HeaplineError, IdempotencyConflict, StaleSequence
from heapline.contract.message import Enqueued
from heapline.core.dedup.idempotency import key_hash
from heapline.core.dedup.verdict import CONFLICT, DUPLICATE, IN_DOUBT, NEW, STALE
from heapline.core.events import I64, KeyRows, ProducerRows
from heapline.core.events import Enqueued as EnqueuedEvent
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.engine.calls import EnqueueCall
from heapline.engine.columns import SCOPES, Columns
from heapline.engine.topic import Topic
from heapline.journal.block import Block, make_block


class CallShare:
    """The part of an identified call for one partition, judged against what that partition remembers."""

    def __init__(
        self, topic: Topic, number: int, index: I64, call: EnqueueCall, columns: Columns, prints: Any, now: Now,
        batch_id: str | None = None,
    ) -> None:  # fmt: skip
        self.partition = topic.partitions[number]
        self._topic = topic
        self._index = index
        self._columns = columns if len(index) == columns.count else columns.subset(index.tolist())
        self._prints = prints[index]
        self._identity = call.identity
        count = len(index)
        self._status = np.zeros(count, dtype=np.int8)
        self._first = np.full(count, -1, dtype=np.int64)
        self._twin = np.full(count, -1, dtype=np.int64)
        self.errors: dict[int, HeaplineError] = {}
        self._ids = np.zeros(count, dtype=np.int64)
        self._keyed = [i for i, t in enumerate(self._columns.tokens or ()) if t is not None]
        self._hashes = [key_hash(self._columns.tokens[i]) for i in self._keyed]  # type: ignore[index]
        self._judge(now, batch_id)
        self.new = self._status == NEW

    def _judge(self, now: Now, batch_id: str | None) -> None:
        everything = np.arange(len(self._index))
        if self._identity is not None:
            seqs = np.array(self._columns.seqs, dtype=np.int64)
            verdict = self.partition.sequences.check(
                self._identity.producer_id, self._identity.epoch, seqs, self._prints
            )  # fmt: skip
            self._take(verdict, everything)
        if self._keyed:
            rows = np.array(self._keyed)
            verdict = self.partition.keys.check(self._hashes, self._prints[rows], now.steady)
            self._take(verdict, rows)
        doubts = self._doubts(batch_id) if self.partition.prepared else {}
        for row in np.flatnonzero(self._twin >= 0).tolist():
            twin = self._twin[row]
            if self._status[twin] != NEW:  # the row it repeats is not new, so it gets the same result
                self._status[row], self._first[row], self._twin[row] = self._status[twin], self._first[twin], -1
        for row in np.flatnonzero((self._status == CONFLICT) | (self._status == STALE)).tolist():
            self.errors[int(self._index[row])] = self._error(row)
        for row in np.flatnonzero(self._status == IN_DOUBT).tolist() if doubts else ():
            self.errors[int(self._index[row])] = BatchInDoubt(self._name(row), doubts.get(row, "(of the same batch)"))

    def _doubts(self, batch_id: str | None) -> dict[int, str]:
        """Return row -> batch for rows that another batch has prepared: they may turn out to be duplicates."""
        prepared, found = self.partition.prepared, {}
        if self._identity is not None:
            seqs = np.array(self._columns.seqs, dtype=np.int64)
            found = prepared.seqs_in_doubt(self._identity.producer_id, self._identity.epoch, seqs, batch_id)
        for i, batch in prepared.hashes_in_doubt(self._hashes, batch_id).items():
            found[self._keyed[i]] = batch
        for row in found:
            if self._status[row] == NEW:
                self._status[row] = IN_DOUBT
        return found

    def _take(self, verdict: Any, rows: I64) -> None:
        """Apply a verdict to rows that are still new."""
        if verdict.all_new:
            return
        for i, row in enumerate(rows.tolist()):
            if self._status[row] == NEW and verdict.status[i] != NEW:
                self._status[row] = verdict.status[i]
                self._first[row] = verdict.first_ids[i]
                if verdict.twins[i] >= 0:
                    self._twin[row] = rows[verdict.twins[i]]

    def _error(self, row: int) -> HeaplineError:
        seq = None if self._identity is None else self._columns.seqs[row]  # type: ignore[index]
        if self._status[row] == STALE:
            assert self._identity is not None
            producer = self._identity.producer_id
            return StaleSequence(producer, seq or 0, self.partition.sequences.answered_below_of(producer))
        first = int(self._first[row])
        return IdempotencyConflict(self._name(row), self._topic.ulid(first) if first >= 0 else "(of the same batch)")

    def _name(self, row: int) -> str:
        token = self._columns.tokens[row] if self._columns.tokens else None
        if token is not None:
            return f"idempotency key {token!r}"
        return f"sequence {None if self._columns.seqs is None else self._columns.seqs[row]}"

    @property
    def index(self) -> I64:
        """The rows of the call that are in this share."""
        return self._index

    def new_rows(self) -> list[int]:
        rows: list[int] = self._index[self.new].tolist()
        return rows

    def refuse(self, rows: set[int], error: HeaplineError) -> None:
        """Refuse these rows of the call, and those that repeat them."""
        for row, where in enumerate(self._index.tolist()):
            twin = int(self._twin[row])
            if where in rows or (twin >= 0 and int(self._index[twin]) in rows):
                self.errors[where] = error
                self.new[row] = False

    def build(self, now: Now, in_turn: bool = True) -> tuple[Any, Block, EnqueuedEvent, I64 | None]:
        new = np.flatnonzero(self.new)
        part = self._columns if len(new) == len(self._index) else self._columns.subset(new.tolist())
        rows, smalls = part.fill(now.steady, now.wall)
        rows["id"] = self._ids[new] = self.partition.ids.take(len(new), now.steady)
        event = EnqueuedEvent(0, 0, len(new), 0)
        renumber = np.cumsum(self.new) - 1
        if self._identity is not None:
            seqs = np.array(part.seqs, dtype=np.int64)
            event.producers = [
                ProducerRows(*self._identity, np.arange(len(new)), seqs, self._prints[new].tobytes())
            ]  # fmt: skip
        keep = [(i, row) for i, row in enumerate(self._keyed) if self.new[row]]
        if keep:
            rows_keyed = np.array([row for _, row in keep])
            window = round(self.partition.config.dedup_window * 1000)
            scopes = [SCOPES[(self._columns.scopes[r] if self._columns.scopes else None) or "window"] for _, r in keep]
            event.keys = KeyRows(
                renumber[rows_keyed], b"".join(self._hashes[i] for i, _ in keep), self._prints[rows_keyed].tobytes(),
                np.array(scopes, dtype=np.int8).tobytes(), np.full(len(keep), now.steady + window, dtype=np.int64),
            )  # fmt: skip
        fairness = give_turns(self.partition, rows, part, in_turn)
        return rows, make_block(rows, smalls, part.payloads), event, fairness

    def results(self) -> list[tuple[int, Enqueued]]:
        suffix = self._topic.id_suffix
        if self.new.all():
            results = [Enqueued(id, False, None, suffix) for id in self._ids.tolist()]
            return list(zip(self._index.tolist(), results, strict=True))
        found: list[tuple[int, Enqueued]] = []
        for row, where in enumerate(self._index.tolist()):
            if where in self.errors:
                found.append((where, Enqueued(0, error=self.errors[where])))
            elif self._status[row] == DUPLICATE:
                twin = int(self._twin[row])
                first = int(self._ids[twin]) if twin >= 0 else int(self._first[row])
                found.append((where, Enqueued(first, True, None, suffix)))
            else:
                found.append((where, Enqueued(int(self._ids[row]), False, None, suffix)))
        return found


def give_turns(partition: Partition, rows: Any, part: Columns, in_turn: bool = True) -> I64 | None:
    """Write turns into the rows of new messages that are ready (the others get theirs later). Return the hashes of
    their fairness keys, or None without fairness."""
    if partition.fair is None:
        return None
    hashes = part.fairness_hashes()
    ready = rows["due"] == 0
    if in_turn and ready.any():
        priorities = partition.ordering.keys(rows["priority"][ready], rows["enqueued_at"][ready])
        rows["turn"][ready] = partition.fair.take(priorities, hashes[ready])
    return hashes
