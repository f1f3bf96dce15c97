"""The dashboard in front of a broker with fewer features: what it lacks is absent, and the rest works."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from heapline import Backoff
from tests.integration.sql_processes import connect, sql_node
from tests.postgres import fresh_schema

pytest.importorskip("asyncpg")


async def test_pages_of_the_postgres_broker_work_and_others_are_absent(tmp_path: Path) -> None:
    data = tmp_path / "a"
    async with sql_node(data, fresh_schema()) as node:
        async with connect(node, data) as hl:
            await hl.create_topic("jobs", max_retries_default=0, backoff=Backoff(base=0.0))
            await hl.enqueue("jobs", b"later", delay=3600)
            waiting = await hl.enqueue("jobs", b"waits")
            (message,) = await hl.pop("jobs", 1, wait=5.0)
            await message.nack(reason="it failed")
            (dead,) = await hl.dlq_list("jobs")
            features = (await hl.describe()).features
        base = f"http://127.0.0.1:{node.http_port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=30.0) as browser:
            key = (data / "admin.key").read_text().strip()
            login = await browser.post("/ui/login", data={"key": key})
            browser.headers["cookie"] = login.headers["set-cookie"].partition(";")[0]
            overview = (await browser.get("/ui/")).text
            assert "jobs" in overview
            assert ("Workers" in overview) is ("leases" in features)
            assert ("Schedules" in overview) is ("schedules" in features)
            for path in (
                "/topics",
                "/topics/jobs",
                "/topics/jobs?tab=next",
                "/topics/jobs?tab=partitions",
                "/topics/jobs?tab=config",
                "/messages?q=jobs",
                f"/messages?q={waiting.message_id}",
                f"/message?topic=jobs&id={waiting.message_id}",
                f"/message?topic=jobs&id={dead.message_id}",
                "/dead",
                "/dead?topic=jobs",
                "/schedules",
                "/access",
                "/access?tab=users",
                "/audit",
            ):
                answer = await browser.get(f"/ui{path}")
                assert answer.status_code == 200, (path, answer.text[-600:])
