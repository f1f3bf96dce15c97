"""The order of delivery: all int64 priorities, ties in order of arrival, aging, several partitions."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import heapline
from heapline.contract.broker import Broker
from heapline.contract.message import Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, drain, put, take

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
EXTREMES = [0, -1, 1, INT64_MIN, INT64_MAX, INT64_MIN + 1, INT64_MAX - 1, 1 << 52, -(1 << 53) - 1, (1 << 53) + 1]


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("mode", ["min", "max"])
async def test_order_holds_over_all_of_int64(topic: MakeTopic, broker: Broker, mode: str, partitions: int) -> None:
    await topic(mode=mode, partitions=partitions)
    for priority in EXTREMES:
        await put(broker, priority)
    wanted = sorted(EXTREMES, reverse=mode == "max")
    found = await broker.pop("jobs", 100)
    assert [m.priority for m in found] == wanted
    assert [m.payload for m in found] == [str(p).encode() for p in wanted]


@pytest.mark.parametrize("mode", ["min", "max"])
async def test_single_pops_give_the_same_order_as_one_large_one(topic: MakeTopic, broker: Broker, mode: str) -> None:
    await topic(mode=mode)
    await put(broker, *EXTREMES)
    assert await drain(broker) == [str(p).encode() for p in sorted(EXTREMES, reverse=mode == "max")]


@pytest.mark.parametrize("mode", ["min", "max"])
async def test_equal_priorities_are_served_in_order_of_arrival(topic: MakeTopic, broker: Broker, mode: str) -> None:
    await topic(mode=mode)
    for i in range(5):
        await broker.enqueue("jobs", b"%d" % i, priority=7)
    await broker.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=7) for i in range(5, 10)])
    assert await drain(broker) == [b"%d" % i for i in range(10)]


@pytest.mark.feature("partitions")
async def test_best_message_over_all_partitions_comes_first(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=20)
    rng = random.Random(1)
    priorities = [rng.randrange(-1000, 1000) for _ in range(500)]
    for at in range(0, 500, 50):
        batch = [Outgoing(b"x", priority=p, key=f"k{rng.randrange(50)}") for p in priorities[at : at + 50]]
        await broker.enqueue_batch("jobs", batch)
    assert len({info.partition for info in await broker.peek("jobs", 100)}) > 5
    found = [m.priority for count in (1, 2, 100, 300, 97) for m in await broker.pop("jobs", count)]
    assert found == sorted(priorities)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(priorities=st.lists(st.integers(INT64_MIN, INT64_MAX) | st.sampled_from(EXTREMES), max_size=30), data=st.data())
async def test_any_mixture_of_pushes_and_pops_serves_the_best(
    topic: MakeTopic, broker: Broker, priorities: list[int], data: st.DataObject
) -> None:
    await topic(partitions=3)
    waiting: list[int] = []
    while priorities or waiting:
        some = [priorities.pop() for _ in range(data.draw(st.integers(min(5, len(priorities)), len(priorities))))]
        await put(broker, *some)
        waiting = sorted(waiting + some)
        count = data.draw(st.integers(3, 12))
        found = await broker.pop("jobs", count)
        assert [m.priority for m in found] == waiting[:count]
        await broker.ack(found)
        waiting = waiting[count:]


@pytest.mark.feature("partitions")
async def test_messages_of_one_key_stay_in_one_partition(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=16)
    for i in range(4):
        keys = [f"customer-{n}" for n in range(12)]
        await broker.enqueue_batch(
            "jobs", [Outgoing(b"x", key=key, idempotency_key=f"{i}{key}" if i % 2 else None) for key in keys]
        )  # fmt: skip
        await broker.enqueue("jobs", b"x", key=f"customer-{i}")
    homes: dict[str, set[int]] = {}
    for m in await broker.pop("jobs", 200):
        homes.setdefault(m.key or "", set()).add(m.partition)
    assert len(homes) == 12
    assert {len(partitions) for partitions in homes.values()} == {1}
    assert len(set.union(*homes.values())) > 4


async def test_keys_find_their_partition_again_after_a_restart(world: World, topic: MakeTopic) -> None:
    await topic(partitions=16)
    first = [await world.broker.enqueue("jobs", b"x", key=f"k{i}") for i in range(10)]
    before = [(await world.broker.get("jobs", r.id)).partition for r in first]
    hl = await world.reopen()
    again = [await hl.enqueue("jobs", b"x", key=f"k{i}") for i in range(10)]
    assert [(await hl.get("jobs", r.id)).partition for r in again] == before


async def test_waiting_makes_more_urgent_on_an_aging_topic(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(ordering=heapline.aging(1.0))
    await put(hl, 100)
    await world.advance(50)
    await put(hl, 60)  # aged to 50 by now
    await world.advance(50)
    await put(hl, -20)
    assert await drain(hl) == [b"-20", b"100", b"60"]


async def test_aging_works_the_other_way_round_on_a_max_topic(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(mode="max", ordering=heapline.aging(2.0), partitions=3)
    await put(hl, 10)
    await world.advance(30)  # now equal to 70
    await put(hl, 60, 80)
    assert await drain(hl) == [b"80", b"10", b"60"]


async def test_redelivered_message_keeps_its_rank(world: World, jobs: Broker) -> None:
    await put(jobs, 5, 5, 5)
    first = await take(jobs)
    await first.nack(backoff=0)
    await put(jobs, 5)
    assert (await take(jobs)).id == first.id


async def test_expired_lease_returns_message_at_its_original_priority(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(backoff=heapline.Backoff(base=0))
    await put(hl, 1, 2)
    first = await take(hl, visibility=1.0)
    await world.advance(2)
    again = await take(hl)
    assert (again.id, again.priority, again.attempts) == (first.id, 1, 2)
