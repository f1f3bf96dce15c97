"""Fixtures: every store that `heapline.assign` supports, empty (`kv`), and a way to wait for the end of a ttl
(`ended`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from heapline.assign.kv import KV, MemoryKV
from heapline.assign.nats_kv import NatsKV
from tests.integration.nats_rig import Servers

Ended = Callable[[str], Awaitable[None]]


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Servers(tmp_path_factory.mktemp("nats"), 1) as servers:
        yield servers.urls[0]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "nats"])
async def kv(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[KV]:
    if request.param == "memory":
        yield MemoryKV(clock)
        return
    url = request.getfixturevalue("nats_url")
    async with await NatsKV.connect(url, bucket=secrets.token_hex(8)) as kv:
        yield kv


@pytest.fixture
def ended(kv: KV, clock: Clock) -> Ended:
    """Wait until a key's ttl of one second has ended: on the fake clock, or on the server's."""

    async def wait(key: str) -> None:
        clock.now += 1.0
        async with asyncio.timeout(30):
            while await kv.get(key) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    return wait
