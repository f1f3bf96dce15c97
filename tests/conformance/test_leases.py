"""Settle and extend leases: ack, nack, release, extend, bury; and what late callers get."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.message import LeaseRef, Message
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, picture, put, take

Act = Callable[[Broker, Any], Awaitable[None]]
ACTS: dict[str, Act] = {
    "ack": lambda hl, m: hl.ack(m),
    "nack": lambda hl, m: hl.nack(m, backoff=0),
    "release": lambda hl, m: hl.release(m),
    "extend": lambda hl, m: hl.extend(m, 60),
    "bury": lambda hl, m: hl.bury(m),
}
each_act = pytest.mark.parametrize("act", sorted(ACTS))


# -- ack ---------------------------------------------------------------------------------------------------------------


async def test_acked_message_is_removed(jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    await (await take(jobs)).ack()
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.leased, stats.acked_total) == (0, 0, 1)
    assert (await jobs.get("jobs", id)).state == "acked"


async def test_ack_takes_one_or_many_of_any_kind_of_collection(jobs: Broker) -> None:
    await put(jobs, *range(7))
    a, b, c, d, e, f, g = await jobs.pop("jobs", 7)
    await jobs.ack(a)
    await jobs.ack([b, c])
    await jobs.ack((d,))
    await jobs.ack(m for m in [e, f])
    await jobs.ack(LeaseRef("jobs", g.id, g.token))
    await jobs.ack([])
    assert (await jobs.stats("jobs")).acked_total == 7


async def test_ack_many_acks_all_held_messages_and_reports_the_lost(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    for i in range(10):
        await put(broker, i)
    messages = await broker.pop("jobs", 10)
    lost = [messages[2], messages[7]]
    await broker.release(lost)
    with pytest.raises(heapline.LeaseLost, match="extend leases in time") as caught:
        await broker.ack(messages)
    assert sorted(caught.value.lost) == sorted(m.id for m in lost)
    stats = await broker.stats("jobs")
    assert (stats.ready, stats.leased, stats.acked_total) == (2, 0, 8)


async def test_repeated_ack_succeeds(jobs: Broker) -> None:
    await put(jobs, 1, 2)
    messages = await jobs.pop("jobs", 2)
    await jobs.ack(messages[0])
    await jobs.ack(messages)
    await jobs.ack(messages)
    assert (await jobs.stats("jobs")).acked_total == 2


async def test_ack_repeated_with_another_token_is_lost(jobs: Broker) -> None:
    await put(jobs, 1)
    first = await take(jobs)
    await first.release()
    await (await take(jobs)).ack()
    with pytest.raises(heapline.LeaseLost):
        await first.ack()


async def test_message_given_twice_in_one_call_counts_once(jobs: Broker) -> None:
    await put(jobs, 1)
    m = await take(jobs)
    await jobs.ack([m, m])
    assert (await jobs.stats("jobs")).acked_total == 1


async def test_leases_of_several_topics_may_be_acked_together(topic: MakeTopic, broker: Broker) -> None:
    for name in ("a", "b", "c"):
        await topic(name)
        await put(broker, 1, 2, topic=name)
    held = [m for name in ("a", "b", "c") for m in await broker.pop(name, 2)]
    await held[2].release()
    await broker.delete_topic("a")
    with pytest.raises((heapline.LeaseLost, heapline.TopicNotFound)):
        await broker.ack(held)
    assert [((await broker.stats(t)).ready, (await broker.stats(t)).leased) for t in ("b", "c")] == [(1, 0), (0, 0)]


# -- nack --------------------------------------------------------------------------------------------------------------


async def test_nacked_message_waits_for_the_given_backoff(world: World, jobs: Broker) -> None:
    await put(jobs, 1)
    m = await take(jobs)
    await m.nack(backoff=2.0, reason="busy")
    info = await jobs.get("jobs", m.id)
    assert (info.state, info.reason, info.attempts) == ("delayed", "busy", 1)
    assert info.due_at is not None
    assert abs(info.due_at - world.now() - timedelta(seconds=2)) < timedelta(milliseconds=50)
    await world.advance(1.9)
    assert await jobs.pop("jobs") == []
    await world.advance(0.3)
    again = await take(jobs)
    assert (again.id, again.attempts, again.priority, again.enqueued_at) == (m.id, 2, 1, m.enqueued_at)


async def test_nack_with_backoff_zero_is_ready_immediately(jobs: Broker) -> None:
    await put(jobs, 1)
    await (await take(jobs)).nack(backoff=0)
    assert (await take(jobs)).attempts == 2


@pytest.mark.usefixtures("fake_time")
async def test_default_backoff_grows_by_its_factor_up_to_its_max(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(backoff=heapline.Backoff(base=2.0, factor=3.0, max=20.0, jitter=0.0))
    await put(hl, 1)
    for wait in (2, 6, 18, 20, 20):
        m = await take(hl)
        await m.nack()
        due = (await hl.get("jobs", m.id)).due_at
        assert due is not None
        assert abs(due - world.now() - timedelta(seconds=wait)) < timedelta(milliseconds=50)
        await world.advance(wait + 0.2)


@pytest.mark.usefixtures("fake_time")
async def test_default_backoff_is_spread_by_its_jitter(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(backoff=heapline.Backoff(base=100.0, jitter=0.5))
    await put(hl, *range(50))
    messages = await hl.pop("jobs", 50)
    await hl.nack(messages)
    waits = [((await hl.get("jobs", m.id)).due_at or world.now()) - world.now() for m in messages]
    assert timedelta(seconds=49) < min(waits) < timedelta(seconds=90)
    assert timedelta(seconds=110) < max(waits) < timedelta(seconds=151)


async def test_reason_of_a_nack_stays_until_there_is_another(jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    await (await take(jobs)).nack(backoff=0, reason="first")
    assert (await jobs.get("jobs", id)).reason == "first"
    await (await take(jobs)).nack(backoff=0)
    assert (await jobs.get("jobs", id)).reason == "first"
    await (await take(jobs)).nack(backoff=0, reason="second")
    assert (await jobs.get("jobs", id)).reason == "second"


# -- release -----------------------------------------------------------------------------------------------------------


async def test_released_message_is_ready_immediately_without_an_attempt(jobs: Broker) -> None:
    await put(jobs, 1, max_retries=0)
    for _ in range(5):
        m = await take(jobs)
        assert m.attempts == 1
        await m.release()
    await (await take(jobs)).nack(backoff=0)
    assert (await jobs.stats("jobs")).dead == 1


# -- extend ------------------------------------------------------------------------------------------------------------


async def test_extend_sets_the_deadline_to_now_plus_seconds(world: World, jobs: Broker) -> None:
    await put(jobs, 1)
    m = await take(jobs, visibility=2)
    await world.advance(1)
    await m.extend(5)
    assert abs(m.deadline - world.now() - timedelta(seconds=5)) < timedelta(seconds=0.5)
    assert (await jobs.get("jobs", m.id)).deadline == m.deadline
    await world.advance(3)
    await m.ack()


async def test_extend_never_shortens(world: World, jobs: Broker) -> None:
    await put(jobs, 1)
    m = await take(jobs, visibility=60)
    before = m.deadline
    await m.extend(1)
    assert (m.deadline, (await jobs.get("jobs", m.id)).deadline) == (before, before)


@pytest.mark.usefixtures("fake_time")
async def test_extend_never_reaches_past_lease_max_from_the_first_lease(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(lease_max=100.0)
    await put(hl, 1)
    m = await take(hl, visibility=60)
    end = world.now() + timedelta(seconds=100)
    for _ in range(3):
        await world.advance(30)
        await m.extend(80)
    assert abs(m.deadline - end) < timedelta(seconds=1)
    await world.advance(11)
    with pytest.raises(heapline.LeaseLost):
        await m.extend(80)


async def test_extend_many_extends_all_held_messages(jobs: Broker) -> None:
    await put(jobs, 1, 2)
    a, b = await jobs.pop("jobs", 2)
    before = b.deadline
    await a.ack()
    with pytest.raises(heapline.LeaseLost) as caught:
        await jobs.extend([a, b], 600)
    assert caught.value.lost == [a.id]
    assert (await jobs.get("jobs", b.id)).deadline > before  # type: ignore[operator]


# -- bury --------------------------------------------------------------------------------------------------------------


async def test_buried_message_is_a_dead_letter_with_its_reason(jobs: Broker) -> None:
    await put(jobs, 1)
    m = await take(jobs)
    await m.bury("not JSON")
    (dead,) = await jobs.dlq_list("jobs")
    assert (dead.id, dead.state, dead.reason, dead.attempts) == (m.id, "dead", "not JSON", 1)


# -- expiry ------------------------------------------------------------------------------------------------------------


@each_act
async def test_stale_lease_is_refused_and_changes_nothing(world: World, topic: MakeTopic, act: str) -> None:
    hl = world.broker
    await topic(backoff=heapline.Backoff(base=0))
    await put(hl, 1)
    old = await take(hl, visibility=1)
    await world.advance(1.5)
    new = await take(hl)
    before = await picture(hl)
    with pytest.raises(heapline.LeaseLost) as caught:
        await ACTS[act](hl, old)
    assert (caught.value.lost, caught.value.topic) == ([old.id], "jobs")
    assert await picture(hl) == before
    await ACTS[act](hl, new)


@each_act
async def test_settling_a_released_lease_is_rejected(jobs: Broker, act: str) -> None:
    await put(jobs, 1)
    m = await take(jobs)
    await m.release()
    before = await picture(jobs)
    with pytest.raises(heapline.LeaseLost):
        await ACTS[act](jobs, m)
    assert await picture(jobs) == before


@each_act
@pytest.mark.parametrize("partitions", [1, 2])
async def test_unknown_lease_is_refused(topic: MakeTopic, broker: Broker, act: str, partitions: int) -> None:
    await topic(partitions=partitions)
    foreign = 264905529753600000 | 5 << 12  # of partition 5, which does not exist
    with pytest.raises(heapline.LeaseLost) as caught:
        await ACTS[act](broker, LeaseRef("jobs", foreign, 0))
    assert caught.value.lost == [foreign]


async def test_expired_lease_is_redelivered_with_its_attempt_counted(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(backoff=heapline.Backoff(base=1.0, jitter=0))
    (id,) = await put(hl, 1)
    await take(hl, visibility=1)
    await world.advance(1.2)
    info = await hl.get("jobs", id)
    assert (info.state, info.attempts, info.reason) == ("delayed", 1, "lease expired")
    assert (await hl.stats("jobs")).lease_timeouts_total == 1
    await world.advance(1.2)
    assert (await take(hl)).attempts == 2


async def test_extended_lease_does_not_expire_at_its_first_deadline(world: World, jobs: Broker) -> None:
    await put(jobs, 1)
    m = await take(jobs, visibility=1)
    await m.extend(10)
    await world.advance(2)
    assert (await jobs.get("jobs", m.id)).state == "leased"
    await m.ack()


async def test_concurrent_settlements_do_not_affect_each_other(jobs: Broker) -> None:
    await put(jobs, *range(60))
    messages = await jobs.pop("jobs", 60)
    kinds: list[Callable[[Message], Awaitable[None]]] = [
        lambda m: m.ack(), lambda m: m.nack(backoff=3600), lambda m: m.release(), lambda m: m.bury(),
        lambda m: m.extend(600),
    ]  # fmt: skip
    await asyncio.gather(*(kinds[i % 5](m) for i, m in enumerate(messages)))
    stats = await jobs.stats("jobs")
    assert (stats.acked_total, stats.delayed, stats.ready, stats.dead, stats.leased) == (12, 12, 12, 12, 12)


async def test_totals_count_completed_calls_only(jobs: Broker) -> None:
    await put(jobs, 1, 2)
    a, b = await jobs.pop("jobs", 2)
    await a.ack()
    await b.nack(backoff=3600)
    for late in (b.ack, a.nack, b.nack):
        with pytest.raises(heapline.LeaseLost):
            await late()
    stats = await jobs.stats("jobs")
    assert (stats.acked_total, stats.nacked_total, stats.leased_total) == (1, 1, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda hl, m: hl.nack(m, backoff=-1), lambda hl, m: hl.nack(m, backoff="1"), lambda hl, m: hl.nack(m, reason=7),
        lambda hl, m: hl.nack(m, reason="x" * 5000), lambda hl, m: hl.nack(m, reason="\ud800"),
        lambda hl, m: hl.bury(m, reason=b"x"), lambda hl, m: hl.bury(m, reason="\ud800"),
        lambda hl, m: hl.extend(m, 0), lambda hl, m: hl.extend(m, -1), lambda hl, m: hl.extend(m, float("nan")),
        lambda hl, m: hl.ack("01ARZ3NDEKTSV4RRFFQ69G5FAV"), lambda hl, m: hl.ack([m.id]), lambda hl, m: hl.ack(None),
        lambda hl, m: hl.ack(7), lambda hl, m: hl.release([m, "x"]),
        lambda hl, m: hl.ack(LeaseRef("jobs", m.message_id, m.token)),
        lambda hl, m: hl.ack(LeaseRef("jobs", m.id, "7")), lambda hl, m: hl.nack(LeaseRef("jobs", None, 1)),
    ],
)  # fmt: skip
async def test_bad_act_is_refused_and_changes_nothing(jobs: Broker, call: Act) -> None:
    await put(jobs, 1)
    m = await take(jobs)
    before = await picture(jobs)
    with pytest.raises(heapline.BadRequest):
        await asyncio.wait_for(call(jobs, m), 20)
    assert await picture(jobs) == before
    await m.ack()


async def test_lost_lease_is_named_by_its_ulid(jobs: Broker) -> None:
    await put(jobs, 1, 2)
    one, other = await jobs.pop("jobs", 2)
    await jobs.release([one, other])
    for held in (one, [one]):
        with pytest.raises(heapline.LeaseLost) as caught:
            await jobs.ack(held)
        assert one.message_id in str(caught.value)
    with pytest.raises(heapline.LeaseLost) as caught:
        await jobs.nack(LeaseRef("jobs", other.id, other.token))
    assert str(other.id) in str(caught.value), "a LeaseRef does not contain the topic's id suffix"


async def test_lost_leases_are_shown_by_the_ids_that_people_know(jobs: Broker) -> None:
    await jobs.create_topic("mail")
    for topic in ("jobs", "mail"):
        await jobs.enqueue(topic, b"x")
    (job,), (mail,) = await jobs.pop("jobs"), await jobs.pop("mail")
    for lost in (job, [job], [job, mail]):
        if lost is job:
            await jobs.ack([job, mail])
        with pytest.raises(heapline.LeaseLost) as caught:
            await jobs.nack(lost)
        shown = [job.message_id, mail.message_id] if lost == [job, mail] else [job.message_id]
        assert f"had ended ({', '.join(shown)})" in str(caught.value)
        assert caught.value.lost == ([job.id, mail.id] if len(shown) == 2 else [job.id])
