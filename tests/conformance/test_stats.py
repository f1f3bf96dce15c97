"""Statistics beyond counts: depth by priority, due times, and the age of the oldest message."""

from __future__ import annotations

from datetime import timedelta

import pytest

from heapline.contract.broker import Broker
from heapline.contract.config import aging
from heapline.contract.message import TopicStats
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, put, take


def depths(stats: TopicStats) -> list[tuple[int, int, int]]:
    return [(bucket.low, bucket.high, bucket.count) for bucket in stats.depth_by_priority]


def dues(stats: TopicStats) -> dict[float | None, int]:
    return {bucket.within: bucket.count for bucket in stats.due_histogram if bucket.count}


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("partitions", [1, 3])
async def test_depth_by_priority_counts_ready_messages(
    topic: MakeTopic, broker: Broker, mode: str, partitions: int
) -> None:
    await topic(mode=mode, partitions=partitions)
    await put(broker, -(1 << 63), -12, -1, 0, 0, 1, 2, 4, 5, 10, (1 << 63) - 1)
    await put(broker, 3, delay=3600)
    stats = await broker.stats("jobs")
    assert depths(stats)[1:-1] == [(-19, -10, 1), (-1, -1, 1), (0, 0, 2), (1, 1, 1), (2, 4, 2), (5, 9, 1), (10, 19, 1)]
    assert (depths(stats)[0][0], depths(stats)[-1][1]) == (-(1 << 63), (1 << 63) - 1)
    await take(broker)
    assert sum(count for _, _, count in depths(await broker.stats("jobs"))) == 10


@pytest.mark.usefixtures("fake_time")
@pytest.mark.parametrize(("mode", "expected"), [("min", (-4, -2)), ("max", (20, 49))])
async def test_depth_of_an_aging_topic_is_by_effective_priority(
    world: World, topic: MakeTopic, broker: Broker, mode: str, expected: tuple[int, int]
) -> None:
    await topic(mode=mode, ordering=aging(1.5))
    await put(broker, 12)
    assert depths(await broker.stats("jobs")) == [(10, 19, 1)]
    await world.advance(10)
    assert depths(await broker.stats("jobs")) == [(*expected, 1)]


async def test_empty_topic_has_no_depth_no_age_and_nothing_due(jobs: Broker) -> None:
    stats = await jobs.stats("jobs")
    assert (depths(stats), dues(stats), stats.oldest_ready_age) == ([], {}, None)
    assert stats.partitions[0].oldest_ready_age is None


@pytest.mark.usefixtures("fake_time")
async def test_due_histogram_shows_when_delayed_messages_become_due(world: World, jobs: Broker) -> None:
    await put(jobs, 1, 2, delay=0.9)
    await put(jobs, 3, delay=59)
    await jobs.enqueue("jobs", b"4", deliver_at=world.now() + timedelta(hours=5))
    await put(jobs, 5, delay=86400 * 300)
    assert dues(await jobs.stats("jobs")) == {1: 2, 60: 1, 6 * 3600: 1, None: 1}
    await world.advance(55)
    assert dues(await jobs.stats("jobs")) == {10: 1, 6 * 3600: 1, None: 1}


@pytest.mark.usefixtures("fake_time")
async def test_age_is_that_of_the_longest_waiting_ready_message_since_its_enqueue(world: World, jobs: Broker) -> None:
    await put(jobs, 1, delay=5)
    await world.advance(2)
    await put(jobs, 2)
    await world.advance(1)
    assert (await jobs.stats("jobs")).oldest_ready_age == 1
    await world.advance(3)
    stats = await jobs.stats("jobs")
    assert stats.oldest_ready_age == stats.partitions[0].oldest_ready_age == 6, "the age counts from the enqueue"
    await take(jobs)
    await take(jobs)
    assert (await jobs.stats("jobs")).oldest_ready_age is None


async def test_cancelled_messages_are_subtracted_from_the_sums(jobs: Broker) -> None:
    ids = [(await jobs.enqueue("jobs", b"x", priority=i, delay=60 * (i % 2) or None)).id for i in range(40)]
    for id in ids[:20]:
        await jobs.cancel("jobs", id)
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.delayed) == (10, 10)
    assert sum(count for _, _, count in depths(stats)) == 10
    assert sum(dues(stats).values()) == 10


@pytest.mark.usefixtures("fake_time")
@pytest.mark.parametrize("partitions", [1, 3])
async def test_stats_report_when_the_first_lease_ends(
    world: World, topic: MakeTopic, broker: Broker, partitions: int
) -> None:
    await topic(partitions=partitions)
    await put(broker, 1, 2, 3)
    assert (await broker.stats("jobs")).lease_ends_in is None
    (first,) = await broker.pop("jobs", visibility=20)
    (second,) = await broker.pop("jobs", visibility=50)
    await world.advance(5)
    stats = await broker.stats("jobs")
    assert stats.lease_ends_in == 15
    assert {p.lease_ends_in for p in stats.partitions} <= {15, 45, None}
    await broker.extend(first, 60)
    assert (await broker.stats("jobs")).lease_ends_in == 45
    await broker.ack(second)
    assert (await broker.stats("jobs")).lease_ends_in == 60
    await broker.ack(first)
    assert (await broker.stats("jobs")).lease_ends_in is None


async def test_stats_count_how_long_enqueues_pops_and_commits_took(jobs: Broker) -> None:
    before = (await jobs.stats("jobs")).latencies
    await put(jobs, 1, 2)
    await take(jobs)
    after = (await jobs.stats("jobs")).latencies
    grown = {name: sum(after[name].counts) - sum(before[name].counts) for name in after}
    assert grown["enqueue"] >= 1
    assert grown["pop"] == 1
    assert grown["commit"] >= 2
    assert all(len(reported.counts) == len(reported.bounds_ms) + 1 for reported in after.values())


async def test_stats_have_the_parts_of_the_broker_s_features(jobs: Broker) -> None:
    features, stats = (await jobs.describe()).features, await jobs.stats("jobs")
    assert (stats.log is not None) == ("log" in features)
    if "partitions" in features:
        assert stats.spine is not None
    if stats.spine is not None:  # a broker without partitions may report its rank bound
        assert stats.spine.bound is None or stats.spine.bound >= 1


@pytest.mark.feature("log")
async def test_recorded_audit_is_in_the_statistics(world: World, jobs: Broker) -> None:
    stats = await jobs.stats("jobs")
    assert stats.log is not None
    assert stats.log.audit is None
    until = world.now() - timedelta(minutes=5)
    await jobs.record_audit("jobs", until, 12, lost=1, doubled=2, early=3, refuted=["none_lost", "not_early"], topics=2)
    stats = await jobs.stats("jobs")
    assert stats.log is not None
    found = stats.log.audit
    assert found is not None
    assert (found.messages, found.lost, found.doubled, found.early, found.topics) == (12, 1, 2, 3, 2)
    assert found.refuted == ["none_lost", "not_early"]
    assert abs(found.until - until) < timedelta(milliseconds=1)
    assert found.recorded_at > found.until
