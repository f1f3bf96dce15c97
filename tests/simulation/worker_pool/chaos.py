"""Faults of a worker pool, and when they occur, drawn from the seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from heapline.assign.errors import AssignError
from heapline.assign.partitions import Partition
from tests.simulation.worker_pool.world import Worker, World


class Chaos:
    """Draws faults at random times."""

    def __init__(self, world: World, workers_max: int) -> None:
        self._world, self._rng, self._max = world, random.Random(f"chaos {world.seed}"), workers_max

    async def run(self, seconds: float) -> None:
        world, rng = self._world, self._rng
        end = world.loop.time() + seconds
        world.is_faulty = True
        faults = world.faults
        faults.slow, faults.slow_max = rng.choice((0.0, 0.02, 0.1, 0.6)), rng.choice((0.9, 4.0))
        faults.lost_answers = rng.choice((0.0, 0.01, 0.05))
        faults.lost_requests, faults.lost_events = rng.choice((0.0, 0.01, 0.05)), rng.choice((0.0, 0.1, 1.0))
        faults.late = rng.choice((0.0, 0.0, 0.02, 0.1))
        faults.stale = rng.choice((0.0, 0.05, 0.3))
        kinds = ("join", "join", "stop", "restart", "crash", "crash", "pause", "pause", "cut", "cut", "lag", "deaf",
                 "leader", "split", "partitions", "partitions", "stick", "block")  # fmt: skip
        async with asyncio.TaskGroup() as self._group:
            while world.loop.time() < end:
                await asyncio.sleep(rng.expovariate(0.8))
                kind = rng.choice(kinds)
                world.events[kind] = world.events.get(kind, 0) + 1
                self._group.create_task(getattr(self, f"_{kind}")())
        world.is_faulty = False
        faults.calm()

    def _one(self) -> Worker | None:
        running = self._world.running()
        return self._rng.choice(running) if running else None

    async def _join(self) -> None:
        if len(self._world.running()) < self._max:
            self._world.add()

    async def _stop(self) -> None:
        if (worker := self._one()) is not None and worker.is_started:
            await self._world.stop(worker)

    async def _restart(self) -> None:
        if (worker := self._one()) is not None and worker.is_started:
            await self._world.stop(worker)
            self._world.add()

    async def _stick(self) -> None:
        """Hang a worker's hooks and cut it off after a slow renewal: only its own clock can stop it."""
        if (worker := self._one()) is not None:
            worker.hooks_hang_until = self._world.loop.time() + 12
            worker.client.answer_delay = self._rng.choice((0.0, 0.9))
            await asyncio.sleep(self._rng.uniform(0, 2))
            worker.client.cuts_after_write = True
            await asyncio.sleep(8)
            worker.client.cuts_after_write = worker.client.is_cut = False
            worker.client.answer_delay = 0.0

    async def _crash(self) -> None:
        if (worker := self._one()) is not None:
            self._world.note(f"{worker.name} crashes")
            worker.process.kill()

    async def _pause(self) -> None:
        if (worker := self._one()) is not None:
            await self._pause_one(worker)

    async def _leader(self) -> None:
        """Pause or cut off the leader, which chance alone would hit too rarely."""
        leaders = [worker for worker in self._world.running() if worker.manager.is_leader]
        if leaders:
            await self._rng.choice((self._pause_one, self._cut_one))(leaders[0])

    async def _pause_one(self, worker: Worker) -> None:
        seconds = self._rng.choice((0.5, 2.0, 3.0, 5.0, 12.0))
        self._world.note(f"{worker.name} is paused for {seconds} s")
        worker.process.pause()
        await asyncio.sleep(seconds)
        worker.process.resume()
        self._world.check_holders()

    async def _cut(self) -> None:
        if (worker := self._one()) is not None:
            await self._cut_one(worker)

    async def _cut_one(self, worker: Worker) -> None:
        seconds = self._rng.choice((1.0, 3.0, 6.0, 15.0))
        self._world.note(f"{worker.name} is cut off for {seconds} s")
        worker.client.is_cut = True
        await asyncio.sleep(seconds)
        worker.client.is_cut = False

    async def _split(self) -> None:
        """Cut half of the pool off from the store."""
        running = self._world.running()
        for worker in self._rng.sample(running, len(running) // 2):
            self._group.create_task(self._cut_one(worker))

    async def _lag(self) -> None:
        if (worker := self._one()) is not None:
            worker.client.lag = self._rng.choice((3.0, 8.0, 17.0))
            self._world.note(f"{worker.name} reads what was {worker.client.lag} s ago")
            await asyncio.sleep(self._rng.uniform(1, 10))
            worker.client.lag = 0.0

    async def _deaf(self) -> None:
        if (worker := self._one()) is not None:
            worker.client.is_deaf = True
            await asyncio.sleep(self._rng.choice((2.0, 18.0)))
            worker.client.is_deaf = False

    async def _block(self) -> None:
        """Block a worker's event loop, while a thread of the process still calls `holds`."""
        if (worker := self._one()) is not None:
            seconds = self._rng.choice((1.0, 4.0, 9.0))
            self._world.note(f"{worker.name}'s loop is blocked for {seconds} s")
            worker.process.block()
            await asyncio.sleep(seconds)
            self._world.check_holders()
            worker.process.resume()

    async def _partitions(self) -> None:
        world = self._world
        gone = [partition for partition in world.everything if partition not in world.partitions]
        kind = self._rng.choice(("remove", "remove", "again", "add"))
        if kind == "remove" and len(world.partitions) > 4:
            world.partitions.remove(self._rng.choice(world.partitions))
        elif kind == "again" and gone:
            world.partitions.append(self._rng.choice(gone))
        else:
            fresh = Partition(("q", f"{len(world.everything):02}"))
            world.everything.append(fresh)
            world.partitions.append(fresh)
        if (worker := self._one()) is not None and worker.is_started:
            await asyncio.wait([worker.process.start(lambda: quietly(worker.manager.refresh_partitions))])


async def quietly(work: Callable[[], Awaitable[object]]) -> None:
    with contextlib.suppress(AssignError):
        await work()
