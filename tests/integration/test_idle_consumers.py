"""Many idle consumers: idle streams, and consumers that have credits and do not read.

They cost only the messages they hold, delay no other caller, and leave nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from heapline.contract.errors import Unauthenticated, UnavailableError
from heapline.contract.leases import Pop, messages_of
from heapline.contract.message import Outgoing
from heapline.server.protocols import message_streams
from heapline.wire.protobuf import response_of
from tests.integration.proxy import Proxy
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_process import Process
from tests.integration.server_rig import Keys, Requests, Rig, pop_start, until

STREAMS = 1000
STALLED = 50
CREDITS, SIZE = 40, 20_000
COUNT = 3000  # more than their total credits
LEASE = 8.0  # longer than opening all their streams takes on a slow machine


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path, streams_per_key=2 * STREAMS) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        yield rig


class Crowd:
    """Waiting streams over a few connections, and the messages they got."""

    def __init__(self, clients: list[RawGrpc]) -> None:
        self.got: list[tuple[int, bytes]] = []
        self._streams = [asyncio.create_task(self._follow(clients[i % len(clients)], i)) for i in range(STREAMS)]

    async def _follow(self, client: RawGrpc, number: int) -> None:
        requests = Requests(pop_start(credits=1, holder=f"s{number}"))
        with contextlib.suppress(UnavailableError):
            async for answer in client.calls.stream("PopStream", requests):
                messages = messages_of(client, response_of(Pop).unpack(answer))
                self.got += [(number, m.payload) for m in messages]
                await client.ack(messages)

    async def close(self) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)


def waiting(rig: Rig) -> int:
    """Return the number of pops waiting in the engine."""
    return sum(not call.future.done() for call in rig.behind.topics.runner("jobs").turns.pops)


async def test_of_a_thousand_idle_streams_exactly_one_gets_a_message(rig: Rig) -> None:
    tasks, before = len(asyncio.all_tasks()), rig.server.gate.requests_open
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawGrpc(rig.grpc_target)) for _ in range(4)]
        crowd = Crowd(clients)
        stack.push_async_callback(crowd.close)

        async def all_wait() -> bool:
            await asyncio.sleep(0.1)
            return waiting(rig) == STREAMS == rig.server.gate.requests_open - before

        await until(all_wait)
        for number in range(3):
            await rig.behind.enqueue("jobs", b"%d" % number)

            async def acked(count: int = number + 1) -> bool:
                return (await rig.behind.stats("jobs")).acked_total == count

            await until(acked)
        assert sorted(payload for _, payload in crowd.got) == [b"0", b"1", b"2"], (
            "each was delivered to exactly one stream"
        )
        assert len({number for number, _ in crowd.got}) == 3, "a stream without credits gets nothing"
        assert (await rig.behind.stats("jobs")).leased_total == 3

    async def all_gone() -> bool:
        await asyncio.sleep(0.05)
        return len(asyncio.all_tasks()) <= tasks and not waiting(rig) and rig.server.gate.requests_open == before

    await until(all_gone)
    await rig.behind.enqueue("jobs", b"after")
    assert (await rig.behind.stats("jobs")).ready == 1


async def test_idle_stream_is_woken_and_never_polls(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_streams, "CHECK_EVERY", 0.005)
    pops = 0
    do = rig.behind.do

    def counted(command: Any, *more: Any) -> Any:
        nonlocal pops
        pops += isinstance(command, Pop)
        return do(command, *more)

    monkeypatch.setattr(rig.behind, "do", counted)
    asked = 0

    def is_valid(_: Any) -> bool:
        nonlocal asked
        asked += 1
        return True

    monkeypatch.setattr(rig._guard, "is_valid", is_valid)
    stream = rig.wire.calls.stream("PopStream", Requests(pop_start(credits=1)))
    waiting = asyncio.ensure_future(anext(stream))

    async def asked_often() -> bool:
        return asked > 10

    await until(asked_often)
    assert pops == 1
    await rig.behind.enqueue("jobs", b"x")
    assert [m.payload for m in (await asyncio.wait_for(waiting, 10)).messages.items] == [b"x"]
    await stream.aclose()


async def test_idle_stream_of_a_revoked_key_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_streams, "CHECK_EVERY", 0.01)
    keys = Keys(good="*:produce,consume,admin")
    async with Rig(tmp_path, keys) as rig:
        rig.wire.calls.metadata = (("authorization", "good"),)
        await rig.broker.create_topic("jobs", **rig.small)
        stream = rig.wire.calls.stream("PopStream", Requests(pop_start(credits=1)))
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        keys.revoked.add("good")
        with pytest.raises(Unauthenticated):
            await asyncio.wait_for(waiting, 10)
        await rig.behind.enqueue("jobs", b"x")
        assert await rig.leased() == 0


@pytest.mark.slow
async def test_stalled_consumers_hold_only_their_credits_and_block_no_others(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(Process(tmp_path / "data", "--insecure-everybody"))
        broker = await stack.enter_async_context(RawGrpc(server.grpc_target))
        await broker.create_topic("jobs", segment_bytes=8 << 20, backoff={"base": 0.0})
        alone = max([await rate(broker) for _ in range(2)])
        await fill(broker, COUNT)
        before = server.anonymous_bytes()
        proxies = [await stack.enter_async_context(Proxy(server.grpc_target)) for _ in range(STALLED)]
        for i, proxy in enumerate(proxies):
            await stack.enter_async_context(stalled(proxy, f"s{i}"))
        held = await settled(broker)
        assert 0 < held <= STALLED * CREDITS, "credits hold"
        grown = server.anonymous_bytes() - before
        assert grown < STALLED * CREDITS * SIZE + (16 << 20), f"{grown >> 20} MB for {held} messages of {SIZE} bytes"
        beside = max([await rate(broker) for _ in range(3)])
        assert beside > alone / 5, f"others continue: {beside:.0f} messages/s, alone {alone:.0f}"
        taken = await drain(broker)
        assert taken == COUNT, "messages of stalled consumers are delivered to others when their leases end"
        print(f"{held} held by {STALLED}, {grown >> 20} MB; {alone:.0f} and {beside:.0f} messages/s")


@contextlib.asynccontextmanager
async def stalled(proxy: Proxy, holder: str) -> AsyncIterator[None]:
    """A consumer that has given credits and reads nothing."""
    client = await RawGrpc(proxy.target).__aenter__()
    await client.stats("jobs")
    proxy.stall()
    requests = Requests(pop_start(credits=CREDITS, max_messages=5, visibility=LEASE, holder=holder))
    stream = client.calls.stream("PopStream", requests)
    reading = asyncio.ensure_future(anext(stream))
    try:
        yield
    finally:
        proxy.cut()
        with contextlib.suppress(UnavailableError, asyncio.CancelledError):
            await reading
        await client.close()


async def fill(broker: RawGrpc, count: int) -> None:
    for _ in range(0, count, 50):
        await broker.enqueue_batch("jobs", [Outgoing(b"." * SIZE, priority=5)] * 50)


async def rate(broker: RawGrpc) -> float:
    """Return messages per second of a working client, on messages that precede those of the others."""
    start = time.perf_counter()
    for _ in range(10):
        await broker.enqueue_batch("jobs", [Outgoing(b"mine", priority=0)] * 20)
        messages = await broker.pop("jobs", 20)
        assert {m.payload for m in messages} == {b"mine"}
        await broker.ack(messages)
    return 200 / (time.perf_counter() - start)


async def settled(broker: RawGrpc) -> int:
    last = most = 0
    async with asyncio.timeout(60):
        while (now := (await broker.stats("jobs")).leased) != last or most == 0:
            last, most = now, max(most, now)
            await asyncio.sleep(0.2)
    return most


async def drain(broker: RawGrpc) -> int:
    taken = 0
    async with asyncio.timeout(120):
        while True:
            messages = await broker.pop("jobs", 200, wait=LEASE + 4, max_bytes=8 << 20, visibility=60.0)
            if not messages:
                return taken
            taken += len(messages)
            await broker.ack(messages)
