"""Attempts, the retry limit, and the outcome of a message that has reached it."""

from __future__ import annotations

import pytest

import heapline
from heapline.contract.broker import Broker
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, put, take


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_max_retries_of_n_is_at_most_n_plus_one_deliveries(jobs: Broker, limit: int) -> None:
    await put(jobs, 1, max_retries=limit)
    attempts = []
    while messages := await jobs.pop("jobs"):
        attempts.append(messages[0].attempts)
        await messages[0].nack(backoff=0, reason=f"failure {len(attempts)}")
    assert attempts == list(range(1, limit + 2))
    (dead,) = await jobs.dlq_list("jobs")
    assert (dead.state, dead.reason, dead.attempts) == ("dead", f"failure {limit + 1}", limit + 1)
    assert (await jobs.stats("jobs")).dead_total == 1


async def test_topic_default_limit_applies_to_messages_without_one(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_retries_default=1)
    await put(broker, 1)
    for _ in range(2):
        await (await take(broker)).nack(backoff=0)
    assert (await broker.stats("jobs")).dead == 1


async def test_default_limit_is_sixteen_retries(jobs: Broker) -> None:
    await put(jobs, 1)
    deliveries = 0
    while messages := await jobs.pop("jobs"):
        deliveries += 1
        await messages[0].nack(backoff=0)
    assert deliveries == 17


async def test_expired_leases_count_as_attempts_and_the_reason_says_so(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(backoff=heapline.Backoff(base=0))
    await put(hl, 1, max_retries=1)
    for _ in range(2):
        await take(hl, visibility=1)
        await world.advance(1.2)
    (dead,) = await hl.dlq_list("jobs")
    assert (dead.reason, dead.attempts) == ("lease expired", 2)


async def test_dead_letter_without_a_given_reason_has_a_default_one(jobs: Broker) -> None:
    await put(jobs, 1, max_retries=0)
    await (await take(jobs)).nack()
    (dead,) = await jobs.dlq_list("jobs")
    assert dead.reason


async def test_messages_of_one_nack_are_retried_independently(jobs: Broker) -> None:
    await put(jobs, 1, max_retries=0)
    await put(jobs, 2)
    messages = await jobs.pop("jobs", 2)
    await jobs.nack(messages, backoff=0, reason="both")
    assert [m.priority for m in await jobs.pop("jobs", 2)] == [2]
    assert [dead.priority for dead in await jobs.dlq_list("jobs")] == [1]


@pytest.mark.parametrize("way", ["nack", "bury"])
async def test_message_without_a_dlq_is_dropped_and_reported(topic: MakeTopic, broker: Broker, way: str) -> None:
    await topic(dlq=False)
    (id,) = await put(broker, 1, max_retries=0)
    m = await take(broker)
    await (m.nack(reason="broken") if way == "nack" else m.bury("broken"))
    info = await broker.get("jobs", id)
    assert (info.state, info.reason) == ("dropped", "broken")
    assert await broker.dlq_list("jobs") == []
    assert (await broker.stats("jobs")).dead_total == 1


async def test_attempts_count_up_to_the_limit(jobs: Broker) -> None:
    await put(jobs, 1, max_retries=250)
    for number in range(1, 252):
        m = await take(jobs)
        assert m.attempts == number
        await m.nack(backoff=0)
    assert (await jobs.stats("jobs")).dead == 1
