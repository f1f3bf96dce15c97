"""Replay: messages selected and changed by SQL, killed and continued, each enqueued once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from heapline.spark.jobs.replay import ReplayResult, replay
from tests.integration.server_process import Process
from tests.spark.conftest import MARKS

pytestmark = MARKS


class Killed(BaseException):
    pass


async def test_replay_enqueues_messages_once_if_the_job_is_killed(spark: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with Process(data) as server:
        where = {"heapline.url": server.target, "heapline.api_key_file": str(data / "admin.key")}
        async with heapline.connect(server.target, api_key=(data / "admin.key").read_text().strip()) as hl:
            await hl.create_topic("orders", partitions=2)
            await hl.create_topic("again", partitions=2)
            sent = [
                Outgoing(b'{"n": %d}' % n, n % 5, f"k{n % 7}", headers={"a": f"{n}", "heapline-replay": "x"}, ttl=900)
                for n in range(300)
            ]  # fmt: skip
            ids = [e.message_id for e in await hl.enqueue_batch("orders", sent)]
            await hl.ack(await hl.pop("orders", 100))
            ends = {p: end for p, (_, end) in (await hl.offsets("orders")).items()}
            await hl.enqueue_batch("orders", [Outgoing(b"later")] * 20)

            def run(tell: Any = None, **more: Any) -> ReplayResult:
                given: dict[str, Any] = {
                    "name": "monday", "into": "again", "end": ends, "chunk_rows": 150, "folder": tmp_path / "job",
                    "filter": "priority < 3", "select": "priority + 10 AS priority", "tell": tell,
                } | more  # fmt: skip
                return replay(spark, where, "orders", **given)

            with pytest.raises(BadRequest, match=r"Spark rejected the SQL.*nothing"):
                await asyncio.to_thread(run, filter="nothing = 1")

            def die(done: int, total: int, messages: int) -> None:
                if done == 2:
                    raise Killed

            with pytest.raises(Killed):
                await asyncio.to_thread(run, die)
            result = await asyncio.to_thread(run)
            assert (result.chunks_before, result.messages) == (2, 180)
            assert (await asyncio.to_thread(run)).was_done
            with pytest.raises(BadRequest, match="started with a different filter"):
                await asyncio.to_thread(run, filter="priority < 4")
            [first] = await hl.peek("again", 1)
            assert first.expires_at is not None
            assert first.due_at is not None
            assert first.expires_at - first.due_at == timedelta(seconds=900)
            got = await hl.pop("again", 1000)
            assert len(got) == 180
            for message in got:
                n = int(message.payload[6:-1])
                origin = message.headers.pop("heapline-replayed-from").split("/")
                assert origin[0] == "orders"
                assert 0 <= int(origin[2]) < ends[int(origin[1])]
                assert message.headers == {
                    "a": str(n), "heapline-replay": "monday", "heapline-replayed-id": ids[n],
                }  # fmt: skip
                assert (message.priority, message.key) == (n % 5 + 10, f"k{n % 7}")
            assert {int(m.payload[6:-1]) for m in got} == {n for n in range(300) if n % 5 < 3}
            result = await asyncio.to_thread(run, name="some", folder=tmp_path / "some", count=25)
            assert result.messages == 25
            origins = [m.headers["heapline-replayed-from"].split("/")[1] for m in await hl.pop("again", 99)]
            assert set(origins) == {"0", "1"}
            with pytest.raises(BadRequest, match="count"):
                await asyncio.to_thread(run, name="none", folder=tmp_path / "none", count=0)
