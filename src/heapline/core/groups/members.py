"""Group membership, and which member reads which partition.

Each partition has an *owner*, the only member that may hold its rows, and a *target*, the member that is to read it.
They differ only while the partition is *revoking*: then the owner gets no new rows, and the target gets none until the
owner's rows are acked or timed out. So two members never hold the same row. A dead member stays the owner until then.

Members keep leases that are not recorded. Reopening the log grants each member a full lease (`revive`). `Assign`
decides how partitions are spread. The group decides whether a partition is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from heapline.core.events import GroupMembers

Shares = Mapping[str, Sequence[int]]  # member -> partitions
#: (members, partitions, current shares) -> new shares: each partition to exactly one member, moving as few as possible.
Assign = Callable[[Sequence[str], Sequence[int], Shares], Shares]
Free = Callable[[int], bool]  # whether no member holds rows of this partition


class Membership:
    def __init__(self) -> None:
        self.generation = 0
        self.leases: dict[str, int] = {}  # member -> when its lease expires, in order of joining
        self.owners: dict[int, str] = {}
        self.targets: dict[int, str] = {}

    # -- queries ---------------------------------------------------------------------------------------------------

    def reads(self, member: str) -> list[int]:
        """Return the partitions whose rows this member gets."""
        return [p for p, owner in self.owners.items() if owner == member and self.targets.get(p) == member]

    def revoking(self) -> list[int]:
        """Return the partitions that change owner and whose last rows are still in flight."""
        return [p for p, owner in self.owners.items() if self.targets.get(p) != owner]

    def may_hold(self, member: str, partition: int) -> bool:
        return self.owners.get(partition) == member

    def overdue(self, now: int) -> list[str]:
        return [member for member, until in self.leases.items() if until <= now]

    def next_deadline(self) -> int | None:
        return min(self.leases.values(), default=None)

    def beat(self, member: str, until: int) -> bool:
        """Record a heartbeat. Return False if it is not, or no longer, a member: it must join."""
        if member not in self.leases:
            return False
        self.leases[member] = max(self.leases[member], until)
        return True

    def revive(self, until: int) -> None:
        self.leases = dict.fromkeys(self.leases, until)

    # -- decisions -------------------------------------------------------------------------------------------------

    def decide(
        self, group: str, members: Sequence[str], partitions: Sequence[int], assign: Assign, free: Free, now: int
    ) -> GroupMembers:
        """Reassign `partitions` to `members`, and hand over the partitions that are free."""
        shares = {member: [p for p, target in self.targets.items() if target == member] for member in members}
        targets = _checked(assign(members, partitions, shares), members, partitions) if members else {}
        return self._event(group, members, partitions, targets, free, now)

    def decide_hand_over(self, group: str, free: Free, now: int) -> GroupMembers | None:
        """Hand over the partitions that have become free to their targets."""
        if not any(free(p) for p in self.revoking()):
            return None
        partitions = sorted(self.owners.keys() | self.targets.keys())
        return self._event(group, list(self.leases), partitions, self.targets, free, now)

    def _event(
        self,
        group: str,
        members: Sequence[str],
        partitions: Iterable[int],
        targets: Mapping[int, str],
        free: Free,
        now: int,
    ) -> GroupMembers:
        owners = {}
        for p in partitions:
            owner, target = self.owners.get(p), targets.get(p)
            owners[p] = owner if owner is not None and owner != target and not free(p) else target
        readers = sorted({name for name in (*owners.values(), *targets.values()) if name is not None})
        index = {name: i for i, name in enumerate(readers)}
        columns = (
            np.array(list(owners), dtype=np.int64),
            np.array([-1 if owner is None else index[owner] for owner in owners.values()], dtype=np.int64),
            np.array([index[targets[p]] if p in targets else -1 for p in owners], dtype=np.int64),
        )
        return GroupMembers(group, self.generation + 1, list(members), readers, *columns, now)

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply(self, event: GroupMembers, until: int) -> list[int]:
        """Apply the event and return the partitions whose owner changed. New members get a lease until `until`."""
        columns = (event.partitions.tolist(), event.owners.tolist(), event.targets.tolist())
        rows = list(zip(*columns, strict=True))
        before = self.owners
        self.owners = {p: event.readers[owner] for p, owner, _ in rows if owner >= 0}
        self.targets = {p: event.readers[target] for p, _, target in rows if target >= 0}
        self.leases = {member: self.leases.get(member, until) for member in event.members}
        self.generation = event.generation
        return [p for p in before if self.owners.get(p) != before[p]]

    def to_state(self) -> list[Any]:
        return [self.generation, list(self.leases), list(self.owners.items()), list(self.targets.items())]

    @classmethod
    def from_state(cls, state: list[Any]) -> Membership:
        membership = cls()
        membership.generation = state[0]
        membership.leases = dict.fromkeys(state[1], 0)
        membership.owners, membership.targets = dict(state[2]), dict(state[3])
        return membership


def _checked(shares: Shares, members: Sequence[str], partitions: Sequence[int]) -> dict[int, str]:
    targets = {p: member for member, some in shares.items() for p in some}
    given = sum(len(some) for some in shares.values())
    if given != len(partitions) or targets.keys() != set(partitions) or not set(targets.values()) <= set(members):
        raise ValueError("an assignment must give each partition to exactly one of the members")
    return targets
