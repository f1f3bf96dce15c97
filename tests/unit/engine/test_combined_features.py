"""Many partitions with all features together: turns, a limit per key, a rate, freshness, strategies, throttling,
growth, prepared batches, changed settings and failed writes. Everything is delivered, and nothing hangs."""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from heapline import HeaplineError, LeaseRef, Message, Outgoing
from heapline.engine import admission
from tests.simulation.rank_audit import ranks
from tests.unit.engine.rig import Rig, settle

KEYS = ("a", "a", "b", "c", None)
STEPS = 150


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(fire_slice=self.rng.choice((3, 64)))
        self.limit = self.rng.choice((1, 2))
        self.sent: set[bytes] = set()
        self.doubtful: set[bytes] = set()  # whose enqueue was not answered
        self.batches: dict[str, list[bytes]] = {}
        self.held: dict[int, Message] = {}
        self.acked: Counter[bytes] = Counter()

    async def open(self) -> None:
        await self.rig.open()
        config = {"strategy": self.rng.choice(("best_first", "best_first", "round_robin", "weighted"))}
        await self.rig.topic(
            partitions=3, fairness="keys", max_inflight_per_key=self.limit, max_retries_default=250, min_freshness=0.02,
            max_pops_per_second=1000.0, visibility_default=3600.0, **config,
        )  # fmt: skip

    def messages(self) -> list[Outgoing]:
        rng, count = self.rng, self.rng.choice((1, 3, 10))
        start = len(self.sent)
        names = [b"%d" % n for n in range(start, start + count)]
        self.sent.update(names)
        delays = [rng.choice((None, None, 0.001, 0.2)) for _ in names]
        return [
            Outgoing(name, rng.randrange(3), delay=delay, fairness_key=rng.choice(KEYS))
            for name, delay in zip(names, delays, strict=True)
        ]

    async def step(self) -> None:
        verb = self.rng.choice(
            ("enqueue", "enqueue", "prepare", "commit", "pop", "pop", "pop", "end", "end", "throttle", "grow",
             "settings", "fail", "time", "time", "restart")
        )  # fmt: skip
        try:
            await getattr(self, f"_{verb}")()
        except (HeaplineError, OSError):  # creating the system topic may fail
            await self.until_serving()

    async def until_serving(self) -> None:
        async with asyncio.timeout(20):
            while not all(runner.is_serving for runner in self.rig.hl.topics._all_runners()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def _enqueue(self) -> None:
        messages = self.messages()
        try:
            await self.rig.hl.enqueue_batch("jobs", messages)
        except HeaplineError:
            self.doubtful.update(m.payload for m in messages)
            raise

    async def _prepare(self) -> None:
        messages, batch = self.messages(), f"b{len(self.sent)}"
        self.batches[batch] = [m.payload for m in messages]
        try:
            await self.rig.hl.prepare_batch(batch, "1", messages, topic="jobs")
        except HeaplineError:
            self.doubtful.update(self.batches.pop(batch))
            raise

    async def _commit(self) -> None:
        for batch in sorted(self.batches)[:2]:
            await self.rig.hl.commit_batch(batch, ["1"])
            del self.batches[batch]

    async def _pop(self) -> None:
        got = await self.rig.hl.pop("jobs", self.rng.choice((1, 4, 50)), max_bytes=self.rng.choice((1, 1 << 20)))
        assert not self.held.keys() & {m.id for m in got}, "leased twice"
        self.held |= {m.id: m for m in got}
        out = Counter(m.fairness_key for m in self.held.values())
        assert all(count <= self.limit for key, count in out.items() if key is not None)

    async def _end(self, share: float = 0.5) -> None:
        for message in self.rng.sample(list(self.held.values()), round(len(self.held) * share)):
            ref = LeaseRef("jobs", message.id, message.token)
            verb = self.rng.choice(("ack", "ack", "nack", "release"))
            del self.held[message.id]  # even without an answer: the lease may have ended then
            if verb == "ack":
                try:
                    await self.rig.hl.ack(ref)
                except HeaplineError:
                    self.doubtful.add(message.payload)
                    raise
                self.acked[message.payload] += 1
            else:
                await (self.rig.hl.release(ref) if verb == "release" else self.rig.hl.nack(ref, backoff=0))

    async def _throttle(self) -> None:
        partition = self.rng.randrange(len(self.rig.runner().loaded.topic.partitions))
        await self.rig.hl.set_partition_throttled("jobs", partition, self.rng.random() < 0.6)

    async def _grow(self) -> None:
        if self.rng.random() < 0.3:
            count = len(self.rig.runner().loaded.topic.partitions)
            await self.rig.hl.update_topic("jobs", partitions=min(8, count + 1))

    async def _settings(self) -> None:
        rng = self.rng
        # A lower limit would apply only once leases have ended, so it is only raised here.
        self.limit += rng.random() < 0.1
        rate, freshness = rng.choice((0.0, 200.0, 1000.0)), rng.choice((0.0, 0.02, 0.3))
        await self.rig.hl.update_topic(
            "jobs", max_inflight_per_key=self.limit, max_pops_per_second=rate, min_freshness=freshness
        )

    async def _fail(self) -> None:
        operation = self.rng.choice(("fdatasync", "pwritev"))
        self.rig.disk.inject(operation, errno.EIO, path=".seg", after=self.rng.choice((0, 1, 3)), times=1)

    async def _time(self) -> None:
        self.rig.clock.advance(self.rng.choice((0.001, 0.05, 1.0)))
        await settle(5)

    async def _restart(self) -> None:
        if self.rng.random() < 0.3:
            self.rig.disk.clear_faults()
            await self.rig.reopen()

    async def drain(self) -> None:
        """Pop until nothing is left, letting time pass in between."""
        self.rig.disk.clear_faults()
        await self.until_serving()
        hl = self.rig.hl
        while self.batches:
            await self._commit()
        for partition in range(len(self.rig.runner().loaded.topic.partitions)):
            await hl.set_partition_throttled("jobs", partition, False)
        idle = 0
        while True:
            got = await hl.pop("jobs", 50)
            self.held |= {m.id: m for m in got}
            out = Counter(m.fairness_key for m in self.held.values())
            assert all(count <= self.limit for key, count in out.items() if key is not None)
            await hl.ack([LeaseRef("jobs", m.id, m.token) for m in self.held.values()])
            self.acked.update(m.payload for m in self.held.values())
            self.held.clear()
            stats = await hl.stats("jobs")
            if not (stats.ready or stats.delayed or stats.leased):
                return
            idle = 0 if got else idle + 1
            assert idle < 20, f"stuck: {stats.ready} ready, {stats.delayed} delayed, {stats.leased} leased"
            # Leases whose answer was lost expire; then there is a backoff.
            self.rig.clock.advance(0.4 if idle < 5 else 3600.0)
            await settle(3)


@pytest.mark.parametrize("seed", range(8))
async def test_everything_is_delivered_once_and_limits_hold_with_all_features(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(seed)

    def anywhere(keys: list[bytes], partitions: int) -> Any:
        return np.array([world.rng.randrange(partitions) for _ in keys], dtype=np.int64)

    if seed % 2:  # keys are in several partitions, as after many growths
        monkeypatch.setattr(admission, "place", anywhere)
    await world.open()
    for _ in range(STEPS):
        await world.step()
    await world.drain()
    assert [name for name, count in world.acked.items() if count > 1] == []
    assert world.sent - world.doubtful <= world.acked.keys() <= world.sent
    topic: Any = world.rig.runner().loaded.topic
    assert [p.entries.parked.rows for p in topic.partitions] == [0] * len(topic.partitions)
    assert topic.fair._leases == {}
    if topic.config.strategy == "best_first":
        assert {r.rank for r in await ranks(world.rig.hl, "jobs")} == {1}
    await world.rig.hl.close()
