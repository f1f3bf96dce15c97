"""A topic over many partitions: one order over all of them, and throttled partitions."""

from __future__ import annotations

import asyncio
import random

import pytest

from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import Memory, World

pytestmark = pytest.mark.feature("partitions")


async def test_pops_over_many_partitions_return_the_best_of_the_whole_topic(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=20)
    rng = random.Random(4)
    waiting: list[tuple[int, int]] = []
    for _ in range(60):
        batch = [Outgoing(b"", rng.randrange(50), key=f"k{rng.randrange(99)}") for _ in range(rng.randrange(1, 30))]
        results = await broker.enqueue_batch("jobs", batch)
        waiting += [(m.priority, r.id) for m, r in zip(batch, results, strict=True)]
        waiting.sort()
        found = await broker.pop("jobs", rng.choice([1, 2, 17]))
        assert [(m.priority, m.id) for m in found] == waiting[: len(found)]
        del waiting[: len(found)]


async def test_messages_of_one_key_are_in_one_partition(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=20)
    await broker.enqueue_batch("jobs", [Outgoing(b"", key=f"k{i % 7}") for i in range(70)])
    places: dict[str | None, set[int]] = {}
    for message in await broker.pop("jobs", 70):
        places.setdefault(message.key, set()).add(message.partition)
    assert len(places) == 7
    assert all(len(partitions) == 1 for partitions in places.values())


@pytest.mark.feature("log")
async def test_every_lease_records_its_limit(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=4)
    await broker.enqueue_batch("jobs", [Outgoing(b"", i, key=f"k{i}") for i in range(40)])
    while await broker.pop("jobs", 7):
        pass
    count = 0
    for partition in range(4):
        async for frame in broker.read_log("jobs", partition):
            for event in frame.events:
                if event.kind == "leased":
                    keys = await asyncio.gather(*(broker.get("jobs", id) for id in event.columns["ids"].tolist()))
                    worst = max(info.priority or 0 for info in keys)
                    limit = event.columns["limit"]
                    assert limit is None or worst <= limit
                    count += limit is not None
    assert count > 3


async def test_throttled_partition_waits_while_others_are_served(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=4)
    await broker.enqueue_batch("jobs", [Outgoing(b"", i, key=f"k{i}") for i in range(40)])
    await broker.set_partition_throttled("jobs", 2, True, "moving disks")
    found = await broker.pop("jobs", 40)
    assert {m.partition for m in found} == {0, 1, 3}
    assert [m.priority for m in found] == sorted(m.priority for m in found)
    stats = await broker.stats("jobs")
    assert stats.partitions[2].throttled == "moving disks"
    assert (stats.spine.partitions, stats.spine.available) == (4, 3)
    assert stats.ready == 40 - len(found) == stats.partitions[2].ready > 0
    await broker.ack(found)
    await broker.set_partition_throttled("jobs", 2, False)
    assert {m.partition for m in await broker.pop("jobs", 40)} == {2}


@pytest.mark.parametrize("partitions", [1, 3])
async def test_pop_blocks_while_everything_is_throttled_and_gets_its_message_afterwards(
    topic: MakeTopic, broker: Broker, partitions: int
) -> None:
    await topic(partitions=partitions)
    for partition in range(partitions):
        await broker.set_partition_throttled("jobs", partition, True)
    await broker.enqueue("jobs", b"later")
    assert await broker.pop("jobs") == []
    waiting = asyncio.ensure_future(broker.pop("jobs", wait=60))
    for partition in range(partitions):
        await broker.set_partition_throttled("jobs", partition, False)
    assert [m.payload for m in await waiting] == [b"later"]


@pytest.mark.parametrize("memory", ["journal", "snapshot"])
async def test_throttling_survives_a_restart(world: World, topic: MakeTopic, memory: Memory) -> None:
    await topic(partitions=2)
    await world.broker.set_partition_throttled("jobs", 1, True, "why")
    broker = await world.reopen(memory)
    assert [p.throttled for p in (await broker.stats("jobs")).partitions] == [None, "why"]


@pytest.mark.parametrize(
    ("partition", "throttled", "reason"),
    [(2, True, None), (-1, True, None), (True, True, None), (0, 1, None), (0, True, 5)],
)
async def test_invalid_throttling_is_refused(
    topic: MakeTopic, broker: Broker, partition: int, throttled: bool, reason: str | None
) -> None:
    await topic(partitions=2)
    with pytest.raises(BadRequest):
        await broker.set_partition_throttled("jobs", partition, throttled, reason)


async def test_stats_report_the_spine_strategy(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3, k=5)
    await broker.enqueue_batch("jobs", [Outgoing(b"", key=f"k{i}") for i in range(20)])
    before = (await broker.stats("jobs")).spine
    assert (before.strategy, before.k, before.bound, before.candidates) == ("best_first", 5, 1, 3)
    await broker.pop("jobs", 20)
    stats = await broker.stats("jobs")
    assert stats.spine.candidates == 0
    assert stats.spine.selections_total == before.selections_total + 1
    assert [p.leased_total for p in stats.partitions] == [p.leased for p in stats.partitions]


@pytest.mark.parametrize("partitions", [1, 4])
async def test_min_freshness_lets_a_better_later_message_go_first(
    topic: MakeTopic, world: World, partitions: int, fake_time: None
) -> None:
    broker = world.broker
    await topic(partitions=partitions, min_freshness=0.5)
    await broker.enqueue("jobs", b"good", priority=5, key="a")
    assert await broker.pop("jobs") == []
    await world.advance(0.4)
    await broker.enqueue("jobs", b"better", priority=1, key="b")
    await world.advance(0.3)
    assert await broker.pop("jobs", 5) == [], "no worse message is delivered before it either"
    await world.advance(0.3)
    assert [m.payload for m in await broker.pop("jobs", 5)] == [b"better", b"good"]


async def test_waiting_pop_gets_a_message_once_its_freshness_is_reached(
    topic: MakeTopic, world: World, fake_time: None
) -> None:
    await topic(partitions=3, min_freshness=0.5)
    await world.broker.enqueue("jobs", b"x")
    waiting = asyncio.ensure_future(world.broker.pop("jobs", wait=60))
    await world.advance(0.1)
    assert not waiting.done()
    await world.advance(0.5)
    assert [m.payload for m in await waiting] == [b"x"]


async def test_round_robin_serves_partitions_in_turn_and_reports_no_bound(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=4, strategy="round_robin")
    await broker.enqueue_batch("jobs", [Outgoing(b"", i, key=f"k{i}") for i in range(80)])
    found = await broker.pop("jobs", 12)
    assert sorted(m.partition for m in found) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for partition in range(4):
        mine = [m.priority for m in found if m.partition == partition]
        assert mine == sorted(mine)
    assert (await broker.stats("jobs")).spine.bound is None


async def test_weighted_strategy_is_changed_live(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=2, strategy="weighted", partition_weights={0: 3})
    await broker.enqueue_batch("jobs", [Outgoing(b"", key=f"k{i}") for i in range(200)])
    assert [m.partition for m in await broker.pop("jobs", 8)].count(0) == 6
    await broker.update_topic("jobs", partition_weights={1: 3})
    assert [m.partition for m in await broker.pop("jobs", 8)].count(1) == 6
    await broker.update_topic("jobs", strategy="best_first")
    ids = [m.id for m in await broker.pop("jobs", 8)]
    assert ids == sorted(ids)


@pytest.mark.parametrize(
    "config",
    [{"strategy": "best"}, {"partition_weights": {0: 0}}, {"partition_weights": {5000: 1}}, {"min_freshness": -1}],
)
async def test_invalid_spine_settings_are_refused(topic: MakeTopic, config: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        await topic(partitions=2, **config)
