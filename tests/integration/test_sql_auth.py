"""Keys and users in PostgreSQL: two nodes share them, and neither accepts a caller that it cannot check."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

import heapline
from heapline.contract.errors import Unauthenticated
from tests.integration.proxy import Proxy
from tests.integration.server_process import Process
from tests.integration.sql_processes import admin_key, connect, http, sql_node
from tests.postgres import fresh_schema, shared_port

pytest.importorskip("asyncpg")
PASSWORD = "correct horse battery"


class Two(NamedTuple):
    a: Process
    b: Process
    data: Path  # with the administrator's key
    key: str


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    """Two nodes that were started together on a new database."""
    schema = fresh_schema()
    a, b = sql_node(tmp_path / "a", schema), sql_node(tmp_path / "b", schema)
    await asyncio.gather(a.spawn(), b.spawn())
    await asyncio.gather(a.ready(), b.ready())
    (data,) = [path.parent for path in tmp_path.glob("*/admin.key")]  # only one of them created the key
    yield Two(a, b, data, admin_key(data))
    for node in (a, b):
        assert await node.terminate() == 0
        assert b"Traceback" not in node.logged()


async def rejected(client: httpx.AsyncClient, seconds: float = 2.0) -> float:
    """Return after how many seconds the client's calls were rejected, if within `seconds`."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while (answer := await client.get("/v1/heaps")).status_code == 200:
        assert loop.time() - began < seconds
    assert answer.status_code == 401
    return loop.time() - began


async def confirmed(client: httpx.AsyncClient, path: str) -> httpx.Response:
    needed = await client.delete(f"{path}?force=true")
    assert needed.status_code == 428, needed.text
    return await client.delete(f"{path}?force=true", headers={"x-confirmation": needed.json()["facts"]["token"]})


async def test_nodes_share_keys_users_and_confirmations(two: Two) -> None:
    async with http(two.a, two.key) as a, http(two.b, two.key) as b:
        made = (await a.post("/v1/keys", json={"name": "worker", "scopes": ["*:produce,consume"]})).json()
        async with http(two.b, made["secret"]) as worker:
            assert (await worker.get("/v1/heaps")).status_code == 200  # immediately, although the other node created it
            assert (await confirmed(a, f"/v1/keys/{made['key']['id']}")).status_code == 200
            await rejected(worker)
        person = {"email": "ada@example.org", "password": PASSWORD, "scopes": ["*:consume"]}
        assert (await b.post("/v1/users", json=person)).status_code == 201
        login = {"email": "ada@example.org", "password": PASSWORD}
        token = (await a.post("/v1/auth/login", json=login)).json()["token"]
        async with http(two.b, token) as ada:
            assert (await ada.get("/v1/heaps")).status_code == 200
            assert (await confirmed(a, "/v1/users/ada@example.org")).status_code == 200
            await rejected(ada)
        assert (await a.post("/v1/heaps", json={"topic": "jobs"})).status_code == 201
        needed = await a.delete("/v1/heaps/jobs?force=true")
        assert needed.status_code == 428, needed.text
        headers = {"x-confirmation": needed.json()["facts"]["token"]}
        assert (await b.delete("/v1/heaps/jobs?force=true", headers=headers)).status_code == 200


async def test_revocation_on_one_node_ends_calls_that_wait_on_another(two: Two) -> None:
    async with http(two.a, two.key) as a, connect(two.b, two.data) as admin:
        await admin.create_topic("jobs")
        made = (await a.post("/v1/keys", json={"name": "worker", "scopes": ["*:consume"]})).json()
        async with heapline.connect(two.b.target, api_key=made["secret"]) as worker:
            waiting = asyncio.create_task(worker.pop("jobs", 1, wait=60.0))
            await worker.stats("jobs")
            assert (await confirmed(a, f"/v1/keys/{made['key']['id']}")).status_code == 200
            async with asyncio.timeout(10):
                with pytest.raises(Unauthenticated):
                    await waiting


async def test_node_that_cannot_read_its_keys_rejects_all_calls_until_it_can(tmp_path: Path) -> None:
    data = tmp_path / "a"
    async with Proxy(f"127.0.0.1:{shared_port()}") as proxy:
        url = f"postgresql://postgres@{proxy.target}/postgres"
        async with sql_node(data, fresh_schema(), url) as node, http(node, admin_key(data)) as client:
            assert (await client.get("/v1/heaps")).status_code == 200
            await proxy.close()
            async with asyncio.timeout(30):
                while "no key can be checked" not in (answer := await client.get("/v1/heaps")).text:
                    assert answer.status_code == 503  # the topics cannot be read either
            assert answer.status_code == 503
            async with http(node, "hl_0011223344556677_" + "x" * 43) as unknown:
                for _ in range(50):  # more than the allowed failed attempts: these did not count as any
                    assert (await unknown.get("/v1/heaps")).status_code == 503
            await proxy.reopen()
            async with asyncio.timeout(30):
                while (answer := await client.get("/v1/heaps")).status_code != 200:
                    assert answer.status_code == 503
            assert b"Traceback" not in node.logged(), node.logged().decode()
