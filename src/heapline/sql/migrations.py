"""Create and upgrade the tables of a shard. Migrations are numbered files that are applied once, in order.

Migrations only go forward. A schema with a higher version than this program knows is refused, and so is a database
that was opened as another shard or with another number of shards: topics would not be found.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

import asyncpg

from heapline.contract.errors import BadRequest, UnknownFormat
from heapline.sql.statements import statement

_FILE = re.compile(r"(\d{4})_\w+\.sql\Z")


@cache
def all_migrations() -> tuple[str, ...]:
    """Return the text of each migration. The first one leads to version 1."""
    found: dict[int, str] = {}
    for file in files("heapline.sql").joinpath("migrations").iterdir():
        match = _FILE.match(file.name)
        if match:
            number = int(match[1])
            if number in found:
                raise ValueError(f"two migrations have the number {number}")
            found[number] = file.read_text(encoding="utf-8")
    if sorted(found) != list(range(1, len(found) + 1)):
        raise ValueError(f"migrations must be numbered from 1 without gaps, got {sorted(found)}")
    return tuple(found[number] for number in sorted(found))


async def migrate(
    connection: asyncpg.Connection,
    schema: str,
    shard: int,
    shards: int,
    migrations: tuple[str, ...] | None = None,
) -> int:
    """Bring the schema to the newest version and return that. Nodes that start together take turns."""
    migrations = all_migrations() if migrations is None else migrations
    async with connection.transaction():
        await connection.execute(statement("lock_migrations"), f"heapline migration {schema}")
        await connection.execute(statement("create_schema", schema=schema))
        version = await _version(connection, schema, shard, shards)
        if version > len(migrations):
            raise UnknownFormat(f"schema {schema!r} of shard {shard}", version)
        for migration in migrations[version:]:
            await connection.execute(migration)
        if version == 0:
            await connection.execute(statement("insert_meta"), len(migrations), shard, shards)
        elif version < len(migrations):
            await connection.execute(statement("update_version"), len(migrations))
    return len(migrations)


async def _version(connection: asyncpg.Connection, schema: str, shard: int, shards: int) -> int:
    """Return the version of the schema, 0 if it is new. Raise if it is that of another shard."""
    if not await connection.fetchval(statement("has_meta"), schema):
        return 0
    row = await connection.fetchrow(statement("select_meta"))
    if row is None:
        raise BadRequest(f"schema {schema!r} of shard {shard} has no row in its table meta; restore it from a backup")
    if (row["shard"], row["shards"]) != (shard, shards):
        raise BadRequest(
            f"the database of shard {shard} was opened before as shard {row['shard']} of {row['shards']}, now as "
            f"{shard} of {shards}; give the URLs in the first order (the number of shards cannot change)"
        )
    version: int = row["version"]
    return version
