"""Pops of clients that disconnect, cleanly or not: their leases are returned as soon as possible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from heapline.client.transports.native import NativeBroker
from heapline.contract.errors import UnavailableError
from heapline.contract.leases import Pop
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request
from heapline.wire.frames import peer
from tests.integration.cuttable_client import Cuttable, answered, fill
from tests.integration.proxy import Proxy
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Requests, Rig, pop_start, until


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        yield rig


@pytest.fixture(params=["native", "grpc"])
async def world(rig: Rig, request: pytest.FixtureRequest) -> AsyncIterator[Cuttable]:
    is_native = request.param == "native"
    async with Proxy(rig.target if is_native else rig.grpc_target) as proxy:
        client = NativeBroker(proxy.target) if is_native else RawGrpc(proxy.target)
        async with Cuttable(rig, proxy, client) as world:
            yield world


async def test_waiting_pop_whose_connection_breaks_leases_nothing(world: Cuttable) -> None:
    popping = asyncio.ensure_future(world.client.pop("jobs", wait=60))

    async def waits() -> bool:
        return bool(world.rig.server.dispatcher._waiting)

    await until(waits)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(popping, 20)
    await world.nothing_is_left()
    await fill(world.rig, 1)
    assert await world.counts() == (1, 0)


@pytest.mark.parametrize("wait", [0.0, 60.0])
async def test_pop_whose_answer_was_cut_keeps_its_leases_until_they_end(world: Cuttable, wait: float) -> None:
    """The server cannot know whether the answer has arrived."""
    await fill(world.rig, 3)
    world.proxy.hold()
    popping = asyncio.ensure_future(world.client.pop("jobs", 2, wait=wait, visibility=30.0))
    await answered(world.proxy)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(popping, 20)
    await world.nothing_is_left()
    assert await world.counts() == (1, 2)
    await world.rig.advance(31)
    assert await world.counts() == (1, 0), "they are redelivered after a backoff"
    await world.rig.advance(60)
    assert await world.counts() == (3, 0)


async def test_repeated_named_pop_returns_the_same_leases(world: Cuttable) -> None:
    await fill(world.rig, 5)
    world.proxy.hold()
    popping = asyncio.ensure_future(world.client.pop("jobs", 2, wait=60.0, request_id="r1"))
    await answered(world.proxy)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(popping, 20)
    first = await world.rig.wire.pop("jobs", 2, request_id="r1")
    assert [m.payload[:1] for m in first] == [b"0", b"1"]
    assert await world.counts() == (3, 2)
    await world.rig.wire.ack(first)
    assert await world.counts() == (3, 0)


async def test_pop_cancelled_while_it_waits_ends_on_the_server(world: Cuttable) -> None:
    popping = asyncio.ensure_future(world.client.pop("jobs", wait=60.0))

    async def waits() -> bool:
        return bool(world.rig.server.dispatcher._waiting)

    await until(waits)
    popping.cancel()
    await asyncio.wait({popping})
    del popping  # its traceback refers to the call, and so to the connection

    async def ended() -> bool:
        return not world.rig.server.dispatcher._waiting

    await until(ended)
    await fill(world.rig, 1)
    assert await world.counts() == (1, 0)
    await world.nothing_is_left()


class Leaving:
    """A broker whose caller is cancelled exactly between its answer and the caller that waits for it."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        self.caller: asyncio.Task[Any]

    async def do(self, command: Any, *more: Any) -> Any:
        answer = await self._broker.do(command, *more)
        if isinstance(command, Pop):
            asyncio.get_running_loop().call_soon(self.caller.cancel)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


async def test_pop_cancelled_between_its_answer_and_its_handler_releases_the_messages(rig: Rig) -> None:
    await fill(rig, 3)
    broker = Leaving(rig.behind)
    dispatcher = Dispatcher(broker, {}, rig.server.gate)  # type: ignore[arg-type]

    async def pop() -> Any:
        async with Request(rig.server.gate, "grpc", "Pop", {}) as request:
            return await dispatcher.run(Pop("jobs", 2, wait=10.0), request)

    broker.caller = asyncio.ensure_future(pop())
    with pytest.raises(asyncio.CancelledError):
        await broker.caller

    async def all_back() -> bool:
        stats = await rig.behind.stats("jobs")
        return (stats.ready, stats.leased, stats.leased_total) == (3, 0, 2)

    await until(all_back)


# -- no cut: the other side disappears silently ------------------------------------------------------------------------


async def test_client_that_vanished_silently_leases_no_more_messages(tmp_path: Path) -> None:
    async with (
        Rig(tmp_path, grpc_keepalive=1.0) as rig,
        Proxy(rig.grpc_target) as proxy,
        RawGrpc(proxy.target) as client,
    ):
        await rig.broker.create_topic("jobs", **rig.small)
        stream = client.calls.stream("PopStream", Requests(pop_start(credits=5)))
        waiting = [asyncio.ensure_future(anext(stream)), asyncio.ensure_future(client.pop("jobs", wait=60.0))]

        async def under_way(count: int) -> bool:
            return rig.server.gate.requests_open == count

        await until(lambda: under_way(2))  # a stream and a pop
        proxy.vanish()
        await until(lambda: under_way(0))
        await fill(rig, 1)
        stats = await rig.behind.stats("jobs")
        assert (stats.ready, stats.leased_total) == (1, 0)
        for future in waiting:
            future.cancel()
        await asyncio.wait(waiting)


async def test_native_client_that_vanished_leases_no_more_messages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "SILENCE_SECONDS", 0.5)
    async with Proxy(rig.target) as proxy, NativeBroker(proxy.target) as client:
        waiting = asyncio.ensure_future(client.pop("jobs", wait=60.0))

        async def under_way(count: int) -> bool:
            return rig.server.gate.requests_open == count

        await until(lambda: under_way(1))
        proxy.vanish()
        await until(lambda: under_way(0))
        await fill(rig, 1)
        stats = await rig.behind.stats("jobs")
        assert (stats.ready, stats.leased_total) == (1, 0)
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(waiting, 20)
