"""Counts of delayed messages by the time at which they become due, and herds among them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from heapline import Outgoing
from heapline.contract.broker import Broker
from heapline.contract.errors import TopicNotFound
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, put

pytestmark = [pytest.mark.feature("due_times"), pytest.mark.usefixtures("fake_time")]


async def test_every_delayed_message_is_counted_where_it_becomes_due(
    world: World, topic: MakeTopic, broker: Broker
) -> None:
    await topic(partitions=2)
    for delay in (30, 90, 95, 3599, 3700, 80_000, 90_000, 1_000_000):
        await broker.enqueue("jobs", b"", delay=delay, key=str(delay))
    await broker.enqueue("jobs", b"", deliver_at=world.now() + timedelta(seconds=600))
    await put(broker, 1)
    found = await broker.due_times("jobs")
    assert found.overdue == 0
    assert {i: span.count for i, span in enumerate(found.hour) if span.count} == {0: 1, 1: 2, 9: 1, 59: 1}
    assert {i: span.count for i, span in enumerate(found.day) if span.count} == {0: 4, 1: 1, 2: 1, 44: 1}
    assert found.later == 2
    assert (len(found.hour), len(found.day)) == (60, 48)
    assert {span.seconds for span in found.hour} == {60}
    assert abs(found.hour[0].at - world.now()) < timedelta(seconds=1)
    assert found.hour[1].at - found.hour[0].at == timedelta(minutes=1)
    assert not any(span.is_herd for span in (*found.hour, *found.day))


async def test_herd_is_marked(jobs: Broker) -> None:
    await jobs.enqueue_batch("jobs", [Outgoing(b"", delay=600.5)] * 500)
    for n in range(60):
        await jobs.enqueue("jobs", b"", delay=60 * n + 30)
    found = await jobs.due_times("jobs")
    assert [i for i, span in enumerate(found.hour) if span.is_herd] == [10]
    assert found.hour[10].count == 501


async def test_topic_without_delayed_messages_has_zeros(jobs: Broker) -> None:
    found = await jobs.due_times("jobs")
    assert (found.overdue, found.later, sum(span.count for span in found.hour)) == (0, 0, 0)
    with pytest.raises(TopicNotFound):
        await jobs.due_times("nothing")
