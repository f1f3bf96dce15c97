"""SIGTERM under load: acknowledged calls are kept, refused ones are reported, and nothing needs repair."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from heapline.client.transports.native import NativeBroker
from heapline.contract.errors import UnavailableError
from heapline.wire.descriptors import pb
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_audit import audit_topics, check_record
from tests.integration.server_load import Load, make_topics
from tests.integration.server_process import Process
from tests.integration.server_rig import Requests, pop_start
from tests.integration.test_server_kill_loop import drain

pytestmark = pytest.mark.slow


async def play(place: Path, stops: int, seed: int) -> Load:
    print(f"seed {seed}")
    draw, load = random.Random(seed), Load(seed)
    server = Process(place / "data", "--insecure-everybody")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(server)
        for turn in range(stops + 1):
            await server.__aenter__()
            broker = await stack.enter_async_context(NativeBroker(server.target))
            streams = await stack.enter_async_context(RawGrpc(server.grpc_target))
            if turn == 0:
                await make_topics(broker)
                load.start()
                stack.push_async_callback(load.abandon)
            load.link.point_to(broker, streams)
            await asyncio.sleep(draw.uniform(0.3, 1.2))
            load.check_alive()
            if turn < stops:
                assert await server.terminate() == 0
                check_log(server.logged(), turn + 1)
        await load.stop()
        check_record(load.record, await audit_topics(broker))
        async with asyncio.timeout(60):
            await drain(broker, load.record)
        check_record(load.record, await audit_topics(broker))
        assert await server.terminate() == 0
    check_log(server.logged(), stops + 1)
    texts = {str(error) for error in load.link.refusals}
    assert any("stopping" in text for text in texts), texts
    print(f"{stops} stops, {len(load.link.refusals)} calls refused; {dict(load.record.counts)}")
    return load


def check_log(log: bytes, stops: int) -> None:
    """Every process logged that it stopped, and no error while stopping or opening."""
    assert log.count(b'"event": "stopped"') == stops
    complaints = re.findall(rb"^.*(?:WARNING|ERROR|CRITICAL|Traceback|Exception|never retrieved).*$", log, re.MULTILINE)
    assert not complaints, complaints


async def test_stopped_server_leaves_nothing_to_repair(tmp_path: Path) -> None:
    load = await play(tmp_path, stops=2, seed=7400)
    assert load.record.counts["ack"]


async def test_server_with_idle_clients_stops_immediately(tmp_path: Path) -> None:
    """The server stops long before its grace period ends, because it does not wait for idle callers."""
    config = tmp_path / "server.yaml"
    config.write_text("stop_grace: 3600\n")
    server = Process(tmp_path / "data", "--insecure-everybody", "--config", str(config))
    async with server, RawGrpc(server.grpc_target) as broker, NativeBroker(server.target) as native:
        await broker.create_topic("jobs", segment_bytes=1 << 20)
        ways = [
            broker.calls.stream("PopStream", Requests(pop_start(credits=5))),
            broker.calls.stream("PopStream", Requests(pop_start())),
            broker.calls.stream("PopStream", Requests()),
            broker.calls.stream("EnqueueStream", Requests()),
        ]
        idle = [asyncio.ensure_future(anext(way)) for way in ways]
        idle.append(asyncio.ensure_future(broker.pop("jobs", wait=3600)))
        idle.append(asyncio.ensure_future(native.pop("jobs", wait=3600)))
        idle.append(asyncio.ensure_future(watch_health(server.grpc_target)))
        await broker.stats("jobs")
        await native.stats("jobs")
        await asyncio.sleep(0.2)
        assert not any(future.done() for future in idle)
        assert await server.terminate() == 0
        for end in await asyncio.gather(*idle, return_exceptions=True):
            assert isinstance(end, UnavailableError), repr(end)
        with pytest.raises(UnavailableError):
            await broker.calls("Stats", pb.StatsRequest(topic="jobs"))
    check_log(server.logged(), 1)


async def watch_health(target: str) -> None:
    """Like clients that let gRPC watch the server's health."""
    async with grpc.aio.insecure_channel(target) as channel:
        try:
            async for _ in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                pass
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(error.details()) from None


@pytest.mark.soak
@pytest.mark.parametrize("round", range(10))
async def test_server_stopped_repeatedly_loses_nothing(tmp_path: Path, round: int) -> None:
    await play(tmp_path, stops=12, seed=random.SystemRandom().randrange(1 << 31))
