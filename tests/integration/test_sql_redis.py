"""The connection to Redis: nodes work without it while it is down, and use it again afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import heapline.sql
from heapline.contract.errors import BadRequest
from tests.postgres import fresh_schema, shared_url
from tests.unit.engine.rig import until
from tests.valkey import Valkey, fresh_redis

pytest.importorskip("asyncpg")
from heapline.sql.redis import CONNECTIONS_MAX, DEPLOYMENT_KEY, Redis, RedisDown


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    server = Valkey().start()
    yield server
    server.close()


@pytest.fixture
async def connection(valkey: Valkey) -> AsyncIterator[Redis]:
    found = Redis(valkey.url())
    await found.open("one")
    yield found
    await found.close()


async def ping(redis: Redis) -> Any:
    return await redis.run(lambda client: client.ping())


async def test_commands_fail_immediately_while_redis_is_down_and_work_after(connection: Redis, valkey: Valkey) -> None:
    assert await ping(connection)
    valkey.kill()
    for _ in range(100):
        with pytest.raises(RedisDown):
            await ping(connection)
    assert connection.failures_total == 1
    valkey.start()
    await until(lambda: connection.is_up)
    assert await ping(connection)
    owner = await connection.run(lambda client: client.get(DEPLOYMENT_KEY))
    assert owner == b"one", "a server that forgot everything belongs to this deployment again"


async def test_cancellation_ends_a_loop_of_commands_at_each_step(connection: Redis) -> None:
    """A flusher is such a loop. One that loses its cancellation runs on, and closing its node waits for it."""

    async def forever() -> None:
        while True:
            await ping(connection)

    for steps in range(40):
        task = asyncio.ensure_future(forever())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        _, running = await asyncio.wait([task], timeout=2.0)
        if running:
            task.cancel()
        assert not running, f"cancelled after {steps} steps of the event loop, it did not end"
        assert task.cancelled()


async def test_more_commands_than_connections_wait_for_one(connection: Redis) -> None:
    assert all(await asyncio.gather(*(ping(connection) for _ in range(4 * CONNECTIONS_MAX))))
    assert (connection.is_up, connection.failures_total) == (True, 0)


async def test_database_of_another_deployment_is_not_used(connection: Redis, valkey: Valkey) -> None:
    other = Redis(valkey.url())
    await other.open("two")
    try:
        with pytest.raises(RedisDown):
            await ping(other)
        assert await connection.run(lambda client: client.get(DEPLOYMENT_KEY)) == b"one"
    finally:
        await other.close()


async def test_node_opens_and_works_while_redis_is_down(valkey: Valkey) -> None:
    valkey.kill()
    async with heapline.sql.open([shared_url()], schema=fresh_schema(), redis=valkey.url()) as hl:
        await hl.create_topic("jobs")
        await hl.enqueue("jobs", b"x")
        assert [m.payload for m in await hl.pop("jobs", 10)] == [b"x"]
        valkey.start()
        await until(lambda: hl.node.redis.is_up)


async def test_two_nodes_share_a_database() -> None:
    url, schema = fresh_redis(), fresh_schema()
    async with (
        heapline.sql.open([shared_url()], schema=schema, redis=url) as first,
        heapline.sql.open([shared_url()], schema=schema, redis=url) as second,
    ):
        assert first.node.redis is not None
        assert second.node.redis is not None
        assert (first.node.redis.is_up, second.node.redis.is_up) == (True, True)
        described = await first.describe()
        assert url not in str(described.settings)


def test_invalid_url_is_refused() -> None:
    with pytest.raises(BadRequest, match="redis must be a URL"):
        heapline.sql.open([shared_url()], redis="127.0.0.1:6379")
    with pytest.raises(BadRequest, match="cannot read a URL of redis"):
        heapline.sql.open([shared_url()], redis="redis://127.0.0.1:port/")
