"""Schedules on the Postgres broker: several nodes fire them, each firing once, even if nodes are killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import heapline.sql
from heapline.contract.schedules import SCHEDULE, SCHEDULED_AT
from heapline.sql.placement import shard_of
from tests.integration.sql_processes import connect, sql_node
from tests.integration.test_sql_shards import topics_by_shard
from tests.postgres import fresh_schema, shared_url

asyncpg = pytest.importorskip("asyncpg")
SCHEDULES = [f"every-second-{i}" for i in range(6)]
FIRINGS = 5


@pytest.fixture
async def urls() -> AsyncIterator[list[str]]:
    name = fresh_schema()
    admin = await asyncpg.connect(shared_url())
    await admin.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")
    yield [shared_url(), shared_url(name)]
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


async def test_each_firing_is_enqueued_once_by_nodes_that_are_killed(tmp_path: Path, urls: list[str]) -> None:
    schema, topics = fresh_schema(), topics_by_shard(2)
    assert {shard_of("default", name, 2) for name in SCHEDULES} == {0, 1}
    async with sql_node(tmp_path / "a", schema, *urls) as a, sql_node(tmp_path / "b", schema, *urls) as b:
        async with connect(a, tmp_path / "a") as hl:
            for topic in topics:
                await hl.create_topic(topic)
            starts = datetime.now(UTC) + timedelta(seconds=0.5)
            for i, name in enumerate(SCHEDULES):  # schedules and topics of both shards, in all combinations
                await hl.create_schedule(name, every=1, topic=topics[i // 3], starts=starts, misfire="all")
            await fired(hl, SCHEDULES[0], 1)
            assert (await hl.get_schedule(SCHEDULES[0])).state == "active"
        await a.kill()
        async with connect(b, tmp_path / "a") as hl:
            await fired(hl, SCHEDULES[1], 3)
        await b.kill()
        async with sql_node(tmp_path / "c", schema, *urls) as c, connect(c, tmp_path / "a") as hl:
            for name in SCHEDULES:
                await fired(hl, name, FIRINGS)
                await hl.delete_schedule(name)
            times: dict[str, list[datetime]] = {}
            for topic in topics:
                for message in await hl.pop(topic, 1000):
                    at = datetime.fromisoformat(message.headers[SCHEDULED_AT])
                    times.setdefault(message.headers[SCHEDULE].removeprefix("default/"), []).append(at)
    assert sorted(times) == sorted(SCHEDULES)
    for found in times.values():
        first = min(found)
        assert sorted(found) == [first + timedelta(seconds=i) for i in range(len(found))]
        assert abs(first - starts) < timedelta(milliseconds=1)


async def fired(hl: heapline.Broker, name: str, count: int) -> None:
    async with asyncio.timeout(30):
        while (await hl.get_schedule(name)).fired_count < count:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.05)


async def test_firing_whose_mark_was_lost_is_recognized(urls: list[str]) -> None:
    """As after a crash between the enqueue and the commit of the schedule's row, or after restoring an old copy."""
    schema = fresh_schema()
    async with heapline.sql.open(urls[:1], schema=schema) as hl:
        await hl.create_topic("jobs")
        await hl.create_schedule("a", every=1, topic="jobs", misfire="all")
        admin = await asyncpg.connect(urls[0], server_settings={"search_path": schema})
        before = await admin.fetchrow("SELECT state, wake FROM schedules")
        await fired(hl, "a", 2)
        await admin.execute("UPDATE schedules SET state = $1, wake = $2", *before)
        await admin.close()
        await fired(hl, "a", 3)
        await hl.delete_schedule("a")
        times = [m.headers[SCHEDULED_AT] for m in await hl.pop("jobs", 100)]
        assert len(times) == len(set(times)) >= 3
