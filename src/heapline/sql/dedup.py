"""Repeated enqueues, by idempotency key or by a producer's sequence.

The rules are the core's (core/dedup): what the database remembers of the identities of a call is loaded into small
windows, which judge its rows. A call with identities locks its topic, so nothing changes between judging and storing.

Sequences are only inserted here, and so is how far their producer had all answers. Slots that are full are emptied of
what was answered (rings.py), and only then is the producer's row updated. So sequences are read before that row: what
was removed in between is below what the row says then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from heapline.contract.errors import BatchInDoubt, HeaplineError, IdempotencyConflict, StaleEpoch, StaleSequence
from heapline.core.dedup.idempotency import WINDOW, KeyWindow, key_hash
from heapline.core.dedup.sequences import SequenceWindow
from heapline.core.dedup.verdict import CONFLICT, DUPLICATE, NEW, STALE, Verdict, fingerprints
from heapline.sql.rows import NewRow
from heapline.sql.shard import Turn
from heapline.sql.statements import statement


class Identity(NamedTuple):
    """The producer that numbered the messages of a call."""

    producer_id: str
    epoch: int
    answered_below: int


class Producer(NamedTuple):
    """A producer's row."""

    epoch: int
    answered_below: int
    forgotten_below: int

    @property
    def floor(self) -> int:
        """The sequence below which repeats are refused: they are not remembered."""
        return max(self.answered_below, self.forgotten_below)


class Judgement:
    """The verdict on each row of a call: new, a repeat of a stored message or of another row, or refused."""

    def __init__(self, rows: Sequence[NewRow], topic_ulid: Any) -> None:
        count = len(rows)
        self._rows, self._ulid = rows, topic_ulid
        self._status, self._first, self._twin = [NEW] * count, [-1] * count, [-1] * count
        self.errors: dict[int, HeaplineError] = {}

    def take(self, verdict: Verdict, rows: Sequence[int]) -> None:
        """Apply a verdict to rows that are still new."""
        if verdict.all_new:
            return
        for i, row in enumerate(rows):
            if self._status[row] == NEW and verdict.status[i] != NEW:
                self._status[row] = verdict.status.item(i)
                self._first[row] = verdict.first_ids.item(i)
                twin = verdict.twins.item(i)
                self._twin[row] = rows[twin] if twin >= 0 else -1

    def settle(self, identity: Identity | None, answered_below: int) -> None:
        """Resolve rows that repeat rows which are not new, and name the errors."""
        for row, twin in enumerate(self._twin):
            if twin >= 0 and self._status[twin] != NEW:
                self._status[row], self._first[row], self._twin[row] = self._status[twin], self._first[twin], -1
        for row, status in enumerate(self._status):
            if status == STALE and identity is not None:
                self.errors[row] = StaleSequence(identity.producer_id, self._rows[row].seq or 0, answered_below)
            elif status == CONFLICT:
                first = self._first[row]
                known = self._ulid(first) if first >= 0 else "(of the same batch)"
                self.errors[row] = IdempotencyConflict(self.name(row), known)

    def name(self, row: int) -> str:
        """Return the identity of a row, for an error."""
        token = self._rows[row].idempotency_key
        return f"sequence {self._rows[row].seq}" if token is None else f"idempotency key {token!r}"

    def refuse(self, rows: Sequence[int], error: HeaplineError) -> None:
        """Refuse these rows, and those that repeat them."""
        refused = set(rows)
        for row, twin in enumerate(self._twin):
            if row in refused or twin in refused:
                self.errors[row] = error

    @property
    def new(self) -> list[int]:
        return [row for row, status in enumerate(self._status) if status == NEW and row not in self.errors]

    def duplicate_of(self, row: int, ids: dict[int, int]) -> int | None:
        """Return the id of the message that a row repeats; `ids` are those of the new rows."""
        if self._status[row] != DUPLICATE:
            return None
        twin = self._twin[row]
        return ids[twin] if twin >= 0 else self._first[row]


class Memory:
    """The stored state of the identities of one call."""

    def __init__(self, turn: Turn, rows: Sequence[NewRow], identity: Identity | None) -> None:
        self._turn, self._rows, self._identity = turn, rows, identity
        self._prints = fingerprints([row.payload for row in rows])
        self._keyed = [i for i, row in enumerate(rows) if row.idempotency_key is not None]
        self._hashes = [key_hash(rows[i].idempotency_key or "") for i in self._keyed]
        self._producer: Producer | None = None  # None: it has not begun the epoch of this call yet

    async def judge(self, batch: str | None = None) -> Judgement:
        """Judge the rows; `batch` is the prepared batch that they are for, whose other parts may share identities."""
        judgement = Judgement(self._rows, self._turn.topic.ulid)
        doubts = await self._in_doubt(batch)  # first: a commit moves them to the tables that are read then
        if self._identity is not None:
            judgement.take(await self._judge_sequences(self._identity), range(len(self._rows)))
        if self._keyed:
            judgement.take(await self._judge_keys(), self._keyed)
        judgement.settle(self._identity, 0 if self._producer is None else self._producer.floor)
        for row, other in doubts.items():
            if row in judgement.new:
                judgement.refuse([row], BatchInDoubt(judgement.name(row), other))
        return judgement

    async def _in_doubt(self, batch: str | None) -> dict[int, str]:
        """Return the rows whose identity is in an undecided batch, and that batch."""
        connection, topic = self._turn.connection, self._turn.topic.id
        found: dict[int, str] = {}
        if self._keyed:
            rows = await connection.fetch(statement("keys_in_doubt"), topic, self._hashes, batch)
            batches = {row["hash"]: row["batch"] for row in rows}
            found |= {i: batches[h] for i, h in zip(self._keyed, self._hashes, strict=True) if h in batches}
        if self._identity is not None:
            producer, epoch, _ = self._identity
            seqs = [row.seq for row in self._rows]
            rows = await connection.fetch(statement("sequences_in_doubt"), topic, producer, epoch, seqs, batch)
            by_seq = {row["seq"]: row["batch"] for row in rows}
            found |= {i: by_seq[seq] for i, seq in enumerate(seqs) if seq in by_seq}
        return found

    async def _judge_sequences(self, identity: Identity) -> Verdict:
        seqs = np.array([row.seq for row in self._rows], dtype=np.int64)
        values = self._turn.topic.id, identity.producer_id, identity.epoch, seqs.tolist()
        stored = await self._turn.connection.fetch(statement("select_sequences"), *values)
        known = await read_producer(self._turn, identity.producer_id)
        if known is not None and identity.epoch < known.epoch:
            raise StaleEpoch(identity.producer_id, identity.epoch, known.epoch)
        window = SequenceWindow()
        window.open(identity.producer_id, identity.epoch, 1, self._turn.now)
        if known is not None and identity.epoch == known.epoch:
            self._producer = known
            columns = sorted((r["seq"], r["id"], r["print"]) for r in stored)
            window.record(
                identity.producer_id,
                identity.epoch,
                np.array([c[0] for c in columns], dtype=np.int64),
                np.array([c[1] for c in columns], dtype=np.int64),
                np.array([c[2] for c in columns], dtype=np.uint32),
                self._turn.now,
            )
            window.answered(identity.producer_id, identity.epoch, known.floor)
        return window.check(identity.producer_id, identity.epoch, seqs, self._prints)

    async def _judge_keys(self) -> Verdict:
        stored = await self._turn.connection.fetch(
            statement("select_keys"), self._turn.topic.id, self._hashes, self._turn.now
        )
        window = KeyWindow()
        window.record(
            [r["hash"] for r in stored],
            np.array([r["id"] for r in stored], dtype=np.int64),
            np.array([r["print"] for r in stored], dtype=np.uint32),
            np.array([r["scope"] for r in stored], dtype=np.int8),
            np.array([r["expires"] for r in stored], dtype=np.int64),
        )
        return window.check(self._hashes, self._prints[self._keyed], self._turn.now)

    async def record_in_doubt(self, ids: dict[int, int], batch: str, part: str) -> None:
        """Remember the identities of rows that were prepared, by row."""
        connection, topic = self._turn.connection, self._turn.topic
        kept = [(row, hash) for row, hash in zip(self._keyed, self._hashes, strict=True) if row in ids]
        if kept:
            end = self._turn.now + round(topic.config.dedup_window * 1000)
            await connection.execute(
                statement("insert_prepared_keys"),
                topic.id,
                batch,
                part,
                [hash for _, hash in kept],
                [ids[row] for row, _ in kept],
                [self._prints.item(row) for row, _ in kept],
                [self._rows[row].scope for row, _ in kept],
                [end if self._rows[row].scope == WINDOW else 0 for row, _ in kept],
            )
        if self._identity is not None and ids:
            await connection.execute(
                statement("insert_prepared_sequences"),
                topic.id,
                batch,
                part,
                self._identity.producer_id,
                self._identity.epoch,
                [self._rows[row].seq for row in ids],
                list(ids.values()),
                [self._prints.item(row) for row in ids],
            )

    async def record(self, ids: dict[int, int]) -> None:
        """Remember the identities of the rows that were stored, by row."""
        await self._record_keys(ids)
        if self._identity is not None:
            await self._record_sequences(self._identity, ids)

    async def _record_keys(self, ids: dict[int, int]) -> None:
        kept = [(row, hash) for row, hash in zip(self._keyed, self._hashes, strict=True) if row in ids]
        if not kept:
            return
        connection, topic, now = self._turn.connection, self._turn.topic, self._turn.now
        hashes = [hash for _, hash in kept]
        await connection.execute(statement("delete_expired_keys_of"), topic.id, hashes, now)
        end = now + round(topic.config.dedup_window * 1000)
        await connection.execute(
            statement("insert_keys"),
            topic.id,
            hashes,
            [ids[row] for row, _ in kept],
            [self._prints.item(row) for row, _ in kept],
            [self._rows[row].scope for row, _ in kept],
            [end if self._rows[row].scope == WINDOW else 0 for row, _ in kept],
        )

    async def _record_sequences(self, identity: Identity, ids: dict[int, int]) -> None:
        connection, topic, now = self._turn.connection, self._turn.topic, self._turn.now
        producer, epoch, answered = identity
        if self._producer is None:
            await connection.execute(statement("upsert_producer"), topic.id, producer, epoch, answered, 0, now)
        else:
            answered = max(answered, self._producer.answered_below)
        if ids:
            await connection.execute(
                statement("insert_sequences"),
                topic.id,
                producer,
                epoch,
                answered,
                now,
                [self._rows[row].seq for row in ids],
                list(ids.values()),
                [self._prints.item(row) for row in ids],
            )


async def read_producer(turn: Turn, producer_id: str) -> Producer | None:
    row = await turn.connection.fetchrow(statement("select_producer"), turn.topic.id, producer_id)
    return None if row is None else Producer(*row)


async def open_producer(turn: Turn, producer_id: str) -> int:
    """Begin the next epoch of a producer and return it."""
    known = await read_producer(turn, producer_id)
    epoch = 1 if known is None else known.epoch + 1
    await turn.connection.execute(statement("upsert_producer"), turn.topic.id, producer_id, epoch, 0, 0, turn.now)
    return epoch
