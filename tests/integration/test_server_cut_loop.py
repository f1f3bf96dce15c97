"""The connections of a server under load are cut repeatedly, at random times and in mid-frame.

The server stays up. Its clients' record is checked against its log as in test_server_kill_loop.py, and when the
clients are gone the process holds no more sockets and leases than before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from heapline.client.transports.native import NativeBroker
from tests.integration.proxy import Proxy
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_audit import audit_topics, check_record, lives
from tests.integration.server_load import Load, make_topics
from tests.integration.server_process import Process
from tests.integration.server_rig import until
from tests.integration.test_server_kill_loop import drain

pytestmark = pytest.mark.slow


async def play(place: Path, cuts: int, seed: int) -> Load:
    print(f"seed {seed}")
    draw, load = random.Random(seed), Load(seed)
    server = Process(place / "data", "--insecure-everybody")
    async with server, NativeBroker(server.target) as straight:
        await make_topics(straight)
        sockets = server.open_sockets()
        async with contextlib.AsyncExitStack() as stack:
            load.start()
            stack.push_async_callback(load.abandon)
            for turn in range(cuts + 1):
                proxy = await stack.enter_async_context(Proxy(server.target))
                streams = await stack.enter_async_context(Proxy(server.grpc_target))
                load.link.point_to(
                    await stack.enter_async_context(NativeBroker(proxy.target)),
                    await stack.enter_async_context(RawGrpc(streams.target)),
                )
                await asyncio.sleep(draw.uniform(0.1, 0.6))
                load.check_alive()
                if turn < cuts:
                    await asyncio.gather(break_off(proxy, draw), break_off(streams, draw))
            await load.stop()

        async def left() -> bool:
            return server.open_sockets() <= sockets

        await until(left)
        check_record(load.record, await audit_topics(straight))
        async with asyncio.timeout(60):
            await drain(straight, load.record)
        audits = await audit_topics(straight)
        check_record(load.record, audits)
        assert not +lives(audits)
        assert await server.terminate() == 0
    log = server.logged()
    assert b"Traceback" not in log, log
    assert b"ERROR" not in log, log
    print(f"{cuts} cuts, {len(load.link.refusals)} calls cut off; {dict(load.record.counts)}")
    return load


async def break_off(proxy: Proxy, draw: random.Random) -> None:
    how = draw.choice(["cut", "mid-frame", "held", "stalled"])
    if how == "mid-frame":
        proxy.cut_after(draw.randrange(5000))
    elif how == "held":
        proxy.hold()
    elif how == "stalled":
        proxy.stall()
    if how != "cut":
        await asyncio.sleep(draw.uniform(0.02, 0.3))
    await proxy.close()


async def test_connections_cut_under_load_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    load = await play(tmp_path, cuts=8, seed=443)
    assert load.link.refusals


@pytest.mark.soak
@pytest.mark.parametrize("round", range(10))
async def test_connections_cut_a_hundred_times_lose_nothing(tmp_path: Path, round: int) -> None:
    await play(tmp_path, cuts=60, seed=random.SystemRandom().randrange(1 << 31))
