"""A real server process lets in whoever has a key of its directory, for what that key is good for, and nobody else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from heapline.client.wire import WireBroker
from heapline.errors import PermissionDenied, Unauthenticated
from tests.integration.server_process import Process


def keys(data: Path, *words: str) -> str:
    command = [sys.executable, "-m", "heapline", "keys", *words, "--data", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    return done.stdout


@pytest.mark.slow
async def test_first_start_leaves_a_key_for_the_administrator_who_makes_others(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with Process(data) as server:
        async with WireBroker(server.target) as nobody:
            with pytest.raises(Unauthenticated):
                await nobody.list_topics()
        async with WireBroker(server.target, credential="hl_0000_wrong") as wrong:
            with pytest.raises(Unauthenticated):
                await wrong.list_topics()
        admin_key = (data / "admin.key").read_text().strip()
        async with WireBroker(server.target, credential=admin_key) as admin:
            await admin.create_topic("orders", segment_bytes=1 << 20)
            await admin.create_topic("secrets", segment_bytes=1 << 20)
            told = await asyncio.to_thread(keys, data, "create", "--name", "worker", "--scope", "orders:produce")
            worker_key = next(word for word in told.split() if word.startswith("hl_"))
            async with WireBroker(server.target, credential=f"Bearer {worker_key}") as worker:
                await worker.enqueue("orders", b"x")
                with pytest.raises(PermissionDenied):
                    await worker.enqueue("secrets", b"x")
                with pytest.raises(PermissionDenied):
                    await worker.pop("orders")
                key_id = worker_key.split("_")[1]
                await asyncio.to_thread(keys, data, "revoke", key_id)
                for _ in range(40):  # within a second or so
                    try:
                        await worker.enqueue("orders", b"too late")
                    except Unauthenticated:
                        break
                    await asyncio.sleep(0.1)
                else:
                    pytest.fail("a revoked key still opens")
            assert [m.payload for m in await admin.pop("orders")][:1] == [b"x"]
        assert admin_key.encode() not in await _output(server)


async def _output(server: Process) -> bytes:
    server.process.terminate()
    out, _ = await server.process.communicate()
    return bytes(out) + server.logged()
