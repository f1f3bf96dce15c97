"""Maintenance of partitions: in separate steps while no turn is planned, and no later than pops need it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.contract.errors import TopicReloading
from heapline.contract.message import Outgoing
from heapline.core.now import Now
from heapline.core.partition import Partition
from heapline.engine import partition_upkeep
from heapline.engine.partition_upkeep import BEHIND_TURNS_MAX, STEP_ROWS
from heapline.engine.turns import Turns
from tests.unit.engine.rig import Rig, opened, settle, until


class Watch:
    """Records which partitions were maintained, how many heap rows were merged, and whether a turn was running."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int, bool]] = []
        self.turns = 0
        self._is_in_turn = False
        maintain, run = Partition.maintain, Turns._run

        def watched(partition: Partition, now: Now, budget: int) -> bool:
            before = partition.entries.heap.work
            more = maintain(partition, now, budget)
            self.calls.append((partition.number, partition.entries.heap.work - before, self._is_in_turn))
            return more

        def turn(turns: Turns) -> None:
            self._is_in_turn = True
            self.turns += 1
            run(turns)
            self._is_in_turn = False

        monkeypatch.setattr(Partition, "maintain", watched)
        monkeypatch.setattr(Turns, "_run", turn)

    @property
    def in_turns(self) -> int:
        return sum(is_in_turn for _, _, is_in_turn in self.calls)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def heaps(rig: Rig) -> list[Any]:
    return [partition.entries.heap for partition in rig.runner().loaded.topic.partitions]


async def fill(rig: Rig, count: int, batch: int = 1000, start: int = 0) -> None:
    for at in range(start, start + count, batch):
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"", (at + i) * 7919 % 1000) for i in range(batch)])


async def test_small_turns_leave_maintenance_to_steps_between_them(watch: Watch) -> None:
    async with opened(topic={"partitions": 3}) as rig:
        for _ in range(20):
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"", i, delay=60) for i in range(9)])
            await settle()
        assert watch.calls
        assert watch.in_turns == 0
        assert {number for number, _, _ in watch.calls} == {0, 1, 2}


async def test_idle_topic_merges_to_the_end_in_bounded_steps(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_upkeep, "BEHIND_ROWS_MAX", 1 << 30)
    async with opened() as rig:
        await fill(rig, 100_000, batch=5000)
        await settle(200)
        assert heaps(rig)[0].is_settled
        merged = [rows for _, rows, _ in watch.calls if rows]
        assert sum(merged) > 3 * STEP_ROWS
        assert max(merged) <= STEP_ROWS + 32768, "plus at most the last run, to which the merged rows are joined"
        assert watch.in_turns == 0


async def test_steady_load_is_maintained_in_a_turn_before_pops_become_slow(watch: Watch) -> None:
    async with opened() as rig:
        turns = rig.runner().turns
        heaps(rig)[0]._tiers.is_settled = False

        def again() -> None:
            if watch.in_turns == 0 and watch.turns < 2 * BEHIND_TURNS_MAX:
                turns.plan()
                rig.runner().loaded.topic.changed.add(0)
                asyncio.get_running_loop().call_soon(again)

        again()
        await settle(3 * BEHIND_TURNS_MAX)
        assert watch.in_turns == 1
        assert watch.turns <= BEHIND_TURNS_MAX + 2


async def test_large_turns_maintain_partitions_themselves(watch: Watch) -> None:
    async with opened() as rig:
        for _ in range(3):
            await asyncio.gather(fill(rig, 5000, 5000), fill(rig, 5000, 5000))
        assert watch.in_turns == 3


async def test_maintenance_of_many_partitions_is_spread_over_steps(watch: Watch) -> None:
    async with opened(topic={"partitions": 64}) as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"", i, delay=60) for i in range(640)])
        before, steps = len(watch.calls), []
        for _ in range(200):
            await asyncio.sleep(0)
            steps.append(len(watch.calls) - before)
            before = len(watch.calls)
        assert len({number for number, _, _ in watch.calls}) == 64
        assert max(steps) <= STEP_ROWS // 1024


async def test_failed_maintenance_reloads_the_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"kept", delay=60)
        with monkeypatch.context() as patch:
            patch.setattr(Partition, "maintain", lambda *_: 1 / 0)
            with pytest.raises(TopicReloading):
                await rig.hl.enqueue("jobs", b"x", delay=60)
        await until(lambda: rig.runner().is_serving)
        assert (await rig.hl.stats("jobs")).log.reloads_total == 1


async def test_maintenance_of_partitions_whose_growth_failed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        runner, run = rig.runner(), Turns._run

        def turn_before_a_failure(turns: Turns) -> None:
            run(turns)
            asyncio.get_running_loop().call_soon(runner.poison, OSError("disk"))
            turns.plan()  # the maintenance step yields to this turn, which does not run

        rig.disk.inject("pwritev", path=".seg")
        rig.io.hold = {"commit"}
        growth = asyncio.ensure_future(rig.hl.update_topic("jobs", partitions=4))
        await settle()
        with monkeypatch.context() as patch:
            patch.setattr(Turns, "_run", turn_before_a_failure)
            messages = [Outgoing(b"", key=f"{i}", delay=60) for i in range(40)]
            batch = asyncio.ensure_future(rig.hl.enqueue_batch("jobs", messages))
            await until(lambda: not runner.is_serving)
        rig.io.release()
        lost = await asyncio.gather(growth, batch, return_exceptions=True)
        assert list(map(type, lost)) == [TopicReloading, TopicReloading]
        await until(lambda: runner.is_serving)
        assert len(runner.loaded.topic.partitions) == 1
        await rig.hl.enqueue("jobs", b"", delay=60)
        await settle()
        assert runner.counters.reloads == 1
