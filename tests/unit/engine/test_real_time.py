"""The system's own clock, disk and threads: timed events happen automatically and never early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import heapline
from heapline.contract.broker import Broker

LONG = 30.0  # the longest delay allowed for a slow machine


@pytest.fixture
async def hl(tmp_path: Path) -> AsyncIterator[Broker]:
    async with heapline.open(tmp_path / "data", spare_segment_bytes=1 << 20) as broker:
        await broker.create_topic(
            "jobs",
            segment_bytes=1 << 20,
            max_payload_bytes=1000,
            tick=0.01,
            backoff=heapline.Backoff(base=0.02, jitter=0),
        )
        yield broker


@pytest.mark.parametrize("delay", [0.001, 0.0101, 0.0335, 0.07])
async def test_delay_is_never_early(hl: Broker, delay: float) -> None:
    for _ in range(3):
        before = time.monotonic()
        await hl.enqueue("jobs", b"x", delay=delay)
        messages = await hl.pop("jobs", wait=LONG)
        assert time.monotonic() - before >= delay
        await hl.ack(messages)


async def test_deliver_at_is_never_early(hl: Broker) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=0.05)
    await hl.enqueue("jobs", b"x", deliver_at=moment)
    assert len(await hl.pop("jobs", wait=LONG)) == 1
    assert datetime.now(UTC) >= moment


async def test_unacked_lease_is_redelivered_after_its_backoff(hl: Broker) -> None:
    await hl.enqueue("jobs", b"x")
    before = time.monotonic()
    await hl.pop("jobs", visibility=0.03)
    (again,) = await hl.pop("jobs", wait=LONG)
    assert again.attempts == 2
    assert time.monotonic() - before >= 0.05 - 0.002  # its deadline is in whole milliseconds


async def test_message_expires_automatically(hl: Broker) -> None:
    r = await hl.enqueue("jobs", b"x", ttl=0.03)
    async with asyncio.timeout(LONG):
        while (await hl.get("jobs", r.id)).state != "expired":  # noqa: ASYNC110 - nothing tells the end of it
            await asyncio.sleep(0.005)
    assert await hl.pop("jobs") == []


async def test_pause_until_ends_automatically_and_wakes_waiting_pops(hl: Broker) -> None:
    await hl.enqueue("jobs", b"x")
    until = datetime.now(UTC) + timedelta(seconds=0.05)
    await hl.pause_topic("jobs", until=until)
    assert len(await hl.pop("jobs", wait=LONG)) == 1
    assert datetime.now(UTC) >= until


async def test_many_workers_and_producers_lose_and_duplicate_nothing(hl: Broker) -> None:
    done: list[bytes] = []

    async def produce(number: int) -> None:
        producer = heapline.Producer(f"p{number}")
        for i in range(50):
            await hl.enqueue(
                "jobs", b"%d-%d" % (number, i), priority=i, producer=producer, delay=0.01 if i % 5 else None
            )

    async def work() -> None:
        while len(done) < 400:
            for m in await hl.pop("jobs", 7, wait=0.2):
                if m.attempts == 1 and m.priority % 7 == 0:
                    await m.nack(backoff=0.005)
                else:
                    await m.ack()
                    done.append(m.payload)

    async with asyncio.timeout(60):
        await asyncio.gather(*(produce(n) for n in range(8)), *(work() for _ in range(4)))
    assert sorted(done) == sorted(b"%d-%d" % (n, i) for n in range(8) for i in range(50))
