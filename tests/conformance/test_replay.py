"""Replays of past messages: to an iterating reader, and into a topic."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.stream import ReplayFilter, ReplayInfo, StreamMessage
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, drain, put, take

pytestmark = pytest.mark.feature("replay")


async def read(hl: Any, topic: str = "jobs", **options: Any) -> list[StreamMessage]:
    return [row async for row in hl.replay(topic, **options)]


async def payloads(hl: Any, **options: Any) -> list[bytes]:
    return [row.payload for row in await read(hl, **options)]


async def ended(hl: Any, name: str = "again") -> ReplayInfo:
    async with asyncio.timeout(30):
        while (info := await hl.get_replay(name)).state == "running":  # noqa: ASYNC110 - nothing tells the end of it
            await asyncio.sleep(0.001)
    return info


@pytest.fixture
async def both(topic: MakeTopic, broker: Broker) -> Any:
    """A broker with the topics "jobs" and "other"."""
    await topic()
    await topic("other")
    return broker


# -- to a subscriber ---------------------------------------------------------------------------------------------------


async def test_replay_rows_contain_every_field_of_a_message(world: World, topic: MakeTopic) -> None:
    await topic(fairness="keys")
    hl = world.broker
    sent = await hl.enqueue("jobs", b"\x00a", priority=-5, key="k", headers={"h": "v"}, fairness_key="f")
    bare = await hl.enqueue("jobs", b"")
    first, second = await read(hl)
    assert (first.id, first.payload, first.priority, first.key) == (sent.id, b"\x00a", -5, "k")
    assert (first.headers, first.fairness_key, first.attempts, first.topic) == ({"h": "v"}, "f", 1, "jobs")
    assert abs(first.enqueued_at - world.now()) < timedelta(seconds=5)
    assert (second.id, second.payload, second.key, second.headers, second.fairness_key) == (
        bare.id,
        b"",
        None,
        {},
        None,
    )
    assert (first.partition, second.partition) == (0, 0)
    assert first.offset < second.offset
    await first.ack()  # it belongs to no group, so this has no effect


async def test_workers_do_not_change_the_stream(world: World, jobs: Any) -> None:
    await put(jobs, 1, 2, 3)
    await put(jobs, 4, delay=5)
    await world.advance(6)
    before = await payloads(jobs)
    assert before == [b"1", b"2", b"3", b"4"]
    await (await take(jobs)).ack()
    await (await take(jobs)).nack(backoff=1)
    await (await take(jobs)).bury()
    await world.advance(2)
    assert await payloads(jobs) == before


async def test_batches_are_columns_of_one_partition(topic: MakeTopic, broker: Any) -> None:
    await topic(partitions=2)
    for i in range(20):
        await broker.enqueue("jobs", b"%d" % i, key=str(i))
    rows = await read(broker)
    batches = [batch async for batch in broker.replay("jobs", batches=True)]
    assert [m.payload for batch in batches for m in batch.messages()] == [row.payload for row in rows]
    assert [b"%d" % i for i in range(20)] == [row.payload for row in rows]
    assert {batch.partition for batch in batches} == {0, 1}


async def test_replay_between_offsets(jobs: Any, bare_log: None) -> None:
    await put(jobs, *range(10))
    assert await payloads(jobs, start=3, end=6) == [b"3", b"4", b"5"]
    assert await payloads(jobs, start={0: 8}) == [b"8", b"9"]
    assert await payloads(jobs, end={0: 1}) == [b"0"]
    assert await payloads(jobs, start="latest") == []
    assert await payloads(jobs, partitions=[0], start=9) == [b"9"]


async def test_replay_between_times(world: World, jobs: Any, fake_time: None) -> None:
    moments = []
    for priority in range(6):
        moments.append(world.now())
        await put(jobs, priority)
        await world.advance(10)
    assert await payloads(jobs, start=moments[2], end=moments[4]) == [b"2", b"3"]
    assert await payloads(jobs, start=moments[4] + timedelta(milliseconds=1)) == [b"5"]
    assert await payloads(jobs, end=moments[0] - timedelta(days=1)) == []


async def test_fast_replay_returns_live_messages_in_their_current_state(jobs: Any) -> None:
    ids = await put(jobs, *range(6))
    await jobs.cancel("jobs", ids[0])
    await jobs.reschedule("jobs", ids[5], priority=-9)
    await jobs.reschedule("jobs", ids[4], delay=60)
    urgent, done = await jobs.pop("jobs", 2)
    await done.ack()
    rows = await read(jobs, mode="fast")
    assert [(row.id, row.priority) for row in rows] == [(ids[2], 2), (ids[3], 3), (ids[4], 4), (ids[5], -9)]
    assert urgent.id == ids[5], "leased messages are still live"


async def test_replay_filters_rows(jobs: Any) -> None:
    await jobs.enqueue("jobs", b"a", priority=1, key="k", headers={"h": "1"})
    await jobs.enqueue("jobs", b"b", priority=2)
    assert await payloads(jobs, where=ReplayFilter(key="k", headers={"h": "1"}, priority_max=1)) == [b"a"]
    assert await payloads(jobs, where=ReplayFilter(priority_min=2)) == [b"b"]
    assert await payloads(jobs, where=ReplayFilter(headers={"h": "2"})) == []


async def test_replay_at_a_rate_returns_every_row(jobs: Any) -> None:
    await put(jobs, *range(30))
    reader = asyncio.ensure_future(payloads(jobs, rate=1e6))
    assert await reader == [b"%d" % p for p in range(30)]


async def test_checkpoint_continues_where_its_reader_stopped(world: World, jobs: Any) -> None:
    await put(jobs, *range(10))
    rows, seen = jobs.replay("jobs", checkpoint="mine"), []
    async for row in rows:
        seen.append(row.payload)
        if len(seen) == 4:
            break
    await rows.aclose()
    hl: Any = await world.reopen()
    again = await payloads(hl, checkpoint="mine")
    assert again == [b"%d" % p for p in range(3, 10)], "the row at which it stopped was not finished"
    await put(hl, 10)
    assert await payloads(hl, checkpoint="mine") == [b"10"]
    assert await payloads(hl, checkpoint="mine") == []
    assert len(await payloads(hl, checkpoint="another")) == 11


async def test_replay_ends_after_count_rows_and_the_next_one_continues(world: World, jobs: Any) -> None:
    await put(jobs, *range(10))
    options: dict[str, Any] = {"where": ReplayFilter(priority_min=2), "checkpoint": "mine", "count": 3}
    assert await payloads(jobs, **options) == [b"2", b"3", b"4"]
    hl: Any = await world.reopen()
    assert await payloads(hl, **options) == [b"5", b"6", b"7"]
    assert await payloads(hl, **options) == [b"8", b"9"]
    assert await payloads(hl, **options) == []
    assert await payloads(hl, count=1) == [b"0"]


async def test_reading_may_stop_anywhere(jobs: Any) -> None:
    await put(jobs, *range(40))
    async for row in jobs.replay("jobs"):
        assert row.payload == b"0"
        break
    assert (await take(jobs)).priority == 0


@pytest.mark.parametrize(
    "options", [{"start": -1}, {"start": "first"}, {"start": 1.5}, {"start": {5: 0}}, {"partitions": [3]},
                {"start": datetime(2030, 1, 1)},
                {"partitions": []}, {"mode": "slow"}, {"rate": 0}, {"count": 0}, {"where": {}},
                {"checkpoint": "a/b"}], ids=str,
)  # fmt: skip
async def test_invalid_replay_request_is_rejected(jobs: Any, options: dict[str, Any]) -> None:
    with pytest.raises((heapline.BadRequest, heapline.BadName)):
        await read(jobs, **options)


async def test_replay_of_an_unknown_topic_raises_not_found(broker: Any) -> None:
    with pytest.raises(heapline.TopicNotFound):
        await read(broker)
    with pytest.raises(heapline.TopicNotFound):
        await broker.start_replay("again", "jobs")


# -- into a topic ------------------------------------------------------------------------------------------------------


async def test_replay_into_a_topic_enqueues_each_row_once_with_its_origin(both: Any) -> None:
    ids = await put(both, *range(25), headers={"h": "v"})
    started = await both.start_replay("again", "jobs", into="other")
    assert (started.name, started.source, started.into, started.mode) == ("again", "jobs", "other", "all")
    info = await ended(both)
    assert (info.state, info.replayed, info.skipped, info.error) == ("done", 25, 0, None)
    assert info.positions == info.ends
    assert info.done_share == 1.0
    message = await take(both, "other")
    assert message.headers["h"] == "v"
    assert message.headers["heapline-replay"] == "again"
    assert message.headers["heapline-replayed-from"].startswith("jobs/0/")
    assert message.headers["heapline-replayed-id"] == (await both.get("jobs", ids[0])).message_id
    await message.ack()
    assert await drain(both, "other") == [b"%d" % p for p in range(1, 25)]
    assert len(await drain(both)) == 25


async def test_replay_into_a_topic_is_done_after_count_messages(both: Any) -> None:
    await put(both, *range(10))
    options: dict[str, Any] = {"into": "other", "where": ReplayFilter(priority_min=2), "count": 3}
    await both.start_replay("again", "jobs", **options)
    info = await ended(both)
    assert (info.state, info.replayed, info.count, info.done_share) == ("done", 3, 3, 1.0)
    with pytest.raises(heapline.ReplayExists):
        await both.start_replay("again", "jobs", **(options | {"count": 4}))
    assert await drain(both, "other") == [b"2", b"3", b"4"]
    await both.start_replay("more", "jobs", into="other", count=100)
    assert (await ended(both, "more")).replayed == 10


async def test_replay_into_its_own_topic_ends(jobs: Any) -> None:
    await put(jobs, 1, 2)
    await jobs.start_replay("again", "jobs")
    assert (await ended(jobs)).replayed == 2
    assert await drain(jobs) == [b"1", b"1", b"2", b"2"]


async def test_replay_into_a_topic_replaces_priority_and_due_time(world: World, both: Any) -> None:
    await put(both, 1, 2)
    await both.start_replay("again", "jobs", into="other", priority=7, delay=60)
    await ended(both)
    assert await both.pop("other") == []
    await world.advance(61)
    assert [m.priority for m in await both.pop("other", 5)] == [7, 7]
    moment = world.now() + timedelta(hours=1)
    await both.start_replay("later", "jobs", into="other", deliver_at=moment.astimezone(UTC))
    await ended(both, "later")
    assert (await both.stats("other")).delayed == 2


async def test_fast_replay_into_a_topic_filters_and_keeps_due_times(both: Any) -> None:
    ids = await put(both, *range(5))
    await both.cancel("jobs", ids[1])
    await both.reschedule("jobs", ids[2], delay=60)
    where = ReplayFilter(priority_max=3)
    await both.start_replay("again", "jobs", into="other", mode="fast", where=where, keep_due=True)
    info = await ended(both)
    assert (info.replayed, info.skipped) == (3, 2)
    stats = await both.stats("other")
    assert (stats.ready, stats.delayed) == (2, 1)


async def test_replay_name_belongs_to_one_request(world: World, both: Any) -> None:
    await put(both, 1)
    options: dict[str, Any] = {"into": "other", "start": {0: 0}, "where": ReplayFilter(priority_min=0), "rate": 1000.0}
    await both.start_replay("again", "jobs", **options)
    info = await ended(both)
    assert await both.start_replay("again", "jobs", **options) == info
    with pytest.raises(heapline.ReplayExists):
        await both.start_replay("again", "jobs", **{**options, "rate": 999.0})
    with pytest.raises(heapline.ReplayNotFound):
        await both.get_replay("another")
    hl: Any = await world.reopen()
    assert await hl.list_replays() == [info]
    assert await hl.get_replay("again") == info
    assert len(await drain(hl, "other")) == 1


async def test_waiting_replay_reports_its_reason_and_can_be_cancelled(topic: MakeTopic, broker: Any) -> None:
    await topic()
    await topic("other", max_backlog=2)
    await put(broker, *range(5))
    await broker.start_replay("again", "jobs", into="other")
    async with asyncio.timeout(30):
        while (info := await broker.get_replay("again")).error is None or info.replayed < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert "max_backlog" in info.error
    info = await broker.cancel_replay("again")
    assert (info.state, info.replayed) == ("cancelled", 2)
    assert await broker.cancel_replay("again") == info
    with pytest.raises(heapline.ReplayNotFound):
        await broker.cancel_replay("another")


async def test_running_replay_continues_after_a_restart(world: World, topic: MakeTopic) -> None:
    await topic()
    await topic("other", max_backlog=2)
    hl: Any = world.broker
    await put(hl, *range(6))
    await hl.start_replay("again", "jobs", into="other")
    hl = await world.reopen()
    got: list[bytes] = []
    async with asyncio.timeout(30):
        while len(got) < 6:
            got += await drain(hl, "other")
            await asyncio.sleep(0.001)
    info = await ended(hl)
    assert (info.state, info.replayed) == ("done", 6)
    assert got == [b"%d" % p for p in range(6)]


async def test_deleted_target_fails_the_replay(topic: MakeTopic, broker: Any) -> None:
    await topic()
    await topic("other", max_backlog=1)
    await put(broker, *range(4))
    await broker.start_replay("again", "jobs", into="other")
    await broker.delete_topic("other")
    info = await ended(broker)
    assert info.state == "failed"
    assert "other" in info.error


@pytest.mark.parametrize(
    "options", [{"priority": "1"}, {"delay": -1}, {"delay": 1, "keep_due": True}, {"keep_due": 1}, {"rate": -1},
                {"deliver_at": datetime(2030, 1, 1)}, {"start": "now"}, {"into": "no topic"},
                {"name": "a b"}, {"name": "x" * 128}, {"mode": 1}], ids=str,
)  # fmt: skip
async def test_invalid_replay_request_starts_nothing(jobs: Any, options: dict[str, Any]) -> None:
    with pytest.raises((heapline.BadRequest, heapline.BadName)):
        await jobs.start_replay(**{"name": "again", "topic": "jobs", **options})
    assert await jobs.list_replays() == []
