"""Workers in virtual time against random faults: slow, failing and uncancellable handlers, a broker that stalls.

Checked after every history: each message is done or dead, no two handlers hold one message within a lease, no slot
is lost, and the workers' counts match the events.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

import heapline
from heapline.client.tasks import Call, Worker
from heapline.client.tasks.task import Next
from tests.unit.client.tasks.rig import SMALL, World, in_world

MESSAGES = 40
VISIBILITY = 9.0


class Story:
    """One seed's run: what handlers do, what the broker does, and what was observed."""

    def __init__(self, world: World, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = world
        self.runs: defaultdict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        self.calm = False
        self.deaf_until = 0.0
        for name in ("extend", "ack", "nack", "pop"):
            self._trouble(name)
        self._declare()

    def _trouble(self, name: str) -> None:
        real = getattr(self.world.broker, name)

        async def troubled(*args: Any, **kwargs: Any) -> Any:
            now = asyncio.get_running_loop().time()
            if name == "extend" and not self.calm and self.rng.random() < 0.2:
                self.deaf_until = now + 2 * VISIBILITY  # leases expire while other workers can take the messages
            if name == "extend" and now < self.deaf_until:
                raise heapline.DeadlineExceeded(name)
            if not self.calm and self.rng.random() < 0.15:
                await asyncio.sleep(self.rng.choice([0.01, 1.0, 4.0]))
                raise heapline.DeadlineExceeded(name)
            return await real(*args, **kwargs)

        setattr(self.world.broker, name, troubled)

    def _declare(self) -> None:
        app, loop = self.world.app, asyncio.get_running_loop()

        @app.middleware
        async def watched(call: Call, following: Next) -> Any:
            run = {"token": call.message.token, "start": loop.time(), "message": call.message}
            self.runs[call.message.topic, call.message.id].append(run)
            try:
                return await following(call)
            finally:
                run["end"] = loop.time()

        for topic in ("jobs", "other"):

            @app.task(topic=topic, name=topic, timeout=40, retry_on={OSError: 0.5}, bury_on=(KeyError,), max_retries=50)
            async def work(seconds: float, how: str) -> None:
                await asyncio.sleep(seconds)
                if how == "once" and self.rng.random() < 0.6:
                    raise OSError("not yet")
                if how == "bury":
                    raise KeyError("never")

    async def play(self) -> list[Worker]:
        for n in range(MESSAGES):
            task = self.world.app.tasks[self.rng.choice(["jobs", "other"])]
            how = self.rng.choice(["fine", "fine", "once", "bury"])
            seconds = self.rng.choice([0.0, 0.1, 3.0, 15.0, 35.0])
            await task.enqueue(seconds, how, priority=n % 3, delay=self.rng.choice([None, 5.0]))
        workers = []
        for _ in range(3):  # one after the other; the first ones are stopped in the middle
            worker = self.world.app.worker(concurrency=3, visibility=VISIBILITY, grace=self.rng.choice([0.0, 10.0]))
            workers.append(worker)
            running = asyncio.ensure_future(worker.run())
            await asyncio.sleep(self.rng.uniform(5, 40))
            worker.stop()
            async with asyncio.timeout(1000):
                await running
        self.calm = True
        workers += [self.world.app.worker(concurrency=4, visibility=VISIBILITY) for _ in range(2)]
        running_both = [asyncio.ensure_future(worker.run()) for worker in workers[-2:]]
        await self.world.until(self._is_over, seconds=3000)
        for worker in workers[-2:]:
            worker.stop()
        await asyncio.gather(*running_both)
        return workers

    async def _is_over(self) -> bool:
        return all([(await self.world.counts(topic))[:3] == (0, 0, 0) for topic in ("jobs", "other")])


@pytest.mark.parametrize("seed", range(4))
def test_every_message_is_done_or_dead_and_never_run_by_two_within_a_lease(seed: int) -> None:
    async def scenario(world: World) -> None:
        for topic in ("jobs", "other"):
            await world.broker.create_topic(topic, **SMALL, backoff={"base": 0.2})
        story = Story(world, seed)
        workers = await story.play()
        assert len(story.runs) == MESSAGES
        for runs in story.runs.values():
            runs.sort(key=lambda run: run["start"])
            assert len({run["token"] for run in runs}) == len(runs)  # each lease is handled once
            for before, after in pairwise(runs):
                assert after["start"] >= before["end"], (before, after)
        for worker in workers:
            assert worker.slots.free == worker.slots.count
            assert worker.running == 0
            assert worker.totals.abandoned == 0
        dead = sum([(await world.counts(topic))[3] for topic in ("jobs", "other")])
        assert sum(worker.totals.buried for worker in workers) == dead
        assert sum(worker.totals.done for worker in workers) == MESSAGES - dead

    in_world(scenario, seed)
