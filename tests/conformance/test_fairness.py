"""Fairness keys take turns within a priority; leases per key and messages per second can be limited.
All of it is off by default."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

import heapline
from heapline import Outgoing
from heapline.contract.broker import Broker
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import Memory, World, drain, picture, put

pytestmark = pytest.mark.feature("fairness")


async def fill(hl: Broker, *messages: tuple[str | None, bytes], **options: Any) -> list[int]:
    """Enqueue (fairness key, payload) pairs in one batch."""
    batch = [Outgoing(payload, fairness_key=key, **options) for key, payload in messages]
    return [result.id for result in await hl.enqueue_batch("jobs", batch)]


def many(key: str | None, count: int) -> list[tuple[str | None, bytes]]:
    return [(key, f"{key}{i}".encode()) for i in range(count)]


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
async def test_keys_take_turns(topic: MakeTopic, broker: Broker, partitions: int) -> None:
    await topic(fairness="keys", partitions=partitions)
    await fill(broker, *many("a", 5))
    await fill(broker, *many("b", 2))
    await fill(broker, *many("c", 3))
    payloads = await drain(broker)
    assert payloads[-2:] == [b"a3", b"a4"]
    for turn, keys in enumerate(["abc", "abc", "ac"]):
        served = payloads[turn * 3 : turn * 3 + 3][: len(keys)]
        assert sorted(served) == [f"{key}{turn}".encode() for key in keys]


@pytest.mark.parametrize("mode", ["min", "max"])
async def test_priority_takes_precedence_over_turns(topic: MakeTopic, broker: Broker, mode: str) -> None:
    await topic(fairness="keys", mode=mode)
    await fill(broker, *many("a", 3), priority=5)
    await fill(broker, *many("b", 1), priority=5)
    await fill(broker, *many("c", 2), priority=-5)
    low = [b"c0", b"c1"]
    high = [b"a0", b"b0", b"a1", b"a2"]
    assert await drain(broker) == (low + high if mode == "min" else high + low)


async def test_small_tenant_is_not_buried_by_a_large_one(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys")
    await fill(broker, *many("large", 2000))
    await broker.ack(await broker.pop("jobs", 700))
    await fill(broker, *many("small", 10))
    served = [m.fairness_key for m in await broker.pop("jobs", 21)]
    assert served.count("small") == 10


async def test_messages_without_fairness_key_count_as_one_key(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys", partitions=2)
    for i in range(4):
        await fill(broker, (None, b"none%d" % i), key=f"k{i}")
    await fill(broker, *many("a", 2))
    assert sorted((await drain(broker))[:4]) == [b"a0", b"a1", b"none0", b"none1"]


async def test_turns_continue_after_a_restart(world: World, topic: MakeTopic) -> None:
    await topic(fairness="keys", partitions=2)
    for memory in ("snapshot", "journal"):
        await fill(world.broker, *many("a", 50))
        await world.broker.ack(await world.broker.pop("jobs", 20))
        hl = await world.reopen(memory)  # type: ignore[arg-type]
        await fill(hl, *many("b", 2), *many("a", 2))
        served = [m.fairness_key for m in await hl.pop("jobs", 4)]
        assert served.count("b") == 2
        await hl.purge("jobs")


async def test_rescheduled_message_waits_behind_others_of_its_key(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys")
    await fill(broker, *many("a", 2), priority=1)
    await fill(broker, *many("b", 3), priority=1)
    (late,) = await fill(broker, ("a", b"moved"), priority=9)
    await broker.reschedule("jobs", late, priority=1)
    assert await drain(broker) == [b"a0", b"b0", b"a1", b"b1", b"b2", b"moved"]


async def test_retried_message_keeps_its_turn(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys")
    await fill(broker, *many("a", 3), *many("b", 3))
    first, _ = await broker.pop("jobs", 2)
    await first.nack(backoff=0)
    assert [m.payload for m in await broker.pop("jobs", 2)] == [first.payload, b"a1"]


@pytest.mark.usefixtures("fake_time")
async def test_delayed_messages_of_a_key_do_not_delay_its_new_ones(world: World, topic: MakeTopic) -> None:
    await topic(fairness="keys")
    hl = world.broker
    await fill(hl, *many("a", 50), delay=3600)
    await fill(hl, *many("b", 50))
    await fill(hl, ("a", b"now"))
    assert b"now" in [m.payload for m in await hl.pop("jobs", 2)]
    await hl.purge("jobs")
    await fill(hl, *many("a", 50), delay=3600)
    await fill(hl, *many("b", 50))
    await world.advance(3601)
    served = Counter(m.fairness_key for m in await hl.pop("jobs", 40))
    assert served == {"a": 20, "b": 20}


async def test_delivered_message_carries_its_fairness_key(world: World, topic: MakeTopic) -> None:
    await topic(fairness="keys", partitions=4)
    options = {"key": "k", "fairness_key": "tenant ß", "headers": {"h": "1"}}
    one = await world.broker.enqueue("jobs", b"x", **options)  # type: ignore[arg-type]
    await world.broker.enqueue("jobs", b"y", headers={"h": "2"})
    hl = await world.reopen("journal")
    info = await hl.get("jobs", one.id)
    assert (info.fairness_key, info.key, info.headers) == ("tenant ß", "k", {"h": "1"})
    messages = {m.payload: m for m in await hl.pop("jobs", 2)}
    seen = {p: (m.fairness_key, m.key, m.headers) for p, m in messages.items()}
    assert seen == {b"x": ("tenant ß", "k", {"h": "1"}), b"y": (None, None, {"h": "2"})}


async def test_messages_of_a_fairness_key_are_in_one_partition(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys", partitions=8)
    for i in range(10):
        await fill(broker, ("tenant", b"x"), key=f"k{i}")
        await broker.enqueue("jobs", b"y", fairness_key="tenant", idempotency_key=f"i{i}", key=f"k{i}")
    assert len({m.partition for m in await broker.pop("jobs", 20)}) == 1


async def test_repeat_of_an_identified_message_is_recognised(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys", partitions=8)
    first = await broker.enqueue("jobs", b"x", fairness_key="t", key="k", idempotency_key="i")
    again = await broker.enqueue("jobs", b"x", fairness_key="t", key="k", idempotency_key="i")
    assert (again.id, again.duplicate) == (first.id, True)


# -- what is refused ---------------------------------------------------------------------------------------------------


async def test_fairness_key_on_a_topic_without_fairness_is_refused(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    before = await picture(broker)
    with pytest.raises(heapline.BadRequest, match='fairness="keys"'):
        await broker.enqueue("jobs", b"x", fairness_key="a")
    with pytest.raises(heapline.BadRequest, match='fairness="keys"'):
        await fill(broker, ("a", b"x"))
    assert await picture(broker) == before


@pytest.mark.parametrize("priority", [-(1 << 21) - 1, 1 << 21, 1 << 62])
async def test_priority_out_of_the_range_of_a_fair_topic_is_refused(
    topic: MakeTopic, broker: Broker, priority: int
) -> None:
    await topic(fairness="keys")
    (id,) = await fill(broker, ("a", b"x"))
    before = await picture(broker)
    for call in (
        broker.enqueue("jobs", b"x", priority=priority),
        broker.enqueue_batch("jobs", [Outgoing(b"x", priority=priority)]),
        broker.reschedule("jobs", id, priority=priority),
    ):
        with pytest.raises(heapline.BadRequest, match="-2097152 to 2097151"):
            await call
    assert await picture(broker) == before


@pytest.mark.parametrize("mode", ["min", "max"])
async def test_priorities_at_the_ends_of_the_range_are_in_order(topic: MakeTopic, broker: Broker, mode: str) -> None:
    await topic(fairness="keys", mode=mode)
    wanted = [-(1 << 21), -1, 0, 1, (1 << 21) - 1]
    await put(broker, *wanted[::2], *wanted[1::2])
    found = [int(p) for p in await drain(broker)]
    assert found == (wanted if mode == "min" else wanted[::-1])


@pytest.mark.parametrize(
    "config",
    [
        {"fairness": "keys", "ordering": heapline.aging(1.0)},
        {"max_inflight_per_key": 1},
        {"fairness": "keys", "max_inflight_per_key": -1},
        {"fairness": "some"},
        {"max_pops_per_second": -1},
        {"max_pops_per_second": 0.0001},
        {"max_pops_per_second": float("inf")},
    ],
)
async def test_invalid_fairness_settings_are_refused(topic: MakeTopic, config: dict[str, Any]) -> None:
    with pytest.raises(heapline.BadRequest):
        await topic(**config)


async def test_fairness_of_a_topic_cannot_be_changed(topic: MakeTopic, broker: Broker) -> None:
    await topic()
    with pytest.raises(heapline.BadRequest, match="fairness"):
        await broker.update_topic("jobs", fairness="keys")


# -- leases per key ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
async def test_limit_of_one_lease_per_key_processes_each_key_one_by_one(
    topic: MakeTopic, broker: Broker, partitions: int
) -> None:
    await topic(fairness="keys", max_inflight_per_key=1, partitions=partitions)
    await fill(broker, *many("a", 4), *many("b", 4), *many("c", 1))
    done: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
    held: list[heapline.Message] = []
    for _ in range(9):
        held += await broker.pop("jobs", 10)
        assert len({m.fairness_key for m in held}) == len(held)
        message = held.pop(0)
        done[str(message.fairness_key)].append(message.payload)
        await message.ack()
    assert done == {k: [f"{k}{i}".encode() for i in range(n)] for k, n in {"a": 4, "b": 4, "c": 1}.items()}
    assert (await broker.stats("jobs")).ready == 0


async def test_pop_that_finds_only_blocked_messages_waits_like_at_an_empty_topic(
    topic: MakeTopic, broker: Broker
) -> None:
    await topic(fairness="keys", max_inflight_per_key=1)
    await fill(broker, *many("a", 2))
    (held,) = await broker.pop("jobs", 5)
    assert await broker.pop("jobs") == []
    waiting = asyncio.create_task(broker.pop("jobs", wait=60))
    stats = await broker.stats("jobs")
    assert (stats.ready, [p.blocked for p in stats.partitions]) == (1, [1])
    await held.ack()
    assert [m.payload for m in await waiting] == [b"a1"]


async def test_messages_without_fairness_key_are_not_limited(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys", max_inflight_per_key=1)
    await fill(broker, *many(None, 3), *many("a", 3))
    assert len(await broker.pop("jobs", 10)) == 4


@pytest.mark.parametrize("end", ["ack", "nack", "release", "bury", "timeout"])
async def test_every_end_of_a_lease_frees_its_slot(world: World, topic: MakeTopic, end: str) -> None:
    if end == "timeout" and not world.controls_time:
        pytest.skip("needs time that can be moved")
    hl = world.broker
    await topic(fairness="keys", max_inflight_per_key=1)
    await fill(hl, *many("a", 3))
    (held,) = await hl.pop("jobs", 3)
    if end == "timeout":
        await world.advance(31)
    else:
        await {"ack": held.ack, "nack": held.nack, "release": held.release, "bury": held.bury}[end]()
    (following,) = await hl.pop("jobs", 3)
    assert following.payload == (b"a0" if end == "release" else b"a1")


async def test_cancelling_the_next_message_unblocks_the_one_behind_it(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys", max_inflight_per_key=1)
    ids = await fill(broker, *many("a", 4))
    (held,) = await broker.pop("jobs", 4)
    await held.ack()
    await broker.cancel("jobs", ids[1])
    await broker.reschedule("jobs", ids[2], delay=60)
    assert [m.payload for m in await broker.pop("jobs", 4)] == [b"a3"]


@pytest.mark.usefixtures("fake_time")
async def test_blocked_message_expires_and_unblocks_others(world: World, topic: MakeTopic) -> None:
    await topic(fairness="keys", max_inflight_per_key=1)
    hl = world.broker
    await fill(hl, ("a", b"a0"))
    await fill(hl, ("a", b"a1"), ttl=1.0)
    await fill(hl, ("a", b"a2"))
    (held,) = await hl.pop("jobs", 3)
    await world.advance(2)
    assert (await hl.stats("jobs")).ready == 1
    await held.ack()
    assert [m.payload for m in await hl.pop("jobs", 3)] == [b"a2"]


async def test_limit_changes_while_messages_are_blocked(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys")
    await fill(broker, *many("a", 9))
    held = await broker.pop("jobs", 2)
    await broker.update_topic("jobs", max_inflight_per_key=1)
    assert await broker.pop("jobs", 9) == []
    await held[0].ack()
    assert await broker.pop("jobs", 9) == [], "two were leased when one was allowed"
    await held[1].ack()
    assert [m.payload for m in await broker.pop("jobs", 9)] == [b"a2"]
    await broker.update_topic("jobs", max_inflight_per_key=3)
    assert [m.payload for m in await broker.pop("jobs", 9)] == [b"a3", b"a4"]
    await broker.update_topic("jobs", max_inflight_per_key=0)
    assert [m.payload for m in await broker.pop("jobs", 9)] == [b"a5", b"a6", b"a7", b"a8"]


@pytest.mark.parametrize("memory", ["snapshot", "journal"])
async def test_limit_holds_across_a_restart(world: World, topic: MakeTopic, memory: Any) -> None:
    await topic(fairness="keys", max_inflight_per_key=2, partitions=2)
    await fill(world.broker, *many("a", 6), *many("b", 1))
    held = await world.broker.pop("jobs", 9)
    assert len(held) == 3
    hl = await world.reopen(memory)
    assert await hl.pop("jobs", 9) == []
    await hl.ack([heapline.LeaseRef("jobs", held[0].id, held[0].token)])
    (following,) = await hl.pop("jobs", 9)
    assert following.payload == b"a2"


@pytest.mark.parametrize("memory", ["snapshot", "journal"])
async def test_restart_after_the_limit_was_changed_gives_the_same_queue(
    world: World, topic: MakeTopic, memory: Any
) -> None:
    await topic(fairness="keys", max_inflight_per_key=1)
    hl = world.broker
    await fill(hl, *many("a", 6), *many("b", 6))
    for _ in range(3):
        for message in await hl.pop("jobs", 9):
            await message.ack()
    await hl.pop("jobs", 9)
    await hl.update_topic("jobs", max_inflight_per_key=0)
    hl = await world.reopen(memory)
    assert await drain(hl) == [b"a4", b"b4", b"a5", b"b5"]


async def test_purge_takes_blocked_messages_too(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys", max_inflight_per_key=1)
    await fill(broker, *many("a", 5))
    await broker.pop("jobs", 5)
    assert await broker.purge("jobs") == 4
    assert (await broker.stats("jobs")).ready == 0


async def test_blocked_message_can_be_read_and_cancelled(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys", max_inflight_per_key=1)
    ids = await fill(broker, *many("a", 3))
    await broker.pop("jobs", 3)
    assert (await broker.get("jobs", ids[1])).state == "ready"
    await broker.cancel("jobs", ids[1])
    assert (await broker.get("jobs", ids[1])).state == "cancelled"
    assert (await broker.stats("jobs")).partitions[0].blocked == 1


# -- pops per second ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_time")
async def test_max_pops_per_second_delivers_the_best_at_that_rate(world: World, topic: MakeTopic) -> None:
    await topic(max_pops_per_second=20)
    hl = world.broker
    await put(hl, *range(100, 0, -1))
    assert [m.priority for m in await hl.pop("jobs", 100)] == [1, 2], "one tenth of the messages per second"
    assert await hl.pop("jobs", 100) == []
    taken = []
    for _ in range(10):
        await world.advance(0.1)
        taken += [m.priority for m in await hl.pop("jobs", 100)]
    assert taken == list(range(3, 23))


@pytest.mark.usefixtures("fake_time")
async def test_rate_can_change_during_pops(world: World, topic: MakeTopic) -> None:
    await topic(max_pops_per_second=10)
    hl = world.broker
    await put(hl, *range(100))
    assert len(await hl.pop("jobs", 100)) == 1
    await hl.update_topic("jobs", max_pops_per_second=1000)
    await world.advance(0.05)
    assert len(await hl.pop("jobs", 100)) == 50
    await hl.update_topic("jobs", max_pops_per_second=0)
    assert len(await hl.pop("jobs", 100)) == 49


@pytest.mark.usefixtures("fake_time")
async def test_pop_that_waits_for_the_rate_gets_its_message(world: World, topic: MakeTopic) -> None:
    await topic(max_pops_per_second=10)
    hl = world.broker
    await put(hl, 1, 2)
    await hl.pop("jobs")
    waiting = asyncio.create_task(hl.pop("jobs", wait=60))
    await hl.stats("jobs")
    assert not waiting.done()
    await world.advance(0.1)
    assert [m.priority for m in await waiting] == [2]


@pytest.mark.usefixtures("fake_time")
async def test_repeated_request_costs_no_rate(world: World, topic: MakeTopic) -> None:
    await topic(max_pops_per_second=1)
    hl = world.broker
    await put(hl, 1, 2)
    (first,) = await hl.pop("jobs", request_id="r")
    assert [m.id for m in await hl.pop("jobs", request_id="r")] == [first.id]
    await world.advance(1)
    assert [m.priority for m in await hl.pop("jobs", 5)] == [2]


# -- turns are given when a message becomes ready ----------------------------------------------------------------------


async def _let_time_pass(broker: Broker, count: int = 60) -> None:
    """Serve others meanwhile, so that turns assigned earlier are long past."""
    await broker.enqueue_batch("jobs", [Outgoing(b"", fairness_key="others") for _ in range(count)])
    while found := await broker.pop("jobs", 100):
        await broker.ack(found)


async def _first_of(broker: Broker, count: int) -> list[str | None]:
    return [m.fairness_key for m in await broker.pop("jobs", count)]


async def test_due_burst_does_not_starve_messages_enqueued_at_that_time(
    world: World, topic: MakeTopic, fake_time: None
) -> None:
    await topic(fairness="keys", partitions=2)
    await world.broker.enqueue_batch("jobs", [Outgoing(b"", fairness_key="planner", delay=60) for _ in range(50)])
    await _let_time_pass(world.broker)
    await world.advance(61)
    await world.broker.enqueue_batch("jobs", [Outgoing(b"", fairness_key="small") for _ in range(5)])
    assert (await _first_of(world.broker, 12)).count("small") == 5


async def test_committing_an_old_batch_does_not_starve_new_messages(topic: MakeTopic, broker: Broker) -> None:
    await topic(fairness="keys", partitions=2)
    await broker.prepare_batch("b", "p", [Outgoing(b"", fairness_key="bulk") for _ in range(50)], topic="jobs")
    await _let_time_pass(broker)
    await broker.commit_batch("b", ["p"])
    await broker.enqueue_batch("jobs", [Outgoing(b"", fairness_key="small") for _ in range(5)])
    assert (await _first_of(broker, 12)).count("small") == 5


@pytest.mark.parametrize("memory", ["journal", "snapshot"])
async def test_replayed_dead_letters_do_not_starve_other_fairness_keys(
    world: World, topic: MakeTopic, memory: Memory
) -> None:
    broker: Broker = world.broker
    await topic(fairness="keys", partitions=2)
    await broker.enqueue_batch("jobs", [Outgoing(b"", fairness_key="broken") for _ in range(50)])
    await broker.bury(await broker.pop("jobs", 50))
    await _let_time_pass(broker)
    assert await broker.dlq_replay("jobs") == 50
    broker = await world.reopen(memory)
    await broker.enqueue_batch("jobs", [Outgoing(b"", fairness_key="small") for _ in range(5)])
    assert (await _first_of(broker, 12)).count("small") == 5


async def test_message_retried_after_a_backoff_keeps_its_turn(world: World, topic: MakeTopic, fake_time: None) -> None:
    await topic(fairness="keys")
    await world.broker.enqueue_batch("jobs", [Outgoing(b"%d" % i, fairness_key="a") for i in range(5)])
    (first,) = await world.broker.pop("jobs")
    await first.nack(backoff=1.0)
    await world.advance(2)
    assert [m.payload for m in await world.broker.pop("jobs", 5)] == [b"0", b"1", b"2", b"3", b"4"]
