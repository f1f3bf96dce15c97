"""The baseline: plain consistent hashing with a dictionary of points and `bisect`.

It uses the same hash and number of virtual nodes, but no weights, bounds or previous assignment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import xxhash

from heapline.assign.partitions import Partition
from heapline.assign.strategies import Shares


class PlainRing:
    def __init__(self, virtual_nodes: int = 150) -> None:
        self._virtual_nodes = virtual_nodes

    def assign(
        self, workers: Sequence[str], partitions: Sequence[Partition], previous: Shares | None = None
    ) -> dict[str, list[Partition]]:
        owners = {}
        for worker in workers:
            for number in range(self._virtual_nodes):
                owners[xxhash.xxh3_64_intdigest(f"{worker}#{number}".encode())] = worker
        points = sorted(owners)
        shares: dict[str, list[Partition]] = {worker: [] for worker in workers}
        for partition in partitions:
            at = bisect_left(points, xxhash.xxh3_64_intdigest(partition.id.encode()))
            shares[owners[points[at % len(points)]]].append(partition)
        return shares
