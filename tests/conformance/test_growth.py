"""A live topic gets more partitions: existing messages are not affected, and repeats are still recognized."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import heapline
from heapline import Outgoing
from heapline.contract.broker import Broker
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import Memory, World, drain, picture, put, take

pytestmark = pytest.mark.feature("partitions")
MANY = 40


async def config_of(hl: Broker) -> heapline.TopicConfig:
    return next(info.config for info in await hl.list_topics() if info.name == "jobs")


async def homes(hl: Broker, prefix: str) -> dict[str, int]:
    """Return the partitions where the current placement puts keys."""
    names = [f"{prefix}-{i}" for i in range(MANY)]
    sent = await hl.enqueue_batch("jobs", [Outgoing(b"", key=name) for name in names])
    return {name: (await hl.get("jobs", s.id)).partition for name, s in zip(names, sent, strict=True)}


@pytest.mark.feature("log")
async def test_update_topic_grows_a_live_topic(jobs: Broker) -> None:
    info = await jobs.update_topic("jobs", partitions=5)
    assert info.config.partitions == 5
    assert (await config_of(jobs)).partitions == 5
    assert len((await jobs.stats("jobs")).partitions) == 5
    offsets = await jobs.offsets("jobs")
    assert [offsets[p] for p in range(1, 5)] == [(0, 0)] * 4


async def test_partition_count_cannot_be_reduced(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    before = await picture(broker)
    with pytest.raises(heapline.BadRequest, match="shrink"):
        await broker.update_topic("jobs", partitions=2, max_backlog=7)
    assert await picture(broker) == before


@pytest.mark.parametrize("partitions", [0, 1025])
async def test_impossible_count_is_refused_and_changes_nothing(jobs: Broker, partitions: int) -> None:
    before = await picture(jobs)
    with pytest.raises(heapline.BadRequest):
        await jobs.update_topic("jobs", partitions=partitions)
    assert await picture(jobs) == before


async def test_topic_grows_to_the_maximum_partition_count(world: World, jobs: Broker) -> None:
    await put(jobs, 2)
    epoch = await jobs.open_producer("jobs", "p")
    await jobs.update_topic("jobs", partitions=1024)
    batch = [Outgoing(b"%d" % i, priority=1, key=f"k{i}", seq=i) for i in range(50)]
    sent = await jobs.enqueue_batch("jobs", batch, producer_id="p", epoch=epoch)
    hl = await world.reopen("journal")
    again = await hl.enqueue_batch("jobs", batch, producer_id="p", epoch=epoch)
    assert [(a.id, a.duplicate) for a in again] == [(s.id, True) for s in sent]
    assert len(await drain(hl)) == 51


async def test_other_settings_may_change_in_the_same_call(world: World, topic: MakeTopic) -> None:
    await topic(partitions=2)
    await world.broker.update_topic("jobs", partitions=4, max_backlog=9, tick=0.05, fsync="os")
    config = await config_of(world.broker)
    assert (config.partitions, config.max_backlog, config.tick, config.fsync) == (4, 9, 0.05, "os")
    hl = await world.reopen()
    assert await config_of(hl) == config
    await put(hl, 1)
    assert await drain(hl) == [b"1"]


@pytest.mark.feature("log")
async def test_same_partition_count_changes_nothing(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    await broker.update_topic("jobs", partitions=3)
    kinds = [event.kind async for frame in broker.read_log("jobs", 0) for event in frame.events]
    assert "grown" not in kinds


@pytest.mark.feature("log")
async def test_growth_is_in_the_log(jobs: Broker) -> None:
    await jobs.update_topic("jobs", partitions=3)
    grown = [
        event.columns async for frame in jobs.read_log("jobs", 0) for event in frame.events if event.kind == "grown"
    ]
    assert [(g["before"], g["after"]) for g in grown] == [(1, 3)]


async def test_creating_a_grown_topic_again_needs_its_new_count(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=2)
    await broker.update_topic("jobs", partitions=3)
    with pytest.raises(heapline.TopicExists):
        await topic(partitions=2)
    assert (await topic(partitions=3)).config.partitions == 3


async def test_keys_move_only_to_new_partitions_and_only_their_share(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    before = await homes(broker, "a")
    await broker.update_topic("jobs", partitions=4)
    after = await homes(broker, "a")
    moved = [name for name in before if before[name] != after[name]]
    assert moved, "a quarter of forty keys should have moved"
    assert len(moved) < MANY / 2
    assert {after[name] for name in moved} == {3}


@pytest.mark.parametrize("memory", ["snapshot", "journal"])
async def test_old_and_new_messages_are_served_in_order_after_growth(
    world: World, topic: MakeTopic, memory: Memory
) -> None:
    await topic(partitions=2)
    hl = world.broker
    await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i, key=f"k{i}") for i in range(0, 40, 2)])
    await hl.update_topic("jobs", partitions=7)
    await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i, key=f"k{i}") for i in range(1, 40, 2)])
    hl = await world.reopen(memory)
    assert len((await hl.stats("jobs")).partitions) == 7
    assert await drain(hl) == [b"%d" % i for i in range(40)]


@pytest.mark.usefixtures("fake_time")
async def test_leases_delays_and_dead_letters_are_not_disturbed(world: World, topic: MakeTopic) -> None:
    await topic(partitions=2)
    hl = world.broker
    await put(hl, 1, 2, 3)
    held, failed, buried = (await hl.pop("jobs", 3, visibility=100))[:3]
    await hl.nack(failed, backoff=5)
    await hl.bury(buried, reason="bad")
    await hl.enqueue("jobs", b"later", delay=10)
    await hl.update_topic("jobs", partitions=5)
    stats = await hl.stats("jobs")
    assert (stats.leased, stats.delayed, stats.dead) == (1, 2, 1)
    await hl.extend(held, 200)
    await hl.ack(held)
    await world.advance(11)
    assert sorted(await drain(hl)) == [b"2", b"later"]
    assert await hl.dlq_replay("jobs") == 1
    assert await drain(hl) == [b"3"]


async def test_waiting_pop_gets_a_message_of_a_new_partition(jobs: Broker) -> None:
    waiting = asyncio.create_task(jobs.pop("jobs", wait=30.0))
    await jobs.stats("jobs")
    await jobs.update_topic("jobs", partitions=8)
    await jobs.enqueue_batch("jobs", [Outgoing(b"x", key=f"k{i}") for i in range(20)])
    assert len(await waiting) == 1


async def test_timers_run_in_new_partitions(world: World, jobs: Broker) -> None:
    await jobs.update_topic("jobs", partitions=4)
    sent = await jobs.enqueue_batch("jobs", [Outgoing(b"x", key=f"k{i}", delay=0.2) for i in range(40)])
    assert {(await jobs.get("jobs", s.id)).partition for s in sent} == {0, 1, 2, 3}
    await world.advance(1)
    assert len(await drain(jobs)) == 40


IDENTITIES: list[dict[str, Any]] = [
    {"style": "key"},
    {"style": "key", "scope": "pending"},
    {"style": "key", "scope": "until_ack"},
    {"style": "seq"},
    {"style": "seq", "keyed": True},
    {"style": "key", "keyed": True},
    {"style": "both"},
]


def numbered(style: str, keyed: bool, scope: Any, first: int = 0) -> list[Outgoing]:
    return [
        Outgoing(
            b"%d" % i, key=f"k{i}" if keyed else None, idempotency_key=f"i{i}" if style != "seq" else None,
            idempotency_scope=scope, seq=i if style != "key" else None,
        )
        for i in range(first, first + MANY)
    ]  # fmt: skip


@pytest.mark.parametrize("memory", [None, "snapshot", "journal"])
@pytest.mark.parametrize("identity", IDENTITIES, ids=lambda i: "-".join(map(str, i.values())))
async def test_retries_across_growths_never_duplicate(
    world: World, topic: MakeTopic, identity: dict[str, Any], memory: Memory | None
) -> None:
    await topic(partitions=2)
    hl = world.broker
    options = {"style": "key", "keyed": False, "scope": None} | identity
    numbers: dict[str, Any] = {}
    if options["style"] != "key":
        numbers = {"producer_id": "p", "epoch": await hl.open_producer("jobs", "p")}
    first = await hl.enqueue_batch("jobs", numbered(**options), **numbers)
    await hl.update_topic("jobs", partitions=3)
    second = await hl.enqueue_batch("jobs", numbered(**options, first=MANY), **numbers)
    await hl.update_topic("jobs", partitions=9)
    third = await hl.enqueue_batch("jobs", numbered(**options, first=2 * MANY), **numbers)
    if memory is not None:
        hl = await world.reopen(memory)
    for start, sent in ((0, first), (MANY, second), (2 * MANY, third)):
        again = await hl.enqueue_batch("jobs", numbered(**options, first=start), **numbers)
        assert [a.id for a in again] == [s.id for s in sent]
        assert all(a.duplicate for a in again)
    assert sorted(await drain(hl)) == sorted(b"%d" % i for i in range(3 * MANY))


async def test_same_identity_with_another_payload_is_a_conflict_across_growth(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=2)
    await broker.enqueue_batch("jobs", numbered("key", False, None))
    await broker.update_topic("jobs", partitions=20)
    for i in range(MANY):
        with pytest.raises(heapline.IdempotencyConflict):
            await broker.enqueue("jobs", b"other", idempotency_key=f"i{i}")


async def test_older_epoch_is_fenced_in_new_partitions(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=2)
    old = await broker.open_producer("jobs", "p")
    new = await broker.open_producer("jobs", "p")
    await broker.update_topic("jobs", partitions=30)
    for i in range(MANY):
        with pytest.raises(heapline.StaleEpoch):
            await broker.enqueue("jobs", b"x", key=f"k{i}", producer_id="p", epoch=old, seq=i)
    sent = await broker.enqueue_batch("jobs", numbered("seq", True, None), producer_id="p", epoch=new)
    assert not any(s.duplicate for s in sent)


async def test_acknowledged_sequence_is_never_enqueued_again_after_growth(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=2)
    epoch = await broker.open_producer("jobs", "p")
    await broker.enqueue_batch("jobs", numbered("seq", True, None), producer_id="p", epoch=epoch)
    await broker.enqueue_batch(
        "jobs", numbered("seq", True, None, first=MANY), producer_id="p", epoch=epoch, answered_below=MANY
    )
    await broker.update_topic("jobs", partitions=30)
    ready = (await broker.stats("jobs")).ready
    for m in numbered("seq", True, None):
        with pytest.raises(heapline.StaleSequence):
            await broker.enqueue("jobs", m.payload, key=m.key, producer_id="p", epoch=epoch, seq=m.seq)
    assert (await broker.stats("jobs")).ready == ready


@pytest.mark.usefixtures("fake_time")
async def test_number_older_than_the_window_stays_stale_after_growth(world: World, topic: MakeTopic) -> None:
    await topic(partitions=2, dedup_window=60.0)
    hl = world.broker
    epoch = await hl.open_producer("jobs", "p")
    await hl.enqueue_batch("jobs", numbered("seq", True, None), producer_id="p", epoch=epoch)
    await hl.update_topic("jobs", partitions=30)
    await world.advance(3600)
    await hl.enqueue_batch("jobs", [Outgoing(b"", key=f"z{i}") for i in range(MANY)])  # maintenance of the windows
    for m in numbered("seq", True, None):
        try:
            again = await hl.enqueue("jobs", m.payload, key=m.key, producer_id="p", epoch=epoch, seq=m.seq)
        except heapline.StaleSequence:
            continue
        assert again.duplicate


@pytest.mark.usefixtures("fake_time")
async def test_key_is_free_after_its_window_on_a_grown_topic(world: World, topic: MakeTopic) -> None:
    await topic(partitions=2, dedup_window=60.0)
    hl = world.broker
    await hl.enqueue_batch("jobs", numbered("key", False, None))
    await world.advance(30)
    await hl.update_topic("jobs", partitions=30)
    await world.advance(29)
    assert all(a.duplicate for a in await hl.enqueue_batch("jobs", numbered("key", False, None)))
    await world.advance(2)
    assert not any(a.duplicate for a in await hl.enqueue_batch("jobs", numbered("key", False, None)))
    assert all(a.duplicate for a in await hl.enqueue_batch("jobs", numbered("key", False, None)))


@pytest.mark.usefixtures("fake_time")
async def test_shorter_window_does_not_forget_earlier_keys(world: World, topic: MakeTopic) -> None:
    await topic(partitions=2, dedup_window=86400.0)
    hl = world.broker
    await hl.enqueue_batch("jobs", numbered("key", False, None))
    await hl.update_topic("jobs", dedup_window=1.0, partitions=30)
    await world.advance(3600)
    assert all(a.duplicate for a in await hl.enqueue_batch("jobs", numbered("key", False, None)))


@pytest.mark.usefixtures("fake_time")
@pytest.mark.parametrize("scope", ["pending", "until_ack"])
async def test_key_held_by_a_message_outlasts_every_window(world: World, topic: MakeTopic, scope: Any) -> None:
    await topic(partitions=2, dedup_window=1.0)
    hl = world.broker
    await hl.enqueue_batch("jobs", numbered("key", False, scope))
    await hl.update_topic("jobs", partitions=30)
    await world.advance(86400)
    assert all(a.duplicate for a in await hl.enqueue_batch("jobs", numbered("key", False, scope)))
    assert len(await drain(hl)) == MANY
    assert not any(a.duplicate for a in await hl.enqueue_batch("jobs", numbered("key", False, scope)))


async def test_atomic_batch_over_old_and_new_partitions_is_atomic(
    topic: MakeTopic, broker: Broker, bare_log: None
) -> None:
    await topic(partitions=2)
    await broker.enqueue_batch("jobs", numbered("key", False, None))
    await broker.update_topic("jobs", partitions=9)
    mixed = numbered("key", False, None)[: MANY // 2] + numbered("key", False, None, first=MANY)
    before = await picture(broker)
    with pytest.raises(heapline.IdempotencyConflict):
        await broker.enqueue_batch("jobs", [*mixed, Outgoing(b"other", idempotency_key="i0")])
    assert await picture(broker) == before
    results = await broker.enqueue_batch("jobs", mixed)
    assert [r.duplicate for r in results] == [True] * (MANY // 2) + [False] * MANY


async def test_repeated_row_of_a_batch_goes_to_the_same_partition(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=2)
    await broker.enqueue_batch("jobs", numbered("key", False, None, first=MANY))  # checks earlier placements too
    await broker.update_topic("jobs", partitions=9)
    results = await broker.enqueue_batch("jobs", numbered("key", False, None) * 2)
    assert [r.duplicate for r in results] == [False] * MANY + [True] * MANY
    assert [r.id for r in results[:MANY]] == [r.id for r in results[MANY:]]


async def test_producer_continues_across_growth(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=1)
    producer = heapline.Producer("p")
    for count in (2, 5, 11):
        for i in range(10):
            sent = await broker.enqueue("jobs", b"x", key=f"k{i}", producer=producer)
            assert not sent.duplicate
        assert not (await broker.enqueue("jobs", b"x", producer=producer)).duplicate
        await broker.update_topic("jobs", partitions=count)
    assert len(await drain(broker)) == 33


async def test_repeated_pop_returns_a_lease_from_before_growth(jobs: Broker) -> None:
    await put(jobs, 1, 2)
    first = await take(jobs, request_id="r")
    await jobs.update_topic("jobs", partitions=6)
    assert (await take(jobs, request_id="r")).token == first.token


@pytest.mark.feature("batches")
@pytest.mark.parametrize("scope", ["window", "until_ack"])
async def test_keys_prepared_before_growth_are_in_doubt_after_it(topic: MakeTopic, world: World, scope: Any) -> None:
    """The keys of a prepared part are where the old count placed them; a retry must not be enqueued beside them."""
    broker = world.broker
    await topic(partitions=2)
    sent = [Outgoing(b"x", key=f"k{i}", idempotency_key=f"o{i}", idempotency_scope=scope) for i in range(40)]
    first = (await broker.prepare_batch("b", "p1", sent, topic="jobs"))["jobs"]
    await broker.update_topic("jobs", partitions=9)
    broker = await world.reopen("journal")
    for message in sent:
        with pytest.raises(heapline.BatchInDoubt):
            await broker.enqueue_batch("jobs", [message])
    await broker.prepare_batch("b", "p2", sent, topic="jobs")
    assert await broker.commit_batch("b", ["p1", "p2"]) == 40
    await world.advance(3600)
    again = await broker.enqueue_batch("jobs", sent)
    assert all(r.duplicate for r in again)
    assert {r.id for r in again} == {r.id for r in first}
    assert len(await broker.pop("jobs", 100)) == 40
