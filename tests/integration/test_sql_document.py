"""A document that nodes share in PostgreSQL: the outcome of a change, and which node sees which content."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

import heapline.sql
from heapline.contract.errors import UnavailableError
from tests.postgres import fresh_schema, shared_url

if TYPE_CHECKING:
    from heapline.sql.document import Document

pytest.importorskip("asyncpg")


@asynccontextmanager
async def opened(schema: str, url: str = "") -> AsyncIterator[Document]:
    """The document as another node sees it."""
    async with heapline.sql.open([url or shared_url()], schema=schema) as node, node.document("auth") as document:
        yield document


async def write(document: Document, content: bytes) -> None:
    await asyncio.to_thread(document.change_blocking, lambda _: content)


async def test_schema_with_the_longest_name_has_a_document() -> None:
    async with opened("s" * 48) as document:
        await write(document, b"first")
        assert document.content == b"first"


async def test_change_after_a_restore_is_distinguished_from_one_that_the_backup_lacks() -> None:
    import asyncpg

    schema = fresh_schema()
    database = await asyncpg.connect(shared_url(), server_settings={"search_path": schema})
    try:
        async with opened(schema) as document:
            await write(document, b"first")
            await database.execute("CREATE TABLE backup AS SELECT * FROM documents")
            await write(document, b"second, which the backup lacks")
            async with document._reading:  # this node is down
                await database.execute("DELETE FROM documents")
                await database.execute("INSERT INTO documents SELECT * FROM backup")
                async with opened(schema) as restored:
                    assert restored.content == b"first"
                    await write(restored, b"second, after the backup")
            await document.read()
            assert document.content == b"second, after the backup"
    finally:
        await database.close()


async def test_error_of_an_edit_is_raised_to_its_caller_unchanged() -> None:
    def edit(_: bytes | None) -> bytes:
        raise PermissionError(13, "Permission denied", "admin.key")

    async with heapline.sql.open([shared_url()], schema=fresh_schema()) as node, node.document("auth") as document:
        with pytest.raises(PermissionError, match=r"admin\.key"):
            await asyncio.to_thread(document.change_blocking, edit)
        assert node.why_unready() is None
        assert document.content is None
        await write(document, b"first")  # no lock is held


async def test_error_of_a_reader_hides_why_the_database_is_unreachable() -> None:
    """The reader may be an unauthenticated caller, and the cause names the database's role."""
    import asyncpg

    schema = fresh_schema()
    database = await asyncpg.connect(shared_url())
    try:
        await database.execute(f"CREATE ROLE {schema} LOGIN SUPERUSER")
        async with opened(schema, shared_url().replace("postgres@", f"{schema}@")) as document:
            await database.execute(f"ALTER ROLE {schema} NOLOGIN")
            assert document._connection is not None
            await document._connection.close()
            with pytest.raises(UnavailableError) as refused:
                await document.read()
            assert schema not in str(refused.value)
            assert "not permitted to log in" in repr(refused.value.__cause__)
    finally:
        await database.execute(f"ALTER ROLE {schema} LOGIN")
        await database.close()


async def test_node_that_stops_in_a_transaction_does_not_block_other_writers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("heapline.sql.shard.ABANDONED_SECONDS", 1)
    async with opened(fresh_schema()) as document:
        stopped = await document._shard.connect()  # like a node that was cut off: open, and silent from now on
        try:
            await stopped.execute("BEGIN")
            await stopped.execute("SELECT pg_advisory_xact_lock($1)", document._lock_key)
            await write(document, b"first")
            assert document.content == b"first"
        finally:
            await stopped.close()


async def test_content_ages_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(fresh_schema()) as document:
        awake = time.clock_gettime_ns
        slept = {time.CLOCK_BOOTTIME: 3600 * 10**9}  # other clocks stop
        monkeypatch.setattr("time.clock_gettime_ns", lambda clock: awake(clock) + slept.get(clock, 0))
        assert document.age() >= 3600
        await document.read()
        assert document.age() < 60
