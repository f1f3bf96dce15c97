"""A hash ring as two columns: where the virtual nodes stand, and whose they are.

It answers one question for many partitions at once: which of the workers that are open comes first clockwise? It knows
nothing of weights or loads; who is open is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def hashes_of(names: Iterable[str]) -> Hashes:
    hash_of = xxhash.xxh3_64_intdigest
    return np.array([hash_of(name.encode()) for name in names], dtype=np.uint64)


class Ring:
    def __init__(self, workers: Sequence[str], virtual_nodes: int) -> None:
        hash_of = xxhash.xxh3_64_intdigest
        # The number of a virtual node is the seed of its hash: no text needs to be put together for each.
        numbers = range(1, virtual_nodes + 1)
        points = np.array([hash_of(name, n) for name in map(str.encode, workers) for n in numbers], dtype=np.uint64)
        order = np.argsort(points, kind="stable")
        self.points: Hashes = points[order]
        self.owners: Indexes = order // virtual_nodes

    def first_open(self, hashes: Hashes, is_open: Flags) -> tuple[Indexes, Hashes]:
        """For each hash the first worker clockwise that is open, and where it stands; at least one must be open."""
        points, owners = self.points, self.owners
        if not is_open.all():
            kept = is_open[owners]
            points, owners = points[kept], owners[kept]
        at = np.searchsorted(points, hashes)
        at[at == len(points)] = 0  # past the last one the ring begins anew
        return owners[at], points[at]
