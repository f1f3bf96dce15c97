"""A real server is killed repeatedly under MQueue's API: retried requests are stored, and once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.integration.mqueue_rig import NAMESPACE, Client, item
from tests.integration.test_server_kill import Process

pytestmark = pytest.mark.slow
TOPICS = ("a", "b", "c")
KILLS = 3


class Producer:
    """Sends one request after the other over all topics, each repeatedly until answered."""

    def __init__(self, name: int) -> None:
        self._name = name
        self.answered = 0

    async def run(self, client: Client) -> None:
        while True:
            key = f"{self._name}-{self.answered}"
            items = [item(key.encode(), idempotency_key=key) | {"topic": topic} for topic in TOPICS]
            answer = await client.enqueue(*items)
            if answer.status_code == 200:
                self.answered += 1
            else:
                assert answer.status_code == 503, answer.text  # no remains of a kill are in the way


async def drained(client: Client, topic: str) -> list[str]:
    found: list[str] = []
    while messages := (await client.dequeue(topic=topic, limit=10_000)).json():
        found += [m["payload"] for m in messages]
    return found


@asynccontextmanager
async def served(data: Path) -> AsyncIterator[tuple[Process, Client]]:
    async with (
        Process(data, "--insecure-everybody") as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=30) as http,
    ):
        yield server, Client(http, None)


async def test_retries_over_several_topics_with_the_same_keys_count_once(tmp_path: Path) -> None:
    producers = [Producer(n) for n in range(4)]
    for _ in range(KILLS):
        target = sum(p.answered for p in producers) + 40
        async with served(tmp_path) as (server, client):
            tasks = [asyncio.ensure_future(p.run(client)) for p in producers]
            async with asyncio.timeout(60):
                while sum(p.answered for p in producers) < target and not any(t.done() for t in tasks):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            server.process.kill()
            await server.process.wait()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, httpx.TransportError) for end in ends), ends
    async with served(tmp_path) as (_, client):
        assert (await client.enqueue(item() | {"topic": "another"})).status_code == 200  # drops the remains
        found = {topic: await drained(client, topic) for topic in TOPICS}
    first = found[TOPICS[0]]
    assert len(first) == len(set(first)), "a message was stored twice"
    for topic in TOPICS:
        assert sorted(found[topic]) == sorted(first), f"{NAMESPACE}/{topic} got another share than the first topic"
    answered = sum(p.answered for p in producers)
    assert answered >= 40 * KILLS
    assert answered <= len(first) <= answered + len(producers)  # the last request of each may be stored unanswered
