"""`heapline serve --broker sql` as real processes on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from heapline import Outgoing
from heapline.client.transports.http import HttpBroker
from heapline.contract.errors import BadRequest, Unsupported
from tests.integration.raw_grpc import GrpcBroker
from tests.integration.server_process import Process
from tests.integration.sql_processes import admin_key, connect, http, sql_node, until
from tests.integration.test_sql_shards import topics_by_shard
from tests.postgres import UNSYNCED, fresh_schema, postgres_server, shared_url
from tests.valkey import fresh_redis

pytest.importorskip("asyncpg")


async def command(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run a heapline command; return its exit code and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "heapline", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ, **environment},
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode()


async def test_queue_in_postgres_is_served_over_every_interface(tmp_path: Path) -> None:
    data = tmp_path / "a"
    async with sql_node(data, fresh_schema()) as node:
        key = (data / "admin.key").read_text().strip()
        async with (
            connect(node, data) as sdk,
            GrpcBroker(node.grpc_target, key) as grpc,
            over_http(node, data) as rest,
        ):
            await sdk.create_topic("jobs")
            for hl in (sdk, grpc, rest):
                await hl.enqueue("jobs", b"later", delay=3600)
                await hl.enqueue_batch("jobs", [Outgoing(b"b", priority=2), Outgoing(b"a", priority=1)])
                messages = await hl.pop("jobs", 10, wait=5.0)
                assert [m.payload for m in messages] == [b"a", b"b"]
                await messages[0].ack()
                await messages[1].bury("broken")
            assert (await sdk.stats("jobs")).dead == 3
            assert (await sdk.describe()).broker == "sql"
            with pytest.raises(Unsupported, match="ListGroups"):
                await sdk.list_groups("jobs")
            with pytest.raises(BadRequest, match="retention"):
                await anext(sdk.read_log("jobs"))


async def test_commands_work_on_a_node(tmp_path: Path) -> None:
    data = tmp_path / "a"
    async with sql_node(data, fresh_schema()) as node:
        env = {"HEAPLINE_URL": node.target, "HEAPLINE_DATA": str(data)}
        for arguments, expected in (
            (("topic", "create", "jobs"), "jobs"),
            (("put", "jobs", "hello"), ""),
            (("pop", "jobs", "--json"), "hello"),
            (("topic", "show", "jobs"), "jobs"),
            (("dlq", "list", "jobs"), ""),
            (("top", "--once"), "jobs"),
        ):
            code, output = await command(*arguments, **env)
            assert (code, expected in output) == (0, True), (arguments, output)
        for arguments, expected in (
            (("group", "list", "jobs"), "does not support"),
            (("keys", "list"), "are in PostgreSQL"),
            (("backup", "--to", str(tmp_path / "copy")), "does not contain a queue"),
        ):
            code, output = await command(*arguments, **env)
            assert (code, expected in output, "Traceback" in output) == (1, True, False), (arguments, output)


async def test_metrics_and_readiness_follow_the_shards(tmp_path: Path) -> None:
    data, schema, names = tmp_path / "a", fresh_schema(), topics_by_shard(2)
    with postgres_server(UNSYNCED) as (pid, port):
        other = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        async with sql_node(data, schema, shared_url(), other) as node, connect(node, data) as hl, http(node) as client:
            for name in names:
                await hl.create_topic(name)
                await hl.enqueue(name, b"x")
            assert (await client.get("/readyz")).text == "ok\n"
            text = (await client.get("/metrics")).text
            for line in ('shard_up{shard="0"} 1.0', f'backlog{{partition="0",topic="{names[1]}"}} 1.0', "topics 2.0"):
                assert line in text
            assert 'shard_connections{shard="1",state="idle"}' in text
            assert 'shard_commit_latency_ms_count{shard="1"}' in text
            os.kill(pid, signal.SIGQUIT)
            await until(client, "/metrics", lambda answer: 'shard_up{shard="1"} 0.0' in answer.text)
            assert (await client.get("/readyz")).status_code == 200  # the other shard serves
            await hl.enqueue(names[0], b"y")


async def test_node_that_cannot_read_its_keys_is_not_ready(tmp_path: Path) -> None:
    data = tmp_path / "a"
    with postgres_server(UNSYNCED) as (pid, port):
        first = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        async with sql_node(data, fresh_schema(), first, shared_url()) as node, http(node) as client:
            assert (await client.get("/readyz")).text == "ok\n"
            os.kill(pid, signal.SIGQUIT)
            answer = await until(client, "/readyz", lambda answer: answer.status_code != 200)
            assert (answer.status_code, answer.text) == (503, "keys and users cannot be read\n")


async def test_node_without_any_database_is_not_ready(tmp_path: Path) -> None:
    data = tmp_path / "a"
    with postgres_server(UNSYNCED) as (pid, port):
        url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        async with sql_node(data, "heapline", url) as node, http(node) as client:
            os.kill(pid, signal.SIGQUIT)
            answer = await until(client, "/readyz", lambda answer: answer.status_code != 200)
            assert (answer.status_code, answer.text) == (503, "no shard can be reached\n")
            assert (await client.get("/healthz")).status_code == 200


async def test_stopped_node_finishes_its_calls_and_releases_its_number(tmp_path: Path) -> None:
    data, schema = tmp_path / "a", fresh_schema()
    async with sql_node(data, schema) as node, connect(node, data) as hl:
        await hl.create_topic("jobs")
        waiting = asyncio.create_task(hl.pop("jobs", 1, wait=60.0))
        await hl.enqueue("jobs", b"x")
        await waiting
        assert await node.terminate() == 0
        assert b"Traceback" not in node.logged()
    import asyncpg

    connection = await asyncpg.connect(shared_url())
    assert await connection.fetchval(f"SELECT count(*) FROM {schema}.nodes WHERE until > 0") == 0
    await connection.close()


async def test_node_acknowledges_enqueues_by_the_log_in_its_directory(tmp_path: Path) -> None:
    data, schema = tmp_path / "a", fresh_schema()
    async with sql_node(data, schema) as node, over_http(node, data) as hl:
        assert (await hl.describe()).settings["durability"] == "wal"
        await hl.create_topic("jobs", k=100)
        async with flushes_held(schema):
            await hl.enqueue("jobs", b"x")
            assert await stored(schema) == 0
            await node.kill()
    async with sql_node(data, schema) as node, over_http(node, data) as hl:
        assert [m.payload for m in await hl.pop("jobs", 10, wait=10.0)] == [b"x"]


@pytest.mark.parametrize("policy", ["redis", "postgres"])
async def test_durability_of_a_node_can_be_chosen(tmp_path: Path, policy: str) -> None:
    data, redis = tmp_path / "a", fresh_redis()
    (data / "wal").mkdir(parents=True)
    async with sql_node(data, fresh_schema(), durability=policy, redis=redis) as node:
        async with over_http(node, data) as hl:
            assert (await hl.describe()).settings["durability"] == policy
            await hl.create_topic("jobs", k=100)
            await hl.enqueue("jobs", b"x")
            assert [m.payload for m in await hl.pop("jobs", 10, wait=10.0)] == [b"x"]
        assert list((data / "wal").iterdir()) == []
        assert b"write-ahead log not used" in node.logged()


def over_http(node: Process, data: Path) -> HttpBroker:
    """A client that does not number its enqueues, so that they may be acknowledged early."""
    return HttpBroker(f"http://127.0.0.1:{node.http_port}", credential=admin_key(data))


@contextlib.asynccontextmanager
async def flushes_held(schema: str) -> AsyncIterator[None]:
    """Keep all nodes from flushing what they have acknowledged."""
    import asyncpg

    admin = await asyncpg.connect(shared_url(), server_settings={"search_path": schema})
    async with admin.transaction():
        await admin.execute("LOCK TABLE flushed IN SHARE MODE")
        yield
    await admin.close()


async def stored(schema: str) -> int:
    import asyncpg

    admin = await asyncpg.connect(shared_url(), server_settings={"search_path": schema})
    found: int = await admin.fetchval("SELECT count(*) FROM items")
    await admin.close()
    return found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--broker", "sql"), "needs a database"),
        (("--durability", "redis"), "setting of the sql broker"),
        (("--broker", "sql", "--postgres", "postgresql://x@y/z", "--durability", "redis"), "needs a Redis server"),
        (("--broker", "sql", "--postgres", "postgresql://x@y/z", "--slow-mode"), "slow_mode is not used"),
        (("--postgres", "postgresql://x@y/z"), "setting of the sql broker"),
        (("--broker", "sql", "--postgres", "postgresql://nobody@127.0.0.1:1/x"), "cannot open shard 0"),
        (("--broker", "sql", "--postgres", "mysql://x"), "must be a URL such as postgresql://"),
    ],
)
async def test_bad_start_is_explained(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    ports = ("--port", "0", "--grpc-port", "0", "--http-port", "0")
    code, output = await command("serve", "--data", str(tmp_path / "a"), *ports, *arguments)
    assert code == 1
    assert text in output
    assert "Traceback" not in output


async def test_wrong_order_of_shards_is_explained(tmp_path: Path) -> None:
    import asyncpg

    names = [fresh_schema(), fresh_schema()]
    admin = await asyncpg.connect(shared_url())
    for name in names:
        await admin.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")
    await admin.close()
    urls = [shared_url(name) for name in names]
    async with sql_node(tmp_path / "a", "heapline", *urls) as node:
        assert await node.terminate() == 0
    given = {"HEAPLINE_BROKER_TYPE": "sql", "HEAPLINE_POSTGRES": " ".join(urls[::-1])}  # like flags
    ports = ("--port", "0", "--grpc-port", "0", "--http-port", "0")
    code, output = await command("serve", "--data", str(tmp_path / "a"), *ports, **given)
    assert (code, "was opened before as shard" in output, "Traceback" in output) == (1, True, False)
