"""A topic over many partitions: one order over all of them, and partitions that are left out for a while."""

from __future__ import annotations

import asyncio
import random

import pytest

from heapline.broker import Broker
from heapline.errors import BadRequest
from heapline.model import Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import Memory, World


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


async def test_messages_of_one_key_lie_in_one_partition(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=20)
    await broker.enqueue_batch("jobs", [Outgoing(b"", key=f"k{i % 7}") for i in range(70)])
    places: dict[str | None, set[int]] = {}
    for message in await broker.pop("jobs", 70):
        places.setdefault(message.key, set()).add(message.partition)
    assert len(places) == 7
    assert all(len(partitions) == 1 for partitions in places.values())


async def test_every_lease_records_the_limit_under_which_it_was_given(topic: MakeTopic, broker: Broker) -> None:
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


async def test_messages_of_a_throttled_partition_wait_and_everything_else_goes_on(
    topic: MakeTopic, broker: Broker
) -> None:
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
async def test_a_pop_blocks_while_everything_is_throttled_and_gets_its_message_afterwards(
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
async def test_throttling_refuses_nonsense(
    topic: MakeTopic, broker: Broker, partition: int, throttled: bool, reason: str | None
) -> None:
    await topic(partitions=2)
    with pytest.raises(BadRequest):
        await broker.set_partition_throttled("jobs", partition, throttled, reason)


async def test_stats_tell_how_the_spine_chooses(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3, k=5)
    await broker.enqueue_batch("jobs", [Outgoing(b"", key=f"k{i}") for i in range(20)])
    before = (await broker.stats("jobs")).spine
    assert (before.strategy, before.k, before.bound, before.candidates) == ("best_first", 5, 1, 3)
    await broker.pop("jobs", 20)
    stats = await broker.stats("jobs")
    assert stats.spine.candidates == 0
    assert stats.spine.selections_total == before.selections_total + 1
    assert [p.leased_total for p in stats.partitions] == [p.leased for p in stats.partitions]
