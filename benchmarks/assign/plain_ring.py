"""The baseline: consistent hashing as one writes it in an afternoon, a dictionary of points and `bisect`.

It has the same hash and as many virtual nodes as ours, but knows neither weights nor bounds nor what was before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import xxhash

from heapline.assign.model import Partition
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
