"""Prepared batches of the partition rig: parts in the real partition and, as plain lists, in the model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from heapline.contract.errors import IdempotencyConflict
from heapline.contract.message import Outgoing
from heapline.core.dedup.idempotency import key_hash
from heapline.core.dedup.verdict import NEW
from heapline.core.events import EMPTY, BatchPrepared, KeyRows
from heapline.core.partition import Partition
from heapline.engine.columns import SCOPES, Columns
from heapline.engine.duplicates import give_turns
from tests.unit.core.naive import NaiveKey, NaiveMessage
from tests.unit.core.rig_enqueue import EnqueueRig, naive_message


class NaivePrepared(NamedTuple):
    message: NaiveMessage
    name: str | None
    key: NaiveKey | None


class BatchRig(EnqueueRig):
    @property
    def batches(self) -> dict[str, dict[str, list[NaivePrepared]]]:
        return self.model.__dict__.setdefault("batches", {})

    def prepared_ids(self) -> list[int]:
        return [row.message.id for parts in self.batches.values() for rows in parts.values() for row in rows]

    def prepare(self, batch: str, part: str, *messages: Outgoing) -> list[int]:
        """Prepare the messages that are neither duplicates nor in doubt; return their ids."""
        columns = Columns(messages)
        prints = np.array([len(m.payload) for m in messages], dtype=np.uint32)
        status = np.zeros(len(messages), dtype=np.int8)
        keyed = [i for i, m in enumerate(messages) if m.idempotency_key is not None]
        self._judge_keys(keyed, columns, prints, status)
        doubts = self._doubts([messages[i].idempotency_key or "" for i in keyed], batch)
        status[[keyed[row] for row in doubts]] = 4
        new = np.flatnonzero(status == NEW)
        chosen = columns.subset(new.tolist())
        rows, _ = chosen.fill(*self.now)
        rows["payload_len"] = [len(p) for p in chosen.payloads]
        if len(new):
            rows["id"] = self.p.state.ids.take(len(new), self.now.steady)
        fairness = give_turns(self.p, rows, chosen, in_turn=False) if len(new) else None
        event = BatchPrepared(
            0, 0, len(new), batch, part, ["jobs"], b"print", self.now.steady, new, EMPTY, EMPTY,
        )  # fmt: skip
        kept = [self._naive(row, chosen, i, int(prints[new[i]])) for i, row in enumerate(rows)]
        event.keys = _key_rows(kept)
        self.emit(event, rows if len(new) else None, self.allot(rows) if len(new) else None, fairness)
        self.records.update({int(row["id"]): row for row in rows})
        self.batches.setdefault(batch, {})[part] = kept
        return rows["id"].tolist() if len(new) else []

    def _doubts(self, names: list[str], batch: str | None) -> dict[int, str]:
        """Return which keys another batch has prepared; partition and model must agree."""
        doubts = self.p.entries.prepared.hashes_in_doubt([key_hash(name) for name in names], batch)
        held = {
            row.name: of for of, parts in self.batches.items() if of != batch
            for rows in parts.values() for row in rows if row.name is not None
        }  # fmt: skip
        assert doubts == {i: held[name] for i, name in enumerate(names) if name in held}
        return doubts

    def _naive(self, row: object, chosen: Columns, i: int, print_: int) -> NaivePrepared:
        message = naive_message(row, chosen.fairness[i] if chosen.fairness else None)
        name = chosen.tokens[i] if chosen.tokens else None
        if name is None:
            return NaivePrepared(message, None, None)
        scope = SCOPES[(chosen.scopes[i] if chosen.scopes else None) or "window"]
        expires = self.now.steady + round(self.config.dedup_window * 1000)
        return NaivePrepared(message, name, NaiveKey(message.id, print_, scope, expires))

    def commit(self, batch: str, parts: list[str]) -> list[int]:
        """Commit exactly these parts; return the ids that became visible, or None if two parts contradict."""
        named = [row for part in parts for row in self.batches[batch][part]]
        first: dict[str, NaivePrepared] = {}
        visible, contradiction = [], False
        for row in named:
            earlier = first.setdefault(row.name, row) if row.name is not None else row
            contradiction |= earlier.key is not None and row.key is not None and earlier.key.print != row.key.print
            if earlier is row:
                visible.append(row)
        if contradiction:
            with pytest.raises(IdempotencyConflict):
                self.p.entries.prepared.twins(batch, parts)
            return []
        left_out = self.p.entries.prepared.twins(batch, parts)
        assert set(left_out) == {row.message.id for row in named} - {row.message.id for row in visible}
        events = self.p.entries.prepared.decide_commit(batch, parts, left_out, self.take_seq, self.now.steady)
        assert [id for event in events for id in event.ids.tolist()] == [row.message.id for row in visible]
        for event in events:
            if self.p.fairness is not None and len(event.ids):
                event.keys = self.p.decide_turns(event)
            if self.config.streams:
                self.p.place_in_stream(event)
            self.emit(event)
        for row in visible:
            self.model.enqueue(row.message)
            if row.name is not None and row.key is not None:
                self.model.keys[row.name] = row.key
        del self.batches[batch]
        return [row.message.id for row in visible]

    def abort(self, batch: str) -> None:
        event = self.p.entries.prepared.decide_abort(batch, self.now.steady)
        assert event is not None
        self.emit(event)
        del self.batches[batch]

    def check(self, p: Partition | None = None, look: bool = False) -> None:
        super().check(p, look)
        p = p or self.p
        expected = {
            batch: {part: [row.message.id for row in rows] for part, rows in parts.items()}
            for batch, parts in self.batches.items()
        }  # fmt: skip
        held = {
            batch: {part: share.ids.tolist() for part, share in parts.items()}
            for batch, parts in p.entries.prepared.batches.items()
        }  # fmt: skip
        assert held == expected
        assert p.entries.prepared.count == len(self.prepared_ids())
        for id in self.prepared_ids():
            assert p.entries.find(id) is None, "prepared messages are invisible"


def _key_rows(rows: list[NaivePrepared]) -> KeyRows | None:
    keyed = [(i, row.name, row.key) for i, row in enumerate(rows) if row.name is not None and row.key is not None]
    if not keyed:
        return None
    return KeyRows(
        np.array([i for i, _, _ in keyed]), b"".join(key_hash(name) for _, name, _ in keyed),
        np.array([key.print for _, _, key in keyed], dtype=np.uint32).tobytes(),
        np.array([key.scope for _, _, key in keyed], dtype=np.int8).tobytes(),
        np.array([key.expires for _, _, key in keyed], dtype=np.int64),
    )  # fmt: skip
