"""The log as data: offsets and decoded columns of all events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import heapline
from heapline.contract.broker import Broker
from heapline.contract.message import LogFrame, Outgoing
from tests.conformance.conftest import MakeTopic
from tests.conformance.worlds import World, put, take

pytestmark = pytest.mark.feature("log")


async def read(hl: Broker, partition: int = 0, **options: Any) -> list[LogFrame]:
    return [frame async for frame in hl.read_log("jobs", partition, **options)]


async def test_new_topic_has_an_empty_log(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=3)
    assert await broker.offsets("jobs") == {0: (0, 0), 1: (0, 0), 2: (0, 0)}
    assert await read(broker) == []


async def test_offsets_count_rows_not_events(jobs: Broker, bare_log: None) -> None:
    await put(jobs, *range(5))
    assert await jobs.offsets("jobs") == {0: (0, 5)}
    await jobs.ack(await jobs.pop("jobs", 3))
    assert await jobs.offsets("jobs") == {0: (0, 11)}
    assert (await jobs.stats("jobs")).partitions[0].offset == 11


@pytest.mark.usefixtures("fake_time")
async def test_timers_without_streams_take_one_row_however_many_fire(
    topic: MakeTopic, broker: Broker, world: World
) -> None:
    await topic(streams=False)
    await broker.enqueue_batch("jobs", [Outgoing(b"x", delay=5.0)] * 4)
    await world.advance(6)
    assert len(await broker.pop("jobs", 10)) == 4
    events = [event for frame in await read(broker) for event in frame.events]
    (fired,) = [event for event in events if event.kind == "fired"]
    assert (fired.row_count, fired.columns["count"]) == (1, 4)
    (leased,) = [event for event in events if event.kind == "leased"]
    start = fired.offset + 1
    assert (leased.offset, leased.columns["tokens"].tolist()) == (start, list(range(start, start + 4)))
    assert (await broker.offsets("jobs"))[0] == (0, start + 4)


async def test_frames_are_dense_and_end_where_offsets_say(topic: MakeTopic, broker: Broker) -> None:
    await topic(partitions=2)
    for i in range(30):
        await broker.enqueue("jobs", b"x", key=f"k{i}")
    await broker.ack(await broker.pop("jobs", 10))
    for partition, (start, end) in (await broker.offsets("jobs")).items():
        at = start
        for frame in await read(broker, partition):
            assert (frame.topic, frame.partition, frame.offset) == ("jobs", partition, at)
            for event in frame.events:
                assert event.offset == at
                at += event.row_count
            assert at == frame.offset + frame.row_count
        assert at == end


async def test_enqueued_rows_carry_the_messages(world: World, jobs: Broker, bare_log: None) -> None:
    results = await jobs.enqueue_batch(
        "jobs", [Outgoing(b"a", priority=5, ttl=9), Outgoing(b"bb", priority=-5, delay=60, max_retries=2)]
    )
    (frame,) = await read(jobs)
    (event,) = frame.events
    assert (event.kind, event.row_count, event.payloads) == ("enqueued", 2, [b"a", b"bb"])
    assert event.columns["ids"].tolist() == [r.id for r in results]
    assert event.columns["priority"].tolist() == [5, -5]
    assert event.columns["payload_len"].tolist() == [1, 2]
    assert event.columns["ttl_ms"].tolist() == [9000, 0]
    due = event.columns["due"].tolist()
    assert due[0] == 0
    assert due[1] - event.columns["enqueued_at"][1] >= 60_000
    now = world.now().timestamp() * 1000
    assert abs(frame.time_ms - now) < 5000
    assert abs(frame.wall_ms - now) < 5000


async def test_log_contains_every_kind_of_event(world: World, topic: MakeTopic) -> None:
    hl = world.broker
    await topic(backoff=heapline.Backoff(base=0))
    await hl.open_producer("jobs", "p")
    ids = await put(hl, *range(8))
    await put(hl, 8, delay=1)
    await put(hl, 9, ttl=1)
    messages = await hl.pop("jobs", 6, visibility=2, holder="w")
    await messages[0].ack()
    await messages[1].nack(backoff=0, reason="r")
    await messages[2].release()
    await messages[3].extend(1000)
    await messages[4].bury("b")
    await hl.cancel("jobs", ids[6])
    await hl.reschedule("jobs", ids[7], priority=1)
    await hl.dlq_replay("jobs")
    await world.advance(3)  # the timer fires, the ttl ends, and so does the sixth lease
    await hl.bury(await hl.pop("jobs", 1))
    await hl.dlq_delete("jobs", where=heapline.DlqFilter())
    await hl.pause_topic("jobs")
    await hl.resume_topic("jobs")
    await hl.update_topic("jobs", max_backlog=100)
    await hl.purge("jobs")
    kinds = {event.kind for frame in await read(hl) for event in frame.events}
    assert kinds == {
        "producer_opened", "enqueued", "leased", "acked", "nacked", "released", "extended", "dead_lettered",
        "cancelled", "rescheduled", "replayed", "fired", "expired", "lease_expired", "dead_deleted", "paused",
        "resumed", "config_changed", "purged",
    }  # fmt: skip


async def test_columns_have_one_value_per_row_or_one_for_all(world: World, topic: MakeTopic, bare_log: None) -> None:
    hl = world.broker
    await topic()
    await put(hl, 1, 2, 3, ttl=1)
    a, b, _ = await hl.pop("jobs", 3, holder="w")
    await a.ack()
    await b.nack(backoff=60, reason="r")
    await world.advance(2)
    for frame in await read(hl):
        for event in frame.events:
            assert isinstance(event.columns.get("ids"), np.ndarray)
            for name, column in event.columns.items():
                if isinstance(column, np.ndarray | list):
                    assert len(column) == event.row_count, (event.kind, name)


async def test_log_leases_contain_attempts_holder_and_deadline(jobs: Broker) -> None:
    await put(jobs, 1, 2)
    m = (await jobs.pop("jobs", 2, holder="worker-1"))[0]
    leased = (await read(jobs))[-1].events[-1]
    assert leased.kind == "leased"
    assert leased.columns["attempts"].tolist() == [1, 1]
    assert list(leased.columns["holders"]) == ["worker-1", "worker-1"]
    assert leased.columns["deadlines"].tolist()[0] == round(m.deadline.timestamp() * 1000)


@pytest.mark.parametrize(("start", "end"), [(0, None), (0, 0), (3, 8), (5, 6), (0, 1000), (9, None), (10, None)])
async def test_range_returns_the_frames_that_contain_its_rows(
    jobs: Broker, start: int, end: int | None, bare_log: None
) -> None:
    for p in range(10):
        await put(jobs, p)
    frames = await read(jobs, start=start, end=end)
    rows = [row for frame in frames for row in range(frame.offset, frame.offset + frame.row_count)]
    assert rows == list(range(start, min(10, 10 if end is None else end)))


async def test_reading_a_range_again_returns_the_same_rows(jobs: Broker) -> None:
    await put(jobs, *range(20))
    first = await read(jobs, start=0, end=20)
    await jobs.ack(await jobs.pop("jobs", 20))
    again = await read(jobs, start=0, end=20)
    assert [(f.unit, f.offset, f.row_count, f.events[0].payloads) for f in first] == [
        (f.unit, f.offset, f.row_count, f.events[0].payloads) for f in again
    ]


async def test_log_continues_after_a_restart(world: World, jobs: Broker, bare_log: None) -> None:
    await put(jobs, 1)
    before = await read(jobs)
    hl = await world.reopen()
    assert [f.events[0].payloads for f in await read(hl)] == [f.events[0].payloads for f in before]
    start, end = (await hl.offsets("jobs"))[0]
    assert start == 0
    await put(hl, 2)
    assert (await read(hl, start=end))[-1].events[0].payloads == [b"2"]


@pytest.mark.parametrize(
    "options", [{"partition": 1}, {"partition": -1}, {"partition": "0"}, {"start": -1}, {"start": "0"}, {"end": -1},
                {"end": "9"}, {"start": 1.5}], ids=str,
)  # fmt: skip
async def test_bad_range_is_refused(jobs: Broker, options: dict[str, Any]) -> None:
    with pytest.raises(heapline.BadRequest):
        [frame async for frame in jobs.read_log("jobs", **options)]


async def test_reading_may_stop_anywhere(jobs: Broker) -> None:
    for p in range(40):
        await put(jobs, p)
    async for frame in jobs.read_log("jobs"):
        assert frame.offset == 0
        break
    assert (await take(jobs)).priority == 0
