"""Calls on single messages: get, peek, cancel, reschedule."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, drain, picture, put, take

# -- get ---------------------------------------------------------------------------------------------------------------


async def test_get_returns_every_field_of_a_message(world: World, jobs: Broker) -> None:
    r = await jobs.enqueue("jobs", b"body", priority=4, key="k", headers={"a": "b"}, ttl=60, delay=10)
    info = await jobs.get("jobs", r.id)
    assert (info.id, info.message_id, info.topic, info.partition) == (r.id, r.message_id, "jobs", 0)
    assert (info.state, info.priority, info.attempts, info.reason) == ("delayed", 4, 0, None)
    assert (info.payload, info.key, info.headers) == (b"body", "k", {"a": "b"})
    assert info.enqueued_at is not None
    assert info.due_at is not None
    assert info.expires_at is not None
    assert abs(info.due_at - info.enqueued_at - timedelta(seconds=10)) < timedelta(seconds=0.1)
    assert info.expires_at - info.due_at == timedelta(seconds=60)


async def test_get_takes_both_spellings_of_an_id(jobs: Broker) -> None:
    r = await jobs.enqueue("jobs", b"x")
    infos = [await jobs.get("jobs", spelling) for spelling in (r.id, r.message_id, r.message_id.lower(), str(r.id))]
    assert {info.id for info in infos} == {r.id}


async def test_get_follows_a_message_through_its_states(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1, delay=1)

    async def state() -> str:
        return (await jobs.get("jobs", id)).state

    assert await state() == "delayed"
    await world.advance(1.2)
    assert await state() == "ready"
    m = await take(jobs)
    assert await state() == "leased"
    await m.nack(backoff=1)
    assert await state() == "delayed"
    await world.advance(1.2)
    await (await take(jobs)).bury()
    assert await state() == "dead"
    await jobs.dlq_replay("jobs")
    assert await state() == "ready"
    await (await take(jobs)).ack()
    assert await state() == "acked"


@pytest.mark.parametrize("end", ["acked", "cancelled", "expired", "purged", "dropped", "deleted"])
async def test_get_of_a_removed_message_returns_how_it_ended(world: World, topic: MakeTopic, end: str) -> None:
    hl = world.broker
    await topic(dlq=end != "dropped")
    (id,) = await put(hl, 1, ttl=1)
    if end == "cancelled":
        await hl.cancel("jobs", id)
    elif end == "expired":
        await world.advance(1.2)
    elif end == "purged":
        await hl.purge("jobs")
    else:
        m = await take(hl)
        await (m.ack() if end == "acked" else m.bury("why"))
        if end == "deleted":
            await hl.dlq_delete("jobs", [id])
    went = world.now()
    info = await hl.get("jobs", id)
    assert info.state == end
    assert info.ended_at is not None
    assert abs(info.ended_at - went) < timedelta(seconds=1)
    assert info.enqueued_at is not None
    if end == "dropped":
        assert info.reason == "why"


@pytest.mark.usefixtures("fake_time")
async def test_each_removed_message_keeps_its_own_time(world: World, jobs: Broker) -> None:
    ids = await put(jobs, 1, 2, 3)
    times = []
    for _ in ids:
        await (await take(jobs)).ack()
        times.append(world.now())
        await world.advance(100)
    ended = [(await jobs.get("jobs", id)).ended_at for id in ids]
    assert all(at is not None and abs(at - time) < timedelta(seconds=1) for at, time in zip(ended, times, strict=True))


@pytest.mark.parametrize("id", [1, "1", 1 << 62, 5 << 12])
async def test_get_of_an_unknown_id_is_not_found(jobs: Broker, id: Any) -> None:
    with pytest.raises(heapline.MessageNotFound, match="holds no message"):
        await jobs.get("jobs", id)


BAD_IDS = ["", "xyz", "0" * 25, "U" * 26, "7ZZZZZZZZZZZZZZZZZZZZZZZZZ", -1, 1 << 63, 1.5, None, True, b"1"]


@pytest.mark.parametrize("id", BAD_IDS, ids=str)
async def test_malformed_id_is_rejected_by_every_call(jobs: Broker, id: Any) -> None:
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: jobs.get("jobs", id), lambda: jobs.cancel("jobs", id), lambda: jobs.reschedule("jobs", id, delay=1),
        lambda: jobs.dlq_replay("jobs", [id]), lambda: jobs.dlq_delete("jobs", [id]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(heapline.BadRequest, match=r"not a message id|not one that Heapline made"):
            await call()


async def test_get_of_a_leased_message_shows_current_priority_and_payload(jobs: Broker) -> None:
    (id,) = await put(jobs, 5)
    await jobs.reschedule("jobs", id, priority=2)
    await take(jobs)
    info = await jobs.get("jobs", id)
    assert (info.state, info.priority, info.payload) == ("leased", 2, b"5")


# -- peek --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
async def test_peek_shows_the_next_messages_in_order_and_changes_nothing(
    topic: MakeTopic, broker: Broker, partitions: int
) -> None:
    await topic(partitions=partitions)
    for p in (3, 1, 2, 5, 4):
        await put(broker, p)
    await put(broker, 0, delay=60)
    infos = await broker.peek("jobs", 3)
    assert [(info.priority, info.payload, info.state) for info in infos] == [
        (1, b"1", "ready"), (2, b"2", "ready"), (3, b"3", "ready"),
    ]  # fmt: skip
    assert len(await broker.peek("jobs")) == 5
    assert await drain(broker) == [b"1", b"2", b"3", b"4", b"5"]


async def test_peek_returns_ten_messages_by_default(jobs: Broker) -> None:
    await put(jobs, *range(15))
    assert len(await jobs.peek("jobs")) == 10


@pytest.mark.parametrize("limit", [0, -1, 1.5, None, 1 << 40])
async def test_bad_limit_is_refused(jobs: Broker, limit: Any) -> None:
    with pytest.raises(heapline.BadRequest):
        await jobs.peek("jobs", limit)
    if limit != 1 << 40:
        with pytest.raises(heapline.BadRequest):
            await jobs.dlq_list("jobs", limit)


async def test_peek_skips_messages_removed_by_other_calls(world: World, jobs: Broker) -> None:
    ids = await put(jobs, *range(8))
    await jobs.cancel("jobs", ids[0])
    await jobs.reschedule("jobs", ids[1], delay=60)
    await jobs.reschedule("jobs", ids[2], priority=100)
    await take(jobs)
    assert [info.priority for info in await jobs.peek("jobs")] == [4, 5, 6, 7, 100]


# -- cancel ------------------------------------------------------------------------------------------------------------


async def test_cancelled_message_is_never_delivered(world: World, jobs: Broker) -> None:
    ready, delayed = (await put(jobs, 1))[0], (await put(jobs, 2, delay=1))[0]
    at = (await put(jobs, 3, deliver_at=world.now() + timedelta(seconds=1)))[0]
    for id in (ready, delayed, at):
        await jobs.cancel("jobs", id)
        assert (await jobs.get("jobs", id)).state == "cancelled"
    await world.advance(2)
    assert await jobs.pop("jobs") == []
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.delayed) == (0, 0)


async def test_cancel_of_an_unknown_id_is_not_found(jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    await (await take(jobs)).ack()
    before = await picture(jobs)
    for unknown in (1, id):
        with pytest.raises(heapline.MessageNotFound):
            await jobs.cancel("jobs", unknown)
    assert await picture(jobs) == before


async def test_cancel_twice_is_not_found(jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    await jobs.cancel("jobs", id)
    with pytest.raises(heapline.MessageNotFound):
        await jobs.cancel("jobs", id)


async def test_cancel_of_a_leased_message_is_a_conflict(jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    m = await take(jobs)
    before = await picture(jobs)
    with pytest.raises(heapline.ConflictError, match="leased to a worker"):
        await jobs.cancel("jobs", id)
    assert await picture(jobs) == before
    await m.ack()


async def test_cancel_of_a_message_that_waits_for_a_retry(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    await (await take(jobs)).nack(backoff=1)
    await jobs.cancel("jobs", id)
    await world.advance(2)
    assert await jobs.pop("jobs") == []


# -- reschedule --------------------------------------------------------------------------------------------------------


async def test_reschedule_of_a_ready_message_delays_it(world: World, jobs: Broker) -> None:
    ids = await put(jobs, 1, 2)
    await jobs.reschedule("jobs", ids[0], delay=1)
    assert (await jobs.get("jobs", ids[0])).state == "delayed"
    assert await drain(jobs) == [b"2"]
    await world.advance(1.2)
    m = await take(jobs)
    assert (m.id, m.priority, m.attempts) == (ids[0], 1, 1)


async def test_reschedule_of_a_delayed_message_makes_it_ready(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1, delay=3600)
    await jobs.reschedule("jobs", id, delay=0)
    assert (await take(jobs)).id == id
    await world.advance(1)
    assert await jobs.pop("jobs") == [], "the old timer has no effect"


@pytest.mark.usefixtures("fake_time")
async def test_reschedule_moves_a_timer_forwards_and_back(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1, delay=100)
    await jobs.reschedule("jobs", id, delay=200)
    await world.advance(150)
    assert await jobs.pop("jobs") == []
    await jobs.reschedule("jobs", id, deliver_at=world.now() + timedelta(seconds=10))
    await world.advance(11)
    assert (await take(jobs)).id == id
    await world.advance(500)
    assert (await jobs.stats("jobs")).ready == 0


async def test_reschedule_keeps_omitted_fields(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 5, delay=50, ttl=30, headers={"a": "b"}, key="k")
    before = await jobs.get("jobs", id)
    await jobs.reschedule("jobs", id, priority=1)
    after = await jobs.get("jobs", id)
    assert after.priority == 1
    assert (after.due_at, after.expires_at, after.state) == (before.due_at, before.expires_at, "delayed")
    await jobs.reschedule("jobs", id, delay=20)
    later = await jobs.get("jobs", id)
    assert later.priority == 1
    assert later.due_at is not None
    assert later.expires_at is not None
    assert abs(later.due_at - world.now() - timedelta(seconds=20)) < timedelta(seconds=0.5)
    assert later.expires_at - later.due_at == timedelta(seconds=30)
    assert (later.payload, later.key, later.headers, later.enqueued_at) == (b"5", "k", {"a": "b"}, before.enqueued_at)


@pytest.mark.parametrize("mode", ["min", "max"])
async def test_reprioritised_message_is_served_by_its_new_priority(topic: MakeTopic, broker: Broker, mode: str) -> None:
    await topic(mode=mode, partitions=2)
    ids = [(await put(broker, p))[0] for p in (10, 20, 30)]
    await broker.reschedule("jobs", ids[1], priority=-(1 << 63))
    await broker.reschedule("jobs", ids[2], priority=(1 << 63) - 1)
    messages = await broker.pop("jobs", 3)
    wanted = [-(1 << 63), 10, (1 << 63) - 1]
    assert [m.priority for m in messages] == (wanted if mode == "min" else wanted[::-1])


async def test_priority_of_a_delayed_message_counts_when_it_is_due(world: World, jobs: Broker) -> None:
    (late,) = await put(jobs, 9, delay=1)
    await put(jobs, 5)
    await jobs.reschedule("jobs", late, priority=1)
    await world.advance(1.2)
    assert [m.priority for m in await jobs.pop("jobs", 2)] == [1, 5]


async def test_touched_message_keeps_its_priority_through_retries(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 9)
    await jobs.reschedule("jobs", id, priority=2)
    m = await take(jobs)
    await m.nack(backoff=1)
    await world.advance(1.2)
    again = await take(jobs)
    assert (again.priority, again.attempts) == (2, 2)
    await again.bury()
    await jobs.dlq_replay("jobs")
    assert (await take(jobs)).priority == 2


async def test_message_rescheduled_many_times_is_delivered_once(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 0)
    for i in range(30):
        await jobs.reschedule("jobs", id, delay=(i * 7) % 5, priority=i % 3)
    await jobs.reschedule("jobs", id, delay=0)
    assert [m.id for m in await jobs.pop("jobs", 10)] == [id]
    await world.advance(6)
    assert await jobs.pop("jobs", 10) == []
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.delayed, stats.leased) == (0, 0, 1)


async def test_reschedule_of_a_retry_keeps_its_attempts(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    await (await take(jobs)).nack(backoff=3600, reason="busy")
    await jobs.reschedule("jobs", id, delay=0)
    assert (await jobs.get("jobs", id)).reason == "busy"
    assert (await take(jobs)).attempts == 2


async def test_reschedule_restarts_the_ttl_from_the_new_due_time(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1, ttl=1)
    await jobs.reschedule("jobs", id, delay=2)
    await world.advance(2.5)
    assert (await jobs.get("jobs", id)).state == "ready"
    await world.advance(1)
    assert (await jobs.get("jobs", id)).state == "expired"


async def test_reschedule_to_a_past_time_counts_from_now_with_its_ttl(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1, ttl=1, delay=3600)
    await jobs.reschedule("jobs", id, deliver_at=world.now() - timedelta(days=1))
    await world.advance(0.5)
    assert (await jobs.get("jobs", id)).state == "ready"
    await world.advance(1)
    assert (await jobs.get("jobs", id)).state == "expired"


async def test_reschedule_of_priority_leaves_the_ttl_alone(world: World, jobs: Broker) -> None:
    (id,) = await put(jobs, 1, ttl=1)
    await world.advance(0.6)
    await jobs.reschedule("jobs", id, priority=7)
    await world.advance(0.6)
    assert (await jobs.get("jobs", id)).state == "expired"


async def test_reschedule_of_a_leased_message_is_a_conflict(jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    await take(jobs)
    before = await picture(jobs)
    with pytest.raises(heapline.ConflictError):
        await jobs.reschedule("jobs", id, delay=1)
    assert await picture(jobs) == before


@pytest.mark.parametrize("gone", ["unknown", "acked", "dead"])
async def test_reschedule_of_a_message_not_waiting_raises_not_found(jobs: Broker, gone: str) -> None:
    (id,) = await put(jobs, 1)
    if gone != "unknown":
        m = await take(jobs)
        await (m.ack() if gone == "acked" else m.bury())
    with pytest.raises(heapline.MessageNotFound):
        await jobs.reschedule("jobs", 77 if gone == "unknown" else id, delay=1)


@pytest.mark.parametrize(
    "change",
    [
        {}, {"delay": -1}, {"delay": "1"}, {"priority": 1 << 63}, {"priority": 1.0}, {"delay": float("nan")},
        {"deliver_at": datetime(2030, 1, 1)}, {"delay": 1, "deliver_at": datetime(2030, 1, 1, tzinfo=UTC)},
    ],
    ids=str,
)  # fmt: skip
async def test_bad_reschedule_is_refused_and_changes_nothing(jobs: Broker, change: dict[str, Any]) -> None:
    (id,) = await put(jobs, 1)
    before = await picture(jobs)
    with pytest.raises(heapline.BadRequest):
        await jobs.reschedule("jobs", id, **change)
    assert await picture(jobs) == before


async def test_reschedule_on_an_aging_topic_keeps_the_time_already_waited(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(ordering=heapline.aging(10.0))
    (old,) = await put(hl, 100)
    await world.advance(5)
    await put(hl, 60)
    await hl.reschedule("jobs", old, priority=105)  # now equal to 55
    assert (await take(hl)).id == old
