"""Assign the partitions of a group to its members, with the strategies of `heapline.assign`.

Every partition has the same weight. Partitions stay with their member as far as an even spread allows: a join moves
about one share, and a leave moves only what the leaver had. The function is stateless and deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heapline.assign import Partition, WeightedConsistentHashStrategy

_strategy = WeightedConsistentHashStrategy()


def assign(
    members: Sequence[str], partitions: Sequence[int], shares: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Assign each partition to one of the members."""
    known = {number: Partition((str(number),)) for number in partitions}
    before = {member: [known[p] for p in share if p in known] for member, share in shares.items()}
    after = _strategy.assign(members, list(known.values()), before)
    return {member: sorted(int(partition.keys[0]) for partition in share) for member, share in after.items()}
