"""Calls over a limit raise ResourceExhausted with that limit, and change nothing. Payload size is in test_enqueue."""

from __future__ import annotations

import asyncio

import pytest

import heapline
from heapline.contract.broker import Broker
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, picture, put, take


async def test_enqueue_over_max_backlog_is_refused(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_backlog=3, partitions=2)
    for p in (1, 2):
        await put(broker, p)
    await put(broker, 3, delay=60)
    before = await picture(broker)
    with pytest.raises(heapline.ResourceExhausted, match=r"max_backlog.*3.*retry later") as caught:
        await broker.enqueue("jobs", b"x")
    assert caught.value.limit == 3
    assert isinstance(caught.value, heapline.UnavailableError)
    assert await picture(broker) == before


async def test_backlog_counts_ready_and_delayed_but_not_leased_or_dead(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_backlog=2)
    await put(broker, 1, 2)
    a, b = await broker.pop("jobs", 2)
    await a.bury()
    await put(broker, 3, 4)
    with pytest.raises(heapline.ResourceExhausted):
        await put(broker, 5)
    await b.nack(backoff=0)  # a message that is redelivered is never refused
    assert (await broker.stats("jobs")).ready == 3
    await broker.purge("jobs")
    await put(broker, 5)


async def test_concurrent_enqueues_never_exceed_max_backlog(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_backlog=10)
    calls = [
        broker.enqueue("jobs", b"%d" % i, **({"idempotency_key": f"k{i}"} if i % 3 == 0 else {})) for i in range(40)
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [r for r in results if isinstance(r, heapline.ResourceExhausted)]
    assert (len(refused), (await broker.stats("jobs")).ready) == (30, 10)


async def test_rejected_call_does_not_count_against_concurrent_ones(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_backlog=3)
    await broker.enqueue("jobs", b"first", idempotency_key="k")
    conflict = broker.enqueue("jobs", b"other", idempotency_key="k")
    large = broker.enqueue_batch("jobs", [heapline.Outgoing(b"x")] * 3)
    small = broker.enqueue_batch("jobs", [heapline.Outgoing(b"y")] * 2)
    results = await asyncio.gather(conflict, large, small, return_exceptions=True)
    assert [type(r) for r in results] == [heapline.IdempotencyConflict, heapline.ResourceExhausted, list]


async def test_refused_new_epoch_is_not_opened(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_backlog=1)
    await put(broker, 1)
    with pytest.raises(heapline.ResourceExhausted):
        await broker.enqueue("jobs", b"x", producer_id="p", epoch=9, seq=0)
    assert await broker.open_producer("jobs", "p") == 1


async def test_pop_over_max_inflight_is_refused(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_inflight=2, partitions=2)
    for p in (1, 2, 3):
        await put(broker, p)
    held = await broker.pop("jobs", 10)
    assert len(held) == 2, "a pop gets as many as the limit allows"
    before = await picture(broker)
    with pytest.raises(heapline.ResourceExhausted, match=r"max_inflight.*2") as caught:
        await broker.pop("jobs")
    assert caught.value.limit == 2
    assert await picture(broker) == before
    await held[0].ack()
    assert (await take(broker)).priority == 3


async def test_pop_of_an_empty_topic_at_max_inflight_is_just_empty(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_inflight=1)
    await put(broker, 1)
    await take(broker)
    assert await broker.pop("jobs") == []


async def test_pop_that_waits_at_max_inflight_wakes_when_a_lease_ends(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_inflight=1)
    await put(broker, 1, 2)
    held = await take(broker)
    waiting = asyncio.create_task(broker.pop("jobs", wait=60))
    await broker.stats("jobs")
    await held.ack()
    assert [m.priority for m in await waiting] == [2]


async def test_repeated_request_is_answered_at_max_inflight(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_inflight=1)
    await put(broker, 1, 2)
    (first,) = await broker.pop("jobs", request_id="r")
    assert [m.id for m in await broker.pop("jobs", request_id="r")] == [first.id]


@pytest.mark.usefixtures("fake_time")
async def test_limits_count_right_after_a_restart(world: World, topic: MakeTopic) -> None:
    await topic(max_inflight=1, max_backlog=2)
    await put(world.broker, 1, 2)
    await take(world.broker)
    await put(world.broker, 3)
    hl = await world.reopen("journal")
    with pytest.raises(heapline.ResourceExhausted):
        await hl.pop("jobs")
    with pytest.raises(heapline.ResourceExhausted):
        await put(hl, 4)
