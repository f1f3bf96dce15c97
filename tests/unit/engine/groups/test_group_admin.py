"""Creating, deleting and growing groups: durable in one unit, and the same after a crash."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.contract.config import GroupConfig
from heapline.contract.message import Outgoing
from heapline.core.events import GroupCreated
from heapline.core.now import Now
from heapline.engine.groups import admin
from tests.unit.engine.groups.group_calls import fetch, fill, payloads
from tests.unit.engine.rig import Rig, opened


async def test_recreated_group_is_the_new_one_after_a_restart() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        runner = rig.runner()
        await rig.hl.create_group("jobs", "g", max_retries=3)
        await fetch(rig.hl, "old")

        def anew(now: Now) -> None:  # two calls of one turn
            admin.delete(runner, "g", now)
            admin._create(runner, "g", "latest", [(0, 0, 0), (1, 0, 0)], GroupConfig(max_retries=7), now)

        await runner.call(anew)
        after = Rig(rig.disk.crash())
        await after.open()
        info = await after.hl.get_group("jobs", "g")
        assert (info.config.max_retries, info.members) == (7, {})
        await after.hl.close()


async def test_group_deletion_begins_at_partition_0_in_any_recovery_order() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        runner = rig.runner()
        await rig.hl.create_group("jobs", "g")
        group = runner.loaded.topic.groups.by_name["g"]
        group.partitions = dict(reversed(group.partitions.items()))
        assert [number for number, _ in runner.loaded.topic.groups.decide_delete("g", 0)] == [0, 1]


async def test_new_partitions_are_assigned_after_a_crash_before_the_record() -> None:
    async with opened() as rig:
        await fetch(rig.hl)
        runner = rig.runner()
        runner.on_grown = None  # as if the journal ended right there
        await rig.hl.update_topic("jobs", partitions=3)
        await rig.reopen()
        await fetch(rig.hl)
        assert (await rig.hl.get_group("jobs", "g")).members == {"a": [0, 1, 2]}


async def test_group_is_created_in_one_unit() -> None:
    async with opened(topic={"partitions": 64}) as rig:
        await fill(rig, 3)
        runner = rig.runner()
        units: set[int] = set()
        emit = runner.loaded.topic.emit

        def spy(journal: Any, partition: Any, event: Any, now: Any) -> None:
            emit(journal, partition, event, now)
            if isinstance(event, GroupCreated):
                units.add(journal.open_unit_number)

        runner.loaded.topic.emit = spy  # type: ignore[method-assign]
        for number in range(40):  # wherever in its segment it happens
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"x" * 900)] * 20)
            units.clear()
            await rig.hl.create_group("jobs", f"g{number}")
            assert len(units) == 1


@pytest.mark.parametrize("policy", ["commit", "interval", "os"])
async def test_lag_is_correct_from_any_offset_with_a_relaxed_fsync(policy: str) -> None:
    async with opened(topic={"fsync": policy, "fsync_interval": 60.0}) as rig:
        await fill(rig, 10)
        info = await rig.hl.create_group("jobs", "g", start={0: 5})
        assert info.lag == 5


@pytest.mark.parametrize("policy", ["commit", "interval", "os"])
async def test_group_from_earliest_gets_all_rows_with_a_relaxed_fsync(policy: str) -> None:
    async with opened(topic={"fsync": policy, "fsync_interval": 60.0}) as rig:
        await fill(rig, 3000)
        got = 0
        async with asyncio.timeout(20):
            while got < 3000:
                fetched = await fetch(rig.hl)
                got += len(payloads(fetched))
                assert fetched.batches
            await fill(rig, 3000)
            while got < 6000:
                got += len(payloads(await fetch(rig.hl)))
