"""Transports against a real server: connections that break, vanish or fail to open, and calls that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import heapline
from heapline.client.target import ClientTls
from heapline.client.transports.blocking_calls import BlockingCalls
from heapline.client.transports.http import HttpBroker
from heapline.client.transports.native import NativeBroker
from heapline.contract.errors import BadRequest, Closed, UnavailableError
from heapline.contract.topics import ListTopics
from heapline.wire.frames import peer
from tests.integration.cuttable_client import answered, fill
from tests.integration.http_rig import HttpRig
from tests.integration.proxy import Proxy
from tests.integration.server_rig import Rig, until


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        yield rig


async def test_client_detects_a_server_that_vanished_silently(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "SILENCE_SECONDS", 0.5)
    async with Proxy(rig.target) as proxy, NativeBroker(proxy.target) as client:
        popping = asyncio.ensure_future(client.pop("jobs", wait=60.0))

        async def waits() -> bool:
            return bool(rig.server.dispatcher._waiting)

        await until(waits)
        proxy.vanish()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(popping, 20)


async def test_pop_cancelled_with_its_answer_on_the_wire_returns_the_messages(rig: Rig) -> None:
    await fill(rig, 3)
    async with Proxy(rig.target) as proxy, NativeBroker(proxy.target) as client:
        await client.stats("jobs")  # it is connected
        proxy.hold()
        popping = asyncio.ensure_future(client.pop("jobs", 2, wait=60.0))

        async def leased() -> bool:
            return await rig.leased() == 2

        await until(leased)
        await answered(proxy)
        popping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await popping
        proxy.flow()

        async def all_back() -> bool:
            stats = await rig.behind.stats("jobs")
            return (stats.ready, stats.leased) == (3, 0)

        await until(all_back)


async def test_server_that_does_not_exist_is_unavailable() -> None:
    async with NativeBroker("127.0.0.1:1") as nowhere:
        with pytest.raises(UnavailableError):
            await nowhere.list_topics()
    with pytest.raises(Closed):
        await nowhere.list_topics()


async def test_http_transport_reports_a_stopped_server_as_unavailable(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.heap()
        async with HttpBroker(rig.url) as broker:
            assert (await broker.stats("jobs")).ready == 0
            await rig.server.stop()
            with pytest.raises(UnavailableError):
                await broker.stats("jobs")


def test_tls_files_for_a_plain_target_are_rejected() -> None:
    with pytest.raises(BadRequest, match="does not use TLS"):
        NativeBroker("heapline://q:1", tls=ClientTls())


@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
async def test_other_ports_of_the_server_are_refused_at_once(port: str, rig: Rig) -> None:
    target = f"127.0.0.1:{getattr(rig.server, port)}"
    wrong = f"{target} is not a native port of Heapline: the peer speaks HTTP or gRPC.*; give the port of"
    async with heapline.connect(target, deadline=600) as hl:
        with pytest.raises(BadRequest, match=wrong):
            await hl.list_topics()
    calls = BlockingCalls([target], None, retry_seconds=600)
    with pytest.raises(BadRequest, match=wrong):
        await asyncio.to_thread(calls.do, ListTopics())
