"""Idempotency keys that a partition has seen: detect duplicates by a key that the caller chooses.

A key is remembered by its 16-byte hash for one of three scopes: WINDOW until a time, PENDING until the message is first
leased, UNTIL_ACK until it is removed. A repeated key gets the first message's id; with another payload it is a
conflict. An expired key is unknown, whether or not its row is still in memory.

Keys of the window scope are collected in a dict. When it is full they become a sorted run of columns (`key_run.py`),
and runs of similar size are merged, so a million keys take few runs and 36 bytes each. Large merges run in slices, paid
for by the records that cause them, and hold both copies until done. At most one row of a hash is unexpired, so the
order in which runs are searched does not matter. The other scopes end with a message, not with time; they are in dicts
by hash and by id. Time is passed in and must never go back.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from heapline.contract.errors import SnapshotCorrupt, UnknownFormat
from heapline.core.dedup.key_run import Columns, KeyRun, Merge, halves, in_order
from heapline.core.dedup.verdict import CONFLICT, DUPLICATE, I8, NO_ID, U32, Verdict, find_twins, judge_twins
from heapline.core.events import I64

#: Scopes of a key.
WINDOW, PENDING, UNTIL_ACK = range(3)

_RECENT_MAX = 4096
#: Two runs of at most this many rows are merged in one call (a few ms); larger ones in slices.
_AT_ONCE_MAX = 1 << 15
#: Rows of each source that a large merge advances per recorded row: enough to finish before the next merge.
_MERGE_PACE = 16
#: Rows of each source that one call of `expire` may process.
_EXPIRE_BUDGET = 1 << 14
_STATE_VERSION = 1


def key_hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


class KeyWindow:
    """The idempotency keys of one topic partition."""

    def __init__(self, *, _recent_max: int = _RECENT_MAX, _at_once_max: int = _AT_ONCE_MAX) -> None:
        self._recent_max, self._at_once_max = _recent_max, _at_once_max
        self._now = 0
        self._runs: list[KeyRun] = []  # oldest first, each usually more than twice as long as the next
        self._merge: Merge | None = None
        self._merge_due = 0
        self._held: dict[bytes, tuple[int, int, int]] = {}  # hash -> id, fingerprint, scope
        self._held_by_id: dict[int, bytes] = {}
        self._pending = 0
        self._clear_recent()

    def check(self, hashes: list[bytes], fingerprints: U32, now: int) -> Verdict:
        """Judge each row; no row is ever STALE."""
        self._now = max(self._now, now)
        if len(hashes) == 1:
            return self._check_one(hashes[0], fingerprints.item(0))
        verdict = Verdict.fresh(len(hashes))
        self._find_recent(hashes, verdict, fingerprints)
        self._find_held(hashes, verdict, fingerprints)
        self._find_in_runs(hashes, verdict, fingerprints)
        if len(set(hashes)) < len(hashes):
            find_twins(hashes, verdict)
            judge_twins(verdict.status, verdict.twins, fingerprints)
        verdict.all_new = not verdict.status.any()
        return verdict

    def record(self, hashes: list[bytes], ids: I64, fingerprints: U32, scopes: I8, expires_at: I64) -> None:
        """Remember keys of enqueued messages; `expires_at` (ms) applies to the window scope only."""
        if scopes.any():
            for row in np.flatnonzero(scopes != WINDOW).tolist():
                self._hold(hashes[row], ids.item(row), fingerprints.item(row), scopes.item(row))
            rows = np.flatnonzero(scopes == WINDOW)
            hashes = [hashes[row] for row in rows.tolist()]
            ids, fingerprints, expires_at = ids[rows], fingerprints[rows], expires_at[rows]
        if not hashes:
            return
        if len(self._recent_hashes) + len(hashes) > self._recent_max:
            self._flush()
        if len(hashes) > self._recent_max:
            self._add_run(Columns(*halves(hashes), ids, fingerprints, expires_at))
        else:
            self._append_recent(hashes, ids, fingerprints, expires_at)
        self._advance(len(hashes) * _MERGE_PACE)

    def leased(self, ids: I64) -> None:
        """Free the PENDING keys of messages that were leased."""
        if self._pending:
            self._release(ids, (PENDING,))

    def gone(self, ids: I64) -> None:
        """Free the PENDING and UNTIL_ACK keys of messages that were removed."""
        if self._held:
            self._release(ids, (PENDING, UNTIL_ACK))

    def expire(self, now: int) -> None:
        """Free memory of expired keys, a bounded amount of work at a time."""
        self._now = max(self._now, now)
        if self._recent and self._recent_expires_max <= self._now:
            self._clear_recent()
        merging = self._merge.sources if self._merge else ()
        self._runs = [run for run in self._runs if run.expires_max > self._now or run in merging]
        if self._merge is None:
            stale = [run for run in self._runs if run.expired_share(self._now) >= 0.5]
            if stale:
                self._merge = Merge(max(stale, key=len))
        self._advance(_EXPIRE_BUDGET)

    @property
    def expires_max(self) -> int:
        """Time by which every current key of the window scope has expired; 0 if there is none."""
        return max(self._recent_expires_max, max((run.expires_max for run in self._runs), default=0))

    @property
    def holds_any(self) -> bool:
        """Whether any message holds a key; such keys have no time limit."""
        return bool(self._held)

    def __len__(self) -> int:
        """Return the number of keys in memory, including expired ones that were not swept yet."""
        return sum(len(run) for run in self._runs) + len(self._recent) + len(self._held)

    @property
    def nbytes(self) -> int:
        """Memory in bytes, with rough estimates for the dicts."""
        columns = sum(run.nbytes for run in self._runs) + (self._merge.nbytes if self._merge else 0)
        return columns + 20 * len(self._recent_ids) + 160 * len(self._recent) + 280 * len(self._held)

    def to_state(self) -> dict[str, Any]:
        tables = [run.rows for run in self._runs]
        if self._recent:
            tables.append(in_order(self._recent_columns(), self._now))
        return {
            "version": _STATE_VERSION,
            "now": self._now,
            "runs": [rows.to_state() for rows in tables],
            "held": [[key, *entry] for key, entry in self._held.items()],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], **thresholds: int) -> KeyWindow:
        if state.get("version") != _STATE_VERSION:
            raise UnknownFormat("key window of a snapshot", state.get("version", 0))
        window = cls(**thresholds)
        try:
            window._now = state["now"]
            runs = [KeyRun(Columns.from_state(parts)) for parts in state["runs"]]
            for key, message_id, fingerprint, scope in state["held"]:
                window._hold(key, message_id, fingerprint, scope)
        except (KeyError, TypeError, ValueError) as problem:
            raise SnapshotCorrupt("key window", repr(problem)) from problem
        window._runs = [run for run in runs if len(run)]
        window._settle()
        return window

    # -- lookup ------------------------------------------------------------------------------------------------

    def _find_recent(self, hashes: list[bytes], verdict: Verdict, prints: U32) -> None:
        if not self._recent or self._recent.keys().isdisjoint(hashes):
            return
        get = self._recent.get
        at = np.array([get(key, -1) for key in hashes], dtype=np.intp)
        rows = np.flatnonzero((at >= 0) & (self._recent_expires[at] > self._now))
        _known(verdict, rows, self._recent_ids[at[rows]], self._recent_prints[at[rows]], prints)

    def _find_held(self, hashes: list[bytes], verdict: Verdict, prints: U32) -> None:
        if not self._held or self._held.keys().isdisjoint(hashes):
            return
        for row, key in enumerate(hashes):
            entry = self._held.get(key)
            if entry is not None:
                verdict.first_ids[row] = entry[0]
                verdict.status[row] = DUPLICATE if entry[1] == prints.item(row) else CONFLICT

    def _find_in_runs(self, hashes: list[bytes], verdict: Verdict, prints: U32) -> None:
        if not self._runs or not hashes:
            return
        high, low = halves(hashes)
        order = high.argsort()
        high, low = high[order], low[order]
        for run in self._runs:
            hits, at = run.find(high, low)
            if len(hits):
                fresh = run.rows.expires[at] > self._now
                rows, at = order[hits[fresh]], at[fresh]
                _known(verdict, rows, run.rows.ids[at], run.rows.prints[at], prints)

    def _check_one(self, key: bytes, fingerprint: int) -> Verdict:
        at = self._recent.get(key, -1)
        if at >= 0 and self._recent_expires.item(at) > self._now:
            first_id, recorded = self._recent_ids.item(at), self._recent_prints.item(at)
        elif key in self._held:
            first_id, recorded, _ = self._held[key]
        else:
            first_id, recorded = self._find_one_in_runs(key)
        if first_id == NO_ID:
            return Verdict.unseen(1)
        verdict = Verdict.fresh(1)
        verdict.first_ids[0] = first_id
        verdict.status[0] = DUPLICATE if recorded == fingerprint else CONFLICT
        verdict.all_new = False
        return verdict

    def _find_one_in_runs(self, key: bytes) -> tuple[int, int]:
        high, low = np.uint64(int.from_bytes(key[:8], "little")), int.from_bytes(key[8:], "little")
        for run in self._runs:
            at = run.find_one(high, low)
            if at >= 0 and run.rows.expires[at] > self._now:
                return run.rows.ids.item(at), run.rows.prints.item(at)
        return NO_ID, 0

    # -- keys held by a message --------------------------------------------------------------------------------

    def _hold(self, key: bytes, message_id: int, fingerprint: int, scope: int) -> None:
        self._held[key] = (message_id, fingerprint, scope)
        self._held_by_id[message_id] = key
        self._pending += scope == PENDING

    def _release(self, ids: I64, scopes: tuple[int, ...]) -> None:
        by_id, listed = self._held_by_id, ids.tolist()
        if by_id.keys().isdisjoint(listed):
            return
        for message_id in [i for i in listed if i in by_id]:
            scope = self._held[by_id[message_id]][2]
            if scope in scopes:
                del self._held[by_id.pop(message_id)]
                self._pending -= scope == PENDING

    # -- keys of the window scope ------------------------------------------------------------------------------

    def _clear_recent(self) -> None:
        self._recent: dict[bytes, int] = {}  # hash -> row of the three columns
        self._recent_hashes: list[bytes] = []
        self._recent_ids: I64 = np.empty(0, dtype=np.int64)  # allocated at first use: most partitions see no key
        self._recent_prints: U32 = np.empty(0, dtype=np.uint32)
        self._recent_expires: I64 = np.empty(0, dtype=np.int64)
        self._recent_expires_max = 0

    def _append_recent(self, hashes: list[bytes], ids: I64, prints: U32, expires: I64) -> None:
        start = len(self._recent_hashes)
        if not start:
            self._recent_ids = np.empty(self._recent_max, dtype=np.int64)
            self._recent_prints = np.empty(self._recent_max, dtype=np.uint32)
            self._recent_expires = np.empty(self._recent_max, dtype=np.int64)
        end = start + len(hashes)
        self._recent.update(zip(hashes, range(start, end), strict=True))
        self._recent_hashes += hashes
        self._recent_ids[start:end] = ids
        self._recent_prints[start:end] = prints
        self._recent_expires[start:end] = expires
        self._recent_expires_max = max(self._recent_expires_max, int(expires.max()))

    def _recent_columns(self) -> Columns:
        n = len(self._recent_hashes)
        columns = self._recent_ids[:n], self._recent_prints[:n], self._recent_expires[:n]
        return Columns._make((*halves(self._recent_hashes), *columns))

    def _flush(self) -> None:
        if self._recent_hashes:
            rows = self._recent_columns()
            self._clear_recent()
            self._add_run(rows)

    def _add_run(self, rows: Columns) -> None:
        rows = in_order(rows, self._now)
        if len(rows.high):
            self._runs.append(KeyRun(rows))
            self._settle()

    def _settle(self) -> None:
        """Merge neighbors until each run is at least twice as long as the next; large ones one at a time."""
        at = len(self._runs) - 2
        while at >= 0:
            older, newer = self._runs[at : at + 2]
            merging = self._merge.sources if self._merge else ()
            if len(older) < 2 * len(newer) and older not in merging and newer not in merging:
                if len(older) + len(newer) <= self._at_once_max:
                    merge = Merge(older, newer)
                    self._replace(merge, merge.finish(self._now))
                elif self._merge is None:
                    self._merge = Merge(older, newer)
            at = min(at, len(self._runs) - 1) - 1

    def _advance(self, rows: int) -> None:
        """Do `rows` of a large merge. Small amounts are saved up, because a slice has a fixed cost."""
        if self._merge is None:
            return
        self._merge_due += rows
        if self._merge_due < self._at_once_max // 4:
            return
        merged = self._merge.advance(self._merge_due, self._now)
        self._merge_due = 0
        if merged is not None:
            merge, self._merge = self._merge, None
            self._replace(merge, merged)
            self._settle()

    def _replace(self, merge: Merge, merged: KeyRun) -> None:
        at = self._runs.index(merge.sources[0])
        self._runs[at : at + len(merge.sources)] = [merged] if len(merged) else []


def _known(verdict: Verdict, rows: Any, ids: I64, recorded: U32, prints: U32) -> None:
    verdict.first_ids[rows] = ids
    verdict.status[rows] = np.where(recorded == prints[rows], DUPLICATE, CONFLICT)
