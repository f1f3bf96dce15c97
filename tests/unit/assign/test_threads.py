"""Calls from other threads than that of the event loop: queries while the assignment changes, refreshes, stops."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from heapline.assign.config import Config
from heapline.assign.errors import ConnectionLost
from heapline.assign.kv import MemoryKV
from heapline.assign.manager import Manager
from heapline.assign.member import Change, Member
from heapline.assign.partitions import Partition, StaticSource
from heapline.assign.subscriptions import SubscriptionConfig, SubscriptionHelper

PARTITIONS = [Partition(("p", f"{n:04}")) for n in range(2000)]


@pytest.fixture(autouse=True)
def _switch_threads_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_queries_in_other_threads_survive_changes_of_the_assignment() -> None:
    manager = Manager(Config(), MemoryKV(), StaticSource(PARTITIONS), clock=lambda: 0.0)
    member = manager._member = Member("worker-0", "s", 6.0)
    member.lease.renewed(0.0)
    member._grants = {partition: number for number, partition in enumerate(PARTITIONS)}
    errors: list[BaseException] = []
    done = threading.Event()

    def query() -> None:
        try:
            while not done.is_set():
                assignment = manager.assignment
                assert len(assignment.partitions) in (0, len(PARTITIONS))
                manager.holds(PARTITIONS[0])
                assert manager.fence(PARTITIONS[7]) in (7, None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=query) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        member.begin(added := Change(tuple(PARTITIONS), ()))
        member.finish(added)
        member.finish(Change((), tuple(PARTITIONS)))
    done.set()
    for thread in threads:
        thread.join()
    assert not errors


class Counting(StaticSource):
    """A source that counts its listings."""

    count = 0

    async def list_partitions(self) -> Any:
        self.count += 1
        return await super().list_partitions()


async def test_any_thread_may_refresh_partitions_of_a_leader_and_a_follower() -> None:
    kv, source = MemoryKV(), Counting(PARTITIONS[:10])
    config = Config(heartbeat_interval=0.05, heartbeat_ttl=2.0, cold_start_window=0, planned_scale_window=0)
    managers = [Manager(config, kv, source) for _ in range(2)]
    with pytest.raises(ConnectionLost):
        await managers[0].refresh_partitions()
    await asyncio.gather(*(manager.start() for manager in managers))
    try:
        for manager in managers:
            before = source.count
            calls = [asyncio.to_thread(lambda: asyncio.run(manager.refresh_partitions())) for _ in range(8)]  # noqa: B023
            async with asyncio.timeout(30):
                await asyncio.gather(*calls, manager.refresh_partitions())
                while source.count == before:  # noqa: ASYNC110 - a follower's request reaches the leader later
                    await asyncio.sleep(0.01)
    finally:
        await asyncio.gather(*(manager.stop() for manager in managers))


def test_refresh_raises_after_the_managers_loop_has_ended() -> None:
    async def started() -> Manager:
        config = Config(cold_start_window=0, heartbeat_interval=0.05)
        manager = Manager(config, MemoryKV(), StaticSource(PARTITIONS[:3]))
        await manager.start()
        return manager

    manager = asyncio.run(started())
    with pytest.raises(ConnectionLost, match="loop is not running"):
        asyncio.run(manager.refresh_partitions())


async def test_every_method_of_a_subscription_helper_may_be_called_from_any_thread() -> None:
    async def handle(partition: Partition, message: Any) -> None: ...

    # The partitions are not held, so the client is not used; tests/integration/test_subscriptions.py has a real one.
    client: Any = None
    helper = SubscriptionHelper(client, SubscriptionConfig(stream="work"), holds=lambda partition: False)

    def work(number: int) -> None:
        own = PARTITIONS[50 * number : 50 * (number + 1)]
        for _ in range(5):
            asyncio.run(helper.update_subscriptions(own, [], handle))
            assert set(own) <= set(helper.partitions)
            assert helper.health().wanted >= len(own)
            asyncio.run(helper.reconcile())
            asyncio.run(helper.update_subscriptions([], own, handle))
            assert not set(own) & set(helper.partitions)

    await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(4)))
    await helper.update_subscriptions(PARTITIONS[:5], [], handle)
    await asyncio.to_thread(lambda: asyncio.run(helper.close()))
    assert helper.partitions == ()
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("assign")] == []
