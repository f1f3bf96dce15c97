"""MQueue's API on the Postgres broker: the seed's semantics where they depend on the storage."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.integration.mqueue_rig import PLACE, WHERE, Client, item
from tests.integration.sql_processes import admin_key, http, sql_node, until
from tests.integration.test_sql_shards import topics_by_shard
from tests.postgres import UNSYNCED, fresh_schema, postgres_server, shared_url

asyncpg = pytest.importorskip("asyncpg")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """A caller of a node on two shards."""
    schema = fresh_schema()
    admin = await asyncpg.connect(shared_url())
    await admin.execute(f"CREATE DATABASE {schema} STRATEGY FILE_COPY")
    data = tmp_path / "a"
    async with sql_node(data, schema, shared_url(), shared_url(schema), token_lifetime=3600) as node:
        async with http(node) as plain:
            yield Client(plain, admin_key(data))
        assert await node.terminate() == 0
        assert b"Traceback" not in node.logged()
    await admin.execute(f"DROP DATABASE {schema} WITH (FORCE)")
    await admin.close()


async def test_messages_live_as_the_seed_describes(client: Client) -> None:
    assert await client.take() == []
    await client.put(b"to create the topic")
    (first,) = await client.take()
    assert (await client.ack(first["id"])).status_code == 200
    soon, later = ((datetime.now(UTC) + timedelta(seconds=s)).isoformat() for s in (3, 3.2))
    items = [item(b"c", 2), item(b"b", 1, deliver_after=later), item(b"a", 1, deliver_after=soon), item(b"d", 2)]
    ids = (await client.enqueue(*items)).json()
    client.http.headers.update(client.headers)
    await until(client.http, f"/v1/heaps/{WHERE}:stats", lambda answer: answer.json()["ready"] == 4)
    taken = await client.take()
    # The lowest priority first, then the earliest deliver_after, then the lowest id.
    assert [m["id"] for m in taken] == [ids[2], ids[1], ids[0], ids[3]]
    assert (await client.ack(ids[0])).status_code == 200
    assert (await client.ack(ids[0])).status_code == 409
    assert (await client.nack(ids[1], error="Payment gateway timeout")).status_code == 200
    assert (await client.ack(ids[2], lease_token=taken[0]["lease_token"])).status_code == 200
    assert await client.take() == []


HOSTILE = [
    None, True, -1, 0, 1 << 53, (1 << 63) - 1, -(1 << 63), 1 << 63, 1.5, 1e308, "", "\0", "a\0b", "\ud800", "a/b", "..",
    "x" * 5000, [], {}, "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "2023-10-27T10:00:00", "NaN", "'; DROP TABLE t",
]  # fmt: skip


async def test_hostile_requests_are_refused_and_change_nothing(client: Client) -> None:
    await client.put(b"first")
    rng, statuses = random.Random(1), Counter[int]()
    (held,) = await client.take()
    bodies = {
        "/enqueue": item(b"x", deliver_after="2023-10-27T10:00:00Z", idempotency_key="k"),
        "/ack": {**PLACE, "id": held["id"], "lease_token": 1},
        "/nack": {**PLACE, "id": held["id"], "lease_token": 1, "error": "e"},
        "/dequeue": {**PLACE, "limit": 1},
    }
    for path, body in bodies.items():
        for name in body:
            for value in rng.sample(HOSTILE, 12):
                changed = {**body, name: value}
                if path == "/dequeue":
                    answer = await client.http.get(path, params=query(changed), headers=client.headers)
                else:
                    content = json.dumps([changed] if path == "/enqueue" else changed)
                    answer = await client.http.post(path, content=content, headers=client.headers)
                statuses[answer.status_code] += 1
                assert answer.status_code < 500, (path, name, value, answer.text)
    assert statuses[200], "some of the values are valid"
    assert (await client.ack(held["id"])).status_code in (200, 409), (
        "the lease is this caller's, or a hostile call ended it"
    )
    assert (await client.enqueue(item(b"last"))).status_code == 200


def query(params: dict[str, Any]) -> dict[str, str]:
    """Return values as text that can be sent in a URL."""
    return {name: str(value).encode(errors="replace").decode() for name, value in params.items()}


async def test_idempotency_key_is_unique_in_its_namespace(client: Client) -> None:
    topics = [f"t{i}" for i in range(6)]  # of both shards

    def keyed(topic: str, key: str = "order-1", **more: Any) -> dict[str, Any]:
        return item(b"x", **{"topic": topic, "idempotency_key": key, **more})

    answers = await asyncio.gather(*(client.enqueue(keyed(topic)) for topic in topics))
    stored = {id for answer in answers if answer.status_code == 200 for id in answer.json()}
    assert len(stored) == 1  # others are repeats, or were refused while the first one was in progress
    assert {answer.status_code for answer in answers} <= {200, 409}
    (id,) = stored
    for topic in topics:
        assert (await client.enqueue(keyed(topic))).json() == [id]
    assert (await client.enqueue(keyed("t0"), item(b"y", topic="t0"))).json()[0] == id  # next to a new message
    (other,) = (await client.enqueue(keyed("t1", namespace="other"))).json()
    assert other != id
    changed = item(b"changed", topic="t3", idempotency_key="order-1")
    assert (await client.enqueue(changed)).status_code == 409
    assert (await client.enqueue(keyed("t1", "twice"), keyed("t2", "twice"))).status_code == 400


async def test_login_says_when_its_token_expires(client: Client) -> None:
    person = {"email": "ada@example.org", "password": "correct horse battery"}
    made = await client.http.post("/v1/users", json={**person, "scopes": ["*:consume"]}, headers=client.headers)
    assert made.status_code == 201
    answer = (await client.http.post("/v1/auth/login", json=person)).json()
    left = datetime.fromisoformat(answer["expires_at"]) - datetime.now(UTC)
    assert timedelta(minutes=50) < left <= timedelta(hours=1)
    assert await Client(client.http, answer["token"]).take() == []


async def test_dead_shard_answers_500_while_others_serve(tmp_path: Path) -> None:
    data, names = tmp_path / "a", topics_by_shard(2)
    with postgres_server(UNSYNCED) as (pid, port):
        other = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        async with sql_node(data, fresh_schema(), shared_url(), other) as node, http(node) as plain:
            client = Client(plain, admin_key(data))
            alive, dead = ({"namespace": "default", "topic": name} for name in names)
            assert (await client.enqueue(item(**alive), item(**alive))).status_code == 200
            assert (await client.enqueue(item(**dead))).status_code == 200
            os.kill(pid, signal.SIGQUIT)
            async with asyncio.timeout(30):
                while (first := await client.enqueue(item(**dead))).status_code == 200:
                    pass
            for answer in (first, await client.dequeue(**dead), await client.ack(1, **dead)):
                assert (answer.status_code, answer.json()["error"]) == (500, "UnavailableError")
            assert (await client.enqueue(item(**alive))).status_code == 200
            assert len((await client.dequeue(**alive)).json()) == 3
