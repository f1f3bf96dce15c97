"""Verdicts on repeated enqueues and payload fingerprints, shared by both kinds of duplicate detection.

An enqueue is identified by its producer's sequence (`sequences.py`) or by a free-form key (`idempotency.py`). Either
window judges a batch row by row with a `Verdict`. The caller decides what to answer, raise or record.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from heapline.core.events import I64

I8 = npt.NDArray[np.int8]
U32 = npt.NDArray[np.uint32]

#: Never seen: enqueue it. Seen: answer with the first id. Seen with another payload: refuse. Too old to know: refuse.
NEW, DUPLICATE, CONFLICT, STALE = range(4)
#: Prepared by an undecided batch. The windows never return it; it is set over their verdicts where such batches are
#: known.
IN_DOUBT = 4
NO_ID = -1


class Verdict(msgspec.Struct):
    """One status per row of a checked batch.

    A row that repeats something recorded earlier has the first message's id in `first_ids`. A row that repeats an
    earlier row of the same batch has that row's number in `twins` instead, because no id exists yet.
    """

    status: I8
    first_ids: I64
    twins: I64
    #: True if every row is NEW: then nothing else needs to be checked.
    all_new: bool

    @classmethod
    def fresh(cls, n: int) -> Verdict:
        """Return a verdict with every row NEW, to be filled in."""
        return cls(np.zeros(n, np.int8), np.full(n, NO_ID, np.int64), np.full(n, NO_ID, np.int64), all_new=True)

    @classmethod
    def unseen(cls, n: int) -> Verdict:
        """Return a final verdict with every row NEW. Single rows, the common case, share one read-only verdict."""
        return _ONE_UNSEEN if n == 1 else cls.fresh(n)

    def first_id(self, row: int, ids: I64) -> int:
        """Return the id that answers `row`, where `ids` are those assigned to the rows of this batch."""
        twin = self.twins.item(row)
        if twin != NO_ID:
            row = twin
        first = self.first_ids.item(row)
        return ids.item(row) if first == NO_ID else first


def _one_unseen() -> Verdict:
    verdict = Verdict.fresh(1)
    for column in (verdict.status, verdict.first_ids, verdict.twins):
        column.flags.writeable = False
    return verdict


_ONE_UNSEEN = _one_unseen()


def fingerprint(payload: bytes) -> int:
    """Return 32 bits that distinguish payloads under the same identity."""
    return xxhash.xxh3_64_intdigest(payload) & 0xFFFFFFFF


def fingerprints(payloads: Sequence[bytes]) -> U32:
    """Return the fingerprint of each payload."""
    digests = np.fromiter(map(xxhash.xxh3_64_intdigest, payloads), dtype=np.uint64, count=len(payloads))
    return digests.astype(np.uint32)  # the lower bits


def judge_twins(status: I8, twins: I64, fingerprints: U32) -> None:
    """Judge rows that repeat a NEW row of their own batch against that row."""
    rows = np.flatnonzero(twins != NO_ID)
    same = fingerprints[rows] == fingerprints[twins[rows]]
    status[rows] = np.where(same, DUPLICATE, CONFLICT)


def find_twins(identities: list[bytes], verdict: Verdict) -> None:
    """Mark NEW rows that repeat the identity of an earlier row of their batch."""
    first: dict[bytes, int] = {}
    for row, identity in enumerate(identities):
        leader = first.setdefault(identity, row)
        if leader != row and verdict.status[row] == NEW:
            verdict.twins[row] = leader
