"""Forgetting a key in a live queue: its messages are no longer delivered, and what is left is reported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import heapline
from heapline.contract.message import Outgoing
from heapline.spark.jobs.forget import forget
from tests.integration.server_process import Process
from tests.spark.conftest import MARKS

pytestmark = MARKS


async def test_forget_removes_messages_and_reports_what_is_in_the_journal(spark: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with Process(data) as server:
        where = {"heapline.url": server.target, "heapline.api_key_file": str(data / "admin.key")}
        await asyncio.to_thread(_forget_all, spark, where, server.target, (data / "admin.key").read_text().strip())


def _forget_all(spark: Any, where: dict[str, str], target: str, api_key: str) -> None:
    with heapline.connect_sync(target, api_key=api_key) as hl:
        hl.create_topic("jobs", partitions=2)
        hl.enqueue_batch(
            "jobs", [Outgoing(b"%d" % n, n, key=f"k{n % 2}", delay=9e5 if n > 7 else None) for n in range(12)]
        )
        got = hl.pop("jobs", 4, visibility=3600.0)  # 0 to 3
        mine = [message for message in got if message.key == "k1"]
        hl.bury(mine[:1])
        hl.ack([message for message in got if message.key == "k0"])
        [found] = forget(spark, where, "k1").topics
        # 1 is dead, 3 is leased, 5, 7, 9 and 11 wait.
        assert (found.cancelled, found.dead_deleted, found.leased, found.payloads_left) == (4, 1, 1, 6)
        assert found.segments == (1, 1)
        stats = hl.stats("jobs")
        assert (stats.ready, stats.delayed, stats.leased, stats.dead) == (2, 2, 1, 0)
        hl.release(mine[1:])
        [found] = forget(spark, where, "k1", topics=["jobs"]).topics
        assert (found.cancelled, found.leased, found.payloads_left) == (1, 0, 6)
        assert {message.key for message in hl.pop("jobs", 10)} == {"k0"}
