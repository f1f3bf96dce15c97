"""A fast replay against a naive model: every live message that became due, once, in its current state."""

from __future__ import annotations

import random

import pytest

import heapline
from heapline.contract.stream import StreamMessage
from heapline.engine.replays import scan
from heapline.testing import HandClock, MemoryBroker
from tests.unit.engine.replays.test_replay_jobs import ended

TOPIC = {"segment_bytes": 1 << 20, "max_payload_bytes": 64 << 10, "partitions": 2, "max_retries_default": 1}


async def do_something(hl: MemoryBroker, clock: HandClock, draw: random.Random, number: int) -> None:
    standing = hl.standing("jobs")
    some = draw.choice(standing).id if standing else 0
    what = draw.choice(["put", "put", "delayed", "cancel", "later", "sooner", "urgent", "ack", "nack", "bury", "revive",
                        "pass", "purge" if draw.random() < 0.1 else "put"])  # fmt: skip
    try:
        if what == "put":
            await hl.enqueue("jobs", b"%d" % number, priority=number % 7, key=str(number), ttl=draw.choice([None, 60]))
        elif what == "delayed":
            await hl.enqueue("jobs", b"%d" % number, delay=draw.choice([5, 50]), key=str(number))
        elif what == "cancel":
            await hl.cancel("jobs", some)
        elif what == "later":
            await hl.reschedule("jobs", some, delay=draw.choice([3, 40]))
        elif what == "sooner":
            await hl.reschedule("jobs", some, delay=0)
        elif what == "urgent":
            await hl.reschedule("jobs", some, priority=-number)
        elif what == "revive":
            await hl.dlq_replay("jobs", rate=draw.choice([None, 0.5]))
        elif what == "pass":
            clock.advance(4)
            for _ in range(2):
                await hl.stats("jobs")
        elif what == "purge":
            await hl.purge("jobs")
        else:
            for message in await hl.pop("jobs", 2, visibility=10):
                await getattr(message, what)()
    except (heapline.MessageNotFound, heapline.MessageLeased):
        pass


async def all_rows(hl: MemoryBroker, mode: str) -> list[StreamMessage]:
    return [row async for row in hl.replay("jobs", mode=mode)]  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(8))
async def test_fast_replay_returns_live_messages_once_in_first_row_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan.MergedScan.read, "__defaults__", (9, 1 << 20))
    clock, draw = HandClock(), random.Random(seed)
    hl = MemoryBroker(clock)
    await hl.create_topic("jobs", **TOPIC)
    for number in range(120):
        await do_something(hl, clock, draw, number)
    living = {info.id: info for info in hl.standing("jobs")}
    expected = list(dict.fromkeys(row.id for row in await all_rows(hl, "all") if row.id in living))
    fast = await all_rows(hl, "fast")
    assert [row.id for row in fast] == expected
    assert {row.id: row.priority for row in fast} == {id: living[id].priority for id in expected}
    assert expected, "the test would prove nothing"


async def test_fast_replay_into_a_topic_keeps_current_due_times() -> None:
    clock = HandClock()
    hl = MemoryBroker(clock)
    for topic in ("jobs", "other"):
        await hl.create_topic(topic, segment_bytes=1 << 20, max_payload_bytes=1 << 16)
    first = await hl.enqueue("jobs", b"moved")
    await hl.enqueue("jobs", b"ready")
    await hl.reschedule("jobs", first.id, delay=100, priority=5)
    moved = await hl.get("jobs", first.id)
    await hl.start_replay("r", "jobs", into="other", mode="fast", keep_due=True)
    await ended(hl, "r")
    found = {info.payload: info for info in hl.standing("other")}
    assert (found[b"ready"].state, found[b"moved"].state) == ("ready", "delayed")
    assert (found[b"moved"].due_at, found[b"moved"].priority) == (moved.due_at, 5)
