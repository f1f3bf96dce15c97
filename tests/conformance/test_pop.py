"""`pop`: how many messages, how long, for which holder, how many bytes; and waiting for messages."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.message import Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, picture, put, take

LONG = 60.0  # a timeout that a passing test never reaches


async def test_pop_of_an_empty_topic_is_empty(jobs: Broker) -> None:
    assert await jobs.pop("jobs") == []


async def test_pop_returns_one_by_default_and_at_most_the_requested_count(jobs: Broker) -> None:
    await put(jobs, 1, 2, 3, 4, 5)
    assert len(await jobs.pop("jobs")) == 1
    assert len(await jobs.pop("jobs", 3)) == 3
    assert len(await jobs.pop("jobs", max_messages=3)) == 1


async def test_leased_message_is_not_delivered_again(jobs: Broker) -> None:
    await put(jobs, *range(40))
    pops = await asyncio.gather(*(jobs.pop("jobs", 7, holder=f"w{i}") for i in range(10)))
    ids = [m.id for messages in pops for m in messages]
    assert len(ids) == len(set(ids)) == 40


async def test_concurrent_pops_get_the_best_messages_in_call_order(jobs: Broker) -> None:
    await put(jobs, *range(6))
    first, second = await asyncio.gather(jobs.pop("jobs", 2), jobs.pop("jobs", 4))
    assert [m.priority for m in first + second] == list(range(6))


async def test_visibility_is_the_topics_default_unless_given(world: World, topic: MakeTopic) -> None:
    await topic(visibility_default=12.0)
    await put(world.broker, 1, 2)
    default, own = await take(world.broker), await take(world.broker, visibility=45.5)
    slack = timedelta(seconds=1)
    assert abs(default.deadline - world.now() - timedelta(seconds=12)) < slack
    assert abs(own.deadline - world.now() - timedelta(seconds=45.5)) < slack


async def test_holder_is_visible_while_the_message_is_leased(jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    m = await take(jobs, holder="worker-1")
    info = await jobs.get("jobs", id)
    assert (info.state, info.holder, info.deadline) == ("leased", "worker-1", m.deadline)
    await m.release()
    assert (await jobs.get("jobs", id)).holder is None


async def test_pop_is_bounded_in_bytes_but_gives_at_least_one(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    await broker.enqueue_batch("jobs", [Outgoing(b"x" * 10_000)] * 30)
    some = await broker.pop("jobs", 100, max_bytes=60_000)
    assert 1 <= len(some) <= 6
    assert len(await broker.pop("jobs", 100, max_bytes=1)) == 1
    assert len(await broker.pop("jobs", 100)) == 30 - len(some) - 1


# -- waiting -----------------------------------------------------------------------------------------------------------


async def waiting_pop(hl: Broker, **options: Any) -> asyncio.Task[list[heapline.Message]]:
    """Start a pop and wait until it waits."""
    task = asyncio.create_task(hl.pop("jobs", **{"wait": LONG, **options}))
    await hl.stats("jobs")
    assert not task.done()
    return task


async def test_waiting_pop_returns_as_soon_as_a_message_is_ready(jobs: Broker) -> None:
    task = await waiting_pop(jobs, max_messages=100)
    await put(jobs, 1)
    assert [m.priority for m in await task] == [1]


async def test_waiting_pop_returns_ready_messages_without_waiting_for_more(jobs: Broker) -> None:
    await put(jobs, 1)
    assert len(await jobs.pop("jobs", 100, wait=LONG)) == 1


async def test_pop_returns_empty_after_its_wait(jobs: Broker) -> None:
    assert await jobs.pop("jobs", wait=0.02) == []


async def test_waiting_pops_are_served_in_call_order(jobs: Broker) -> None:
    tasks = [await waiting_pop(jobs) for _ in range(3)]
    await put(jobs, 1, 2, 3)
    assert [(await task)[0].priority for task in tasks] == [1, 2, 3]


async def test_waiting_pop_wakes_for_a_release(jobs: Broker) -> None:
    await put(jobs, 1)
    m = await take(jobs)
    task = await waiting_pop(jobs)
    await m.release()
    assert [x.id for x in await task] == [m.id]


async def test_waiting_pop_wakes_for_a_nack_without_backoff(jobs: Broker) -> None:
    await put(jobs, 1)
    m = await take(jobs)
    task = await waiting_pop(jobs)
    await m.nack(backoff=0)
    assert [x.attempts for x in await task] == [2]


async def test_waiting_pop_wakes_when_a_timer_fires(world: World, jobs: Broker) -> None:
    await jobs.enqueue("jobs", b"late", delay=1)
    task = await waiting_pop(jobs)
    await world.advance(1.2)
    assert [m.payload for m in await task] == [b"late"]


async def test_waiting_pop_wakes_when_a_lease_expires(world: World, topic: MakeTopic) -> None:
    await topic(backoff=heapline.Backoff(base=0))
    await put(world.broker, 1)
    await take(world.broker, visibility=1)
    task = await waiting_pop(world.broker)
    await world.advance(1.2)
    assert [m.attempts for m in await task] == [2]


async def test_waiting_pop_wakes_for_reschedule_replay_and_resume(jobs: Broker) -> None:
    (id,) = await put(jobs, 1, delay=3600)
    task = await waiting_pop(jobs)
    await jobs.reschedule("jobs", id, delay=0)
    (m,) = await task
    await m.bury()
    task = await waiting_pop(jobs)
    await jobs.dlq_replay("jobs")
    (m,) = await task
    await m.release()
    await jobs.pause_topic("jobs")
    task = await waiting_pop(jobs)
    await jobs.resume_topic("jobs")
    assert len(await task) == 1


async def test_cancelled_wait_leases_nothing(jobs: Broker) -> None:
    task = await waiting_pop(jobs)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await put(jobs, 1)
    assert (await take(jobs)).attempts == 1


async def test_pop_cancelled_at_any_time_leaves_no_lease(jobs: Broker) -> None:
    await put(jobs, 1)
    for steps in range(25):
        task = asyncio.create_task(jobs.pop("jobs"))
        for _ in range(steps):
            await asyncio.sleep(0)
        if task.done():
            await task.result()[0].release()
            continue
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (m,) = await jobs.pop("jobs", wait=5)  # released immediately, not at the lease's end
        assert m.attempts == 1
        await m.release()


# -- repeating ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
async def test_repeated_request_gets_the_same_leases(topic: MakeTopic, broker: Broker, partitions: int) -> None:
    await topic(partitions=partitions)
    for i in range(9):
        await put(broker, i)
    first = await broker.pop("jobs", 4, request_id="r1", holder="w")
    again = await broker.pop("jobs", 4, request_id="r1", holder="w")
    facts = [[(m.id, m.token, m.deadline, m.attempts, m.payload) for m in ms] for ms in (first, again)]
    assert facts[0] == facts[1]
    other = await broker.pop("jobs", 9, request_id="r2")
    assert not {m.id for m in other} & {m.id for m in first}
    await broker.ack(again)


async def test_repeated_request_gets_only_leases_still_held(jobs: Broker) -> None:
    await put(jobs, 1, 2, 3)
    first = await jobs.pop("jobs", 2, request_id="r")
    await first[0].ack()
    assert [m.id for m in await jobs.pop("jobs", 2, request_id="r")] == [first[1].id]


async def test_request_repeated_while_the_first_still_waits_gets_the_same_leases(jobs: Broker) -> None:
    first, second = [await waiting_pop(jobs, max_messages=2, request_id="r") for _ in range(2)]
    await put(jobs, 1, 2, 3, 4)
    assert [m.id for m in await first] == [m.id for m in await second]
    assert (await jobs.stats("jobs")).leased == 2


async def test_repeated_request_is_answered_while_the_topic_is_paused(jobs: Broker) -> None:
    await put(jobs, 1, 2)
    first = await jobs.pop("jobs", request_id="r")
    await jobs.pause_topic("jobs")
    assert [m.id for m in await jobs.pop("jobs", request_id="r")] == [first[0].id]
    assert await jobs.pop("jobs", request_id="other") == []


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_messages": 0}, {"max_messages": -1}, {"max_messages": 1.5}, {"max_messages": True}, {"visibility": 0},
        {"visibility": -1}, {"visibility": "30"}, {"visibility": float("nan")}, {"visibility": 12 * 3600 + 1},
        {"wait": -1}, {"wait": "long"}, {"wait": None}, {"wait": float("inf")}, {"max_bytes": 0}, {"max_bytes": "1"},
        {"holder": 7}, {"holder": "\ud800"}, {"holder": "w" * 5000}, {"request_id": 7}, {"request_id": "\ud800"},
        {"request_id": "r" * 5000}, {"request_id": ""},
    ],
    ids=lambda options: ascii(options)[:30],
)  # fmt: skip
async def test_bad_pop_is_refused_and_leases_nothing(jobs: Broker, options: dict[str, Any]) -> None:
    await put(jobs, 1)
    before = await picture(jobs)
    with pytest.raises(heapline.BadRequest):
        await asyncio.wait_for(jobs.pop("jobs", **options), 20)
    assert await picture(jobs) == before


async def test_visibility_up_to_lease_max_is_allowed(topic: MakeTopic, broker: Broker) -> None:
    await topic(lease_max=60.0)
    await put(broker, 1)
    with pytest.raises(heapline.BadRequest, match="lease_max"):
        await broker.pop("jobs", visibility=61)
    assert len(await broker.pop("jobs", visibility=60)) == 1
