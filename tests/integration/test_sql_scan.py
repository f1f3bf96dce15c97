"""Scans of a topic by ranges of ids on the Postgres broker: every message that stays is returned exactly once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asyncpg")

import heapline
from heapline.contract.fields import INT64_MAX
from heapline.contract.message import Outgoing
from heapline.sql.layout import COLUMNS
from heapline.sql.statements import statement
from tests.integration.sql_processes import admin_key, connect, http, sql_node
from tests.integration.sql_rig import fresh_topic, node
from tests.postgres import fresh_schema


async def scan(hl: Any, topic: str, *, dead: bool = False, parts: int = 1, **options: Any) -> list[Any]:
    bounds = (await hl.split_messages(topic, dead=dead, parts=parts)).bounds
    found = []
    for first, end in pairwise(bounds):
        at: int | None = first
        while at is not None:
            page = await hl.scan_messages(topic, dead=dead, first_id=at, end_id=end, **options)
            found += page.items
            at = page.next_id
    return found


async def test_pages_are_bounded_in_rows_and_bytes_and_miss_nothing() -> None:
    async with node() as hl:
        topic = fresh_topic()
        await hl.create_topic(topic)
        assert await scan(hl, topic) == []
        await hl.enqueue_batch(
            topic, [Outgoing(b"x" * 1000, n, delay=60.0 if n % 3 == 0 else None) for n in range(300)]
        )
        for parts in (1, 7):
            found = await scan(hl, topic, parts=parts, limit=17)
            assert sorted(m.priority for m in found) == list(range(300))
        assert Counter(m.state for m in found) == {"ready": 200, "delayed": 100}
        [first, *_] = (await hl.split_messages(topic)).bounds
        page = await hl.scan_messages(topic, first_id=first, max_bytes=2500)
        assert (len(page.items), page.next_id) == (2, page.items[-1].id + 1)
        page = await hl.scan_messages(topic, first_id=first, max_bytes=1)
        assert len(page.items) == 1, "one message is returned, however large"
        assert {m.payload for m in await scan(hl, topic, payloads=False)} == {None}
        assert sorted(m.id for m in await scan(hl, topic, limit=100)) == sorted(m.id for m in found)


async def test_messages_that_move_during_a_scan_are_returned_once() -> None:
    """Half of the messages are leased, returned, buried and replayed all the time; all of them stay in the topic."""
    async with node() as hl:
        topic = fresh_topic()
        await hl.create_topic(topic, backoff=heapline.Backoff(base=0.0), max_retries_default=200)
        await hl.enqueue_batch(topic, [Outgoing(b"%d" % n) for n in range(400)])
        over = False

        async def disturb() -> None:
            while not over:
                messages = await hl.pop(topic, 100)
                await hl.nack(messages[:50])
                await hl.release(messages[50:])

        disturbing = asyncio.create_task(disturb())
        try:
            for _ in range(10):
                found = Counter(m.payload for m in await scan(hl, topic, parts=4, limit=13))
                assert found == Counter(b"%d" % n for n in range(400))
        finally:
            over = True
            await disturbing


async def test_scan_of_dead_letters_returns_only_those() -> None:
    async with node() as hl:
        topic = fresh_topic()
        await hl.create_topic(topic)
        await hl.enqueue_batch(topic, [Outgoing(b"%d" % n) for n in range(10)])
        for message in await hl.pop(topic, 4):
            await message.bury("broken")
        found = await scan(hl, topic, dead=True, parts=2)
        assert [(m.payload, m.state, m.reason) for m in found] == [(b"%d" % n, "dead", "broken") for n in range(4)]
        assert len(await scan(hl, topic)) == 6


@pytest.mark.parametrize("dead", [False, True])
async def test_page_reads_only_its_own_rows(dead: bool) -> None:
    """New slots have no statistics: a planner left to itself sorts all messages for each page."""
    async with node() as hl:
        topic = fresh_topic()
        id = (await hl.create_topic(topic)).incarnation
        await hl.enqueue_batch(topic, [Outgoing(b"x")] * 3000)
        if dead:
            for message in await hl.pop(topic, 300):
                await message.bury("broken")
        scan = statement("scan_dead" if dead else "scan_waiting", columns=COLUMNS)
        async with hl.node.shards[0].connection() as connection, connection.transaction():
            await connection.execute(statement("scan_in_order"))
            text = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {scan}", id, 0, INT64_MAX, 10, 1 << 20)
        assert 10 <= sum(rows_read(json.loads(text)[0]["Plan"])) <= 100


def rows_read(plan: dict[str, Any]) -> Iterator[float]:
    """Yield how many rows each scan of a table returned."""
    if "Relation Name" in plan:
        yield plan["Actual Rows"] * plan["Actual Loops"]
    for inner in plan.get("Plans", ()):
        yield from rows_read(inner)


async def test_http_answers_ids_as_digits_because_javascript_rounds_numbers(tmp_path: Path) -> None:
    data = tmp_path / "node"
    async with (
        sql_node(data, fresh_schema()) as server,
        connect(server, data) as hl,
        http(server, admin_key(data)) as web,
    ):
        await hl.create_topic("jobs")
        ids = [e.id for e in await hl.enqueue_batch("jobs", [Outgoing(b"x")] * 3)]
        answer = (await web.get("/v1/messages:split?topic=jobs")).json()
        assert answer["bounds"] == [str(ids[0]), str(ids[-1] + 1)]
        found, at = [], answer["bounds"][0]
        while at is not None:
            page = (await web.get(f"/v1/messages?topic=jobs&first_id={at}&end_id={answer['bounds'][1]}&limit=2")).json()
            found += [item["id"] for item in page["items"]]
            at = page.get("next_id")
        assert found == list(map(str, ids))
