"""NATS-specific behavior: old servers, foreign buckets, stopped nodes, oversized values."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats
import pytest
from nats.js import api

from heapline.assign import nats_bucket
from heapline.assign.errors import BadConfig, ConnectionLost
from heapline.assign.kv import Conflict, Entry
from heapline.assign.nats_kv import NatsKV
from tests.integration.nats_rig import Servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("nats"), 1) as servers:
        yield servers


@pytest.fixture
def bucket() -> str:
    return secrets.token_hex(8)


@pytest.mark.parametrize(
    ("version", "is_accepted"), [((2, 9, 10), False), ((2, 11, 11), False), ((2, 12, 0), True), ((3, 0, 0), True)]
)
def test_server_before_2_12_is_rejected(version: tuple[int, int, int], is_accepted: bool) -> None:
    major, minor, patch = version
    client: Any = SimpleNamespace(connected_server_version=SimpleNamespace(major=major, minor=minor, patch=patch))
    if is_accepted:
        nats_bucket.check_version(client)
        return
    with pytest.raises(BadConfig, match=rf"is {major}\.{minor}\.{patch}; heapline.assign needs 2\.12"):
        nats_bucket.check_version(client)


async def test_unreachable_server_raises_connection_lost_without_credentials() -> None:
    with pytest.raises(ConnectionLost) as caught:
        await NatsKV.connect("nats://someone:secret@127.0.0.1:1", connect_within=0.3)
    assert "secret" not in str(caught.value)


async def test_foreign_bucket_is_rejected_and_not_changed(servers: Servers, bucket: str) -> None:
    client = await nats.connect(servers.urls[0])
    await client.jetstream().create_key_value(api.KeyValueConfig(bucket=bucket, history=5))
    with pytest.raises(BadConfig, match="was not created by"):
        await NatsKV.open(client, bucket=bucket)
    assert (await client.jetstream().stream_info(f"KV_{bucket}")).config.max_msgs_per_subject == 5
    await client.close()


@pytest.mark.parametrize("name", ["", "a.b", "a b", "ü", "x" * 129])
async def test_malformed_bucket_name_is_rejected(servers: Servers, name: str) -> None:
    with pytest.raises(BadConfig, match="bucket name"):
        await NatsKV.connect(servers.urls, bucket=name)


async def test_more_replicas_than_servers_are_rejected(servers: Servers, bucket: str) -> None:
    with pytest.raises(BadConfig, match="replicas"):
        await NatsKV.connect(servers.urls, bucket=bucket, replicas=3)


async def test_missing_bucket_is_not_created_with_create_false(servers: Servers, bucket: str) -> None:
    with pytest.raises(BadConfig, match="no worker pool has used it"):
        await NatsKV.connect(servers.urls, bucket=bucket, create=False)
    async with (
        await NatsKV.connect(servers.urls, bucket=bucket) as one,
        await NatsKV.connect(servers.urls, bucket=bucket, create=False) as other,
    ):
        await one.create("leader", b"ada")
        assert (await other.get("leader")) is not None


async def test_concurrent_opens_create_one_bucket(servers: Servers, bucket: str) -> None:
    kvs = await asyncio.gather(*(NatsKV.connect(servers.urls, bucket=bucket) for _ in range(8)))
    await kvs[0].create("leader", b"ada")
    assert [entry.value for kv in kvs for entry in await kv.entries("")] == [b"ada"] * 8
    for kv in kvs:
        await kv.close()


async def test_oversized_value_is_rejected_and_the_connection_stays_open(servers: Servers, bucket: str) -> None:
    async with await NatsKV.connect(servers.urls, bucket=bucket) as kv:
        with pytest.raises(BadConfig, match="max_payload"):
            await kv.create("assignment", bytes(1 << 20))
        big = bytes((1 << 20) - (64 << 10))
        revision = await kv.create("assignment", big)
        assert await kv.get("assignment") == Entry("assignment", big, revision)


async def test_unchanged_large_value_is_not_sent_again(servers: Servers, bucket: str) -> None:
    async with await NatsKV.connect(servers.urls, bucket=bucket) as kv:
        revision = await kv.create("assignment", bytes(500_000))
        received = [kv._client.stats["in_bytes"]]
        for _ in range(3):
            assert await kv.get("assignment") == Entry("assignment", bytes(500_000), revision)
            received.append(kv._client.stats["in_bytes"])
        assert received[1] - received[0] > 500_000
        assert received[3] - received[1] < 10_000


async def test_callers_connection_is_not_closed(servers: Servers, bucket: str) -> None:
    client = await nats.connect(servers.urls[0])
    async with await NatsKV.open(client, bucket=bucket) as kv:
        await kv.create("leader", b"ada")
    assert client.is_connected
    await client.close()


async def test_watch_reports_an_expired_key(servers: Servers, bucket: str) -> None:
    async with (
        await NatsKV.connect(servers.urls, bucket=bucket) as kv,
        contextlib.aclosing(kv.watch("worker.")) as events,
        asyncio.timeout(30),
    ):
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await kv.get("none")
        revision = await kv.create("worker.w-1", b"1", ttl=0.1)
        assert await waiting == Entry("worker.w-1", b"1", revision)
        assert await anext(events) is None


async def test_permanently_closed_client_is_replaced(servers: Servers, bucket: str) -> None:
    async with await NatsKV.connect(servers.urls, bucket=bucket) as kv:
        revision = await kv.create("leader", b"ada")
        await kv._client.close()
        assert await kv.get("leader") == Entry("leader", b"ada", revision)


async def test_closed_store_raises_connection_lost(servers: Servers, bucket: str) -> None:
    kv = await NatsKV.connect(servers.urls, bucket=bucket)
    await kv.close()
    for asking in (kv.get("leader"), kv.create("leader", b""), kv.entries(""), anext(kv.watch(""))):
        with pytest.raises(ConnectionLost):
            await asking


async def test_paused_server_raises_connection_lost_and_late_writes_keep_their_revision(
    tmp_path: Path, bucket: str
) -> None:
    with Servers(tmp_path, 1) as servers:
        async with await NatsKV.connect(servers.urls, bucket=bucket, answer_within=0.3, ping_interval=60) as kv:
            revision = await kv.create("leader", b"ada")
            servers.nodes[0].pause()
            with pytest.raises(ConnectionLost):
                await kv.get("leader")
            with pytest.raises(ConnectionLost):
                await kv.update("leader", b"bob", revision)
            with pytest.raises(ConnectionLost):
                await kv.entries("")
            servers.nodes[0].send(signal.SIGCONT)
            await answered(kv, b"bob")  # applied in the end, so it must not count as rejected
            with pytest.raises(Conflict):
                await kv.update("leader", b"eve", revision)


async def test_returning_node_is_found_and_watchers_poll_again(tmp_path: Path, bucket: str) -> None:
    with Servers(tmp_path, 1) as servers:
        async with await NatsKV.connect(servers.urls, bucket=bucket, answer_within=0.5) as kv:
            first = await kv.create("leader", b"ada")
            async with contextlib.aclosing(kv.watch("")) as events, asyncio.timeout(60):
                hint = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)
                servers.nodes[0].kill()
                with pytest.raises(ConnectionLost):
                    await kv.get("leader")
                servers.nodes[0].start()
                assert await hint is None
                assert await answered(kv, b"ada") == Entry("leader", b"ada", first)
                second = await kv.update("leader", b"bob", first)
                assert await anext(events) == Entry("leader", b"bob", second)


async def test_documented_permissions_suffice(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "assign.md").read_text(encoding="utf-8")
    named = docs.split("```text permissions\n")[1].split("```")[0].replace("<bucket>", "pool").split()
    publish = ", ".join(f'"{subject}"' for subject in named)
    subscribe = '"_INBOX.>", "heapline.assign.pool.>"'
    users = (
        f"accounts {{ A {{ jetstream: enabled, users: [{{ user: w, password: w, permissions: "
        f"{{ publish: [{publish}], subscribe: [{subscribe}] }} }}] }} }}\n"
    )
    with Servers(tmp_path, 1, users) as servers:
        async with await NatsKV.connect(servers.urls, bucket="pool", user="w", password="w") as kv:
            async with contextlib.aclosing(kv.watch("")) as events, asyncio.timeout(30):
                waiting = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)
                await kv.get("none")
                revision = await kv.create("leader", b"1", ttl=5)
                assert await waiting == Entry("leader", b"1", revision)
            assert len(await kv.entries("")) == 1
            await kv.delete("leader", revision)


async def answered(kv: NatsKV, value: bytes) -> Entry:
    """Retry until the key has this value."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ConnectionLost):
                entry = await kv.get("leader")
                if entry is not None and entry.value == value:
                    return entry
            await asyncio.sleep(0.05)


async def test_repeated_error_is_logged_rarely_and_without_addresses(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    complaints = nats_bucket.ErrorLogger(lambda: now)
    for _ in range(20):
        await complaints.log_error(OSError("cannot reach nats://u:secret@host"))
    await complaints.log_error(nats.errors.Error('permissions violation for publish to "$kv.x.leader"'))
    now = 11.0
    await complaints.log_error(OSError("cannot reach nats://u:secret@host"))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "secret" not in "".join(said)
    assert "$kv.x.leader" in said[1]


def test_importing_assign_does_not_import_nats() -> None:
    program = (
        "import sys; from heapline import assign; sys.exit(any(name.split('.')[0] == 'nats' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_missing_nats_py_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(BadConfig, match=r"pip install 'heapline\[nats\]'"):
        nats_bucket.require_nats()
