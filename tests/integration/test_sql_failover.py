"""Failover of PostgreSQL to a standby that lacks the last commits: a node continues there, with the same URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import heapline
import heapline.sql
from heapline import Outgoing
from tests.integration.sql_rig import take_all
from tests.postgres import UNSYNCED, KillablePostgres, fresh_schema, shared_url
from tests.unit.engine.rig import until

asyncpg = pytest.importorskip("asyncpg")
pytestmark = pytest.mark.slow


class Pair:
    """A primary, and a standby that follows it."""

    def __init__(self) -> None:
        self.primary = KillablePostgres(UNSYNCED)
        self.primary.start()
        self.standby = KillablePostgres(UNSYNCED, self.primary)
        self.standby.start()

    @property
    def url(self) -> str:
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=primary"

    async def part(self) -> None:
        """Let the standby catch up, and end its replication."""
        end = await _ask(self.primary, "SELECT pg_current_wal_lsn()::text")
        while not await _ask(self.standby, f"SELECT pg_last_wal_replay_lsn() >= '{end}'"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await _ask(self.standby, "ALTER SYSTEM SET primary_conninfo = ''")
        await _ask(self.standby, "SELECT pg_reload_conf()")
        while await _ask(self.standby, "SELECT count(*) FROM pg_stat_wal_receiver"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def fail_over(self) -> None:
        self.primary.kill()
        self.standby.promote()

    def close(self) -> None:
        self.standby.close()
        self.primary.close()


async def _ask(server: KillablePostgres, query: str) -> Any:
    connection = await asyncpg.connect(server.url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    found = Pair()
    yield found
    found.close()


async def available(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call until the database answers."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await call()
            except heapline.UnavailableError:
                await asyncio.sleep(0.05)


async def test_node_flushes_again_what_a_failover_lost(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with heapline.sql.open([pair.url], wal=str(tmp_path / "wal"), poll_interval=0.1) as hl:
        await hl.create_topic("jobs", k=100)
        flusher: Any = hl.node.buffers[0].flusher  # type: ignore[union-attr]
        await hl.enqueue("jobs", b"before")
        await until(lambda: flusher.depth == 0)
        await pair.part()
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % n) for n in range(5)])
        await hl.enqueue("jobs", b"delayed", delay=0.1)
        await until(lambda: flusher.depth == 0)
        await asyncio.to_thread(pair.fail_over)
        await available(lambda: hl.enqueue("jobs", b"after", idempotency_key="after"))
        await until(lambda: "the database has lost flushed messages" in caplog.text)
        await until(lambda: flusher.depth == 0)
        expected = [b"before", b"delayed", b"after", *(b"%d" % n for n in range(5))]
        assert sorted(await take_all(hl, "jobs")) == sorted(expected)


async def test_token_from_before_a_failover_ends_no_lease_from_after_it(pair: Pair) -> None:
    """The standby does not know which tokens the primary had handed out since."""
    async with heapline.sql.open([pair.url], poll_interval=0.1) as hl:
        await hl.create_topic("jobs", backoff=heapline.Backoff(base=0))
        for n in range(3):
            await hl.enqueue("jobs", b"%d" % n)
        await pair.part()
        old = [message for _ in range(3) for message in await hl.pop("jobs", visibility=3600)]
        await asyncio.to_thread(pair.fail_over)
        new = [message for _ in range(3) for message in await available(lambda: hl.pop("jobs", visibility=3600))]
        assert [m.id for m in new] == [m.id for m in old]
        for call in (hl.ack, hl.nack, hl.release, hl.bury):
            with pytest.raises(heapline.LeaseLost) as lost:
                await call(old)
            assert set(lost.value.lost) == {m.id for m in old}
        with pytest.raises(heapline.LeaseLost):
            await hl.extend(old, 60)
        stats = await hl.stats("jobs")
        assert (stats.leased, stats.ready, stats.delayed, stats.dead) == (3, 0, 0, 0)
        await hl.ack(new)


async def test_connections_to_a_server_that_became_read_only_are_replaced() -> None:
    """They once stayed in the pool, so the node did not work until it was restarted."""
    async with heapline.sql.open([shared_url()], schema=fresh_schema(), connections=2) as hl:
        await hl.create_topic("jobs")
        shard = hl.node.shards[0]
        async with shard.connection() as first, shard.connection() as second:
            for connection in (first, second):
                await connection.execute("SET default_transaction_read_only = on")
        await available(lambda: hl.enqueue("jobs", b"x", idempotency_key="once"))
        assert await take_all(hl, "jobs") == [b"x"]
