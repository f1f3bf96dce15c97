"""A real server process accepts only the keys of its directory, and only within their scopes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from heapline.client.connect import connect, connect_from_env
from heapline.client.target import ClientTls
from heapline.client.transports.native import NativeBroker
from heapline.contract.errors import PermissionDenied, Unauthenticated
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_process import Process
from tests.integration.server_rig import Requests, pop_start


def heapline(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", "heapline", *words], {**os.environ, "COLUMNS": "400"}
    return subprocess.run(command, capture_output=True, text=True, check=check, env=environment, timeout=60)


def keys(data: Path, *words: str) -> str:
    return heapline("keys", *words, "--data", str(data)).stdout


@pytest.mark.slow
async def test_first_start_creates_an_admin_key(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with Process(data) as server:
        async with RawGrpc(server.grpc_target) as nobody:
            with pytest.raises(Unauthenticated):
                await nobody.list_topics()
        async with RawGrpc(server.grpc_target, credential="hl_0000_wrong") as wrong:
            with pytest.raises(Unauthenticated):
                await wrong.list_topics()
        admin_key = (data / "admin.key").read_text().strip()
        async with RawGrpc(server.grpc_target, credential=admin_key) as admin:
            await admin.create_topic("orders", segment_bytes=1 << 20)
            await admin.create_topic("secrets", segment_bytes=1 << 20)
            reported = await asyncio.to_thread(keys, data, "create", "--name", "worker", "--scope", "orders:produce")
            worker_key = next(word for word in reported.split() if word.startswith("hl_"))
            async with RawGrpc(server.grpc_target, credential=f"Bearer {worker_key}") as worker:
                await worker.enqueue("orders", b"x")
                with pytest.raises(PermissionDenied):
                    await worker.enqueue("secrets", b"x")
                with pytest.raises(PermissionDenied):
                    await worker.pop("orders")
                key_id = worker_key.split("_")[1]
                await asyncio.to_thread(keys, data, "revoke", key_id, "--yes")
                for _ in range(40):  # within a second or so
                    try:
                        await worker.enqueue("orders", b"too late")
                    except Unauthenticated:
                        break
                    await asyncio.sleep(0.1)
                else:
                    pytest.fail("a revoked key is still accepted")
            assert [m.payload for m in await admin.pop("orders")][:1] == [b"x"]
        assert admin_key.encode() not in await _output(server)


@pytest.mark.slow
async def test_following_each_advice_for_a_missing_key_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "elsewhere"
    async with Process(data) as server:
        monkeypatch.setenv("HEAPLINE_URL", server.target)
        monkeypatch.setenv("HEAPLINE_API_KEY_FILE", str(data / "admin.key"))
        async with connect(server.target) as hl:
            with pytest.raises(Unauthenticated, match=r"HEAPLINE_API_KEY_FILE and use heapline\.connect_from_env"):
                await hl.list_topics()
        async with connect_from_env() as hl:
            assert await hl.list_topics() == []
        monkeypatch.setenv("HEAPLINE_DATA", str(data))
        async with connect(server.target) as hl:
            assert await hl.list_topics() == []


async def _output(server: Process) -> bytes:
    server.process.terminate()
    out, _ = await server.process.communicate()
    return bytes(out) + server.logged()


@pytest.mark.slow
async def test_over_tls_the_command_line_ends_an_open_stream_and_a_waiting_pop(tmp_path: Path) -> None:
    data, certs = tmp_path / "data", tmp_path / "certs"
    await asyncio.to_thread(heapline, "certs", "dev", str(certs))
    files = ("--tls-certificate", str(certs / "server.crt"), "--tls-key", str(certs / "server.key"))
    async with Process(data, *files, "--tls-client-ca", str(certs / "ca.crt")) as server:
        reported = await asyncio.to_thread(keys, data, "create", "--name", "worker", "--scope", "jobs:consume")
        worker_key = next(word for word in reported.split() if word.startswith("hl_"))
        tls = ClientTls(ca=certs / "ca.crt", certificate=certs / "client.crt", key=certs / "client.key")
        target = f"heapline+tls://{server.grpc_target}"
        async with (
            contextlib.AsyncExitStack() as stack,
            RawGrpc(target, credential=(data / "admin.key").read_text().strip(), tls=tls) as admin,
            RawGrpc(target, credential=worker_key, tls=tls) as worker,
        ):
            await admin.create_topic("jobs", segment_bytes=1 << 20)
            stream = asyncio.ensure_future(anext(worker.calls.stream("PopStream", Requests(pop_start(credits=1)))))
            popping = asyncio.ensure_future(worker.pop("jobs", wait=600))
            native = await stack.enter_async_context(
                NativeBroker(f"heapline+tls://{server.target}", credential=worker_key, tls=tls)
            )
            waiting = asyncio.ensure_future(native.pop("jobs", wait=600))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(keys, data, "revoke", worker_key.split("_")[1], "--yes")
            for call in (stream, popping, waiting):
                with pytest.raises(Unauthenticated):
                    await asyncio.wait_for(call, 20)  # two seconds on an idle machine
        calls = [json.loads(line)["call"] for line in (data / "audit.jsonl").read_text().splitlines()]
        assert {"keys.create", "keys.revoke", "MakeHeap"} <= set(calls)
        output = await _output(server)
        assert worker_key.encode() not in output
        assert b"BEGIN" not in output


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--tls-certificate", "nowhere.crt", "--tls-key", "nowhere.key")])
async def test_server_reachable_from_other_machines_does_not_start_without_tls(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    ports = ["--port", "0", "--grpc-port", "0", "--http-port", "0"]
    command = ["serve", "--data", str(tmp_path / "data"), "--host", "0.0.0.0", *ports]
    done = await asyncio.to_thread(heapline, *command, *flags, check=False)
    assert done.returncode != 0
    assert "--plaintext" in done.stderr or "nowhere.key" in done.stderr
    assert "Traceback" not in done.stderr
