"""`heapline assign watch` as a process, on a running worker pool."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from heapline.assign.config import Config
from heapline.assign.manager import Manager
from heapline.assign.nats_kv import NatsKV
from heapline.assign.partitions import Partition, StaticSource
from tests.integration.nats_rig import Servers

CONFIG = Config(cold_start_window="500ms", planned_scale_window="500ms", heartbeat_interval="500ms")
PARTITIONS = [Partition((f"tool{n}", "a")) for n in range(6)]


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A server on which two workers share six partitions."""
    with Servers(tmp_path, 1) as servers:
        async with await NatsKV.connect(servers.urls, bucket="meeting") as kv:
            managers = [Manager(CONFIG, kv, StaticSource(PARTITIONS)) for _ in range(2)]
            await asyncio.gather(*(manager.start() for manager in managers))
            yield servers.urls[0]
            for manager in managers:
                await manager.stop()


async def run(url: str, *flags: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "heapline",
        "assign",
        "watch",
        "--nats",
        url,
        "--bucket",
        "meeting",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


async def test_once_prints_json(url: str) -> None:
    code, out, err = await run(url, "--once", "--json")
    assert (code, err) == (0, "")
    seen = json.loads(out)
    assert sorted(seen["holders"]) == sorted(partition.id for partition in PARTITIONS)
    assert [seat["worker"] for seat in seen["workers"]] == ["worker-0", "worker-1"]
    assert {seat["standing"] for seat in seen["workers"]} == {"live"}
    assert seen["leader"] in ("worker-0", "worker-1")


async def test_once_prints_a_table(url: str) -> None:
    code, out, err = await run(url, "--once")
    assert (code, err) == (0, "")
    assert "2 workers, 6 partitions" in out
    assert all(partition.id in out for partition in PARTITIONS)


async def test_missing_bucket_is_reported(url: str) -> None:
    code, out, err = await run(url, "--bucket", "elsewhere")
    assert (code, out) == (1, "")
    assert "no worker pool has used it yet" in err


async def test_live_screen_of_80_by_24_ends_with_ctrl_c(url: str) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "heapline",
        "assign",
        "watch",
        "--nats",
        url,
        "--bucket",
        "meeting",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    try:
        async with asyncio.timeout(60):
            while b"2 workers, 6 partitions" not in seen or b"worker-1" not in seen:
                seen += await asyncio.to_thread(os.read, ours, 65536)
            process.send_signal(signal.SIGINT)
            reading = asyncio.create_task(asyncio.to_thread(drain, ours))
            assert await process.wait() == 0
            rest = await reading
    finally:
        if process.returncode is None:
            process.kill()  # otherwise a thread would wait for its output forever
    os.close(ours)
    assert b"Traceback" not in seen + rest
    assert b"\x1b[?1049l" in rest, "the terminal's own screen comes back"


def drain(terminal: int) -> bytes:
    found = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # all writers have closed it
            return found
        if not part:
            return found
        found += part
