"""A server that disappears silently: no reset, no end. Calls end in time, and the next server is used.

The proxy swallows what comes from either side. Only the client's own pings can distinguish it from a slow server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import heapline
from heapline.client.tasks import Worker
from heapline.client.transports import transport
from heapline.contract.errors import DeadlineExceeded, LeaseLost
from heapline.wire.frames import peer
from tests.integration.proxy import Proxy
from tests.integration.server_rig import Rig, until


class Silence:
    """A server behind two proxies, the first of which falls silent."""

    def __init__(self, rig: Rig, first: Proxy, second: Proxy) -> None:
        self.rig, self.first = rig, first
        self.endpoints = [first.target, second.target]


@pytest.fixture
async def silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Silence]:
    monkeypatch.setattr(peer, "SILENCE_SECONDS", 0.5)
    async with Rig(tmp_path) as rig, Proxy(rig.target) as first, Proxy(rig.target) as second:
        await rig.behind.create_topic("jobs", **rig.small)
        yield Silence(rig, first, second)


async def test_every_call_continues_at_the_next_server_and_counts_once(silence: Silence) -> None:
    async with heapline.connect(endpoints=silence.endpoints, deadline=40) as hl:
        await hl.enqueue("jobs", b"before")
        (message,) = await hl.pop("jobs", visibility=600)
        silence.first.vanish()
        enqueuing = [asyncio.ensure_future(hl.enqueue("jobs", b"%d" % i)) for i in range(20)]
        await asyncio.gather(message.ack(), hl.stats("jobs"), *enqueuing)
        stats = await silence.rig.behind.stats("jobs")
        assert (stats.ready, stats.leased) == (20, 0)
        assert len({call.result().id for call in enqueuing}) == 20


async def test_call_to_the_only_server_ends_at_its_deadline_with_the_cause(
    silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "SILENCE_SECONDS", 600.0)
    monkeypatch.setattr(transport, "RETURN_SECONDS", 0.1)
    async with heapline.connect(silence.first.target, deadline=40) as hl:
        await hl.enqueue("jobs", b"before")
        silence.first.vanish()
        for call in (hl.within(0.2).enqueue("jobs", b"x"), hl.within(0.2).pop("jobs"), hl.within(0.2).purge("jobs")):
            with pytest.raises(DeadlineExceeded, match=r"failed after 0\.2 s: it was sent .* may have been executed"):
                await asyncio.wait_for(call, 20)


async def test_consumer_continues_at_the_next_server_and_lost_messages_return(
    silence: Silence,
) -> None:
    async with heapline.connect(endpoints=silence.endpoints) as hl, hl.consume("jobs", visibility=30) as messages:
        waiting = asyncio.ensure_future(anext(messages))

        async def is_asked_for() -> bool:
            return messages.prefetcher._granted == 2 and silence.rig.server.gate.requests_open >= 1

        await until(is_asked_for)
        silence.first.vanish()
        ids = {(await silence.rig.behind.enqueue("jobs", b"%d" % i)).id for i in range(3)}

        async def are_sent() -> bool:  # to a server that receives nothing
            return (await silence.rig.behind.stats("jobs")).leased_total >= 2

        await until(are_sent)
        passing = asyncio.ensure_future(_let_time_pass(silence.rig))
        acked: set[int] = set()
        async with asyncio.timeout(60):
            while acked != ids:
                message = await waiting
                waiting = asyncio.ensure_future(anext(messages))
                with contextlib.suppress(LeaseLost):  # virtual time
                    await message.ack()
                    acked.add(message.id)
        passing.cancel()
    assert await asyncio.gather(waiting, return_exceptions=True)  # the close ended it
    stats = await silence.rig.behind.stats("jobs")
    assert (stats.ready, stats.delayed, stats.leased) == (0, 0, 0)


async def _let_time_pass(rig: Rig) -> None:
    while True:
        await asyncio.sleep(0.5)
        rig.clock.advance(10)


async def test_worker_continues_when_the_server_answers_again(
    silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEAPLINE_URL", ",".join(silence.endpoints))
    app = heapline.App()
    done: list[int] = []

    @app.task(topic="jobs")
    async def work(n: int) -> None:
        done.append(n)

    worker = app.worker(visibility=5)
    async with app:
        running = asyncio.ensure_future(worker.run())
        await work.enqueue(1)

        async def has(count: int) -> bool:
            return worker.totals.done == count

        await until(lambda: has(1))
        silence.first.vanish()
        await work.enqueue(2)
        await asyncio.wait_for(_reached(worker, 2), 60)
        worker.stop()
        await asyncio.wait_for(running, 60)
    assert set(done) == {1, 2}
    stats = await silence.rig.behind.stats("jobs")
    assert (stats.ready, stats.delayed, stats.leased) == (0, 0, 0)


async def _reached(worker: Worker, done: int) -> None:
    while worker.totals.done < done:  # noqa: ASYNC110 - other tasks send no event
        await asyncio.sleep(0.02)
