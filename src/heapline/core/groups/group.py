"""The consumer groups of a topic: which member may receive which rows, and what is still needed.

`Group` is one group over all partitions. It joins two parts that do not know each other: the group's progress in each
partition (offsets.py) and the member that reads it (members.py). Only a partition's owner may hold its rows. The owner
changes only when none of the rows are in flight and none *can* be in flight. After the log is reopened or the group is
reset, earlier deliveries are unknown and may still be in progress until their deadline (`_quiet`).

`Groups` are all groups of a topic: created, changed and deleted by events, and kept in snapshots. Version 1 of the
state. To change it after a release: bump STATE_VERSION, keep `from_state` for old ones, add a fixture; new names in a
dictionary that may be missing need no new version. Callers handle requests for a group that does not exist. An event
about a missing group means that the journal is inconsistent.

`decide_*` return events and change nothing. `apply` receives the partition in which an event was recorded. Taking rows,
heartbeats and quiet times are not recorded. Time is passed in, in ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from heapline.contract.config import GroupConfig, check_config
from heapline.contract.errors import BadRequest, ResourceExhausted, UnknownFormat
from heapline.core.entries import Replay
from heapline.core.events import (
    F64,
    I64,
    KIND_NAMES,
    AnyEvent,
    Event,
    GroupAcked,
    GroupCreated,
    GroupDead,
    GroupDeleted,
    GroupFailed,
    GroupMembers,
    GroupReset,
)
from heapline.core.groups.deliveries import FAR, Columns, join_columns
from heapline.core.groups.members import Assign, Membership
from heapline.core.groups.offsets import GroupOffsets
from heapline.core.groups.stream import StreamRows
from heapline.core.record import size_bound

STATE_VERSION = 1
_decode_config = msgspec.json.Decoder(GroupConfig).decode
MEMBERS_MAX = 1024  # one event names all members and must fit into the smallest segment


class Share(NamedTuple):
    """Rows of one partition that a member receives, and the delivery number of each."""

    partition: int
    rows: Columns
    attempts: I64


class Group:
    def __init__(self, name: str, config: GroupConfig, at: int) -> None:
        self.name, self.config, self.used_at = name, config, at
        self.partitions: dict[int, GroupOffsets] = {}
        self.members = Membership()
        self._quiet: dict[int, int] = {}  # partition -> time (ms) until which its owner may hold unknown rows
        self._turns: dict[str, int] = {}  # member -> the partition that is served first next time

    # -- rows ------------------------------------------------------------------------------------------------------

    def take(
        self, member: str, credits: int, pages: Mapping[int, StreamRows], now: int, nbytes: int = FAR
    ) -> list[Share]:
        """Take at most `credits` rows for a member from the partitions that it reads.

        The partitions take turns at being first. The rows have about `nbytes` at most, but at least one row is
        returned. A partition without a page yields only redeliveries.
        """
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
        """Return the event, and the rows that the member no longer holds: those were or will be redelivered."""
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
        """Return rows whose delivery timed out. Draw a number for each and pass them to `decide_time_out`."""
        return self.partitions[partition].overdue(now, limit)

    def decide_time_out(self, partition: int, offsets: I64, draws: F64, now: int) -> list[GroupFailed | GroupDead]:
        return self.partitions[partition].decide_fail(offsets, draws, "ack timeout", now, self.config)[0]

    # -- members ---------------------------------------------------------------------------------------------------

    def decide_join(self, member: str, assign: Assign, now: int) -> GroupMembers | None:
        """Add a member. Return None if it already is one; call `restarted` if it forgot which rows it holds."""
        if self.config.observer:
            raise BadRequest(f"group {self.name!r} is an observer and has no members; read with another group")
        if member in self.members.leases:
            return None
        if len(self.members.leases) >= MEMBERS_MAX:
            raise ResourceExhausted(f"members of group {self.name!r}", MEMBERS_MAX)
        return self._members([*self.members.leases, member], assign, now)

    def decide_leave(self, member: str, assign: Assign, now: int) -> GroupMembers | None:
        """Remove a member that stopped. Its rows go to others immediately and do not count as failures."""
        if member not in self.members.leases:
            return None
        return self._members([name for name in self.members.leases if name != member], assign, now, left=member)

    def decide_expire(self, assign: Assign, now: int) -> GroupMembers | None:
        """Remove members without a heartbeat. The rows that they hold must time out first."""
        gone = set(self.members.overdue(now))
        if not gone:
            return None
        return self._members([name for name in self.members.leases if name not in gone], assign, now)

    def decide_respread(self, assign: Assign, now: int) -> GroupMembers | None:
        """Assign the partitions that have no target because the topic has grown."""
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
        """Whether no member holds, or may still hold, rows of the partition."""
        offsets = self.partitions.get(partition)
        return offsets is None or (offsets.outstanding == 0 and now >= self._quiet.get(partition, 0))

    def beat(self, member: str, now: int) -> bool:
        """Record a heartbeat. Return False if the member must join."""
        return self.members.beat(member, now + _ms(self.config.member_lease))

    def restarted(self, member: str, now: int) -> None:
        """Redeliver a restarted member's rows immediately, without counting failures: it lost track of them."""
        self.beat(member, now)
        for partition, owner in self.members.owners.items():
            if owner == member:
                self.partitions[partition].rewind()
                self._quiet.pop(partition, None)

    def opened(self, now: int) -> None:
        """Handle a log that was reopened at `now`: members get a full lease, and time to finish rows they may hold."""
        self.members.revive(now + _ms(self.config.member_lease))
        self._quiet = dict.fromkeys(self.members.owners, now + _ms(self.config.ack_timeout))

    # -- time ------------------------------------------------------------------------------------------------------

    def next_deadline(self, now: int) -> int | None:
        """Return when time alone changes something next: a timeout, redelivery, member expiry or hand-over."""
        times = [offsets.next_deadline(now) for offsets in self.partitions.values()]
        quiet = (self._quiet.get(p, 0) for p in self.members.revoking())
        times += [self.members.next_deadline(), *(until for until in quiet if until > now)]
        return min((time for time in times if time is not None), default=None)

    def in_use(self, now: int) -> bool:
        return bool(self.members.leases) or now < self.used_at + _ms(self.config.unused_after)

    def holds_below(self, partition: int, now: int) -> int | None:
        """Return the lowest offset of the partition that this group still needs, or None if it needs nothing."""
        if self.config.observer or not self.in_use(now) or partition not in self.partitions:
            return None
        return self.partitions[partition].committed

    def holds(self, partition: int, now: int) -> Columns | None:
        """Return single messages that the group also needs: dead letters and replayed dead letters."""
        if self.holds_below(partition, now) is None:
            return None
        return self.partitions[partition].holds()

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply(self, partition: int, event: Event) -> None:
        """Apply an event that was recorded in `partition`."""
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
        """Start a quiet time: a reset forgets deliveries in flight, but their holder does not know that yet."""
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
        group = cls(state["name"], _decode_config(state["config"]), state["used_at"])
        group.members = Membership.from_state(state["members"])
        group.partitions = {n: GroupOffsets.from_state(group.name, offsets) for n, offsets in state["partitions"]}
        return group


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class Groups:
    def __init__(self) -> None:
        self.by_name: dict[str, Group] = {}

    def __iter__(self) -> Iterator[Group]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    @staticmethod
    def decide_create(
        name: str, config: GroupConfig, starts: Iterable[tuple[int, int, int]], now: int
    ) -> list[tuple[int, GroupCreated]]:
        """Return one event per partition. `starts` are (partition, offset, stream rows below it)."""
        check_config(config)
        encoded = msgspec.json.encode(config)
        return [(number, GroupCreated(name, offset, count, encoded, now)) for number, offset, count in starts]

    def decide_rest(self, partitions: int, now: int) -> list[tuple[int, GroupCreated | GroupDeleted]]:
        """Return the events that complete work interrupted by a crash.

        A deletion begins at partition 0. Groups of a topic that has grown read the new partitions from their start.
        """
        events: list[tuple[int, GroupCreated | GroupDeleted]] = []
        for group in self:
            if 0 not in group.partitions:
                events += self.decide_delete(group.name, now)
            elif len(group.partitions) < partitions:
                missing = [(number, 0, 0) for number in range(partitions) if number not in group.partitions]
                events += self.decide_create(group.name, group.config, missing, now)
        return events

    def decide_delete(self, name: str, now: int) -> list[tuple[int, GroupDeleted]]:
        return [(number, GroupDeleted(name, now)) for number in sorted(self.by_name[name].partitions)]

    def apply(self, partition: int, event: AnyEvent) -> None:
        """Apply an event about a group, recorded in `partition`. Ignore other events."""
        name = getattr(event, "group", None)
        if name is None:
            return
        if isinstance(event, GroupCreated) and name not in self.by_name:
            config = _decode_config(event.config)
            self.by_name[name] = Group(name, config, event.at)
        try:
            group = self.by_name[name]
            group.apply(partition, event)
        except KeyError as error:
            detail = f"{KIND_NAMES[type(event)]} of group {name!r} names {error}, which does not exist"
            raise Replay(f"partition {partition}: the journal is inconsistent: {detail}") from error
        if not group.partitions:
            del self.by_name[name]

    def opened(self, now: int) -> None:
        """Start the groups. Call once after snapshot and journal are applied, before any decision."""
        for group in self:
            group.opened(now)

    def moved(self, partition: int, ids: I64, positions: I64) -> None:
        """Update the positions of moved records (`Moved`)."""
        order = np.argsort(ids)
        for group in self:
            group.moved(partition, ids[order], positions[order])

    def holds_below(self, partition: int, now: int) -> int | None:
        """Return the lowest offset that any group still needs."""
        needed = (group.holds_below(partition, now) for group in self)
        return min((offset for offset in needed if offset is not None), default=None)

    def holds(self, partition: int, now: int) -> Columns:
        """Return single messages that groups need in addition to `holds_below`."""
        held = (group.holds(partition, now) for group in self)
        return join_columns([columns for columns in held if columns is not None])

    def next_deadline(self, now: int) -> int | None:
        times = (group.next_deadline(now) for group in self)
        return min((time for time in times if time is not None), default=None)

    def to_state(self) -> dict[str, Any]:
        return {"version": STATE_VERSION, "groups": [group.to_state() for group in self]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Groups:
        if state["version"] != STATE_VERSION:
            raise UnknownFormat("the groups of a snapshot", state["version"])
        groups = cls()
        groups.by_name = {saved["name"]: Group.from_state(saved) for saved in state["groups"]}
        return groups
