"""Delays, delivery times and ttls: never early, kept across restarts, and counted from the right time."""

from __future__ import annotations

from datetime import timedelta

import pytest

import heapline
from heapline.contract.broker import Broker
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, all_fired, drain, put, take

TICK = 0.1  # of a topic by default

# -- delays ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_time")
@pytest.mark.parametrize("delay", [0.001, 0.0014, 0.05, 0.1, 1.5, 59.99, 3600, 86400 * 3, 86400 * 400])
async def test_delay_is_never_early_and_at_most_a_tick_late(world: World, jobs: Broker, delay: float) -> None:
    r = await jobs.enqueue("jobs", b"x", delay=delay)
    info = await jobs.get("jobs", r.id)
    assert info.state == "delayed"
    assert info.due_at is not None
    assert timedelta(seconds=delay) <= info.due_at - world.now() <= timedelta(seconds=delay, milliseconds=2)
    await world.advance(int(delay * 1000) / 1000)
    assert await jobs.pop("jobs") == []
    assert (await jobs.get("jobs", r.id)).state == "delayed"
    await world.advance(TICK)
    assert (await take(jobs)).payload == b"x"


@pytest.mark.usefixtures("fake_time")
@pytest.mark.parametrize("microseconds", [0, 1, 400, 600])
async def test_deliver_at_is_never_early_and_at_most_a_tick_late(world: World, jobs: Broker, microseconds: int) -> None:
    moment = world.now() + timedelta(hours=3, microseconds=microseconds)
    r = await jobs.enqueue("jobs", b"x", deliver_at=moment)
    assert ((await jobs.get("jobs", r.id)).due_at or world.now()) >= moment
    await world.advance(3 * 3600 - 0.001)
    assert await jobs.pop("jobs") == []
    await world.advance(0.002 + TICK)
    assert (await take(jobs)).payload == b"x"


async def test_delayed_messages_fire_in_order_of_their_time_and_then_obey_priority(world: World, jobs: Broker) -> None:
    for delay, priority in ((1.2, 1), (1.1, 2), (0.5, 3)):
        await put(jobs, priority, delay=delay)
    await world.advance(0.7)
    assert await drain(jobs) == [b"3"]
    await world.advance(0.8)
    assert await drain(jobs) == [b"1", b"2"]


async def test_counts_separate_ready_from_delayed(world: World, jobs: Broker) -> None:
    await put(jobs, 1, 2)
    await put(jobs, 3, 4, 5, delay=1)
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.delayed) == (2, 3)
    await world.advance(1.2)
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.delayed) == (5, 0)


@pytest.mark.usefixtures("fake_time")
async def test_many_timers_due_at_the_same_time_all_fire(world: World, topic: MakeTopic) -> None:
    await topic(partitions=3)
    for _ in range(3):
        await put(world.broker, *range(3000), delay=60)
    await world.advance(61)
    await all_fired(world.broker)
    assert (await world.broker.stats("jobs")).ready == 9000


@pytest.mark.feature("log")
@pytest.mark.usefixtures("fake_time")
async def test_timers_of_a_topic_without_streams_fire_too(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(streams=False, partitions=2)
    await put(hl, 1, 2, delay=10)
    await put(hl, 3, deliver_at=world.now() + timedelta(seconds=20))
    await world.advance(11)
    hl = await world.reopen("journal")
    assert await drain(hl) == [b"1", b"2"]
    await world.advance(10)
    assert await drain(hl) == [b"3"]


# -- time to live ------------------------------------------------------------------------------------------------------


async def test_message_not_popped_in_time_expires(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1, ttl=1)
    info = await jobs.get("jobs", id)
    assert info.expires_at is not None
    assert abs(info.expires_at - world.now() - timedelta(seconds=1)) < timedelta(seconds=0.5)
    await world.advance(1.2)
    assert await jobs.pop("jobs") == []
    info = await jobs.get("jobs", id)
    assert info.state == "expired"
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.expired_total) == (0, 1)


async def test_ttl_counts_from_the_due_time(world: World, jobs: Broker) -> None:
    await put(jobs, 1, ttl=1, delay=2)
    await put(jobs, 2, ttl=1, deliver_at=world.now() + timedelta(seconds=2))
    await world.advance(1.9)
    assert (await jobs.stats("jobs")).delayed == 2
    await world.advance(0.3)
    assert (await jobs.stats("jobs")).ready == 2
    await world.advance(1.2)
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.expired_total) == (0, 2)


async def test_message_leased_before_its_ttl_ends_is_not_expired(world: World, jobs: Broker) -> None:
    await put(jobs, 1, ttl=1)
    m = await take(jobs)
    await world.advance(3)
    assert (await jobs.get("jobs", m.id)).state == "leased"
    await m.ack()
    assert (await jobs.get("jobs", m.id)).state == "acked"


@pytest.mark.parametrize("way", ["nack", "nack later", "release", "lease expiry"])
async def test_leased_message_expires_when_its_lease_ends(world: World, topic: MakeTopic, way: str) -> None:
    hl = world.broker
    await topic(backoff=heapline.Backoff(base=0))
    await put(hl, 1, ttl=1)
    m = await take(hl, visibility=2)
    await world.advance(1.5)
    if way == "nack":
        await m.nack(backoff=0)
    elif way == "nack later":
        await m.nack(backoff=60)
    elif way == "release":
        await m.release()
    else:
        await world.advance(1)
    assert await hl.pop("jobs") == []
    assert (await hl.get("jobs", m.id)).state == "expired"
    stats = await hl.stats("jobs")
    assert (stats.ready, stats.delayed, stats.leased, stats.dead) == (0, 0, 0, 0)


async def test_message_that_waits_for_a_retry_expires(world: World, jobs: Broker) -> None:
    await put(jobs, 1, ttl=1)
    m = await take(jobs)
    await m.nack(backoff=60)
    await world.advance(1.2)
    assert (await jobs.get("jobs", m.id)).state == "expired"
    assert (await jobs.stats("jobs")).delayed == 0


async def test_buried_message_does_not_expire(world: World, jobs: Broker) -> None:
    await put(jobs, 1, 2, ttl=1)
    first, second = await jobs.pop("jobs", 2)
    await first.bury()
    await world.advance(1.5)
    await second.bury()
    await world.advance(1.5)
    assert {dead.id for dead in await jobs.dlq_list("jobs")} == {first.id, second.id}


async def test_ttl_ends_while_the_topic_is_paused(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1, ttl=1)
    await jobs.pause_topic("jobs")
    await world.advance(1.2)
    assert (await jobs.get("jobs", id)).state == "expired"


async def test_short_ttl_expires_before_longer_ones(world: World, jobs: Broker) -> None:
    await put(jobs, 1, ttl=3600)
    await put(jobs, 2, ttl=0.5)
    await put(jobs, 3)
    await world.advance(0.8)
    assert await drain(jobs) == [b"1", b"3"]
