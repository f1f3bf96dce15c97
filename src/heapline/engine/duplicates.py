"""Calls with an identity: which partitions remember their rows, and which of their rows are new.

A `CallShare` is the part of a call that goes to one partition, judged against the identities that the partition
remembers. A row is new, or it repeats a known row or another row of its call, or it must be refused. New rows are built
into records and an event here. `admission.py` places rows and decides whether all may be enqueued.

*Topics that have grown.* A retry must find the record of its first attempt. That is where the partition count at that
time placed it, so `FormerPlaces` checks the older partitions before the current count places the message. If a
partition there remembers the identity (or knows that it is too old to decide), the row goes there and gets that
partition's verdict. Otherwise it is new and goes to its new partition, where the next retry finds it. An older count is
checked only for as long as an identity may be remembered there:

- *Numbered, without key*: placed by the count at the epoch's opening, for as long as the epoch lasts. One partition.
- *Numbered, with key or idempotency key*: the counts since the epoch's opening, for as long as the epoch lasts. Numbers
  of older epochs are fenced, so older counts hold none of this one. There is no time limit, because a partition
  refuses a number that it has forgotten (answered, or older than the window) as stale, and a new one could not.
- *Idempotency key of the window scope*: until the last one recorded before the growth has expired (`Grown.until`).
- *Pending and until-ack*: for as long as a partition from before the growth holds any such key.
- *In doubt*: identities of an undecided batch that was prepared before the growth are where the batch is.

Rendezvous hashing moves a key only to new partitions, so only rows that moved are looked up. Nothing is checked on a
topic that never grew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heapline.contract.errors import BatchInDoubt, HeaplineError, IdempotencyConflict, StaleSequence
from heapline.contract.message import Enqueued
from heapline.core.dedup.idempotency import key_hash
from heapline.core.dedup.verdict import CONFLICT, DUPLICATE, IN_DOUBT, NEW, NO_ID, STALE, Verdict
from heapline.core.events import I64, Grown, KeyRows, ProducerRows
from heapline.core.events import Enqueued as EnqueuedEvent
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.core.placement import place
from heapline.engine.columns import SCOPES, Columns, EnqueueCall
from heapline.engine.topic import Topic
from heapline.journal.block import Block, make_block

if TYPE_CHECKING:
    from heapline.engine.columns import Identity

Mask = npt.NDArray[np.bool_]
SHARE_BITS = 10  # messages without key share a partition in runs of 1024; longer ones would leave the others empty


class CallShare:
    """The part of an identified call for one partition, judged against what that partition remembers."""

    def __init__(
        self,
        topic: Topic,
        number: int,
        index: I64,
        call: EnqueueCall,
        columns: Columns,
        prints: Any,
        now: Now,
        batch_id: str | None = None,
    ) -> None:
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
            assert self._columns.seqs is not None
            verdict = self.partition.state.sequences.check(
                self._identity.producer_id, self._identity.epoch, self._columns.seqs, self._prints
            )
            self._take(verdict, everything)
        if self._keyed:
            rows = np.array(self._keyed)
            verdict = self.partition.state.keys.check(self._hashes, self._prints[rows], now.steady)
            self._take(verdict, rows)
        doubts = self._doubts(batch_id) if self.partition.entries.prepared.batches else {}
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
        prepared, found = self.partition.entries.prepared, {}
        if self._identity is not None:
            assert self._columns.seqs is not None
            producer, epoch = self._identity.producer_id, self._identity.epoch
            found = prepared.seqs_in_doubt(producer, epoch, self._columns.seqs, batch_id)
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
        if self._status[row] == STALE:
            assert self._identity is not None
            assert self._columns.seqs is not None
            producer, seq = self._identity.producer_id, self._columns.seqs.item(row)
            return StaleSequence(producer, seq, self.partition.state.sequences.answered_below_of(producer))
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
        rows["id"] = self._ids[new] = self.partition.state.ids.take(len(new), now.steady)
        event = EnqueuedEvent(0, 0, len(new), 0)
        renumber = np.cumsum(self.new) - 1
        if self._identity is not None:
            assert part.seqs is not None
            prints = self._prints[new].tobytes()
            event.producers = [ProducerRows(*self._identity, np.arange(len(new)), part.seqs, prints)]
        keep = [(i, row) for i, row in enumerate(self._keyed) if self.new[row]]
        if keep:
            rows_keyed = np.array([row for _, row in keep])
            window = round(self.partition.config.dedup_window * 1000)
            scopes = [SCOPES[(self._columns.scopes[r] if self._columns.scopes else None) or "window"] for _, r in keep]
            event.keys = KeyRows(
                renumber[rows_keyed],
                b"".join(self._hashes[i] for i, _ in keep),
                self._prints[rows_keyed].tobytes(),
                np.array(scopes, dtype=np.int8).tobytes(),
                np.full(len(keep), now.steady + window, dtype=np.int64),
            )
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


def opened_with(topic: Topic, identity: Identity) -> int:
    """Return the partition count when the producer's epoch was opened; the current one if it was not."""
    return topic.partitions[0].state.sequences.partitions_of(identity.producer_id) or len(topic.partitions)


def name_of_share(producer_id: str, seq: int) -> bytes:
    """Return the name that places a numbered message without key.

    Consecutive numbers share it, because an event per partition costs less than one per message.
    """
    return f"{producer_id}\0{seq >> SHARE_BITS}".encode()


def give_turns(partition: Partition, rows: Any, part: Columns, in_turn: bool = True) -> I64 | None:
    """Write turns into the rows of new messages that are ready (the others get theirs later). Return the hashes of
    their fairness keys, or None without fairness."""
    if partition.fairness is None:
        return None
    hashes = part.fairness_hashes()
    ready = rows["due"] == 0
    if in_turn and ready.any():
        priorities = partition.entries.ordering.keys(rows["priority"][ready], rows["enqueued_at"][ready])
        rows["turn"][ready] = partition.fairness.share.take(priorities, hashes[ready])
    return hashes


class FormerPlaces:
    """The rows of one identified call; `names` are what places them, `parts` their partitions by the current count."""

    def __init__(
        self, topic: Topic, identity: Identity | None, columns: Columns, names: list[bytes], parts: I64, now: int
    ) -> None:
        self._topic, self._identity, self._columns = topic, identity, columns
        self._names, self._today, self._now = names, parts, now
        self._with_token = _present(columns.tokens, columns.count)
        self._with_name = self._with_token | _present(columns.places(), columns.count)
        self._opened_with = len(topic.partitions)  # partition count when the epoch was opened
        if identity is not None:
            self._opened_with = opened_with(topic, identity)

    def parts(self) -> I64:
        """Return the partition of each row."""
        parts = self._today.copy()
        if self._identity is not None and self._opened_with < len(self._topic.partitions):
            rows = np.flatnonzero(~self._with_name)
            parts[rows] = self._placed(rows, self._opened_with)
        left: Mask = np.ones(len(parts), dtype=np.bool_)
        for growth in self._topic.growths:  # oldest first: at most one of a row's partitions remembers it
            by_seq = self._identity is not None and growth.before >= self._opened_with
            by_token = self._may_hold_tokens(growth)
            rows = np.flatnonzero(left & (self._with_name if by_seq else self._with_token & by_token))
            for partition, mine in self._moved(rows, growth.before):
                found = mine[self._remembers(partition, mine, by_seq, by_token)]
                parts[found] = partition.number
                left[found] = False
        return parts

    def _placed(self, rows: I64, count: int) -> I64:
        return place([self._names[row] for row in rows.tolist()], count)

    def _may_hold_tokens(self, growth: Grown) -> bool:
        if not self._with_token.any():
            return False
        old = self._topic.partitions[: growth.before]
        return self._now < growth.until or any(p.state.keys.holds_any or p.entries.prepared.batches for p in old)

    def _moved(self, rows: I64, count: int) -> list[tuple[Partition, I64]]:
        """Return the rows that `count` partitions placed elsewhere, by partition."""
        if not len(rows):
            return []
        old = self._placed(rows, count)
        moved = old != self._today[rows]
        rows, old = rows[moved], old[moved]
        return [(self._topic.partitions[n], rows[old == n]) for n in np.unique(old).tolist()]

    def _remembers(self, partition: Partition, rows: I64, by_seq: bool, by_token: bool) -> Mask:
        found: Mask = np.zeros(len(rows), dtype=np.bool_)
        prints = np.zeros(len(rows), dtype=np.uint32)  # payloads are compared later
        if by_seq and self._identity is not None:
            assert self._columns.seqs is not None
            seqs = self._columns.seqs[rows]
            found |= _known(
                partition.state.sequences.check(self._identity.producer_id, self._identity.epoch, seqs, prints)
            )
            doubts = partition.entries.prepared.seqs_in_doubt(
                self._identity.producer_id, self._identity.epoch, seqs, None
            )
            found[list(doubts)] = True
        mine = np.flatnonzero(self._with_token[rows])
        if by_token and len(mine):
            hashes = [key_hash(self._columns.tokens[row]) for row in rows[mine].tolist()]  # type: ignore[index]
            found[mine] |= _known(partition.state.keys.check(hashes, prints[mine], self._now))
            found[mine[list(partition.entries.prepared.hashes_in_doubt(hashes, None))]] = True
        return found


def _present(column: Any, count: int) -> Mask:
    if not column:
        return np.zeros(count, dtype=np.bool_)
    return np.fromiter((value is not None for value in column), dtype=np.bool_, count=count)


def _known(verdict: Verdict) -> Mask:
    """Return the rows that the partition itself knows, without rows that only repeat another row of their batch."""
    known: Mask = (verdict.status != NEW) & (verdict.twins == NO_ID)
    return known
