"""Enqueues of the partition rig, deduplicated by sequence and key as in the broker."""

from __future__ import annotations

from typing import Any

import numpy as np

from heapline.contract.message import Outgoing
from heapline.core.dedup.idempotency import key_hash
from heapline.core.dedup.verdict import CONFLICT, DUPLICATE, NEW, STALE
from heapline.core.events import (
    Enqueued,
    KeyRows,
    ProducerOpened,
    ProducerRows,
)  # fmt: skip
from heapline.core.record import DEFAULT_RETRIES, FLAG_WALL
from heapline.engine.columns import SCOPES, Columns
from heapline.engine.duplicates import give_turns
from tests.unit.core.naive import NaiveKey, NaiveMessage, NaiveProducer
from tests.unit.core.rig_checks import CheckingRig


class EnqueueRig(CheckingRig):
    def enqueue(self, *messages: Outgoing, producer: str | None = None, answered_below: int = 0) -> list[int]:
        """Enqueue the messages that are not duplicates; return their ids. A producer uses its current epoch."""
        columns = Columns(messages)
        prints = np.array([len(m.payload) for m in messages], dtype=np.uint32)
        status = np.zeros(len(messages), dtype=np.int8)
        if producer is not None:
            self._judge_seqs(producer, columns, prints, status)
        keyed = [i for i, m in enumerate(messages) if m.idempotency_key is not None]
        self._judge_keys(keyed, columns, prints, status)
        new = np.flatnonzero(status == NEW)
        if not len(new):
            return []
        part = columns.subset(new.tolist())
        rows, _ = part.fill(*self.now)
        rows["payload_len"] = [len(p) for p in part.payloads]
        rows["id"] = self.p.state.ids.take(len(new), self.now.steady)
        event = Enqueued(0, 0, len(new), self.take_seq(len(new)))
        ids: list[int] = rows["id"].tolist()
        if producer is not None:
            event.producers = [self._producer_rows(producer, answered_below, ids, part, prints[new])]
        event.keys = self._key_rows(ids, part, prints[new])
        fairness = give_turns(self.p, rows, part)
        self.emit(event, rows, self.allot(rows), fairness)
        for row, key in zip(rows, part.fairness or [None] * part.count, strict=True):
            self.records[int(row["id"])] = row
            self.model.enqueue(naive_message(row, key))
        return ids

    def _judge_seqs(self, producer: str, columns: Columns, prints: Any, status: Any) -> None:
        known = self.model.producers[producer]
        seqs = np.array(columns.seqs, dtype=np.int64)
        verdict = self.p.state.sequences.check(producer, known.epoch, seqs, prints)
        window = round(self.config.dedup_window * 1000)
        aged = any(at <= self.now.steady - window for at in known.written_at)
        for i, seq in enumerate(seqs.tolist()):
            first = known.seqs.get(seq)
            allowed = {NEW}
            if seq < known.answered_below:
                allowed = {STALE}
            elif first is not None:
                allowed = {DUPLICATE if first[1] == int(prints[i]) else CONFLICT}
            if (aged and first is not None) or (aged and seq < max(known.seqs, default=-1)):
                allowed |= {STALE}
            assert verdict.status[i] in allowed, "wrong verdict on a sequence"
            if verdict.status[i] in (DUPLICATE, CONFLICT):
                assert first is not None
                assert verdict.first_ids[i] == first[0]
        np.maximum(status, verdict.status, out=status)

    def _judge_keys(self, keyed: list[int], columns: Columns, prints: Any, status: Any) -> None:
        if not keyed:
            return
        names = [columns.tokens[i] for i in keyed]  # type: ignore[index]
        verdict = self.p.state.keys.check([key_hash(name) for name in names], prints[keyed], self.now.steady)
        for row, i in enumerate(keyed):
            known = self.model.known_key(names[row], self.now)
            expected = NEW if known is None else DUPLICATE if known.print == int(prints[i]) else CONFLICT
            assert verdict.status[row] == expected, f"key {names[row]} got the wrong verdict"
            if known is not None:
                assert verdict.first_ids[row] == known.id
        status[keyed] = np.maximum(status[keyed], verdict.status)

    def _producer_rows(
        self, name: str, answered_below: int, ids: list[int], part: Columns, prints: Any
    ) -> ProducerRows:
        producer = self.model.producers[name]
        seqs = np.array(part.seqs, dtype=np.int64)
        for id, seq, print in zip(ids, seqs.tolist(), prints.tolist(), strict=True):
            producer.seqs[seq] = (id, print)
        producer.answered_below = max(producer.answered_below, answered_below)
        producer.written_at.append(self.now.steady)
        return ProducerRows(name, producer.epoch, answered_below, np.arange(len(ids)), seqs, prints.tobytes())

    def _key_rows(self, ids: list[int], part: Columns, prints: Any) -> KeyRows | None:
        keyed = [i for i, token in enumerate(part.tokens or ()) if token is not None]
        if not keyed:
            return None
        expires = self.now.steady + round(self.config.dedup_window * 1000)
        names = [part.tokens[i] for i in keyed]  # type: ignore[index]
        scopes = [SCOPES[(part.scopes[i] if part.scopes else None) or "window"] for i in keyed]
        for i, name, scope in zip(keyed, names, scopes, strict=True):
            self.model.keys[name] = NaiveKey(ids[i], int(prints[i]), scope, expires)
        return KeyRows(
            np.array(keyed), b"".join(map(key_hash, names)), prints[keyed].tobytes(),
            np.array(scopes, dtype=np.int8).tobytes(), np.full(len(keyed), expires),
        )  # fmt: skip

    def open_producer(self, name: str) -> None:
        epoch = (self.p.state.sequences.epoch_of(name) or 0) + 1
        self.emit(ProducerOpened(name, epoch, 1))
        self.model.producers[name] = NaiveProducer(epoch)


def naive_message(row: Any, fairness: str | None = None) -> NaiveMessage:
    retries = int(row["max_retries"])
    return NaiveMessage(
        id=int(row["id"]), priority=int(row["priority"]), enqueued_at=int(row["enqueued_at"]), due=int(row["due"]),
        wall=bool(int(row["flags"]) & FLAG_WALL), ttl_ms=int(row["ttl_ms"]),
        max_retries=None if retries == DEFAULT_RETRIES else retries, fairness=fairness, turn=int(row["turn"]),
    )  # fmt: skip
