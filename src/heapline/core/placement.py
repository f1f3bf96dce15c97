"""Assign keys to partitions by rendezvous hashing.

Every partition gives every key a score, and the highest score wins. Adding a partition adds one score per key, so a key
either stays in its partition or moves to the new one; no table is needed.

The key is hashed once (xxh3, 64 bits); a partition's score is a mix of that hash with the partition's own constant. The
mix is a bijection of 64 bits, so two partitions never have the same score and there are no ties. The location of stored
messages depends on these constants. They are pinned by a golden test and must never change. The caller decides which
keys to place, and what happens after growth.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from heapline.contract.errors import BadRequest
from heapline.core.events import I64
from heapline.core.ids import PARTITIONS_MAX

U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1, _MULTIPLY_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2 = np.uint64(30), np.uint64(27)

#: Scores are computed for this many (key, partition) pairs at a time: two scratch arrays of 128 KiB stay in cache.
#: Measured with 1024 partitions: 2.5 us per key, against 17 us with new arrays of twice that size.
_PAIRS_PER_CHUNK = 1 << 14


def _constants() -> U64:
    """Return one well-mixed constant per partition: a Weyl sequence through xxh3."""
    weyl = ((p + 1) * _GOLDEN & _MASK for p in range(PARTITIONS_MAX))
    return np.array([xxhash.xxh3_64_intdigest(w.to_bytes(8, "little")) for w in weyl], dtype=np.uint64)


_CONSTANTS = _constants()


def place(keys: list[bytes], partitions: int) -> I64:
    """Return the partition of each key, out of `partitions`."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise BadRequest(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
    placed = np.zeros(len(keys), dtype=np.int64)
    if partitions == 1:
        return placed
    digest = xxhash.xxh3_64_intdigest
    hashes = np.fromiter((digest(key) for key in keys), dtype=np.uint64, count=len(keys))
    constants = _CONSTANTS[:partitions]
    step = min(len(keys), max(1, _PAIRS_PER_CHUNK // partitions))
    scores, scratch = np.empty((2, step, partitions), dtype=np.uint64)
    for start in range(0, len(keys), step or 1):
        chunk = hashes[start : start + step]
        _score(chunk, constants, scores[: len(chunk)], scratch[: len(chunk)])
        placed[start : start + step] = scores[: len(chunk)].argmax(axis=1)
    return placed


def _score(hashes: U64, constants: U64, out: U64, scratch: U64) -> None:
    """Compute the score of every key (rows) at every partition (columns). The multiplications wrap on purpose."""
    np.bitwise_xor(hashes[:, None], constants, out=out)
    np.right_shift(out, _SHIFT_1, out=scratch)
    out ^= scratch
    out *= _MULTIPLY_1
    np.right_shift(out, _SHIFT_2, out=scratch)
    out ^= scratch
    out *= _MULTIPLY_2
