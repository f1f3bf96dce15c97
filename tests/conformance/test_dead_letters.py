"""The dead-letter queue: list, replay, delete."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.message import DlqFilter
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, drain, picture, put, take


async def bury(hl: Broker, *priorities: int, reason: str | None = "bad", **options: Any) -> list[int]:
    """Create dead letters of these priorities, in this order; return their ids."""
    ids = []
    for p in priorities:
        ids += await put(hl, p, **options)
        m = await take(hl)
        assert m.id == ids[-1]
        await m.bury(reason)
    return ids


async def test_list_returns_every_field_of_a_dead_letter(world: World, jobs: Broker) -> None:
    (id,) = await bury(jobs, 7, key="k", headers={"a": "b"})
    (dead,) = await jobs.dlq_list("jobs")
    assert (dead.id, dead.state, dead.priority, dead.payload, dead.key, dead.headers, dead.attempts, dead.reason) == (
        id, "dead", 7, b"7", "k", {"a": "b"}, 1, "bad",
    )  # fmt: skip
    assert dead.ended_at is not None
    assert abs(dead.ended_at - world.now()) < timedelta(seconds=1)
    assert await jobs.get("jobs", id) == dead


async def test_list_returns_the_oldest_up_to_its_limit(world: World, topic: MakeTopic) -> None:
    await topic(partitions=3)
    ids = []
    for p in (5, 1, 3, 2):
        ids += await bury(world.broker, p)
        await world.advance(0.01)
    assert [dead.id for dead in await world.broker.dlq_list("jobs")] == ids
    assert [dead.id for dead in await world.broker.dlq_list("jobs", limit=2)] == ids[:2]


async def test_dead_letters_are_not_delivered(world: World, jobs: Broker) -> None:
    await bury(jobs, 1)
    await world.advance(5)
    assert await jobs.pop("jobs") == []
    stats = await jobs.stats("jobs")
    assert (stats.ready, stats.dead, stats.dead_total) == (0, 1, 1)


# -- replay ------------------------------------------------------------------------------------------------------------


async def test_replay_brings_all_back_and_counts_them(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    await bury(broker, 3, 1, 2)
    assert await broker.dlq_replay("jobs") == 3
    assert await broker.dlq_list("jobs") == []
    assert await broker.dlq_replay("jobs") == 0
    assert await drain(broker) == [b"1", b"2", b"3"]


async def test_replay_resets_attempts(jobs: Broker) -> None:
    (id,) = await put(jobs, 1, max_retries=1)
    for _ in range(2):
        await (await take(jobs)).nack(backoff=0, reason="no")
    assert await jobs.dlq_replay("jobs", [id]) == 1
    info = await jobs.get("jobs", id)
    assert (info.state, info.attempts) == ("ready", 0)
    for number in (1, 2):
        m = await take(jobs)
        assert m.attempts == number
        await m.nack(backoff=0)
    assert (await jobs.get("jobs", id)).state == "dead", "its own limit still holds"


async def test_replay_keeps_key_headers_priority_and_enqueue_time(jobs: Broker) -> None:
    (id,) = await bury(jobs, 9, key="k", headers={"a": "b"})
    before = await jobs.get("jobs", id)
    await jobs.dlq_replay("jobs")
    m = await take(jobs)
    assert (m.id, m.priority, m.key, m.headers, m.enqueued_at) == (id, 9, "k", {"a": "b"}, before.enqueued_at)


async def test_replay_restarts_the_ttl(world: World, jobs: Broker) -> None:
    (id,) = await bury(jobs, 1, ttl=1)
    await world.advance(3)
    await jobs.dlq_replay("jobs")
    await world.advance(0.7)
    assert (await jobs.get("jobs", id)).state == "ready"
    await world.advance(0.7)
    assert (await jobs.get("jobs", id)).state == "expired"


async def test_replay_of_a_dead_letter_skips_dedup(jobs: Broker) -> None:
    first = await jobs.enqueue("jobs", b"x", idempotency_key="k", producer_id="p", epoch=1, seq=1)
    await (await take(jobs)).bury()
    await jobs.dlq_replay("jobs")
    assert (await take(jobs)).id == first.id
    assert (await jobs.enqueue("jobs", b"x", idempotency_key="k")).duplicate, "and is still remembered"


async def test_replay_of_some_ids_leaves_the_others(jobs: Broker) -> None:
    ids = await bury(jobs, 1, 2, 3)
    ulid = (await jobs.get("jobs", ids[2])).message_id
    assert await jobs.dlq_replay("jobs", ids=[ids[0], ulid, 12345]) == 2
    assert [dead.id for dead in await jobs.dlq_list("jobs")] == [ids[1]]
    assert await jobs.dlq_replay("jobs", ids=[]) == 0


async def test_replay_of_a_live_message_does_nothing(jobs: Broker) -> None:
    ids = await put(jobs, 1, 2)
    await take(jobs)
    before = await picture(jobs)
    assert await jobs.dlq_replay("jobs", ids=ids) == 0
    assert await picture(jobs) == before


@pytest.mark.usefixtures("fake_time")
async def test_replay_with_a_rate_spreads_them(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(partitions=2)
    await bury(hl, *range(10))
    assert await hl.dlq_replay("jobs", rate=2.0) == 10
    assert (await hl.stats("jobs")).delayed == 9
    counts = []
    for _ in range(5):
        counts.append(len(await drain(hl)))
        await world.advance(1.0)
    assert counts == [1, 2, 2, 2, 2]
    await world.advance(0.2)
    assert len(await drain(hl)) == 1


async def test_replayed_message_dies_again_with_its_new_reason(jobs: Broker) -> None:
    (id,) = await bury(jobs, 1, reason="first")
    await jobs.dlq_replay("jobs")
    assert (await jobs.get("jobs", id)).reason is None
    await (await take(jobs)).bury("second")
    assert [dead.reason for dead in await jobs.dlq_list("jobs")] == ["second"]


# -- filters -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_time")
async def test_filter_picks_by_reason_priority_key_and_time(world: World, jobs: Broker) -> None:
    start = world.now()
    (a,) = await bury(jobs, 1, reason="Timeout of upstream", key="x")
    await world.advance(10)
    (b,) = await bury(jobs, 5, reason="bad JSON", key="y")
    await world.advance(10)
    (c,) = await bury(jobs, 9, reason="timeout", key="x")

    async def found(**where: Any) -> list[int]:
        return [dead.id for dead in await jobs.dlq_list("jobs", where=DlqFilter(**where))]

    assert await found() == [a, b, c]
    assert await found(reason="TIMEOUT") == [a, c]
    assert await found(priority_min=5) == [b, c]
    assert await found(priority_max=5) == [a, b]
    assert await found(key="x") == [a, c]
    assert await found(died_after=start + timedelta(seconds=5)) == [b, c]
    assert await found(died_before=start + timedelta(seconds=15)) == [a, b]
    assert await found(reason="timeout", priority_min=2) == [c]
    assert await found(reason="nothing") == []
    assert [d.id for d in await jobs.dlq_list("jobs", 1, where=DlqFilter(reason="timeout"))] == [a]


async def test_replay_and_delete_take_filters_and_ids_together(jobs: Broker) -> None:
    ids = await bury(jobs, 1, 2, 3, 4)
    assert await jobs.dlq_replay("jobs", ids[:3], where=DlqFilter(priority_min=2, priority_max=2)) == 1
    assert await jobs.dlq_delete("jobs", where=DlqFilter(priority_min=4)) == 1
    assert [dead.id for dead in await jobs.dlq_list("jobs")] == [ids[0], ids[2]]


@pytest.mark.parametrize(
    "where",
    [
        {"reason": "x"}, "reason", DlqFilter(died_after=datetime(2030, 1, 1)),
        DlqFilter(died_before=datetime(2030, 1, 1)), DlqFilter(died_after=5), DlqFilter(reason=5),
        DlqFilter(priority_min="1"), DlqFilter(priority_max=1.5), DlqFilter(key=7),
    ],
)  # fmt: skip
async def test_bad_filter_is_refused_and_changes_nothing(jobs: Broker, where: Any) -> None:
    await bury(jobs, 1, key="k")
    before = await picture(jobs)
    for call in (jobs.dlq_list, jobs.dlq_replay, jobs.dlq_delete):
        with pytest.raises(heapline.BadRequest):
            await call("jobs", where=where)
    assert await picture(jobs) == before


@pytest.mark.parametrize("rate", [0, -1, "1", float("nan"), 1e9, True])
async def test_bad_rate_is_refused(jobs: Broker, rate: Any) -> None:
    await bury(jobs, 1)
    with pytest.raises(heapline.BadRequest):
        await jobs.dlq_replay("jobs", rate=rate)
    assert (await jobs.stats("jobs")).dead == 1


@pytest.mark.parametrize("ids", [5, "01ARZ3NDEKTSV4RRFFQ69G5FAV", b"x"])
async def test_ids_must_be_a_list(jobs: Broker, ids: Any) -> None:
    for call in (jobs.dlq_replay, jobs.dlq_delete):
        with pytest.raises(heapline.BadRequest):
            await call("jobs", ids)


# -- delete ------------------------------------------------------------------------------------------------------------


async def test_deleted_dead_letters_are_not_listed(jobs: Broker) -> None:
    ids = await bury(jobs, 1, 2, 3)
    assert await jobs.dlq_delete("jobs", ids=[ids[0], ids[1], ids[0]]) == 2
    assert await jobs.dlq_delete("jobs", ids=[ids[0]]) == 0
    assert (await jobs.get("jobs", ids[0])).state == "deleted"
    assert [dead.id for dead in await jobs.dlq_list("jobs")] == [ids[2]]


async def test_delete_requires_ids_or_a_filter(jobs: Broker) -> None:
    await bury(jobs, 1, 2)
    with pytest.raises(heapline.BadRequest, match="say which"):
        await jobs.dlq_delete("jobs")
    assert await jobs.dlq_delete("jobs", where=DlqFilter()) == 2


async def test_more_dead_letters_than_one_slice(jobs: Broker) -> None:
    await put(jobs, *range(2500))
    await jobs.bury(await jobs.pop("jobs", 2500))
    assert len(await jobs.dlq_list("jobs", 5000)) == 2500
    assert await jobs.dlq_replay("jobs", where=DlqFilter(priority_max=1999)) == 2000
    assert await jobs.dlq_delete("jobs", where=DlqFilter()) == 500
    assert (await jobs.stats("jobs")).ready == 2000
