"""The prepared parts of one partition: durable messages that stay invisible until their batch is decided.

A batch has parts; a part has one share in each partition that it reaches. A share keeps, as columns, what its messages
need to enter the queue later. So a commit passes on complete columns and an abort drops them: the cost is per part.

*In doubt.* The identities (idempotency keys, producers' sequences) of prepared messages are neither known nor free.
Parts of one batch may carry the same identities, as two attempts of one task do. For all other callers they are in
doubt until the batch is decided; then those of the named parts become known and the others are dropped.

Which parts a commit names, and whether a part is complete across several topics, is decided elsewhere (coordinator.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from heapline.contract.errors import IdempotencyConflict, SnapshotCorrupt
from heapline.core.events import EMPTY, I64, BatchAborted, BatchCommitted, BatchPrepared, KeyRows, Mask, ProducerRows
from heapline.core.record import ATTEMPTS_MAX

#: The fields of a record's fixed row that are needed when its message enters the queue: 36 bytes instead of 80.
KEPT = np.dtype(
    [("id", "<i8"), ("due", "<i8"), ("enqueued_at", "<i8"), ("ttl_ms", "<i8"), ("flags", "<u2"), ("max_retries", "<u2")]
)
COMMIT_BYTES_MAX = 128 << 10  # per event, unless a single part is larger: that fit into a unit when it arrived


class Share(msgspec.Struct):
    """The messages of one part in one partition."""

    topics: list[str]
    fingerprint: bytes
    at: int
    rows: Any  # of dtype KEPT
    keys: I64
    positions: I64
    index: I64
    known: I64
    known_ids: I64
    producers: list[ProducerRows]
    tokens: KeyRows | None

    @property
    def count(self) -> int:
        return len(self.positions)

    @property
    def ids(self) -> I64:
        ids: I64 = np.ascontiguousarray(self.rows["id"])
        return ids

    def only(self, keep: Mask) -> Share:
        """Return the share without some of its messages and without their identities."""
        if keep.all():
            return self
        number = np.cumsum(keep) - 1
        producers = []
        for p in self.producers:
            here = keep[p.index]
            prints = np.frombuffer(p.prints, dtype=np.uint32)[here].tobytes()
            producers.append(
                ProducerRows(p.producer, p.epoch, p.answered_below, number[p.index[here]], p.seqs[here], prints)
            )
        tokens = self.tokens
        if tokens is not None:
            here = keep[tokens.index]
            hashes = np.frombuffer(tokens.hashes, dtype=np.uint8).reshape(-1, 16)[here].tobytes()
            prints = np.frombuffer(tokens.prints, dtype=np.uint32)[here].tobytes()
            scopes = np.frombuffer(tokens.scopes, dtype=np.int8)[here].tobytes()
            tokens = KeyRows(number[tokens.index[here]], hashes, prints, scopes, tokens.expires[here])
        return replace(
            self,
            rows=self.rows[keep],
            keys=self.keys[keep],
            positions=self.positions[keep],
            index=self.index[keep],
            producers=producers,
            tokens=tokens,
        )

    def identities(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (identity, fingerprint of its payload, row) one by one; only for callers that found a candidate."""
        for p in self.producers:
            prints = np.frombuffer(p.prints, dtype=np.uint32).tolist()
            for seq, print_, row in zip(p.seqs.tolist(), prints, p.index.tolist(), strict=True):
                yield (p.producer, p.epoch, seq), print_, row
        if self.tokens is not None:
            prints = np.frombuffer(self.tokens.prints, dtype=np.uint32).tolist()
            yield from zip(split_hashes(self.tokens.hashes), prints, self.tokens.index.tolist(), strict=True)

    def to_state(self) -> list[Any]:
        """Return the state as references: arrays are encoded later, elsewhere."""
        columns = [self.rows, self.keys, self.positions, self.index, self.known, self.known_ids]
        return [self.topics, self.fingerprint, self.at, columns, [self.producers, self.tokens]]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Share:
        topics, fingerprint, at, (rows, *columns), identities = state
        producers, tokens = _decode(identities)
        keys, positions, index, known, known_ids = (np.frombuffer(column, dtype=np.int64) for column in columns)
        kept = np.frombuffer(rows, dtype=KEPT)
        return cls(topics, fingerprint, at, kept, keys, positions, index, known, known_ids, producers, tokens)


def _decode(identities: Any) -> tuple[list[ProducerRows], KeyRows | None]:
    kind = tuple[list[ProducerRows], KeyRows | None]
    found: Any = msgspec.convert(identities, type=kind, dec_hook=lambda _, v: np.frombuffer(v, dtype=np.int64))
    return found[0], found[1]


def join(shares: Sequence[Share]) -> Share:
    """Join the messages of several shares; their identities are omitted."""
    if len(shares) == 1:
        return replace(shares[0], producers=[], tokens=None)
    rows = np.concatenate([np.zeros(0, dtype=KEPT), *(share.rows for share in shares)])
    keys, positions = (
        np.concatenate([EMPTY, *(getattr(share, name) for share in shares)]) for name in ("keys", "positions")
    )
    return Share([], b"", 0, rows, keys, positions, EMPTY, EMPTY, EMPTY, [], None)


def split_hashes(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + 16] for i in range(0, len(hashes), 16)]


class Prepared:
    """Shares by batch and part, and the identities that are in doubt."""

    def __init__(self) -> None:
        self.batches: dict[str, dict[str, Share]] = {}
        self.count = 0  # messages
        self._hashes: dict[bytes, str] = {}  # hash of an idempotency key -> batch
        self._seqs: dict[tuple[str, int], dict[str, list[I64]]] = {}  # (producer, epoch) -> batch -> sequences

    def shares(self) -> Iterator[Share]:
        return (share for parts in self.batches.values() for share in parts.values())

    @property
    def expires_max(self) -> int:
        """Time by which every window-scope key that a commit may record has expired; 0 if there is none."""
        tokens = [share.tokens for share in self.shares() if share.tokens is not None and len(share.tokens.expires)]
        return max((int(t.expires.max()) for t in tokens), default=0)

    @property
    def nbytes(self) -> int:
        return self.count * (KEPT.itemsize + 24) + 130 * len(self._hashes)

    # -- changes ---------------------------------------------------------------------------------------------------

    def add(self, event: BatchPrepared, rows: Any, positions: I64 | None, keys: I64) -> Share:
        """Store the share of a `BatchPrepared` event, and the heap keys of its messages."""
        kept = np.zeros(event.count, dtype=KEPT)
        if event.count:
            for name in KEPT.names or ():
                kept[name] = rows[name]
        share = Share(
            event.topics,
            event.fingerprint,
            event.at,
            kept,
            keys,
            EMPTY if positions is None else positions,
            event.index,
            event.known,
            event.known_ids,
            event.producers,
            event.keys,
        )
        self._keep(event.batch_id, event.part, share)
        return share

    def _keep(self, batch_id: str, part: str, share: Share) -> None:
        self.batches.setdefault(batch_id, {})[part] = share
        self.count += share.count
        for p in share.producers:
            self._seqs.setdefault((p.producer, p.epoch), {}).setdefault(batch_id, []).append(np.sort(p.seqs))
        if share.tokens is not None:
            self._hashes.update(dict.fromkeys(split_hashes(share.tokens.hashes), batch_id))

    def take(self, batch_id: str, parts: Sequence[str]) -> list[Share]:
        """Remove and return these parts, which must exist, in this order."""
        held = self.batches[batch_id]
        shares = [held.pop(part) for part in parts]
        self.count -= sum(share.count for share in shares)
        return shares

    def drop(self, batch_id: str) -> list[Share]:
        """Forget the batch and return its remaining shares. Its identities are no longer in doubt."""
        shares = list(self.batches.pop(batch_id).values())
        self.count -= sum(share.count for share in shares)
        if self._hashes:
            self._hashes = {key: batch for key, batch in self._hashes.items() if batch != batch_id}
        for producer in [p for p, batches in self._seqs.items() if batch_id in batches]:
            del self._seqs[producer][batch_id]
            if not self._seqs[producer]:
                del self._seqs[producer]
        return shares

    def replace_positions(self, ids_sorted: I64, positions: I64) -> None:
        """Replace the positions of moved records, in new columns: a snapshot may be reading the old ones."""
        for share in self.shares():
            at = np.searchsorted(ids_sorted, share.ids)
            at[at == len(ids_sorted)] = 0
            hit = ids_sorted[at] == share.ids if len(ids_sorted) else np.zeros(share.count, dtype=np.bool_)
            if hit.any():
                share.positions = np.where(hit, positions[at] | (share.positions & ATTEMPTS_MAX), share.positions)

    # -- queries ---------------------------------------------------------------------------------------------------

    def hashes_in_doubt(self, hashes: Sequence[bytes], own: str | None) -> dict[int, str]:
        """Return row -> batch for the idempotency keys that a batch other than `own` has prepared."""
        if not self._hashes or self._hashes.keys().isdisjoint(hashes):
            return {}
        found = {row: self._hashes[key] for row, key in enumerate(hashes) if key in self._hashes}
        return {row: batch for row, batch in found.items() if batch != own}

    def seqs_in_doubt(self, producer: str, epoch: int, seqs: I64, own: str | None) -> dict[int, str]:
        """Return row -> batch for the producer's sequences that a batch other than `own` has prepared."""
        found: dict[int, str] = {}
        for batch, columns in self._seqs.get((producer, epoch), {}).items():
            if batch != own:
                for column in columns:
                    found |= dict.fromkeys(np.flatnonzero(np.isin(seqs, column)).tolist(), batch)
        return found

    def joined(self, event: BatchCommitted) -> Share:
        """Return all messages of the parts that a commit names."""
        held = self.batches[event.batch_id]
        return join([held[part] for part in event.parts])

    def twins(self, batch_id: str, parts: Sequence[str]) -> list[int]:
        """Return the ids that a commit of these parts omits: an earlier part has a message of the same identity.

        If the payloads differ it is not a repeat but a contradiction: `IdempotencyConflict`.
        """
        held = self.batches.get(batch_id, {})
        shares = [held[part] for part in parts if part in held]
        if sum(bool(share.producers or share.tokens) for share in shares) < 2 or not _may_have_twins(shares):
            return []
        first: dict[Any, tuple[int, int]] = {}
        left_out: dict[int, None] = {}
        for share in shares:
            ids = share.ids.tolist()
            for identity, print_, row in share.identities():
                known, id = first.setdefault(identity, (print_, ids[row]))
                if known != print_:
                    raise IdempotencyConflict(f"an identity in two named parts of batch {batch_id!r}", str(id))
                if id != ids[row]:
                    left_out[ids[row]] = None
        return list(left_out)

    # -- decisions -------------------------------------------------------------------------------------------------

    def decide_commit(
        self, batch_id: str, parts: Sequence[str], left_out: Collection[int], seq: Callable[[int], int], at: int
    ) -> list[BatchCommitted]:
        """Attach the named parts, in this order, and drop the rest: one event, or several if it would be too large."""
        if batch_id not in self.batches:
            return []
        held = self.batches[batch_id]
        groups: list[list[str]] = [[]]
        size = 0
        for part in [part for part in parts if part in held]:
            more = 8 * held[part].count + len(part.encode()) + 8
            if groups[-1] and size + more > COMMIT_BYTES_MAX:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += more
        events = []
        for number, group in enumerate(groups):
            ids = np.concatenate([EMPTY, *(held[part].ids for part in group)])
            if left_out:
                ids = ids[~np.isin(ids, np.fromiter(left_out, np.int64, len(left_out)))]
            more_follow = number < len(groups) - 1
            events.append(BatchCommitted(ids, batch_id, group, seq(len(ids) or 1), at, more_follow))
        return events

    def decide_abort(self, batch_id: str, at: int) -> BatchAborted | None:
        return BatchAborted(batch_id, at) if batch_id in self.batches else None

    # -- snapshots -------------------------------------------------------------------------------------------------

    def to_state(self) -> list[Any]:
        return [
            [batch_id, part, share.to_state()]
            for batch_id, parts in self.batches.items()
            for part, share in parts.items()
        ]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> Prepared:
        prepared = cls()
        try:
            for batch_id, part, share in state:
                prepared._keep(batch_id, part, Share.from_state(share))
        except (TypeError, ValueError, msgspec.MsgspecError) as problem:
            raise SnapshotCorrupt("prepared parts", repr(problem)) from problem
        return prepared


def _may_have_twins(shares: Sequence[Share]) -> bool:
    """Whether any identity may occur twice. Cheap, and never wrong if it returns False."""
    columns: dict[Any, list[Any]] = {}
    for share in shares:
        for p in share.producers:
            columns.setdefault((p.producer, p.epoch), []).append(p.seqs)
        if share.tokens is not None:
            halves = np.frombuffer(share.tokens.hashes, dtype=np.uint64).reshape(-1, 2)[:, 0]
            columns.setdefault(None, []).append(halves)
    for parts in columns.values():
        whole = np.concatenate(parts)
        if len(np.unique(whole)) < len(whole):
            return True
    return False
