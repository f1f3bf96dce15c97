"""Which member of a group reads which partition: the strategies of `heapline.assign`, asked with plain numbers.

Every partition weighs the same. What is held stays where it is as far as an even spread allows, so that a join moves
about one share and a leave what the leaver had. Nothing is remembered: the same question has the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heapline.assign import Partition, WeightedConsistentHashStrategy

_strategy = WeightedConsistentHashStrategy()


def assign(
    members: Sequence[str], partitions: Sequence[int], shares: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Each partition to one of the members."""
    known = {number: Partition((str(number),)) for number in partitions}
    before = {member: [known[p] for p in share if p in known] for member, share in shares.items()}
    after = _strategy.assign(members, list(known.values()), before)
    return {member: sorted(int(partition.keys[0]) for partition in share) for member, share in after.items()}
