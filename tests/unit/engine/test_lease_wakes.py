"""A partition that only leased is woken at its deadlines, without being checked in the turn."""

from __future__ import annotations

import pytest

import heapline
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.engine.timers import INF, Wakes
from tests.unit.engine.rig import opened


def test_earlier_wake_is_kept_and_a_partition_in_the_line_stays_there() -> None:
    wakes = Wakes(2)
    wakes.leave()
    assert wakes.next() == INF
    wakes.plan_by(0, 50)
    wakes.plan_by(0, 70)
    assert wakes.next() == 50
    wakes.plan_by(0, 30)
    assert wakes.next() == 30
    wakes.plan_by(1, 10)
    assert list(wakes.line) == [1]
    assert wakes.next() == 30


async def test_pop_over_partitions_computes_no_wake_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(topic={"partitions": 8}) as rig:
        for number in range(40):
            await rig.hl.enqueue("jobs", b"x", priority=number)
        asked: list[int] = []
        next_wake_in = Partition.next_wake_in

        def noted(partition: Partition, now: Now) -> int | None:
            asked.append(partition.number)
            return next_wake_in(partition, now)

        monkeypatch.setattr(Partition, "next_wake_in", noted)
        messages = await rig.hl.pop("jobs", 30, visibility=5)
        assert len({m.partition for m in messages}) > 3
        assert not asked


async def test_leases_over_partitions_expire_in_time() -> None:
    async with opened(topic={"partitions": 8, "backoff": heapline.Backoff(base=0)}) as rig:
        for number in range(40):
            await rig.hl.enqueue("jobs", b"x", priority=number)
        first = await rig.hl.pop("jobs", 20, visibility=30)
        second = await rig.hl.pop("jobs", 20, visibility=5)
        rig.clock.advance(6)
        assert {m.id for m in await rig.hl.pop("jobs", 40, visibility=100)} == {m.id for m in second}
        rig.clock.advance(25)
        assert {m.id for m in await rig.hl.pop("jobs", 40)} == {m.id for m in first}
