"""Feeds over HTTP, on a fake broker: a client that disconnects leaves nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from heapline.contract.call import HERE, Context
from heapline.contract.message import LogFrame
from heapline.server.protocols.http import HttpApp
from tests.unit.server.fake_broker import FakeBroker
from tests.unit.server.rig import ALL, Rig

EMPTY = LogFrame(topic="jobs", partition=0, unit=1, offset=0, row_count=0, time_ms=0, wall_ms=0, events=())


class Endless(FakeBroker):
    """A broker whose feeds send one item and then wait."""

    def __init__(self) -> None:
        super().__init__()
        self.open = 0

    async def stream(self, feed: Any, context: Context = HERE, /) -> AsyncIterator[Any]:  # type: ignore[override]
        self.open += 1
        try:
            yield EMPTY
            await asyncio.Event().wait()
        finally:
            self.open -= 1


class Connection:
    """An ASGI connection that sends one request and disconnects when the test says so."""

    def __init__(self, path: str, query: bytes) -> None:
        self.scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": [(b"authorization", ALL.encode())],
        }
        self.gone, self.sent = asyncio.Event(), list[dict[str, Any]]()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


async def steps(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begin() -> tuple[Rig, Endless, Connection, asyncio.Task[None]]:
    broker = Endless()
    rig, connection = Rig(broker), Connection("/v1/log", b"topic=jobs")
    app = HttpApp(rig.dispatcher, {})
    task = asyncio.ensure_future(app(connection.scope, connection.receive, connection.send))
    await steps()
    assert broker.open == 1
    assert connection.sent[0]["status"] == 200
    return rig, broker, connection, task


async def test_feed_ends_when_its_client_disconnects() -> None:
    rig, broker, connection, task = await begin()
    connection.gone.set()
    await asyncio.wait_for(task, 5)
    assert (broker.open, rig.gate.requests_open, len(rig.gate.credentials)) == (0, 0, 0)


async def test_feed_ends_when_its_request_is_cancelled() -> None:
    rig, broker, _, task = await begin()
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert (broker.open, rig.gate.requests_open, len(rig.gate.credentials)) == (0, 0, 0)
