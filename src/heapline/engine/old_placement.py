"""Place messages with a number or an idempotency key on a topic that has grown.

A retry must find the record of its first attempt. That is where the partition count at that time placed it, so the
older partitions are checked before the current count places the message. If a partition there remembers the identity
(or knows that it is too old to decide), the row goes there and gets that partition's verdict. Otherwise it is new and
goes to its new partition, where the next retry finds it. An older count is checked only for as long as an identity may
be remembered there:

- *Numbered, without key*: placed by the count at the epoch's opening, for as long as the epoch lasts. One partition.
- *Numbered, with key or idempotency key*: the counts since the epoch's opening, for as long as the epoch lasts. Numbers
  of older epochs are fenced, so older counts hold none of this one. There is no time limit, because a partition
  refuses a number that it has forgotten (answered, or older than the window) as stale, and a new one could not.
- *Idempotency key of the window scope*: until the last one recorded before the growth has expired (`Grown.until`).
- *Pending and until-ack*: for as long as a partition from before the growth holds any such key.
- *In doubt*: identities of an undecided batch that was prepared before the growth are where the batch is.

Rendezvous hashing moves a key only to new partitions, so only rows that moved are looked up. Nothing is checked on a
topic that never grew. admission.py interprets the verdicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heapline.core.dedup.idempotency import key_hash
from heapline.core.dedup.verdict import NEW, NO_ID, Verdict
from heapline.core.events import I64, Grown
from heapline.core.partition import Partition
from heapline.core.placement import place
from heapline.engine.columns import Columns
from heapline.engine.topic import Topic

if TYPE_CHECKING:
    from heapline.engine.calls import Identity

Mask = npt.NDArray[np.bool_]


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
            self._opened_with = topic.partitions[0].sequences.partitions_of(identity.producer_id) or self._opened_with

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
        return self._now < growth.until or any(p.keys.holds_any or p.prepared for p in old)

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
            seqs = np.array([self._columns.seqs[row] for row in rows.tolist()], dtype=np.int64)  # type: ignore[index]
            found |= _known(partition.sequences.check(self._identity.producer_id, self._identity.epoch, seqs, prints))
            doubts = partition.prepared.seqs_in_doubt(self._identity.producer_id, self._identity.epoch, seqs, None)
            found[list(doubts)] = True
        mine = np.flatnonzero(self._with_token[rows])
        if by_token and len(mine):
            hashes = [key_hash(self._columns.tokens[row]) for row in rows[mine].tolist()]  # type: ignore[index]
            found[mine] |= _known(partition.keys.check(hashes, prints[mine], self._now))
            found[mine[list(partition.prepared.hashes_in_doubt(hashes, None))]] = True
        return found


def _present(column: Any, count: int) -> Mask:
    if not column:
        return np.zeros(count, dtype=np.bool_)
    return np.fromiter((value is not None for value in column), dtype=np.bool_, count=count)


def _known(verdict: Verdict) -> Mask:
    """Return the rows that the partition itself knows, without rows that only repeat another row of their batch."""
    known: Mask = (verdict.status != NEW) & (verdict.twins == NO_ID)
    return known
