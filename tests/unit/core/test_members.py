"""Members of a group: which member reads which partition, and when a partition moves."""

from __future__ import annotations

import numpy as np
import pytest

from heapline.contract.config import Backoff, GroupConfig
from heapline.core.groups.group import Groups, Share
from tests.unit.core.group_model import i64, spread
from tests.unit.core.group_rig import FIRM, NOW, Rig, page


def readers(rig: Rig) -> dict[str, list[int]]:
    return {member: sorted(rig.group.members.reads(member)) for member in rig.group.members.leases}


def take_as(rig: Rig, member: str, now: int = NOW) -> list[Share]:
    return rig.group.take(member, 100, {p: page(1, 2, 3) for p in rig.group.partitions}, now)


def test_partition_moves_only_without_rows_in_flight() -> None:
    rig = Rig(partitions=2)
    assert [share.partition for share in take_as(rig, "m")] == [0, 1]
    rig.record(0, rig.group.decide_join("n", spread, NOW))
    (moving,) = rig.group.members.revoking()
    assert readers(rig) == {"m": [1 - moving], "n": []}
    assert take_as(rig, "n") == []
    assert rig.group.decide_hand_over(NOW) is None
    event, _ = rig.group.decide_ack("m", moving, i64([1, 2, 3]), NOW)
    rig.record(moving, event)
    rig.record(0, rig.group.decide_hand_over(NOW))
    assert readers(rig) == {"m": [1 - moving], "n": [moving]}
    assert rig.group.partitions[moving].committed == 4, "with its offset"
    assert take_as(rig, "n") == []


def test_revoked_member_gets_no_more_rows_of_the_partition() -> None:
    rig = Rig(partitions=2)
    rig.group.take("m", 2, {p: page(1, 2, 3) for p in (0, 1)}, NOW)
    rig.record(0, rig.group.decide_join("n", spread, NOW))
    moving = set(rig.group.members.revoking())
    assert not moving & {share.partition for share in take_as(rig, "m")}


def test_leaving_member_returns_rows_immediately_without_a_failure() -> None:
    rig = Rig(partitions=2)
    take_as(rig, "m")
    rig.record(0, rig.group.decide_join("n", spread, NOW))
    rig.record(0, rig.group.decide_leave("m", spread, NOW))
    assert readers(rig) == {"n": [0, 1]}
    assert [share.attempts.tolist() for share in take_as(rig, "n")] == [[1, 1, 1]] * 2


def test_dead_members_rows_must_time_out_before_others_get_them() -> None:
    rig = Rig(GroupConfig(ack_timeout=60.0, member_lease=10.0, backoff=Backoff(base=0.0)))
    take_as(rig, "m")
    rig.record(0, rig.group.decide_join("n", spread, NOW))
    assert rig.group.beat("n", NOW + 9000)
    rig.record(0, rig.group.decide_expire(spread, NOW + 10_000))
    assert list(rig.group.members.leases) == ["n"]
    assert not rig.group.beat("m", NOW + 10_000)
    assert rig.group.decide_hand_over(NOW + 59_999) is None
    late = rig.group.overdue(0, NOW + 60_000, 10)
    for event in rig.group.decide_time_out(0, late, np.zeros(3), NOW + 60_000):
        rig.record(0, event)
    rig.record(0, rig.group.decide_hand_over(NOW + 60_000))
    (share,) = take_as(rig, "n", NOW + 60_000)
    assert share.attempts.tolist() == [2, 2, 2]


def test_after_a_restart_rows_wait_for_members_that_may_hold_them() -> None:
    rig = Rig()
    take_as(rig, "m")
    rig.reopen(NOW + 10)

    def to_n(members: object, partitions: list[int], before: object) -> dict[str, list[int]]:
        return {"n": list(partitions)}

    rig.record(0, rig.group.decide_join("n", to_n, NOW + 10))
    assert take_as(rig, "n", NOW + 10) == []
    assert rig.group.decide_hand_over(NOW + 1009) is None
    assert rig.groups.next_deadline(NOW + 10) == NOW + 1010
    rig.record(0, rig.group.decide_hand_over(NOW + 1010))
    (share,) = take_as(rig, "n", NOW + 1010)
    assert share.attempts.tolist() == [1, 1, 1]


def test_restarted_member_gets_its_rows_again_immediately() -> None:
    rig = Rig()
    take_as(rig, "m")
    assert rig.group.decide_join("m", spread, NOW) is None
    rig.group.restarted("m", NOW)
    (share,) = take_as(rig, "m")
    assert share.attempts.tolist() == [1, 1, 1]


def test_join_moves_only_the_partitions_that_the_assignment_moves() -> None:
    rig = Rig(partitions=6)
    rig.record(0, rig.group.decide_join("n", spread, NOW))
    before = dict(rig.group.members.owners)
    rig.record(0, rig.group.decide_join("o", spread, NOW))
    moved = [p for p in before if before[p] != rig.group.members.owners[p]]
    assert len(moved) == 2


def test_partitions_are_reassigned_after_growth() -> None:
    rig = Rig()
    for p, event in Groups.decide_create("g", FIRM, [(1, 0, 0)], NOW):
        rig.record(p, event)
    rig.record(0, rig.group.decide_respread(spread, NOW))
    assert readers(rig) == {"m": [0, 1]}


def test_assignment_that_forgets_a_partition_is_refused() -> None:
    rig = Rig(partitions=2, member=None)
    with pytest.raises(ValueError, match="each partition"):
        rig.group.decide_join("m", lambda members, partitions, before: {"m": [0]}, NOW)


def test_partitions_take_turns_at_being_first() -> None:
    rig = Rig(partitions=3)
    pages = {p: page(*range(9)) for p in range(3)}
    firsts = [rig.group.take("m", 1, pages, NOW)[0].partition for _ in range(6)]
    assert firsts == [0, 1, 2, 0, 1, 2]
