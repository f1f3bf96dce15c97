"""A server in front of a broker that is not the engine and lacks most features."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest

import heapline
from heapline.client.transports.http import HttpBroker
from heapline.contract.admin import Describe, Description
from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.errors import Unsupported
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.server import Server
from heapline.server.settings import ServerSettings
from heapline.testing import MemoryBroker


class QueueOnly(Broker):
    """Passes the calls of the feature `queue` to another broker, and supports no others."""

    features = frozenset({"queue"})

    def __init__(self, inner: Broker) -> None:
        self._inner = inner

    def do(self, command: Command[Any], context: Context = HERE, /) -> Awaitable[Any]:
        self._check(command)
        return self._describe() if isinstance(command, Describe) else self._inner.do(command, context)

    def stream(self, feed: Feed[Any], context: Context = HERE, /) -> AsyncIterator[Any]:
        self._check(feed)
        return self._inner.stream(feed, context)

    async def close(self) -> None:
        await self._inner.close()

    def _check(self, call: Any) -> None:
        feature = type(call).facts.feature
        if feature not in self.features:
            raise Unsupported(type(call).__name__, feature)

    async def _describe(self) -> Description:
        return Description("queue-only", "1", sorted(self.features), {"answer": 42})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with MemoryBroker() as memory:
        settings = ServerSettings(data=tmp_path, port=0, grpc_port=0, http_port=0, stop_grace=2.0)
        running = Server(QueueOnly(memory), NoAuthGuard(), settings)
        await running.start()
        yield running
        await running.stop()


async def test_queue_of_another_broker_is_served_over_every_interface(server: Server) -> None:
    async with (
        heapline.connect(f"127.0.0.1:{server.port}") as sdk,
        HttpBroker(f"http://127.0.0.1:{server.http_port}") as http,
    ):
        await sdk.create_topic("jobs")
        for hl in (sdk, http):
            await hl.enqueue("jobs", b"x")
            [message] = await hl.pop("jobs")
            await message.ack()
            assert await hl.describe() == Description("queue-only", "1", ["queue"], {"answer": 42})


async def test_calls_of_a_missing_feature_are_unsupported_on_every_interface(server: Server) -> None:
    async with (
        heapline.connect(f"127.0.0.1:{server.port}") as sdk,
        HttpBroker(f"http://127.0.0.1:{server.http_port}") as http,
    ):
        for hl in (sdk, http):
            with pytest.raises(Unsupported, match="does not support ListSchedules") as caught:
                await hl.list_schedules()
            assert caught.value.feature == "schedules"
        with pytest.raises(Unsupported, match="does not support ReadLog"):
            await anext(sdk.read_log("jobs"))


async def test_unsupported_call_is_answered_501(server: Server) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}") as client:
        answer = await client.get("/v1/schedules")
    assert (answer.status_code, answer.json()["error"]) == (501, "Unsupported")
    assert answer.json()["facts"] == {"call": "ListSchedules", "feature": "schedules"}
