"""A client whose connection to a rig's server can be cut, and a check that the server keeps nothing of it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from heapline.contract.message import Outgoing
from tests.integration.proxy import Proxy
from tests.integration.server_rig import Rig, until


class Cuttable:
    """A rig, and a client whose connection goes through a proxy."""

    def __init__(self, rig: Rig, proxy: Proxy, client: Any) -> None:
        self.rig, self.proxy, self.client = rig, proxy, client
        self._tasks, self._calls = len(asyncio.all_tasks()), rig.server.gate.requests_open

    async def __aenter__(self) -> Cuttable:
        await self.client.__aenter__()
        await self.client.stats("jobs")  # it is connected
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def counts(self) -> tuple[int, int]:
        stats = await self.rig.behind.stats("jobs")
        return stats.ready, stats.leased

    async def settled(self) -> None:
        """Wait until the server has noticed the cut and released what it had not sent."""

        async def noticed() -> bool:
            return self.rig.server.gate.requests_open <= self._calls and not self.rig.server.dispatcher._returns

        await until(noticed)

    async def nothing_is_left(self) -> None:
        """Check that the server has forgotten its client: no task, no waiting pop, no connection."""
        await self.client.close()

        async def gone() -> bool:
            gc.collect()
            tasks, calls = len(asyncio.all_tasks()), self.rig.server.gate.requests_open
            return tasks <= self._tasks and calls <= self._calls and not self.proxy.connections

        try:
            await until(gone)
        except TimeoutError:
            pytest.fail(f"{self.proxy.connections} connections, {self._tasks} tasks became {asyncio.all_tasks()}")
        assert not self.rig.server.dispatcher._waiting


async def fill(rig: Rig, count: int, size: int = 10) -> None:
    for start in range(0, count, 10):
        numbers = range(start, min(count, start + 10))
        await rig.behind.enqueue_batch("jobs", [Outgoing(b"%d" % i + b"." * size) for i in numbers])


async def answered(proxy: Proxy) -> None:
    """Wait until the server has answered and the client has not received it."""
    await asyncio.wait_for(proxy.taken.wait(), 20)
