"""Migrations on a real database: created once, forward only, and refused if the program is too old."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import heapline
import heapline.sql
from heapline.contract.errors import BadRequest, UnknownFormat
from tests.postgres import drop_schema, fresh_schema, shared_url

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql.migrations import all_migrations, migrate  # noqa: E402 - needs asyncpg


@pytest.fixture
def schema() -> str:
    return fresh_schema()


@pytest.fixture
async def connection(schema: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(shared_url(), server_settings={"search_path": schema})
    yield connection
    await drop_schema(connection, schema)
    await connection.close()


async def version(connection: Any) -> int:
    found: int = await connection.fetchval("SELECT version FROM meta")
    return found


async def test_first_open_creates_the_newest_version(connection: Any, schema: str) -> None:
    assert await migrate(connection, schema, 1, 3) == len(all_migrations())
    row = await connection.fetchrow("SELECT version, shard, shards FROM meta")
    assert tuple(row) == (len(all_migrations()), 1, 3)


async def test_migrating_again_changes_nothing(connection: Any, schema: str) -> None:
    await migrate(connection, schema, 0, 1)
    await connection.execute("INSERT INTO topics (namespace, name, config, id_suffix) VALUES ('a', 'b', '{}', 1)")
    await migrate(connection, schema, 0, 1)
    assert await connection.fetchval("SELECT count(*) FROM topics") == 1


async def test_only_missing_migrations_run_in_order(connection: Any, schema: str) -> None:
    first = all_migrations()
    await migrate(connection, schema, 0, 1, first)
    steps = ("CREATE TABLE extra (n integer)", "ALTER TABLE extra ADD COLUMN m integer")
    assert await migrate(connection, schema, 0, 1, (*first, *steps)) == len(first) + 2
    await connection.execute("INSERT INTO extra (n, m) VALUES (1, 2)")
    assert await version(connection) == len(first) + 2


async def test_failed_migration_leaves_the_schema_as_it_was(connection: Any, schema: str) -> None:
    first = all_migrations()
    await migrate(connection, schema, 0, 1, first)
    with pytest.raises(asyncpg.UndefinedTableError):
        await migrate(connection, schema, 0, 1, (*first, "CREATE TABLE extra (n integer)", "DROP TABLE nothing"))
    assert await version(connection) == len(first)
    assert await connection.fetchval("SELECT to_regclass('extra')") is None


async def test_unknown_version_is_refused(connection: Any, schema: str) -> None:
    await migrate(connection, schema, 0, 1)
    await connection.execute("UPDATE meta SET version = 99")
    with pytest.raises(UnknownFormat, match="99"):
        await migrate(connection, schema, 0, 1)
    with pytest.raises(heapline.CorruptionError, match="upgrade Heapline"):
        async with heapline.sql.open([shared_url()], schema=schema):
            pass
    assert await version(connection) == 99


@pytest.mark.parametrize(("shard", "shards"), [(1, 2), (0, 3), (0, 1)])
async def test_database_of_another_placement_is_refused(connection: Any, schema: str, shard: int, shards: int) -> None:
    await migrate(connection, schema, 0, 2)
    with pytest.raises(BadRequest, match="cannot change"):
        await migrate(connection, schema, shard, shards)


async def test_nodes_that_start_together_migrate_once(schema: str, connection: Any) -> None:
    brokers = [heapline.sql.open([shared_url()], schema=schema) for _ in range(4)]
    opened = await asyncio.gather(*(broker.__aenter__() for broker in brokers))
    assert await version(connection) == len(all_migrations())
    await opened[0].create_topic("jobs")
    assert [len(await broker.list_topics()) for broker in opened] == [1, 1, 1, 1]
    await asyncio.gather(*(broker.close() for broker in opened))
