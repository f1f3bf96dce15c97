"""The Postgres broker's write path against a model, crashed at every await: Hypothesis chooses the calls and the crash.

A node dies at any statement or command to Redis, before the server executes it or after (the answer is lost), or at any
operation on the disk, which then loses what was not synced. Its successor opens the same log, or uses the same Redis.
At the end everything is popped: each acknowledged message exactly once, and no acked message.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import heapline
import heapline.sql
from heapline import Outgoing
from tests.integration.sql_cutter import PHASES, cuttable_connections, cutter
from tests.integration.sql_rig import crash, fresh_topic, open_node, take_all
from tests.simulation.fake_disk import FakeDisk, PowerCut
from tests.valkey import fresh_redis

asyncpg = pytest.importorskip("asyncpg")
redis = pytest.importorskip("redis.asyncio")
from heapline.sql.redis import buffer_key  # noqa: E402 - needs asyncpg

VISIBILITY = 0.3  # seconds


class FailingDisk(FakeDisk):
    """A disk whose operations fail once the power is cut: the node is dead, but its event loop continues."""

    def step(self, operation: str, path: str) -> None:
        try:
            super().step(operation, path)
        except PowerCut:
            raise OSError(errno.EIO, "the power is off", path) from None

    def survivor(self, rng: random.Random) -> FailingDisk:
        """Return the disk as it is after the power cut."""
        disk = FailingDisk(seed=rng.getrandbits(32))
        disk._root = self.crash(rng)._root
        return disk


@pytest.fixture(scope="module", autouse=True)
def cuttable() -> Iterator[None]:
    with cuttable_connections():
        yield


call = st.one_of(
    st.tuples(st.just("enqueue"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("enqueue"), st.integers(1, 4), st.just(False)),
    st.tuples(st.just("take"), st.integers(1, 6), st.booleans()),
)
life = st.fixed_dictionaries(
    {
        "calls": st.lists(call, min_size=1, max_size=6),
        "statements": st.one_of(st.none(), st.integers(1, 40)),
        "is_after": st.booleans(),
        "disk_steps": st.one_of(st.none(), st.none(), st.integers(0, 15)),
    }
)


class Story:
    """The record of one client over several runs of a node."""

    def __init__(self, topic: str, seed: int) -> None:
        self.topic, self.rng = topic, random.Random(seed)
        self.disk = FailingDisk(seed=seed)
        self.asked: set[bytes] = set()
        self.acknowledged: set[bytes] = set()
        self.asked_to_ack: set[bytes] = set()
        self.acked: set[bytes] = set()
        self.keyed: list[bytes] = []  # those with idempotency keys, which are their payloads
        self.ids: dict[bytes, int] = {}  # under which those were acknowledged

    async def live(self, plan: dict[str, Any], config: dict[str, Any]) -> None:
        node = await open_node(self.disk, **config)
        self.disk.cut_power_in(plan["disk_steps"])
        cutter.left, cutter.is_after = plan["statements"], plan["is_after"]
        try:
            for kind, count, flag in plan["calls"]:
                try:
                    await (self.enqueue(node, count, flag) if kind == "enqueue" else self.take(node, count, flag))
                except heapline.UnavailableError:
                    break
        finally:
            await crash(node)
            cutter.left = None
            self.disk = self.disk.survivor(self.rng)

    async def enqueue(self, node: Any, count: int, has_keys: bool) -> None:
        tags = [b"%d" % (len(self.asked) + n) for n in range(count)]
        self.asked |= set(tags)
        if has_keys:
            self.keyed += tags
            tags = self.keyed[-2 * count :]  # earlier ones, whose outcome may be unknown, are repeated
        batch = [
            Outgoing(t, priority=self.rng.randrange(3), idempotency_key=t.decode() if has_keys else None) for t in tags
        ]
        results = await node.enqueue_batch(self.topic, batch)
        self.acknowledged |= set(tags)
        if has_keys:
            for tag, result in zip(tags, results, strict=True):
                assert self.ids.setdefault(tag, result.id) == result.id, "a key counted twice"

    async def take(self, node: Any, count: int, acks: bool) -> None:
        messages = await node.pop(self.topic, count, visibility=VISIBILITY)
        taken = {m.payload for m in messages}
        assert not taken & self.acked, "delivered after its ack"
        if acks:
            self.asked_to_ack |= taken
            await node.ack(messages)
            self.acked |= taken

    async def end(self, config: dict[str, Any]) -> None:
        node = await open_node(self.disk, **config)
        try:
            await self.flushed(node)
            rest = Counter(await take_all(node, self.topic))
        finally:
            await node.close()
        assert self.acknowledged - set(rest) <= self.asked_to_ack, "lost"
        assert not set(rest) & self.acked, "delivered after its ack"
        assert set(rest) <= self.asked
        assert max(rest.values(), default=1) == 1, "stored twice"

    async def flushed(self, node: Any) -> None:
        """Wait until the buffer in Redis is empty: other nodes may have left units there."""
        if node.node.redis is not None:
            while await node.node.redis.run(lambda client: client.llen(buffer_key(0))):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def run(lives: list[dict[str, Any]], seed: int, config: dict[str, Any]) -> None:
    topic = fresh_topic()
    maker = await open_node()
    await maker.create_topic(topic, k=50, backoff=heapline.Backoff(base=0), max_retries_default=250)
    await maker.close()
    story = Story(topic, seed)
    for plan in lives:
        await story.live(plan, config)
    await story.end(config)


@settings(max_examples=15, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(st.lists(life, min_size=1, max_size=3), st.integers(0, 1 << 30))
async def test_acknowledged_messages_survive_crashes_once(lives: list[dict[str, Any]], seed: int) -> None:
    await run(lives, seed, {"wal": "/wal"})


@settings(max_examples=15, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(st.lists(life, min_size=1, max_size=3), st.integers(0, 1 << 30))
async def test_messages_acknowledged_by_redis_survive_crashes_once(lives: list[dict[str, Any]], seed: int) -> None:
    await run(lives, seed, {"redis": fresh_redis(), "durability": "redis", "poll_interval": 0.05})
