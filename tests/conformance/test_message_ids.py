"""Message ids: the integer is unique within its topic, the ULID everywhere; a ULID matches only its own message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.ids import to_ulid
from heapline.contract.message import Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, take

PAIRS = 150
PARTITIONS = pytest.mark.feature("partitions")


@pytest.fixture
async def both(topic: MakeTopic, broker: Broker) -> Broker:
    """A broker with the topics "jobs" and "team/jobs"."""
    await topic()
    await topic("team/jobs")
    return broker


async def paired(hl: Broker) -> tuple[heapline.Enqueued, heapline.Enqueued]:
    """Enqueue into both topics until two messages have the same integer; the clock does not advance."""
    for _ in range(PAIRS):
        one, two = await hl.enqueue("jobs", b"one"), await hl.enqueue("team/jobs", b"two")
        if one.id == two.id:
            return one, two
    raise AssertionError("no two ids were equal")


@pytest.mark.usefixtures("fake_time", "colliding_ids")
async def test_paired_enqueues_into_two_topics_get_distinct_ulids(both: Broker) -> None:
    ids: list[int] = []
    ulids: set[str] = set()
    for _ in range(PAIRS):
        for name in ("jobs", "team/jobs"):
            sent = await both.enqueue(name, b"x")
            ids.append(sent.id)
            ulids.add(sent.message_id)
    assert len(set(ids)) < 2 * PAIRS, "the integers must collide, or this test proves nothing"
    assert len(ulids) == 2 * PAIRS
    popped = [m for name in ("jobs", "team/jobs") for m in await both.pop(name, PAIRS)]
    assert {m.message_id for m in popped} == ulids


@pytest.mark.usefixtures("fake_time", "colliding_ids")
async def test_batches_into_two_topics_get_distinct_ulids(both: Broker) -> None:
    results = [
        result for name in ("jobs", "team/jobs") for result in await both.enqueue_batch(name, [Outgoing(b"x")] * PAIRS)
    ]
    assert len({result.id for result in results}) < 2 * PAIRS
    assert len({result.message_id for result in results}) == 2 * PAIRS


@pytest.mark.feature("batches")
@pytest.mark.feature("groups")
@pytest.mark.feature("log")
async def test_every_answer_gives_a_message_the_same_ulid(topic: MakeTopic, broker: Any) -> None:
    info = await topic(partitions=3)
    sent = await broker.enqueue("jobs", b"x", key="k", idempotency_key="once")
    ulid = to_ulid(sent.id, info.id_suffix)
    again = await broker.enqueue("jobs", b"x", key="k", idempotency_key="once")
    (batched,) = await broker.enqueue_batch("jobs", [Outgoing(b"x", key="k", idempotency_key="once")])
    prepared = await broker.prepare_batch("b", "p", {"jobs": [Outgoing(b"x", key="k", idempotency_key="once")]})
    (peeked,) = await broker.peek("jobs")
    shown = [sent, again, batched, *prepared["jobs"], await broker.get("jobs", sent.id), peeked]
    await broker.abort_batch("b")
    await broker.create_group("jobs", "g", max_retries=0)
    (batch,) = (await broker.group_fetch("jobs", "g", "m", session="s")).batches
    shown += batch.messages()
    rows = {batch.partition: batch.offsets.tolist()}
    await broker.group_nack("jobs", "g", "m", rows, session="s", reason="no")
    shown += await broker.group_dead_list("jobs", "g")
    shown.append(message := await take(broker))
    await message.bury()
    shown += await broker.dlq_list("jobs")
    assert [one.message_id for one in shown] == [ulid] * len(shown)
    assert all(ulid in repr(one) for one in shown)
    frames = [frame async for frame in broker.read_log("jobs", message.partition)]
    assert {frame.id_suffix for frame in frames} == {info.id_suffix}


Call = Callable[[Broker, str], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "get": lambda hl, id: hl.get("jobs", id),
    "cancel": lambda hl, id: hl.cancel("jobs", id),
    "reschedule": lambda hl, id: hl.reschedule("jobs", id, priority=5),
}


@pytest.mark.usefixtures("fake_time", "colliding_ids")
@pytest.mark.parametrize("call", CALLS)
async def test_ulid_of_another_topic_is_answered_as_an_unknown_id(both: Broker, call: str) -> None:
    one, two = await paired(both)
    unknown = to_ulid(one.id + 5, one.id_suffix)
    with pytest.raises(heapline.MessageNotFound) as missing:
        await CALLS[call](both, unknown)
    with pytest.raises(heapline.MessageNotFound) as foreign:
        await CALLS[call](both, two.message_id)
    assert (foreign.value.topic, foreign.value.message_id) == ("jobs", two.message_id)
    assert str(foreign.value) == str(missing.value).replace(unknown, two.message_id)
    assert (await both.get("jobs", one.message_id)).state == "ready"
    await CALLS[call](both, one.message_id)


@pytest.mark.usefixtures("fake_time", "colliding_ids")
async def test_ulids_of_another_topic_match_no_dead_letters(both: Broker) -> None:
    one, two = await paired(both)
    for name in ("jobs", "team/jobs"):
        await both.bury(await both.pop(name, PAIRS))
    assert await both.dlq_replay("jobs", [two.message_id]) == 0
    assert await both.dlq_delete("jobs", [two.message_id]) == 0
    assert (await both.get("jobs", one.id)).state == "dead"
    assert await both.dlq_replay("jobs", [one.message_id, two.message_id]) == 1


async def test_restart_keeps_the_ulids_of_a_topic(world: World, topic: MakeTopic) -> None:
    info = await topic()
    before = await world.broker.enqueue("jobs", b"x")
    for memory in ("journal", "snapshot"):
        await world.reopen(memory)
        hl = world.broker
        assert [known.id_suffix for known in await hl.list_topics()] == [info.id_suffix]
        assert (await hl.get("jobs", before.message_id)).message_id == before.message_id
        assert (await hl.enqueue("jobs", b"y")).id_suffix == info.id_suffix


@pytest.mark.parametrize("change", [{"max_backlog": 9}, pytest.param({"partitions": 2}, marks=PARTITIONS)], ids=str)
async def test_settings_change_keeps_and_recreating_replaces_the_suffix(
    topic: MakeTopic, broker: Broker, change: dict[str, Any]
) -> None:
    info = await topic()
    old = await broker.enqueue("jobs", b"x")
    assert (await broker.update_topic("jobs", **change)).id_suffix == info.id_suffix
    assert (await topic("jobs", **change)).id_suffix == info.id_suffix
    await broker.delete_topic("jobs")
    assert (await topic()).id_suffix not in (0, info.id_suffix)
    with pytest.raises(heapline.MessageNotFound):
        await broker.get("jobs", old.message_id)
