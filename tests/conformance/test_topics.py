"""Topics: created, changed, listed, deleted; a topic of the same name shares nothing with its predecessor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, drain, put, take


async def test_created_topic_has_the_specified_defaults(broker: Broker) -> None:
    info = await broker.create_topic("jobs")
    assert info.config == heapline.TopicConfig()
    assert (info.name, info.incarnation > 0) == ("jobs", True)


@pytest.mark.feature("partitions")
async def test_created_topic_has_the_requested_settings(topic: MakeTopic) -> None:
    info = await topic(
        mode="max", partitions=3, k=2, ordering=heapline.aging(0.5), streams=False, visibility_default=5, lease_max=60,
        max_retries_default=2, backoff=heapline.Backoff(base=0.5), dlq=False, retention=60, dedup_window=3600,
        max_inflight=10, max_backlog=20, fsync="commit", tick=0.05,
    )  # fmt: skip
    c = info.config
    assert (c.mode, c.partitions, c.k, c.ordering, c.streams) == ("max", 3, 2, heapline.Aging(0.5), False)
    assert (c.visibility_default, c.lease_max, c.max_retries_default, c.backoff.base) == (5, 60, 2, 0.5)
    assert (c.dlq, c.retention, c.dedup_window, c.max_inflight, c.max_backlog) == (False, 60, 3600, 10, 20)


async def test_creating_again_with_an_equal_config_changes_nothing(topic: MakeTopic, broker: Broker) -> None:
    first = await topic(mode="max")
    await put(broker, 1)
    assert await topic(mode="max") == first
    assert (await broker.stats("jobs")).ready == 1


async def test_creating_again_with_another_config_raises_topic_exists(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    with pytest.raises(heapline.TopicExists, match="change them with update_topic") as caught:
        await topic(max_backlog=5)
    assert caught.value.differing == ["max_backlog"]
    with pytest.raises(heapline.TopicExists, match="mode cannot be changed; choose another name") as caught:
        await topic(mode="max", max_backlog=5)
    assert caught.value.differing == ["mode", "max_backlog"]
    assert "update_topic" not in str(caught.value), "it would be refused"
    assert (await broker.list_topics())[0].config.mode == "min"


async def test_config_after_an_update_is_what_counts_as_equal(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    await broker.update_topic("jobs", max_backlog=5)
    with pytest.raises(heapline.TopicExists):
        await topic()
    await topic(max_backlog=5)


@pytest.mark.parametrize("name", ["", "a b", "-x", ".x", "é", "a/b/c", "a/", "/a", "x" * 129, "a\n", 7, None])
async def test_bad_topic_name_is_refused_by_every_call(broker: Broker, name: Any) -> None:
    with pytest.raises(heapline.BadName, match="letters"):
        await broker.create_topic(name)
    with pytest.raises(heapline.BadName):
        await broker.enqueue(name, b"x")
    assert await broker.list_topics() == []


@pytest.mark.parametrize(
    "config",
    [
        {"mode": "middle"}, {"partitions": 0}, {"partitions": 1025}, {"k": 0}, {"ordering": "loose"},
        {"ordering": heapline.Aging(0)}, {"ordering": heapline.Aging(float("nan"))}, {"visibility_default": 0},
        {"visibility_default": 61, "lease_max": 60}, {"lease_max": float("inf")}, {"lease_max": -1},
        {"max_retries_default": -1}, {"max_retries_default": 251}, {"backoff": heapline.Backoff(base=-1)},
        {"backoff": heapline.Backoff(base=5, max=1)}, {"backoff": heapline.Backoff(factor=float("inf"))},
        {"backoff": heapline.Backoff(jitter=2)}, {"backoff": heapline.Backoff(max=float("inf"))}, {"dlq": "yes"},
        {"retention": -1}, {"dedup_window": float("nan")}, {"max_payload_bytes": 0}, {"max_payload_bytes": 1 << 30},
        {"max_inflight": -1}, {"max_backlog": -1}, {"segment_bytes": 1000}, {"segment_bytes": (1 << 20) + 1},
        {"fsync": "never"}, {"fsync_interval": 0}, {"tick": 0.001}, {"tick": 2}, {"colour": "red"},
    ],
    ids=str,
)  # fmt: skip
async def test_invalid_setting_is_refused(broker: Broker, topic: MakeTopic, config: dict[str, Any]) -> None:
    with pytest.raises(heapline.BadRequest):
        await topic(**config)
    assert await broker.list_topics() == []


async def test_name_without_namespace_is_in_the_default_one(broker: Broker, topic: MakeTopic) -> None:
    await topic("default/jobs")
    await topic("jobs")
    await put(broker, 1, topic="default/jobs")
    assert (await take(broker, "jobs")).topic == "jobs"
    assert [info.name for info in await broker.list_topics()] == ["jobs"]


async def test_namespaces_keep_topics_of_one_name_apart(broker: Broker, topic: MakeTopic) -> None:
    await topic("jobs")
    await topic("team/jobs")
    await put(broker, 1, topic="team/jobs")
    assert await broker.pop("jobs") == []
    m = await take(broker, "team/jobs")
    assert m.topic == "team/jobs"
    await m.ack()
    assert [info.name for info in await broker.list_topics()] == ["jobs", "team/jobs"]


async def test_topics_are_independent(broker: Broker, topic: MakeTopic) -> None:
    await topic("a")
    await topic("b")
    r = await broker.enqueue("a", b"x")
    assert await broker.pop("b") == []
    with pytest.raises(heapline.MessageNotFound):
        await broker.get("b", r.id)


CALLS_ON_A_TOPIC: list[Callable[[Broker], Any]] = [
    lambda hl: hl.update_topic("nope", max_backlog=1),
    lambda hl: hl.delete_topic("nope"),
    lambda hl: hl.stats("nope"),
    lambda hl: hl.purge("nope"),
    lambda hl: hl.pause_topic("nope"),
    lambda hl: hl.resume_topic("nope"),
    lambda hl: hl.enqueue("nope", b"x"),
    lambda hl: hl.enqueue_batch("nope", [heapline.Outgoing(b"x")]),
    lambda hl: hl.open_producer("nope", "p"),
    lambda hl: hl.pop("nope"),
    lambda hl: hl.ack(heapline.LeaseRef("nope", 1, 1)),
    lambda hl: hl.nack(heapline.LeaseRef("nope", 1, 1)),
    lambda hl: hl.get("nope", 1),
    lambda hl: hl.peek("nope"),
    lambda hl: hl.cancel("nope", 1),
    lambda hl: hl.reschedule("nope", 1, delay=1),
    lambda hl: hl.dlq_list("nope"),
    lambda hl: hl.dlq_replay("nope"),
    lambda hl: hl.dlq_delete("nope", ids=[1]),
]


LOG_CALLS_ON_A_TOPIC: list[Callable[[Broker], Any]] = [
    lambda hl: hl.snapshot("nope"),
    lambda hl: hl.offsets("nope"),
    lambda hl: anext(hl.read_log("nope")),
]


async def refuses_unknown_topic(call: Callable[[Broker], Any], broker: Broker) -> None:
    with pytest.raises(heapline.TopicNotFound, match="create_topic") as caught:
        await call(broker)
    assert caught.value.topic == "nope"


@pytest.mark.parametrize("call", range(len(CALLS_ON_A_TOPIC)))
async def test_unknown_topic_raises_an_error_that_says_what_to_do(broker: Broker, call: int) -> None:
    await refuses_unknown_topic(CALLS_ON_A_TOPIC[call], broker)


@pytest.mark.feature("log")
@pytest.mark.parametrize("call", range(len(LOG_CALLS_ON_A_TOPIC)))
async def test_unknown_topic_is_the_same_error_for_calls_on_its_log(broker: Broker, call: int) -> None:
    await refuses_unknown_topic(LOG_CALLS_ON_A_TOPIC[call], broker)


# -- update ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fixed",
    [{"mode": "max"}, {"ordering": heapline.aging(1)}, {"streams": False}, {"segment_bytes": 2 << 20}],
    ids=lambda f: next(iter(f)),
)
async def test_fixed_settings_cannot_be_updated(jobs: Broker, fixed: dict[str, Any]) -> None:
    before = (await jobs.list_topics())[0]
    with pytest.raises(heapline.BadRequest, match=next(iter(fixed))):
        await jobs.update_topic("jobs", **fixed, max_backlog=3)
    assert (await jobs.list_topics())[0] == before


async def test_update_keeps_omitted_settings(jobs: Broker) -> None:
    await jobs.update_topic("jobs", max_backlog=3)
    info = await jobs.update_topic("jobs", max_inflight=4)
    assert (info.config.max_backlog, info.config.max_inflight) == (3, 4)
    assert (await jobs.list_topics())[0] == info


async def test_update_takes_effect_immediately(world: World, jobs: Broker) -> None:
    await put(jobs, 1, 2)
    await jobs.update_topic("jobs", visibility_default=7.0, max_retries_default=0, max_payload_bytes=10, max_backlog=1)
    m = await take(jobs)
    assert (m.deadline - world.now()).total_seconds() == pytest.approx(7, abs=1)
    with pytest.raises(heapline.PayloadTooLarge):
        await jobs.enqueue("jobs", b"x" * 11)
    with pytest.raises(heapline.ResourceExhausted):
        await jobs.enqueue("jobs", b"x")
    await m.nack()
    assert (await jobs.get("jobs", m.id)).state == "dead"


async def test_update_with_a_bad_setting_changes_nothing(jobs: Broker) -> None:
    before = await jobs.list_topics()
    for bad in ({"max_backlog": -1}, {"colour": "red"}, {"visibility_default": "long"}):
        with pytest.raises(heapline.BadRequest):
            await jobs.update_topic("jobs", **{"max_inflight": 9, **bad})
    assert await jobs.list_topics() == before


async def test_update_survives_a_restart(world: World, jobs: Broker) -> None:
    await jobs.update_topic("jobs", max_backlog=1)
    hl = await world.reopen()
    assert (await hl.list_topics())[0].config.max_backlog == 1
    await put(hl, 1)
    with pytest.raises(heapline.ResourceExhausted):
        await put(hl, 2)


async def test_raised_limit_serves_a_pop_that_waits(topic: MakeTopic, broker: Broker) -> None:
    await topic(max_inflight=1)
    await put(broker, 1, 2)
    await take(broker)
    waiting = asyncio.create_task(broker.pop("jobs", wait=30.0))
    await broker.stats("jobs")
    await broker.update_topic("jobs", max_inflight=2)
    assert [m.payload for m in await waiting] == [b"2"]


async def test_concurrent_creates_create_one_topic(topic: MakeTopic, broker: Broker) -> None:
    infos = await asyncio.gather(*(topic() for _ in range(10)))
    assert len({info.incarnation for info in infos}) == 1
    limits = (1, 1, 2)
    results = await asyncio.gather(*(topic("other", max_backlog=n) for n in limits), return_exceptions=True)
    created = (await broker.get_topic("other")).config.max_backlog  # concurrent calls may take effect in any order
    assert [isinstance(r, heapline.TopicExists) for r in results] == [n != created for n in limits]
    assert len(await broker.list_topics()) == 2


async def test_concurrent_creates_and_deletes_are_serializable(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    await asyncio.gather(
        broker.delete_topic("jobs"), topic("a"), broker.update_topic("jobs", max_backlog=1), topic("b"),
        return_exceptions=True,
    )  # fmt: skip
    assert [info.name for info in await broker.list_topics()] == ["a", "b"]


@pytest.mark.feature("partitions")
async def test_stats_add_up(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    for p in range(12):
        await put(broker, p, delay=60 if p % 4 == 0 else None)
    messages = await broker.pop("jobs", 4)
    await messages[0].bury()
    stats = await broker.stats("jobs")
    for name in ("ready", "delayed", "leased", "dead"):
        assert getattr(stats, name) == sum(getattr(p, name) for p in stats.partitions)
    assert (stats.topic, stats.ready, stats.delayed, stats.leased, stats.dead) == ("jobs", 5, 3, 3, 1)
    assert [p.partition for p in stats.partitions] == [0, 1, 2]
    assert (stats.enqueued_total, stats.leased_total, stats.dead_total) == (12, 4, 1)


@pytest.mark.feature("partitions")
async def test_topic_of_a_thousand_partitions_keeps_one_order(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=1024)
    for at in range(0, 2000, 500):
        await broker.enqueue_batch(
            "jobs", [heapline.Outgoing(b"x", priority=(p * 37) % 2000, key=str(p)) for p in range(at, at + 500)]
        )
    await broker.enqueue("jobs", b"numbered", priority=-1, producer=heapline.Producer("p"))
    messages = await broker.pop("jobs", 3000)
    assert [m.priority for m in messages] == [-1, *range(2000)]
    assert len({m.partition for m in messages}) > 700
    await broker.ack(messages)


# -- delete ------------------------------------------------------------------------------------------------------------


async def test_deleted_topic_stays_deleted(world: World, jobs: Broker) -> None:
    await put(jobs, 1)
    await jobs.delete_topic("jobs")
    for reopened in (False, True):
        hl = await world.reopen() if reopened else jobs
        assert await hl.list_topics() == []
        with pytest.raises(heapline.TopicNotFound):
            await hl.pop("jobs")


async def test_waiting_pop_raises_when_its_topic_is_deleted(jobs: Broker) -> None:
    waiting = asyncio.create_task(jobs.pop("jobs", wait=30.0))
    await jobs.stats("jobs")
    await jobs.delete_topic("jobs")
    with pytest.raises(heapline.TopicNotFound):
        await waiting


async def test_recreated_topic_shares_nothing_with_the_old_one(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    old = await topic()
    ids = await put(hl, 1, 2, 3)
    await hl.enqueue("jobs", b"once", idempotency_key="k", delay=1)
    epoch = await hl.open_producer("jobs", "p")
    await (await take(hl)).bury("bad")
    await hl.pause_topic("jobs")
    await hl.delete_topic("jobs")
    new = await topic()
    assert new.incarnation > old.incarnation
    stats = await hl.stats("jobs")
    assert (stats.ready, stats.delayed, stats.leased, stats.dead, stats.paused) == (0, 0, 0, 0, False)
    if "log" in world.features:
        assert await hl.offsets("jobs") == {0: (0, 0)}
    assert (await hl.enqueue("jobs", b"another", idempotency_key="k")).duplicate is False
    assert await hl.open_producer("jobs", "p") <= epoch
    for id in ids:
        with pytest.raises(heapline.MessageNotFound):
            await hl.get("jobs", id)
    assert await drain(hl) == [b"another"]


async def test_ids_of_a_deleted_topic_are_never_reused(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic()
    old = await put(hl, *range(2500)) + await put(hl, *range(2500))
    await hl.delete_topic("jobs")
    await topic()
    hl = await world.reopen()
    new = await put(hl, *range(2500)) + await put(hl, *range(2500))
    assert not set(old) & set(new)


async def test_lease_of_a_deleted_topic_is_refused_by_its_successor(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic()
    await put(hl, 1)
    old = await take(hl)
    await hl.delete_topic("jobs")
    with pytest.raises(heapline.TopicNotFound):
        await old.ack()
    await topic()
    await put(hl, 1)
    new = await take(hl)
    for act in (old.ack, old.nack, old.release, old.bury):
        with pytest.raises(heapline.LeaseLost) as caught:
            await act()
        assert caught.value.lost == [old.id]
    with pytest.raises(heapline.LeaseLost):
        await old.extend(60)
    assert (await hl.get("jobs", new.id)).state == "leased"
    await new.ack()


@pytest.mark.feature("log")
async def test_stats_report_the_fsync_policy(topic: MakeTopic, broker: Broker) -> None:
    await topic("safe")
    await topic("timed", fsync="interval")
    await topic("loose", fsync="os")
    assert (await broker.stats("safe")).durability == "every answer is durable"
    assert "interval" in (await broker.stats("timed")).durability
    assert "operating system" in (await broker.stats("loose")).durability
