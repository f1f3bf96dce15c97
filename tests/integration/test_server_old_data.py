"""Directories written by earlier versions: a server serves everything in them over gRPC."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import heapline
from heapline.engine import EmbeddedBroker
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.server import Server
from heapline.server.settings import ServerSettings
from tests.fixtures.make_v1 import log_of
from tests.integration.directory_digest import STILL, FixedClock, digest
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_process import Process
from tests.integration.test_fixture_v1 import FIXTURES, VERSIONS

SETTINGS = ServerSettings(port=0, grpc_port=0, http_port=0)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / version / "expected.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def data(version: str, tmp_path: Path) -> Path:
    with tarfile.open(FIXTURES / version / "data.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "data"


async def test_server_serves_everything_in_an_old_directory(data: Path, expected: dict[str, Any]) -> None:
    """At the time when it was written: every config, every event of the log, every message and its state."""
    clock = FixedClock(expected["now"])
    behind = EmbeddedBroker(str(data), config=STILL, clock=clock, draw=np.random.default_rng(1).random)
    async with (
        behind,
        Server(behind, NoAuthGuard(), SETTINGS) as server,
        RawGrpc(f"127.0.0.1:{server.grpc_port}") as hl,
    ):
        infos = {info.name: info for info in await hl.list_topics()}
        assert set(infos) == set(expected["topics"])
        for name, topic in expected["topics"].items():
            assert infos[name].incarnation == topic["incarnation"]
            config = json.loads(msgspec.json.encode(infos[name].config))
            assert topic["config"].items() <= config.items(), name
            assert await log_of(hl, name) == topic["log"], name
            found = json.loads(json.dumps(await digest(hl, name, topic["ids"])))  # type: ignore[arg-type]
            assert found == topic["digest"], name


async def test_real_process_serves_every_message_of_an_old_directory(data: Path, expected: dict[str, Any]) -> None:
    """Today: leases have ended, delays are over. Live messages are delivered once, acked, and gone after a restart."""
    server = Process(data, "--insecure-everybody")
    async with server, RawGrpc(server.grpc_target) as hl, asyncio.timeout(60):
        await check_promises(hl, expected)
        served = [(name, id) for name in expected["topics"] for id in await drain(hl, name)]
        assert len(served) == len(set(served)) > 100
        assert await server.terminate() == 0
    async with server, RawGrpc(server.grpc_target) as hl:
        for name in expected["topics"]:
            stats = await hl.stats(name)
            assert (stats.ready, stats.leased, stats.dead) == (0, 0, 0), name
    assert b"Traceback" not in server.logged()


async def check_promises(hl: RawGrpc, expected: dict[str, Any]) -> None:
    """Promises for longer than a lease: epochs of producers, ids."""
    assert await hl.open_producer("jobs", "p1") == 2
    with pytest.raises(heapline.StaleEpoch):
        await hl.enqueue("jobs", b"numbered", producer_id="p1", epoch=1, seq=8)
    fresh = await hl.enqueue("jobs", b"new")
    assert fresh.id > max(expected["topics"]["jobs"]["ids"])


async def drain(hl: RawGrpc, name: str) -> list[int]:
    """Return the ids of all messages that can be popped today."""
    await hl.resume_topic(name)
    await hl.dlq_replay(name)
    stats = await hl.stats(name)
    for partition in stats.partitions:
        await hl.set_partition_throttled(name, partition.partition, False)
    ids: list[int] = []
    while True:
        popped = await hl.pop(name, 1000, wait=0.2, max_bytes=32 << 20)
        await hl.ack(popped)
        ids += [m.id for m in popped]
        stats = await hl.stats(name)
        soon = sum(bucket.count for bucket in stats.due_histogram[:4])  # within a minute: backoff
        if not popped and not stats.ready and not soon:
            return ids
