"""A real server process is killed with SIGKILL under load: every acknowledged call is kept."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from heapline.client.transports.native import NativeBroker
from heapline.contract.errors import HeaplineError
from heapline.contract.message import Outgoing
from tests.integration.server_process import Process

pytestmark = pytest.mark.slow
BATCH = 20
LEASE = 1.0  # seconds that the dead server's consumers keep their leases


class Ledger:
    """A client's record: what it requested, and what was answered."""

    def __init__(self) -> None:
        self.asked: set[bytes] = set()
        self.enqueued: set[bytes] = set()
        self.ack_asked: set[bytes] = set()
        self.acked: set[bytes] = set()


async def produce(broker: NativeBroker, ledger: Ledger, name: int) -> None:
    number = 0
    while True:
        payloads = [b"%d-%d" % (name, number + i) for i in range(BATCH)]
        number += BATCH
        ledger.asked.update(payloads)
        await broker.enqueue_batch("jobs", [Outgoing(p, priority=len(p)) for p in payloads])
        ledger.enqueued.update(payloads)


async def consume(broker: NativeBroker, ledger: Ledger) -> None:
    while True:
        messages = await broker.pop("jobs", BATCH // 2, wait=1.0, visibility=LEASE)
        payloads = [m.payload for m in messages]
        ledger.ack_asked.update(payloads)
        await broker.ack(messages)
        ledger.acked.update(payloads)


async def drain(broker: NativeBroker) -> list[bytes]:
    found: list[bytes] = []
    while True:
        messages = await broker.pop("jobs", 1000, wait=0.2)
        if not messages:
            stats = await broker.stats("jobs")
            if not (stats.ready or stats.leased or stats.delayed):
                return found
        await broker.ack(messages)
        found += [m.payload for m in messages]


async def test_killed_server_keeps_every_acknowledged_call(tmp_path: Path) -> None:
    ledger = Ledger()
    async with Process(tmp_path / "data", "--insecure-everybody") as server, NativeBroker(server.target) as broker:
        await broker.create_topic("jobs", segment_bytes=1 << 20, backoff={"base": 0.0})
        work = [produce(broker, ledger, n) for n in range(3)] + [consume(broker, ledger) for _ in range(3)]
        tasks = [asyncio.ensure_future(w) for w in work]
        async with asyncio.timeout(30):
            while len(ledger.acked) < 500:  # noqa: ASYNC110 - whenever it is, it is in the midst of it
                await asyncio.sleep(0.01)
        await server.kill()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert all(isinstance(end, HeaplineError) for end in ends), ends
    async with Process(tmp_path / "data", "--insecure-everybody") as server, NativeBroker(server.target) as broker:
        async with asyncio.timeout(60):
            found = await drain(broker)
        left = set(found)
    assert len(found) == len(left), "a message was delivered after its ack"
    assert ledger.enqueued - ledger.ack_asked <= left, "an answered enqueue was lost"
    assert not ledger.acked & left, "an answered ack was forgotten"
    assert left <= ledger.asked


async def test_terminated_server_finishes_and_leaves_cleanly(tmp_path: Path) -> None:
    async with Process(tmp_path / "data", "--insecure-everybody") as server, NativeBroker(server.target) as broker:
        await broker.create_topic("jobs", segment_bytes=1 << 20)
        await broker.enqueue("jobs", b"x")
        waiting = asyncio.ensure_future(broker.pop("jobs", 1, wait=0, visibility=60))
        assert [m.payload for m in await waiting] == [b"x"]
        idle = asyncio.ensure_future(broker.pop("jobs", wait=60))
        await broker.stats("jobs")
        assert await server.terminate() == 0
        with contextlib.suppress(HeaplineError):
            assert await idle == []
        errors = server.logged()
        assert b"stopped" in errors
        assert b"Traceback" not in errors
