"""Pause only stops delivery; purge only removes waiting messages."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, drain, picture, put, take


async def test_paused_topic_delivers_nothing(jobs: Broker) -> None:
    await put(jobs, 1)
    await jobs.pause_topic("jobs")
    assert await jobs.pop("jobs") == []
    assert await jobs.pop("jobs", wait=0.02) == []
    assert (await jobs.stats("jobs")).paused
    await jobs.resume_topic("jobs")
    assert await drain(jobs) == [b"1"]


async def test_pause_stops_only_delivery(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(backoff=heapline.Backoff(base=0))
    await put(hl, 1, 2, 3, 4)
    acked, nacked, extended, left = await hl.pop("jobs", 4, visibility=2)
    await put(hl, 5, delay=1)
    await hl.pause_topic("jobs")
    await put(hl, 6)
    await acked.ack()
    await nacked.nack(backoff=0)
    await extended.extend(60)
    await world.advance(3)  # the timer fires and the last lease ends
    stats = await hl.stats("jobs")
    assert (stats.ready, stats.delayed, stats.leased) == (4, 0, 1)
    assert len(await hl.peek("jobs")) == 4
    await hl.resume_topic("jobs")
    assert await drain(hl) == [nacked.payload, left.payload, b"5", b"6"]


async def test_pause_until_ends_automatically(world: World, jobs: Broker) -> None:
    await put(jobs, 1)
    await jobs.pause_topic("jobs", until=world.now() + timedelta(seconds=1))
    assert await jobs.pop("jobs") == []
    await world.advance(1.2)
    assert not (await jobs.stats("jobs")).paused
    assert await drain(jobs) == [b"1"]


async def test_later_pause_replaces_the_earlier(world: World, jobs: Broker) -> None:
    await jobs.pause_topic("jobs", until=world.now() + timedelta(seconds=1))
    await jobs.pause_topic("jobs")
    await world.advance(2)
    assert (await jobs.stats("jobs")).paused


async def test_pause_until_a_past_time_pauses_nothing(world: World, jobs: Broker) -> None:
    await put(jobs, 1)
    await jobs.pause_topic("jobs", until=world.now() - timedelta(seconds=1))
    assert await drain(jobs) == [b"1"]


async def test_resuming_an_unpaused_topic_does_nothing(jobs: Broker) -> None:
    before = await picture(jobs)
    await jobs.resume_topic("jobs")
    assert await picture(jobs) == before


@pytest.mark.parametrize("until", [datetime(2030, 1, 1), 5, "tomorrow"], ids=str)
async def test_bad_until_is_refused(jobs: Broker, until: Any) -> None:
    with pytest.raises(heapline.BadRequest):
        await jobs.pause_topic("jobs", until=until)
    assert not (await jobs.stats("jobs")).paused


async def test_purge_removes_ready_and_delayed_and_counts_them(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(partitions=3)
    for p in range(6):
        await put(hl, p)
    await put(hl, 6, 7, delay=1)
    await put(hl, 8, deliver_at=world.now() + timedelta(seconds=1))
    assert await hl.purge("jobs") == 9
    await world.advance(2)
    assert await hl.pop("jobs") == []
    stats = await hl.stats("jobs")
    assert (stats.ready, stats.delayed) == (0, 0)
    assert await hl.purge("jobs") == 0


async def test_purge_leaves_leased_and_dead_alone(world: World, jobs: Broker) -> None:
    await put(jobs, 1, 2, 3, 4)
    leased, dead, retried = await jobs.pop("jobs", 3)
    await dead.bury()
    await retried.nack(backoff=1)
    assert await jobs.purge("jobs") == 2
    stats = await jobs.stats("jobs")
    assert (stats.leased, stats.dead) == (1, 1)
    await leased.nack(backoff=0)
    await jobs.dlq_replay("jobs")
    assert [m.id for m in await jobs.pop("jobs", 5)] == [leased.id, dead.id]


async def test_enqueue_after_a_purge_is_not_purged(jobs: Broker) -> None:
    await put(jobs, 1)
    await jobs.purge("jobs")
    await put(jobs, 2)
    assert await drain(jobs) == [b"2"]


@pytest.mark.feature("purge_count")
async def test_purge_of_what_was_counted_leaves_what_was_enqueued_since(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(partitions=3)
    for p in range(6):
        await put(hl, p)
    await put(hl, 6, 7, delay=5)
    (leased,) = await hl.pop("jobs", 1)
    await world.advance(1)
    counted = await hl.purge_count("jobs")
    assert counted.count == 7
    await world.advance(1)
    for p in range(20, 26):
        await put(hl, p)
    await put(hl, 26, delay=1)
    assert await hl.purge("jobs", enqueued_before=counted.as_of) == 7
    stats = await hl.stats("jobs")
    assert (stats.ready, stats.delayed, stats.leased) == (6, 1, 1)
    assert await hl.purge("jobs", enqueued_before=counted.as_of) == 0
    await leased.ack()
    await world.advance(2)
    assert sorted(await drain(hl)) == [str(p).encode() for p in range(20, 27)]


async def test_purge_removes_messages_that_were_changed_in_every_way(world: World, jobs: Broker) -> None:
    ids = await put(jobs, *range(10))
    for id in ids[:4]:
        await jobs.reschedule("jobs", id, delay=1)
    for id in ids[2:6]:
        await jobs.reschedule("jobs", id, delay=0, priority=3)
    await jobs.cancel("jobs", ids[0])
    await take(jobs)
    assert await jobs.purge("jobs") == 8
    await world.advance(2)
    assert await jobs.pop("jobs", 10) == []
