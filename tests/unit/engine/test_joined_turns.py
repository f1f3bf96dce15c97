"""Calls that arrive one by one, as a server's do, join one turn and one commit if they may gather."""

from __future__ import annotations

import asyncio
from pathlib import Path

from heapline.contract.config import BrokerConfig
from heapline.engine import EmbeddedBroker


async def commits_of_ten(directory: Path, gather_steps: int) -> int:
    config = BrokerConfig(spare_segment_bytes=0, gather_steps=gather_steps)
    async with EmbeddedBroker(str(directory), config=config) as broker:
        await broker.create_topic("jobs", segment_bytes=1 << 20)
        before = (await broker.stats("jobs")).commits_total
        calls = []
        for i in range(10):
            calls.append(asyncio.ensure_future(broker.enqueue("jobs", b"%d" % i)))
            await asyncio.sleep(0)
        results = await asyncio.gather(*calls)
        assert len({r.id for r in results}) == 10
        return (await broker.stats("jobs")).commits_total - before


async def test_calls_of_several_loop_steps_share_a_commit_when_they_gather(tmp_path: Path) -> None:
    assert await commits_of_ten(tmp_path, gather_steps=50) == 1


async def test_calls_are_decided_immediately_without_gathering(tmp_path: Path) -> None:
    assert await commits_of_ten(tmp_path, gather_steps=0) > 1
