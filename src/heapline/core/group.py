"""One consumer group over all partitions of its topic: who may take which rows, and what the group still needs.

It joins two things that do not know each other: how far the group is in each partition (core/offsets.py) and who reads
it (core/members.py). The rule between them: only a partition's owner holds its rows, and it changes hands only when
nothing of it is out, and nothing *may* be out: after the log was opened again, or the group was reset, what had been
handed out before is not known any more and may still be worked on until its time is over (`_quiet`).

`decide_*` return events and change nothing; `apply` is told the partition that an event was recorded in. Taking rows,
signs of life and quiet times are not recorded. Time is passed in, in ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.config import GroupConfig
from heapline.core.deliveries import FAR, Columns
from heapline.core.events import (
    Event,
    GroupAcked,
    GroupCreated,
    GroupDead,
    GroupDeleted,
    GroupFailed,
    GroupMembers,
    GroupReset,
)
from heapline.core.members import Assign, Membership
from heapline.core.offsets import GroupOffsets
from heapline.core.position import size_bound
from heapline.core.stream import StreamRows
from heapline.errors import BadRequest, ResourceExhausted

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
MEMBERS_MAX = 1024  # one event names them all, and must fit into the smallest segment


class Share(NamedTuple):
    """Rows of one partition that a member gets, and the number of this delivery for each."""

    partition: int
    rows: Columns
    attempts: I64


class Group:
    def __init__(self, name: str, config: GroupConfig, at: int) -> None:
        self.name, self.config, self.used_at = name, config, at
        self.partitions: dict[int, GroupOffsets] = {}
        self.members = Membership()
        self._quiet: dict[int, int] = {}  # partition -> until then its owner may hold rows that nobody knows of
        self._turns: dict[str, int] = {}  # member -> the partition that it is served from next

    # -- rows ------------------------------------------------------------------------------------------------------

    def take(
        self, member: str, credits: int, pages: Mapping[int, StreamRows], now: int, nbytes: int = FAR
    ) -> list[Share]:
        """At most `credits` rows for a member from the partitions that it reads, which take turns at being first; no
        more than about `nbytes`, but at least one. Without a page a partition gives only what comes again."""
        deadline = now + _ms(self.config.ack_timeout)
        shares: list[Share] = []
        numbers = sorted(self.members.reads(member))
        turn = self._turns.get(member, 0)
        for number in [n for n in numbers if n >= turn] + [n for n in numbers if n < turn]:
            if credits <= 0:
                break
            handed = self.partitions[number].take(credits, pages.get(number), now, deadline, nbytes, not shares)
            if len(handed.attempts):
                credits -= len(handed.attempts)
                if nbytes != FAR:
                    nbytes -= int(size_bound(handed.rows.positions).sum())
                shares.append(Share(number, *handed))
                self._turns[member] = number + 1
        return shares

    def decide_ack(self, member: str, partition: int, offsets: I64, now: int) -> tuple[GroupAcked | None, I64]:
        """The event, and which of the rows the member does not hold any more: those will come again, or came."""
        if not self.members.may_hold(member, partition):
            return None, offsets
        return self.partitions[partition].decide_ack(offsets, now)

    def decide_nack(
        self, member: str, partition: int, offsets: I64, draws: F64, reason: str, now: int
    ) -> tuple[list[GroupFailed | GroupDead], I64]:
        if not self.members.may_hold(member, partition):
            return [], offsets
        return self.partitions[partition].decide_fail(offsets, draws, reason, now, self.config)

    def overdue(self, partition: int, now: int, limit: int) -> I64:
        """Rows whose delivery has timed out: draw a number for each and pass them to `decide_time_out`."""
        return self.partitions[partition].overdue(now, limit)

    def decide_time_out(self, partition: int, offsets: I64, draws: F64, now: int) -> list[GroupFailed | GroupDead]:
        return self.partitions[partition].decide_fail(offsets, draws, "ack timeout", now, self.config)[0]

    # -- members ---------------------------------------------------------------------------------------------------

    def decide_join(self, member: str, assign: Assign, now: int) -> GroupMembers | None:
        """None: it is a member already; tell `restarted` if it has forgotten what it holds."""
        if self.config.observer:
            raise BadRequest(f"group {self.name!r} is an observer and has no members: make another to read with")
        if member in self.members.leases:
            return None
        if len(self.members.leases) >= MEMBERS_MAX:
            raise ResourceExhausted(f"members of group {self.name!r}", MEMBERS_MAX)
        return self._members([*self.members.leases, member], assign, now)

    def decide_leave(self, member: str, assign: Assign, now: int) -> GroupMembers | None:
        """It says that it does nothing more: what it holds goes to others at once, and is no failure."""
        if member not in self.members.leases:
            return None
        return self._members([name for name in self.members.leases if name != member], assign, now, left=member)

    def decide_expire(self, assign: Assign, now: int) -> GroupMembers | None:
        """Members that gave no sign of life are out; what they hold must time out first."""
        gone = set(self.members.overdue(now))
        if not gone:
            return None
        return self._members([name for name in self.members.leases if name not in gone], assign, now)

    def decide_respread(self, assign: Assign, now: int) -> GroupMembers | None:
        """Somebody is to read partitions that nobody is to: the topic has grown."""
        if not self.members.leases or self.partitions.keys() <= self.members.targets.keys():
            return None
        return self._members(list(self.members.leases), assign, now)

    def decide_hand_over(self, now: int) -> GroupMembers | None:
        return self.members.decide_hand_over(self.name, lambda p: self._free(p, now), now)

    def _members(self, members: Sequence[str], assign: Assign, now: int, left: str | None = None) -> GroupMembers:
        def free(partition: int) -> bool:
            return self._free(partition, now) or self.members.owners.get(partition) == left

        return self.members.decide(self.name, members, sorted(self.partitions), assign, free, now)

    def _free(self, partition: int, now: int) -> bool:
        """Does nobody hold rows of it, as far as one can know?"""
        offsets = self.partitions.get(partition)
        return offsets is None or (offsets.outstanding == 0 and now >= self._quiet.get(partition, 0))

    def beat(self, member: str, now: int) -> bool:
        """A sign of life; False: it has to join."""
        return self.members.beat(member, now + _ms(self.config.member_lease))

    def restarted(self, member: str, now: int) -> None:
        """The member began anew and has forgotten what it holds: that comes again, at once and as no failure."""
        self.beat(member, now)
        for partition, owner in self.members.owners.items():
            if owner == member:
                self.partitions[partition].rewind()
                self._quiet.pop(partition, None)

    def opened(self, now: int) -> None:
        """The log was opened again at `now`: members get a full lease, and time to finish what they may hold."""
        self.members.revive(now + _ms(self.config.member_lease))
        self._quiet = dict.fromkeys(self.members.owners, now + _ms(self.config.ack_timeout))

    # -- time ------------------------------------------------------------------------------------------------------

    def next_deadline(self, now: int) -> int | None:
        """When time alone will change something more: a timeout, a redelivery, a member's end, a hand-over."""
        times = [offsets.next_deadline(now) for offsets in self.partitions.values()]
        quiet = (self._quiet.get(p, 0) for p in self.members.revoking())
        times += [self.members.next_deadline(), *(until for until in quiet if until > now)]
        return min((time for time in times if time is not None), default=None)

    def in_use(self, now: int) -> bool:
        return bool(self.members.leases) or now < self.used_at + _ms(self.config.unused_after)

    def holds_below(self, partition: int, now: int) -> int | None:
        """The lowest offset of the partition that this group still needs; None = it holds nothing."""
        if self.config.observer or not self.in_use(now) or partition not in self.partitions:
            return None
        return self.partitions[partition].committed

    def holds(self, partition: int, now: int) -> Columns | None:
        """Single messages that it needs beside those: dead letters, and such that were replayed."""
        if self.holds_below(partition, now) is None:
            return None
        return self.partitions[partition].holds()

    # -- applying --------------------------------------------------------------------------------------------------

    def apply(self, partition: int, event: Event) -> None:
        """`partition` is where the event was recorded."""
        if isinstance(event, GroupMembers):
            self.used_at = max(self.used_at, event.at)
            self._turns = {member: turn for member, turn in self._turns.items() if member in event.members}
            for changed in self.members.apply(event, event.at + _ms(self.config.member_lease)):
                self._quiet.pop(changed, None)
                self._let_go(changed)
        elif isinstance(event, GroupCreated):
            self.partitions[partition] = GroupOffsets(self.name, event.offset, event.count)
        elif isinstance(event, GroupDeleted):
            del self.partitions[partition]
        else:
            if isinstance(event, GroupReset):
                self._keep_quiet(partition)
            self.partitions[partition].apply(event)
            self.used_at = max(self.used_at, event.at)  # type: ignore[attr-defined]

    def _let_go(self, partition: int) -> None:
        offsets = self.partitions.get(partition)
        if offsets is not None and offsets.outstanding:
            offsets.rewind()

    def _keep_quiet(self, partition: int) -> None:
        """A reset forgets what is out; its holder does not know that yet."""
        until = self.partitions[partition].last_deadline()
        if until:
            self._quiet[partition] = max(until, self._quiet.get(partition, 0))

    def moved(self, partition: int, ids: I64, positions: I64) -> None:
        if partition in self.partitions:
            self.partitions[partition].moved(ids, positions)

    def to_state(self) -> dict[str, Any]:
        return {
            "name": self.name, "config": msgspec.json.encode(self.config), "used_at": self.used_at,
            "members": self.members.to_state(),
            "partitions": [(number, offsets.to_state()) for number, offsets in self.partitions.items()],
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Group:
        group = cls(state["name"], msgspec.json.decode(state["config"], type=GroupConfig), state["used_at"])
        group.members = Membership.from_state(state["members"])
        group.partitions = {n: GroupOffsets.from_state(group.name, offsets) for n, offsets in state["partitions"]}
        return group


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
