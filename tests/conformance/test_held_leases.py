"""Lists of leases by holder, and leases that an administrator ends without their token."""

from __future__ import annotations

from datetime import timedelta

import pytest

from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, LeaseLost, TopicNotFound
from heapline.contract.inspection import HeldLease, ListLeases, ListWorkers, WorkerInfo
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, put, take

pytestmark = pytest.mark.feature("leases")


async def by_pages(broker: Broker, limit: int, holder: str | None = None) -> list[HeldLease]:
    found: list[HeldLease] = []
    cursor = None
    while True:
        page = await broker.do(ListLeases("jobs", holder, cursor, limit))
        assert len(page.items) <= limit
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.usefixtures("fake_time")
async def test_leases_are_listed_oldest_first(world: World, topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    await put(broker, *range(10))
    started = world.now()
    old = await broker.pop("jobs", 2, holder="a", visibility=60)
    await world.advance(5)
    new = await broker.pop("jobs", 3, holder="b", visibility=30)
    await broker.extend(old, 50)
    found = await broker.list_leases("jobs")
    assert [row.holder for row in found] == ["a"] * 2 + ["b"] * 3
    assert {row.id for row in found} == {m.id for m in old + new}
    assert {row.id: row.deadline for row in found} == {m.id: m.deadline for m in old + new}
    assert abs(found[0].since - started) < timedelta(seconds=1)
    assert found[-1].since - found[0].since >= timedelta(seconds=5)
    assert {row.attempts for row in found} == {1}
    assert "token" not in repr(found)


@pytest.mark.parametrize("limit", [1, 2, 7])
async def test_pages_of_leases_have_each_lease_once(topic: MakeTopic, broker: Broker, limit: int) -> None:
    await topic(partitions=2)
    await put(broker, *range(12))
    for n in range(6):
        await broker.pop("jobs", 2, holder=f"w{n % 2}")
    whole = await broker.list_leases("jobs")
    assert len(whole) == 12
    assert await by_pages(broker, limit) == whole
    assert await by_pages(broker, limit, "w1") == [row for row in whole if row.holder == "w1"]
    assert await broker.list_leases("jobs", holder="nobody") == []


async def test_leases_that_end_between_pages_hide_no_other(jobs: Broker) -> None:
    await put(jobs, *range(6))
    messages = await jobs.pop("jobs", 6)
    page = await jobs.do(ListLeases("jobs", limit=2))
    await jobs.ack(messages[:3])
    rest = await jobs.do(ListLeases("jobs", cursor=page.cursor, limit=10))
    assert [row.id for row in rest.items] == [m.id for m in messages[3:]]


async def test_leases_are_listed_after_a_restart(world: World, jobs: Broker) -> None:
    await put(jobs, 1, 2, 3)
    await jobs.pop("jobs", 3, holder="a")
    before = await jobs.list_leases("jobs")
    assert await (await world.reopen()).list_leases("jobs") == before


@pytest.mark.usefixtures("fake_time")
async def test_ended_lease_is_a_nack_with_a_reason(world: World, jobs: Broker) -> None:
    await put(jobs, 1, 2)
    first, second = await jobs.pop("jobs", 2)
    assert await jobs.end_leases("jobs", [first.message_id, first.id], reason="the worker hangs") == 1
    info = await jobs.get("jobs", first.id)
    assert (info.state, info.reason, info.attempts) == ("delayed", "the worker hangs", 1)
    with pytest.raises(LeaseLost):
        await first.ack()
    await second.ack()
    assert await jobs.end_leases("jobs", [first.id, second.id, 7]) == 0
    await world.advance(600)
    assert (await take(jobs)).attempts == 2
    assert await jobs.end_leases("jobs", [first.id]) == 1
    assert (await jobs.get("jobs", first.id)).reason == "ended by an administrator"


@pytest.mark.usefixtures("fake_time")
async def test_lease_granted_later_than_the_caller_saw_stays(world: World, jobs: Broker) -> None:
    await put(jobs, 1)
    await take(jobs)
    (seen,) = await jobs.list_leases("jobs")
    await jobs.end_leases("jobs", [seen.id])
    await world.advance(600)
    again = await take(jobs)
    assert await jobs.end_leases("jobs", [seen.id], granted_until=seen.since) == 0
    (current,) = await jobs.list_leases("jobs")
    assert await jobs.end_leases("jobs", [seen.id], granted_until=current.since) == 1
    with pytest.raises(LeaseLost):
        await again.ack()


async def test_workers_are_listed_with_leases_and_rate(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    await topic("other")
    await put(broker, *range(6))
    await put(broker, 1, topic="other")
    await broker.pop("jobs", 3, holder="b")
    done = await broker.pop("jobs", 2, holder="a")
    await broker.ack(done)
    await broker.pop("other", 1, holder="a")
    found = await broker.list_workers()
    assert [(w.topic, w.holder, w.leases, w.waiting) for w in found] == [
        ("jobs", "a", 0, 0), ("jobs", "b", 3, 0), ("other", "a", 1, 0),
    ]  # fmt: skip
    assert found[1].rate > found[0].rate > 0
    assert all(worker.last_lease_at is not None for worker in found)
    pages: list[WorkerInfo] = []
    cursor = None
    while True:
        page = await broker.do(ListWorkers(cursor, 1))
        pages += page.items
        cursor = page.cursor
        if cursor is None:
            break
    assert [(w.topic, w.holder) for w in pages] == [(w.topic, w.holder) for w in found]


async def test_wrong_arguments_are_refused(jobs: Broker) -> None:
    for call in (jobs.list_leases("nothing"), jobs.end_leases("nothing", [1])):
        with pytest.raises(TopicNotFound):
            await call
    with pytest.raises(BadRequest, match="ids"):
        await jobs.end_leases("jobs", [])
    with pytest.raises(BadRequest, match="cursor"):
        await jobs.do(ListLeases("jobs", cursor="x"))
