"""A restart keeps everything: with the broker's snapshots, and from its log alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.message import Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, all_fired, drain, picture, put, take

Reopen = Callable[[], Awaitable[Broker]]


@pytest.fixture(params=["snapshot", "journal", "both"])
def reopen(world: World, request: pytest.FixtureRequest) -> Reopen:
    """Restart; with "both", once from each, so that recovered state is written and read again."""

    async def again() -> Broker:
        for memory in ("journal", "snapshot") if request.param == "both" else (request.param,):
            await world.reopen(memory)
        return world.broker

    return again


@pytest.mark.parametrize("partitions", [1, 4])
async def test_restart_keeps_the_complete_state_of_a_topic(
    world: World, topic: MakeTopic, reopen: Reopen, partitions: int
) -> None:
    hl = world.broker
    await topic(partitions=partitions)
    for p in range(40):
        await hl.enqueue("jobs", b"%d" % p, priority=p % 7, key=f"k{p}", headers={"p": str(p)}, ttl=3600 + p)
    await put(hl, *range(10), delay=50)
    await put(hl, *range(10), deliver_at=world.now() + timedelta(seconds=50))
    messages = await hl.pop("jobs", 20, holder="w", visibility=600)
    await hl.ack(messages[:5])
    await hl.nack(messages[5:8], backoff=30, reason="later")
    await hl.bury(messages[8:11], reason="never")
    await hl.release(messages[11:13])
    waiting = await hl.peek("jobs", 100)
    await hl.reschedule("jobs", waiting[0].id, priority=99)
    await hl.reschedule("jobs", waiting[1].id, delay=20)
    await hl.cancel("jobs", waiting[2].id)
    every = [m.id for m in messages] + [info.id for info in waiting]
    before = await picture(hl), [await hl.get("jobs", id) for id in every]
    hl = await reopen()
    after = await picture(hl), [await hl.get("jobs", id) for id in every]
    assert after == before
    await world.advance(100)
    stats = await hl.stats("jobs")
    assert (stats.ready + stats.leased, stats.delayed) == (40 + 20 - 5 - 3 - 1, 0)


async def test_order_is_kept(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    await topic(mode="max", partitions=3)
    priorities = [5, -(1 << 63), (1 << 63) - 1, 0, 5, -1, 5]
    for p in priorities:
        await put(world.broker, p)
    hl = await reopen()
    await put(hl, 5)
    assert await drain(hl) == [str(p).encode() for p in sorted([*priorities, 5], reverse=True)]


async def test_aging_continues_after_a_restart(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    await topic(ordering=heapline.aging(1.0))
    await put(world.broker, 100)
    hl = await reopen()
    await world.advance(60)
    await put(hl, 60)
    assert await drain(hl) == [b"100", b"60"]


@pytest.mark.usefixtures("fake_time")
async def test_timers_are_kept_and_fire_on_time(world: World, jobs: Broker, reopen: Reopen) -> None:
    await put(jobs, 1, delay=10)
    await put(jobs, 2, delay=86400 * 365)
    await put(jobs, 3, deliver_at=world.now() + timedelta(seconds=20))
    await world.advance(5)
    hl = await reopen()
    await world.advance(4.9)
    assert await hl.pop("jobs") == []
    await world.advance(0.3)
    assert await drain(hl) == [b"1"]
    await world.advance(10)
    assert await drain(hl) == [b"3"]
    hl = await reopen()
    await world.advance(86400 * 365)
    assert await drain(hl) == [b"2"]


@pytest.mark.usefixtures("fake_time")
async def test_time_passes_while_the_broker_is_closed(world: World, jobs: Broker) -> None:
    await put(jobs, 1, delay=60)
    await put(jobs, 2, ttl=60)
    await put(jobs, 3)
    leased = (await jobs.pop("jobs", 2, visibility=60))[1]
    hl = await world.away(61)
    assert [(await hl.get("jobs", m)).state for m in (leased.id,)] == ["delayed"]
    stats = await hl.stats("jobs")
    assert (stats.ready, stats.delayed, stats.leased) == (1, 1, 0), "one is due, one backs off, one has expired"


async def test_leases_and_their_tokens_are_valid_after_a_restart(
    world: World, topic: MakeTopic, reopen: Reopen
) -> None:
    await topic(partitions=2)
    for p in range(6):
        await put(world.broker, p)
    messages = await world.broker.pop("jobs", 6, holder="w", visibility=100)
    hl = await reopen()
    assert await hl.pop("jobs") == []
    refs = [heapline.LeaseRef("jobs", m.id, m.token) for m in messages]
    await hl.ack(refs[0])
    await hl.nack(refs[1], backoff=0)
    await hl.release(refs[2])
    await hl.extend(refs[3], 1000)
    await hl.bury(refs[4], reason="x")
    assert [m.attempts for m in await hl.pop("jobs", 2)] == [2, 1]
    info = await hl.get("jobs", refs[5].id)
    assert (info.state, info.holder, info.deadline) == ("leased", "w", messages[5].deadline)


async def test_leases_end_on_time_after_a_restart(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    await topic(backoff=heapline.Backoff(base=0))
    await put(world.broker, 1, 2)
    short = (await world.broker.pop("jobs", visibility=1))[0]
    long = (await world.broker.pop("jobs", visibility=1))[0]
    await long.extend(1000)
    hl = await reopen()
    await world.advance(1.5)
    again = await take(hl)
    assert (again.id, again.attempts) == (short.id, 2)
    with pytest.raises(heapline.LeaseLost):
        await hl.ack(heapline.LeaseRef("jobs", short.id, short.token))
    assert (await hl.get("jobs", long.id)).state == "leased"


async def test_repeated_ack_and_pop_are_recognised_after_a_restart(world: World, jobs: Broker, reopen: Reopen) -> None:
    await put(jobs, 1, 2, 3)
    messages = await jobs.pop("jobs", 2, request_id="r")
    await messages[0].ack()
    hl = await reopen()
    await hl.ack(heapline.LeaseRef("jobs", messages[0].id, messages[0].token))
    assert [m.id for m in await hl.pop("jobs", 2, request_id="r")] == [messages[1].id]


async def test_attempts_limits_and_reasons_are_kept(world: World, jobs: Broker, reopen: Reopen) -> None:
    (id,) = await put(jobs, 1, max_retries=2)
    hl: Broker = jobs
    for number in (1, 2, 3):
        m = await take(hl)
        assert m.attempts == number
        await m.nack(backoff=0, reason=f"failure {number}")
        hl = await reopen()
        assert (await hl.get("jobs", id)).reason == f"failure {number}"
    assert [dead.attempts for dead in await hl.dlq_list("jobs")] == [3]
    assert await hl.dlq_replay("jobs") == 1
    hl = await reopen()
    assert (await take(hl)).attempts == 1


async def test_dead_letters_are_kept_and_removed_ones_remembered(world: World, jobs: Broker, reopen: Reopen) -> None:
    ids = await put(jobs, 1, 2, 3, 4)
    a, b, c, _ = await jobs.pop("jobs", 4)
    await a.bury("why")
    await b.ack()
    await c.bury()
    await jobs.dlq_delete("jobs", [c.id])
    before = await jobs.dlq_list("jobs")
    hl = await reopen()
    assert await hl.dlq_list("jobs") == before
    assert [(await hl.get("jobs", id)).state for id in ids] == ["dead", "acked", "deleted", "leased"]


@pytest.mark.usefixtures("fake_time")
async def test_time_to_live_is_kept(world: World, jobs: Broker, reopen: Reopen) -> None:
    ids = await put(jobs, 1, 2, 3, ttl=10)
    (late,) = await put(jobs, 4, ttl=10, delay=10)
    leased = await take(jobs, visibility=100)
    await jobs.reschedule("jobs", ids[1], delay=5)
    await world.advance(6)
    hl = await reopen()
    await world.advance(5)
    states = [(await hl.get("jobs", id)).state for id in (*ids, late)]
    assert states == ["leased", "ready", "expired", "ready"]
    hl = await reopen()
    await hl.release(heapline.LeaseRef("jobs", leased.id, leased.token))
    await world.advance(5)
    assert [(await hl.get("jobs", id)).state for id in (*ids, late)] == ["expired", "expired", "expired", "ready"]


async def test_idempotency_keys_of_every_scope_are_kept(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    await topic(partitions=2, dedup_window=60)
    scopes: tuple[Any, ...] = ("window", "pending", "until_ack")
    first = [
        await world.broker.enqueue("jobs", b"x", idempotency_key=f"k-{s}", idempotency_scope=s, delay=30)
        for s in scopes
    ]
    hl = await reopen()
    for scope, r in zip(scopes, first, strict=True):
        again = await hl.enqueue("jobs", b"x", idempotency_key=f"k-{scope}", idempotency_scope=scope)
        assert (again.id, again.duplicate) == (r.id, True)
        with pytest.raises(heapline.IdempotencyConflict):
            await hl.enqueue("jobs", b"y", idempotency_key=f"k-{scope}", idempotency_scope=scope)
    await world.advance(31)
    messages = await hl.pop("jobs", 3)
    hl = await reopen()
    free = [await hl.enqueue("jobs", b"x", idempotency_key=f"k-{s}", idempotency_scope=s) for s in scopes]
    assert [r.duplicate for r in free] == [True, False, True]
    await hl.ack([heapline.LeaseRef("jobs", m.id, m.token) for m in messages])
    await world.advance(30)
    hl = await reopen()
    free = [
        await hl.enqueue("jobs", b"z", idempotency_key=f"k-{s}", idempotency_scope=s) for s in scopes if s != "pending"
    ]
    assert [r.duplicate for r in free] == [False, False]


async def test_producer_epochs_and_numbers_are_kept(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    await topic(partitions=3)
    hl = world.broker
    assert [await hl.open_producer("jobs", "p"), await hl.open_producer("jobs", "p")] == [1, 2]
    batch = [Outgoing(b"%d" % i, seq=i) for i in range(10)]
    first = await hl.enqueue_batch("jobs", batch, producer_id="p", epoch=2)
    await hl.enqueue("jobs", b"10", producer_id="p", epoch=2, seq=10, answered_below=5)
    hl = await reopen()
    again = await hl.enqueue_batch("jobs", batch[5:], producer_id="p", epoch=2)
    assert [(r.id, r.duplicate) for r in again] == [(r.id, True) for r in first[5:]]
    with pytest.raises(heapline.StaleEpoch):
        await hl.enqueue("jobs", b"x", producer_id="p", epoch=1, seq=99)
    assert await hl.open_producer("jobs", "p") == 3
    assert (await hl.stats("jobs")).ready == 11


async def test_producer_object_continues_after_a_restart(world: World, jobs: Broker, reopen: Reopen) -> None:
    producer = heapline.Producer("p")
    await jobs.enqueue("jobs", b"a", producer=producer)
    hl = await reopen()
    assert not (await hl.enqueue("jobs", b"b", producer=producer)).duplicate
    assert await drain(hl) == [b"a", b"b"]


async def test_pause_is_kept(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    await topic("jobs")
    await topic("timed")
    hl = world.broker
    for name in ("jobs", "timed"):
        await put(hl, 1, topic=name)
    await hl.pause_topic("jobs")
    await hl.pause_topic("timed", until=world.now() + timedelta(seconds=10))
    hl = await reopen()
    assert [(await hl.stats(name)).paused for name in ("jobs", "timed")] == [True, True]
    assert await hl.pop("jobs") == []
    await world.advance(11)
    assert [(await hl.stats(name)).paused for name in ("jobs", "timed")] == [True, False]
    await hl.resume_topic("jobs")
    hl = await reopen()
    assert await drain(hl) == [b"1"]


async def test_changed_priorities_are_kept(world: World, jobs: Broker, reopen: Reopen) -> None:
    ids = await put(jobs, 1, 2, 3, 4)
    await jobs.reschedule("jobs", ids[0], priority=10)
    await jobs.reschedule("jobs", ids[3], priority=-10)
    await jobs.reschedule("jobs", ids[1], delay=1)
    hl = await reopen()
    assert [m.priority for m in await hl.pop("jobs", 10)] == [-10, 3, 10]
    await world.advance(1.2)
    assert [m.priority for m in await hl.pop("jobs", 10)] == [2]
    hl = await reopen()
    assert (await hl.get("jobs", ids[3])).priority == -10


async def test_purge_and_cancel_are_kept(world: World, jobs: Broker, reopen: Reopen) -> None:
    ids = await put(jobs, *range(5), delay=1)
    await jobs.cancel("jobs", ids[0])
    await jobs.purge("jobs")
    await put(jobs, 7)
    hl = await reopen()
    await world.advance(2)
    assert await drain(hl) == [b"7"]
    assert [(await hl.get("jobs", id)).state for id in ids[:2]] == ["cancelled", "purged"]


@pytest.mark.feature("log")
async def test_offsets_continue_after_a_restart(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    await topic(partitions=2)
    for p in range(20):
        await put(world.broker, p, key=f"k{p}")
    ends = await world.broker.offsets("jobs")
    hl = await reopen()
    assert await hl.offsets("jobs") == ends


async def test_ids_continue_after_a_restart(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    await topic(partitions=2)
    before = [(await put(world.broker, p, key=f"k{p}"))[0] for p in range(20)]
    hl = await reopen()
    after = [(await put(hl, p, key=f"k{p}"))[0] for p in range(20)]
    assert not set(before) & set(after)
    pairs = zip(before, after, strict=True)
    assert all(old < new for old, new in pairs)


async def test_several_topics_and_namespaces_are_kept(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    for name in ("a", "b", "team/a"):
        await topic(name)
        await world.broker.enqueue(name, name.encode())
    await world.broker.delete_topic("b")
    hl = await reopen()
    assert [info.name for info in await hl.list_topics()] == ["a", "team/a"]
    assert [(await take(hl, name)).payload for name in ("a", "team/a")] == [b"a", b"team/a"]


async def test_large_backlog_is_kept(world: World, topic: MakeTopic, reopen: Reopen) -> None:
    """Enough for runs and chunks that snapshots store apart, and for several journal segments."""
    await topic(partitions=2)
    for at in range(0, 20_000, 2000):
        batch = [
            Outgoing(b"x" * 100, priority=(p * 7919) % 20_000, delay=60 if p % 4 == 0 else None)
            for p in range(at, at + 2000)
        ]
        await world.broker.enqueue_batch("jobs", batch)
    first = [m.priority for m in await world.broker.pop("jobs", 5000, visibility=3600)]
    hl = await reopen()
    found = [m.priority for _ in range(2) for m in await hl.pop("jobs", 5000, visibility=3600)]
    assert [*first, *found] == sorted((p * 7919) % 20_000 for p in range(20_000) if p % 4)
    await world.advance(61)
    await all_fired(hl)
    assert (await hl.stats("jobs")).ready == 5000
