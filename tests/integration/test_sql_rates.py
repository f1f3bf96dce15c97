"""Rates of namespaces over all nodes of the Postgres broker, in Redis and without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import heapline.sql
from heapline.contract.errors import UnavailableError
from tests.integration.mqueue_rig import Client
from tests.integration.sql_processes import admin_key, http, sql_node
from tests.postgres import fresh_schema, shared_url
from tests.valkey import Valkey, fresh_redis

pytest.importorskip("asyncpg")
pytest.importorskip("redis")
RATE = {"mqueue_rate": 0.01, "mqueue_burst": 2000}  # 20 requests, then one in 100 seconds


async def admitted(*clients: Client) -> int:
    """Return how many of many concurrent requests, over all clients, are within the rate."""
    answers = await asyncio.gather(*(client.dequeue() for client in clients for _ in range(30)))
    assert {answer.status_code for answer in answers} <= {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert 1 <= int(answer.headers["retry-after"]) <= 100
    return sum(answer.status_code == 200 for answer in answers)


async def test_nodes_share_the_rate_of_a_namespace_or_limit_it_separately_without_redis(tmp_path: Path) -> None:
    schema, valkey = fresh_schema(), Valkey().start()
    try:
        settings = {**RATE, "redis": valkey.url()}
        async with (
            sql_node(tmp_path / "a", schema, **settings) as a,
            sql_node(tmp_path / "b", schema, **settings) as b,
            http(a) as on_a,
            http(b) as on_b,
        ):
            clients = [Client(plain, admin_key(tmp_path / "a")) for plain in (on_a, on_b)]
            assert await admitted(*clients) == 20
            valkey.kill()
            assert await admitted(*clients) == 2 * 20  # each node separately
            text = (await on_a.get("/metrics")).text
            assert "redis_up 0.0" in text
            for node in (a, b):
                assert await node.terminate() == 0
                assert b"Traceback" not in node.logged()
    finally:
        valkey.close()


async def test_request_counts_in_all_its_namespaces_or_in_none() -> None:
    async with heapline.sql.open([shared_url()], schema=fresh_schema(), redis=fresh_redis()) as hl:
        slow, fast = (0.01, 2.0), (1000.0, 1000.0)
        assert await hl.take_rates({"a": slow, "b": fast}) is None
        assert await hl.take_rates({"a": slow}) is None
        refused = await hl.take_rates({"a": slow, "b": slow})
        assert refused is not None
        assert refused[0] == "a"
        assert 90 < refused[1] <= 100
        assert await hl.take_rates({"b": slow}) is None  # the request that was refused did not count


async def test_without_redis_nothing_is_counted_there() -> None:
    async with heapline.sql.open([shared_url()], schema=fresh_schema()) as hl:
        with pytest.raises(UnavailableError):
            await hl.take_rates({"a": (1.0, 1.0)})
