"""Leased messages as columns: `pop(…, lazy=True)` and `consume_batches`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.message import Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, drain, put

FIELDS = ("topic", "partition", "id", "token", "payload", "priority", "attempts", "key", "headers", "message_id")


def described(message: heapline.Message) -> tuple[Any, ...]:
    return *(getattr(message, name) for name in FIELDS), message.enqueued_at, message.fairness_key


async def test_lazy_pop_returns_the_columns_of_a_pop(jobs: Broker) -> None:
    outgoing = [
        Outgoing(b"a", priority=2, key="k", headers={"x": "1"}),
        Outgoing(b"b", priority=1),
        Outgoing(b"", priority=3),
    ]
    results = await jobs.enqueue_batch("jobs", outgoing)
    batch = await jobs.pop("jobs", 10, lazy=True)
    assert isinstance(batch, heapline.LeasedBatch)
    ids = [results[i].id for i in (1, 0, 2)]
    assert (len(batch), batch.topic, batch.ids) == (3, "jobs", ids)
    assert batch.message_ids == [results[i].message_id for i in (1, 0, 2)]
    assert (batch.payloads, batch.priorities, batch.attempts) == ([b"b", b"a", b""], [1, 2, 3], [1, 1, 1])
    assert (batch.keys, batch.headers) == ([None, "k", None], [{}, {"x": "1"}, {}])


async def test_messages_of_a_batch_are_those_that_pop_returns(jobs: Broker) -> None:
    await jobs.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i, key=f"k{i}") for i in range(5)])
    batch = await jobs.pop("jobs", 5, lazy=True, request_id="same")
    messages = await jobs.pop("jobs", 5, request_id="same")
    expected = [described(m) for m in messages]
    assert [described(m) for m in batch] == expected
    assert [described(batch[i]) for i in range(-5, 5)] == expected * 2
    assert [described(m) for m in batch[1:4]] == expected[1:4]
    assert [described(m) for m in batch[::-2]] == expected[::-2]
    with pytest.raises(IndexError):
        batch[5]


async def test_lazy_pop_of_an_empty_topic_is_an_empty_batch(jobs: Broker) -> None:
    batch = await jobs.pop("jobs", 10, lazy=True)
    assert not batch
    assert len(batch) == 0
    assert list(batch) == []
    assert batch.ids == []
    assert not batch[:3]
    await batch.ack()
    await jobs.release(batch)


ACTS: dict[str, tuple[Callable[[Broker, Any], Awaitable[None]], tuple[int, int, int, int]]] = {
    "ack": (lambda hl, held: hl.ack(held), (0, 0, 0, 4)),
    "nack": (lambda hl, held: hl.nack(held, backoff=60, reason="busy"), (0, 4, 0, 0)),
    "release": (lambda hl, held: hl.release(held), (4, 0, 0, 0)),
    "bury": (lambda hl, held: hl.bury(held, reason="bad"), (0, 0, 4, 0)),
}


@pytest.mark.parametrize("act", sorted(ACTS))
@pytest.mark.parametrize("by", ["broker", "batch"])
async def test_batch_is_settled_as_a_whole(jobs: Broker, act: str, by: str) -> None:
    await put(jobs, 1, 2, 3, 4)
    batch = await jobs.pop("jobs", 4, lazy=True)
    run, expected = ACTS[act]
    if by == "broker":
        await run(jobs, batch)
    else:
        options = {"nack": {"backoff": 60, "reason": "busy"}, "bury": {"reason": "bad"}}
        await getattr(batch, act)(**options.get(act, {}))
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.delayed, stats.dead, stats.acked_total) == expected
    assert stats.leased == 0


async def test_part_of_a_batch_is_settled_without_the_rest(jobs: Broker) -> None:
    await put(jobs, *range(6))
    batch = await jobs.pop("jobs", 6, lazy=True)
    await batch[:2].ack()
    await jobs.release(batch[4:])
    await batch[3].ack()
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.leased, stats.acked_total) == (2, 1, 3)
    await batch[2].nack(backoff=0)
    assert sorted(await drain(jobs)) == [b"2", b"4", b"5"]


async def test_ack_of_a_batch_acks_all_held_messages_and_reports_the_lost(jobs: Broker) -> None:
    await put(jobs, 1, 2, 3)
    batch = await jobs.pop("jobs", 3, lazy=True)
    await batch[1].release()
    with pytest.raises(heapline.LeaseLost) as caught:
        await batch.ack()
    assert caught.value.lost == [batch.ids[1]]
    assert batch.message_ids[1] in str(caught.value)
    assert (await jobs.stats("jobs")).acked_total == 2


async def test_extended_batch_shows_its_new_deadlines(world: World, topic: MakeTopic) -> None:
    await topic(visibility_default=10.0)
    await put(world.broker, 1, 2)
    batch = await world.broker.pop("jobs", 2, lazy=True)
    before = [m.deadline for m in batch]
    await batch[1].release()
    with pytest.raises(heapline.LeaseLost):
        await batch.extend(100)
    after = [m.deadline for m in batch]
    assert (after[0] - before[0]).total_seconds() > 60
    assert after[1] == before[1]
    assert (await world.broker.get("jobs", batch.ids[0])).deadline == after[0]


async def test_batches_are_consumed_until_the_consumer_stops(jobs: Broker) -> None:
    await put(jobs, *range(25))
    sizes, payloads = [], []
    async with asyncio.timeout(30), heapline.consume_batches(jobs, "jobs", 10, prefetch=0) as batches:
        async for batch in batches:
            sizes.append(len(batch))
            payloads += batch.payloads
            await batch.ack()
            if len(payloads) == 25:
                break
    assert (sizes, payloads) == ([10, 10, 5], [b"%d" % i for i in range(25)])
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.leased, stats.acked_total) == (0, 0, 25)


async def test_stopped_consumer_returns_batches_that_were_not_started(jobs: Broker) -> None:
    await put(jobs, *range(30))
    async with asyncio.timeout(30), heapline.consume_batches(jobs, "jobs", 10) as batches:
        first = await anext(batches)
        while (await jobs.stats("jobs")).leased < 20:  # noqa: ASYNC110 - the prefetched batch
            await asyncio.sleep(0.001)
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.leased) == (20, 10)
    await jobs.ack(first)
    released = await jobs.pop("jobs", 20, lazy=True)
    assert released.payloads == [b"%d" % i for i in range(10, 30)]
    assert released.attempts == [1] * 20, "a release does not count an attempt"
