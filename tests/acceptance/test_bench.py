"""`heapline bench` against a server process: it measures the server and leaves it unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import heapline
from tests.integration.server_process import Process

pytestmark = pytest.mark.slow

PATIENCE = 90.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Process]:
    async with Process(tmp_path / "data") as process:
        yield process


async def start(server: Process, scratch: Path, *options: str) -> asyncio.subprocess.Process:
    connection = ["--to", server.target, "--key-file", str(scratch / "data" / "admin.key"), "--scratch", str(scratch)]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "heapline", "bench", *connection, *options, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(heapline.__file__).parents[1])},
    )  # fmt: skip


async def ended(bench: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, errors = await asyncio.wait_for(bench.communicate(), PATIENCE)
    return bench.returncode, out.decode(), errors.decode()


def connect(server: Process, scratch: Path) -> heapline.Broker:
    return heapline.connect(server.target, api_key=(scratch / "data" / "admin.key").read_text().strip())


async def test_server_is_measured_next_to_the_machine_and_left_unchanged(server: Process, tmp_path: Path) -> None:
    async with connect(server, tmp_path) as hl:  # type: ignore[attr-defined]
        await hl.create_topic("jobs")
        bench = await start(server, tmp_path, "--seconds", "0.2", "--concurrency", "8", "--json")
        code, out, errors = await ended(bench)
        assert (code, errors) == (0, "")
        reported = json.loads(out)
        assert all(row["messages"] > 0 and row["p99_ms"] >= row["p50_ms"] > 0 for row in reported["loads"])
        assert [row["baseline"]["ratio"] > 0 for row in reported["loads"]] == [True] * 5
        assert [row["name"] for row in reported["baselines"]][-1] == "bare TCP calls"
        assert [info.name for info in await hl.list_topics()] == ["jobs"]
        assert not list(tmp_path.glob("heapline-bench-*"))


async def test_topic_that_exists_is_refused(server: Process, tmp_path: Path) -> None:
    async with connect(server, tmp_path) as hl:  # type: ignore[attr-defined]
        await hl.create_topic("jobs")
        await hl.enqueue("jobs", b"precious")
        code, out, errors = await ended(await start(server, tmp_path, "--topic", "jobs"))
        assert (code, out) == (1, "")
        assert "topic 'jobs' already exists" in errors
        assert (await hl.stats("jobs")).ready == 1


async def test_interrupted_bench_deletes_its_topic(server: Process, tmp_path: Path) -> None:
    async with connect(server, tmp_path) as hl:  # type: ignore[attr-defined]
        bench = await start(server, tmp_path, "--seconds", "60")
        async with asyncio.timeout(PATIENCE):
            while not await hl.list_topics():
                pass  # each call takes a while, so this does not spin
        bench.send_signal(signal.SIGINT)
        code, _, errors = await ended(bench)
        assert code == 130
        assert "Traceback" not in errors
        assert await hl.list_topics() == []
