"""The life of one message as the journal has it: complete, in order, by pages, and honest about what was reclaimed."""

from __future__ import annotations

from typing import Any

import pytest

from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, MessageNotFound, TopicNotFound
from heapline.contract.inspection import MessageEvent
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, put, take

pytestmark = pytest.mark.feature("history")


async def life(broker: Broker, id: Any, limit: int = 100) -> list[MessageEvent]:
    found: list[MessageEvent] = []
    cursor = None
    while True:
        page = await broker.message_history("jobs", id, limit, cursor)
        assert page.is_complete
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found


async def kinds(broker: Broker, id: Any) -> list[str]:
    return [event.kind for event in await life(broker, id)]


@pytest.mark.usefixtures("fake_time")
@pytest.mark.parametrize("streams", [True, False])
async def test_life_has_everything_that_happened(world: World, topic: MakeTopic, broker: Broker, streams: bool) -> None:
    await topic(max_retries_default=1, partitions=2, streams=streams)
    fired = "fired" if streams else "due"  # a log without streams counts timers and does not name them
    await put(broker, *range(20, 40))
    id = (await broker.enqueue("jobs", b"x", priority=-5, delay=5)).id
    await world.advance(6)
    message = await take(broker, holder="w1")
    assert message.id == id
    await message.extend(100)
    await message.nack(backoff=10, reason="no disk")
    await world.advance(11)
    await (await take(broker, holder="w2")).nack(reason="still none")
    found = await life(broker, id)
    assert [event.kind for event in found] == [
        "enqueued", fired, "leased", "extended", "nacked", fired, "leased", "dead_lettered",
    ]  # fmt: skip
    enqueued, due, leased, extended, nacked, *_, again, dead = found
    assert enqueued.priority == -5
    assert enqueued.due_at is not None
    assert enqueued.due_at <= due.at
    assert (leased.holder, leased.attempts, again.holder, again.attempts) == ("w1", 1, "w2", 2)
    assert leased.deadline is not None
    assert extended.deadline is not None
    assert extended.deadline > leased.deadline
    assert (nacked.reason, dead.reason) == ("no disk", "still none")
    assert [event.at for event in found] == sorted(event.at for event in found)
    assert (dead.at - enqueued.at).total_seconds() == pytest.approx(17, abs=1)
    await broker.dlq_replay("jobs", [id])
    await broker.ack(await take(broker))
    assert (await kinds(broker, id))[-3:] == ["replayed", "leased", "acked"]


async def test_ends_of_messages(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_retries_default=0)
    cancelled, released, purged = await put(broker, 3, 1, 2)
    await broker.cancel("jobs", cancelled)
    await broker.release(await take(broker))
    await broker.reschedule("jobs", purged, priority=9)
    await broker.purge("jobs")
    (buried,) = await put(broker, 1)
    await (await take(broker)).bury(reason="poison")
    await broker.dlq_delete("jobs", [buried])
    assert await kinds(broker, cancelled) == ["enqueued", "cancelled"]
    assert await kinds(broker, released) == ["enqueued", "leased", "released", "purged"]
    assert await kinds(broker, purged) == ["enqueued", "rescheduled", "purged"]
    assert await kinds(broker, buried) == ["enqueued", "leased", "dead_lettered", "dead_deleted"]


@pytest.mark.usefixtures("fake_time")
async def test_delay_and_ttl_end_in_time(world: World, topic: MakeTopic, broker: Broker) -> None:
    await topic(streams=False)
    id = (await broker.enqueue("jobs", b"", delay=10, ttl=20)).id
    assert await kinds(broker, id) == ["enqueued"]
    await world.advance(11)
    assert await kinds(broker, id) == ["enqueued", "due"]
    await world.advance(30)
    assert await kinds(broker, id) == ["enqueued", "due", "expired"]


@pytest.mark.feature("batches")
async def test_prepared_message_is_followed_to_the_decision(jobs: Broker) -> None:
    from heapline import Outgoing

    kept = (await jobs.prepare_batch("b", "p", {"jobs": [Outgoing(b"1")]}))["jobs"][0].id
    lost = (await jobs.prepare_batch("c", "p", {"jobs": [Outgoing(b"2")]}))["jobs"][0].id
    await jobs.commit_batch("b", ["p"])
    await jobs.abort_batch("c")
    assert await kinds(jobs, kept) == ["batch_prepared", "batch_committed"]
    assert await kinds(jobs, lost) == ["batch_prepared", "batch_aborted"]
    assert {event.batch for event in await life(jobs, kept)} == {"b"}


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_pages_join_to_the_same_life(jobs: Broker, limit: int) -> None:
    (id,) = await put(jobs, 1)
    for _ in range(4):
        await jobs.release(await take(jobs))
        await put(jobs, 5)
    whole = await life(jobs, id)
    assert len(whole) == 9
    assert await life(jobs, id, limit) == whole


async def test_life_is_the_same_after_a_restart(world: World, jobs: Broker) -> None:
    ids = await put(jobs, *range(5))
    await (await take(jobs)).ack()
    before = [await life(jobs, id) for id in ids]
    again = await world.reopen()
    assert [await life(again, id) for id in ids] == before


async def test_unknown_message_and_wrong_arguments_are_refused(jobs: Broker) -> None:
    (id,) = await put(jobs, 1)
    for unknown in (id + (1 << 40), id - (1 << 40), 1):
        with pytest.raises(MessageNotFound):
            await jobs.message_history("jobs", unknown)
    with pytest.raises(TopicNotFound):
        await jobs.message_history("nothing", id)
    with pytest.raises(BadRequest, match="cursor"):
        await jobs.message_history("jobs", id, 10, "x")
    with pytest.raises(BadRequest, match="limit"):
        await jobs.message_history("jobs", id, 0)
