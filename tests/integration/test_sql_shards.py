"""The Postgres broker over several shards: the shard of each topic, and the effect of a shard that is down."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

import heapline
import heapline.sql
from heapline import BadRequest, Outgoing
from heapline.contract import call
from heapline.contract.batches import PrepareBatch, Share
from heapline.contract.call import Context
from heapline.contract.messages import EnqueueBatch, pack_messages
from heapline.sql.placement import shard_of
from tests.postgres import UNSYNCED, KillablePostgres, fresh_schema, postgres_server, shared_url

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import circuit, schedules  # noqa: E402 - needs asyncpg
from heapline.sql import shard as shard_module  # noqa: E402 - needs asyncpg
from heapline.sql.namespace_keys import ABANDONED_MS, VALID_MS  # noqa: E402 - needs asyncpg

SHARDS = 3


@pytest.fixture
async def urls() -> AsyncIterator[list[str]]:
    """Separate databases on the shared server."""
    names = [fresh_schema() for _ in range(SHARDS)]
    admin = await asyncpg.connect(shared_url())
    for name in names:
        await admin.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")
    yield [shared_url(name) for name in names]
    for name in names:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


def topics_by_shard(shards: int) -> list[str]:
    """One topic of each shard."""
    found: dict[int, str] = {}
    for i in range(100):
        found.setdefault(shard_of("default", f"jobs{i}", shards), f"jobs{i}")
    return [found[shard] for shard in range(shards)]


async def test_topics_are_spread_over_the_shards_and_listed_together(urls: list[str]) -> None:
    names = topics_by_shard(SHARDS)
    async with heapline.sql.open(urls) as hl:
        for name in names:
            await hl.create_topic(name)
            await hl.enqueue(name, name.encode())
        assert [info.name for info in await hl.list_topics()] == sorted(names)
        assert [(await hl.pop(name))[0].payload.decode() for name in names] == names
    for url, name in zip(urls, names, strict=True):
        connection = await asyncpg.connect(url)
        assert [row["topic"] for row in await connection.fetch("SELECT topic FROM heapline.items")] == [name]
        await connection.close()


async def test_schedules_of_all_shards_are_listed_if_one_shard_ends_its_rows_early(
    urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "PAGE_BYTES", 2000)
    monkeypatch.setattr(schedules, "PAGE_BYTES", 2000)
    candidates = [(shard, f"{'ab'[shard]}{i:02}") for shard in range(2) for i in range(40)]
    names = [name for shard, name in candidates if shard_of("default", name, 2) == shard]  # shard 0 has the first ones
    async with heapline.sql.open(urls[:2]) as hl:
        await hl.create_topic("jobs")
        for name in names:
            await hl.create_schedule(name, every=3600, topic="jobs")
        assert [info.name for info in await hl.list_schedules()] == names


async def test_leases_of_several_shards_may_be_acked_together(urls: list[str]) -> None:
    names = topics_by_shard(SHARDS)
    async with heapline.sql.open(urls) as hl:
        held = []
        for name in names:
            await hl.create_topic(name)
            await hl.enqueue_batch(name, [Outgoing(b"x")] * 3)
            held += await hl.pop(name, 3)
        await hl.ack(held)
        assert [(await hl.stats(name)).leased for name in names] == [0] * SHARDS


@pytest.mark.parametrize("change", ["order", "fewer"])
async def test_other_order_or_number_of_shards_is_refused(urls: list[str], change: str) -> None:
    async with heapline.sql.open(urls) as hl:
        await hl.create_topic("jobs")
    other = urls[::-1] if change == "order" else urls[:2]
    with pytest.raises(BadRequest, match="was opened before as shard"):
        async with heapline.sql.open(other):
            pass


async def test_calls_on_a_shard_that_is_down_fail_while_others_work() -> None:
    names, schema = topics_by_shard(2), fresh_schema()
    with postgres_server(UNSYNCED) as (pid, port):
        down = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        async with heapline.sql.open([shared_url(), down], schema=schema, poll_interval=0.1) as hl:
            for name in names:
                await hl.create_topic(name)
                await hl.enqueue(name, b"before")
            waiting = asyncio.create_task(hl.pop(names[1], 1, wait=60.0))
            assert len(await waiting) == 1
            waiting = asyncio.create_task(hl.pop(names[1], 1, wait=60.0))
            os.kill(pid, signal.SIGQUIT)  # an immediate shutdown, as after a crash
            async with asyncio.timeout(20):
                for call in (waiting, hl.enqueue(names[1], b"x"), hl.pop(names[1]), hl.stats(names[1])):
                    with pytest.raises(heapline.UnavailableError, match="shard 1 is unavailable"):
                        await call
                await hl.enqueue(names[0], b"after")
                assert [m.payload for m in await hl.pop(names[0], 2)] == [b"before", b"after"]


async def test_host_that_stalls_fails_its_calls_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing breaks, so only silence reveals it. Here, no statement ever times out."""
    monkeypatch.setattr(circuit, "QUIET_SECONDS", 0.5)
    monkeypatch.setattr(shard_module, "PING_SECONDS", 0.5)
    names = topics_by_shard(2)
    postgres = KillablePostgres(UNSYNCED)
    postgres.start()
    try:
        urls = [shared_url(), postgres.url]
        async with (
            asyncio.timeout(60),
            heapline.sql.open(urls, schema=fresh_schema(), command_timeout=3600, connections=2) as hl,
        ):
            for name in names:
                await hl.create_topic(name)
            postgres.stall()
            waiting = [asyncio.create_task(hl.enqueue(names[1], b"x")) for _ in range(5)]  # some wait for a connection
            await hl.enqueue(names[0], b"x")
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(end) for end in ends] == [shard_module.ShardDown] * 5
            with pytest.raises(heapline.UnavailableError, match="shard 1 is unavailable; nothing was changed"):
                await hl.enqueue(names[1], b"x")
            assert len(await hl.pop(names[0])) == 1
            postgres.resume()
            await until_available(lambda: hl.enqueue(names[1], b"after", priority=-1))
            assert (await hl.pop(names[1]))[0].payload == b"after"
    finally:
        postgres.resume()
        postgres.close()


async def test_slow_statement_does_not_open_the_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(circuit, "CHECK_SECONDS", 0.01)
    pings = 0
    async with heapline.sql.open([shared_url()], schema=fresh_schema()) as hl:
        shard = hl.node.shards[0]
        ping = shard._ping

        async def count() -> bool:
            nonlocal pings
            pings += 1
            assert await ping()
            return True

        monkeypatch.setattr(shard.circuit, "_ping", count)
        async with shard.connection() as connection:
            while pings < 3:
                await connection.execute("SELECT pg_sleep(0.1)")
        assert shard.is_up


async def test_call_cancelled_while_its_connections_end_raises_cancelled_error() -> None:
    async with heapline.sql.open([shared_url()], schema=fresh_schema()) as hl:
        shard, working = hl.node.shards[0], asyncio.Event()

        async def work(connection: Any) -> None:
            working.set()
            await connection.execute("SELECT pg_sleep(60)")

        for run in (shard.run, partial(in_connection, shard)):
            while not shard.is_up:  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.01)
            working.clear()
            task = asyncio.create_task(run(work))
            await working.wait()
            await shard._cut()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def in_connection(shard: Any, work: Callable[[Any], Awaitable[None]]) -> None:
    async with shard.connection() as connection:
        await work(connection)


async def test_node_continues_when_its_connections_were_cut() -> None:
    async with heapline.sql.open([shared_url()], schema=fresh_schema()) as hl:
        await hl.create_topic("jobs")
        waiting = asyncio.create_task(hl.pop("jobs", 1, wait=60.0, request_id="r"))
        await hl.stats("jobs")
        admin = await asyncpg.connect(shared_url())
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        )
        await admin.close()
        async with asyncio.timeout(30):
            sent = await until_available(lambda: hl.enqueue("jobs", b"x", idempotency_key="once"))
            ends = await asyncio.gather(waiting, return_exceptions=True)
            assert isinstance(ends[0], list | heapline.UnavailableError)
            (message,) = await until_available(lambda: hl.pop("jobs", 1, wait=20.0, request_id="r"))
        assert message.id == sent.id


async def test_enqueue_that_was_paused_after_its_claim_stores_nothing(urls: list[str]) -> None:
    """Another topic has meanwhile claimed its key, so two messages would have one key of the namespace."""
    one, two, three = topics_by_shard(SHARDS)
    async with heapline.sql.open(urls, schema="keys") as hl:
        for topic in (one, two, three):
            await hl.create_topic(topic)
        claims = [(f"k{i}", topic, b"x") for i, topic in enumerate((one, two))]
        found, claimed_at = await hl.claim_keys("default", claims)
        assert found == [None, None]
        paused = Context(claimed_at={topic: at - VALID_MS - 1 for topic, at in claimed_at.items()})
        keyed = [pack_messages([Outgoing(b"x", idempotency_key=f"k{i}")]) for i in range(2)]
        with pytest.raises(heapline.UnavailableError, match="were claimed 60 seconds ago"):
            await hl.do(EnqueueBatch(one, keyed[0]), paused)
        with pytest.raises(heapline.UnavailableError, match="were claimed 60 seconds ago"):
            await hl.do(PrepareBatch("b", "1", [Share(two, keyed[1])]), paused)
        assert [(await hl.stats(topic)).ready for topic in (one, two)] == [0, 0]
        await hl.do(PrepareBatch("b", "1", [Share(two, keyed[1])]), Context(claimed_at=claimed_at))
        for shard in hl.node.shards:
            async with shard.connection() as connection:
                await connection.execute("UPDATE namespace_keys SET at = at - $1", ABANDONED_MS + 1)
        with pytest.raises(heapline.IdempotencyConflict, match="in progress"):  # the enqueue is prepared
            await hl.claim_keys("default", [("k1", three, b"x")])
        assert (await hl.claim_keys("default", [("k0", three, b"x")]))[0] == [None]
        await hl.commit_batch("b", ["1"])
        assert (await hl.claim_keys("default", [("k1", three, b"x")]))[0] == [(await hl.peek(two))[0].id]


async def until_available(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call that may be repeated, until the shard answers."""
    while True:
        try:
            return await call()
        except heapline.UnavailableError:
            await asyncio.sleep(0.05)


async def forever(call: Callable[[], Awaitable[Any]]) -> None:
    """Repeat a call until it raises."""
    while True:
        await call()


async def test_node_continues_after_its_database_refused_connections(
    urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The server runs, so the error is not that of a broken connection; it once ended the node's timers permanently."""
    name = urls[0].rpartition("/")[2]
    admin = await asyncpg.connect(shared_url())
    async with heapline.sql.open(urls[:1], schema=fresh_schema(), poll_interval=0.1) as hl, asyncio.timeout(60):
        await hl.create_topic("jobs")
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
        with pytest.raises(heapline.UnavailableError):
            await forever(lambda: hl.stats("jobs"))
        while "cannot read the next deadline; will retry" not in caplog.text:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.01)
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        await until_available(lambda: hl.enqueue("jobs", b"later", delay=0.1, idempotency_key="once"))
        (message,) = await until_available(lambda: hl.pop("jobs", 1, wait=20.0, request_id="r"))
        assert message.payload == b"later"
    await admin.close()
