"""One run: a crowd of workers that come, go, crash and stand still, on a store that misbehaves; then quiet, and a
verdict.

Each slot is a place where a worker runs: when its process has ended, another one is started there after a while, as
an orchestrator would do. All that is random comes from the seed, so a run can be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heapline.assign.config import AssignmentConfig, Config, RetryConfig
from heapline.assign.errors import AssignError
from heapline.assign.hooks import Hooks
from heapline.assign.kv import Entry
from heapline.assign.manager import Manager
from heapline.assign.model import Partition
from heapline.testing.clock import FakeClock
from heapline.testing.crowd.checkers import SingleHolder, SingleLeader, affinity_kept, eventually_assigned
from heapline.testing.crowd.process import Process, task_factory
from heapline.testing.crowd.store import Client, Faults, Store
from heapline.testing.loop import SimLoop, cancel_all

DRIFT = 0.02  # clocks run faster or slower by up to this
SAMPLE = 0.1  # seconds between two looks at who holds what
TAIL = 60

CONFIG = Config(
    worker_id_max=11, worker_id_ttl=8.0, heartbeat_interval=1.0, heartbeat_ttl=3.0, cold_start_window=4.0,
    planned_scale_window=2.0, operation_timeout=3.0, election_timeout=2.0, startup_timeout=15.0, shutdown_timeout=6.0,
    assignment=AssignmentConfig(min_rebalance_threshold=0.1, rebalance_cooldown=2.0),
    retry=RetryConfig(initial_delay=0.2, max_delay=1.0),
)  # fmt: skip


@dataclass
class Report:
    seed: int
    complaints: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    documents: int = 0
    moves: int = 0
    seconds: float = 0.0  # of virtual time

    def text(self) -> str:
        replay = f"replay: python -m heapline.testing.crowd --seed {self.seed}"
        head = f"seed {self.seed}: {len(self.complaints)} complaint(s)"
        return "\n".join([head, "", *self.lines[-TAIL:], "", *self.complaints[:20], "", replay])


class Worker:
    """A process with a manager, and its user, who takes his time in hooks and fails at times."""

    def __init__(self, world: World, name: str, rate: float | None = None) -> None:
        rng = world.rng
        self.name, self._world = name, world
        rate = rate or 1 + rng.uniform(-DRIFT, DRIFT)
        self.process = Process(name, world.loop, rate, rng.uniform(0, 1000))
        self.client = Client(world.store, self.process, world.faults, random.Random(rng.random()))
        self._rng = random.Random(rng.random())
        self.sticks_until = 0.0  # its hooks hang until then
        self.is_started = False
        self.starting: asyncio.Task[None]
        self.manager = Manager(
            world.config, self.client, world, clock=self.process.clock,
            new_session=world.new_session, hooks=Hooks(on_assignment_changed=self._changed),
        )  # fmt: skip

    def held(self) -> Mapping[Partition, int]:
        if not self.process.is_running:
            return {}
        assignment = self.manager.assignment
        return {p: assignment.fence(p) for p in assignment.partitions if self.manager.holds(p)}

    async def run(self) -> None:
        try:
            await self.manager.start()
        except AssignError as error:
            self._world.note(f"{self.name} could not start: {type(error).__name__}")
            self.process.is_dead = True
            return
        self.is_started = True
        self._world.note(f"{self.name} started as {self.manager.worker_id}")

    async def stop(self) -> None:
        try:
            await self.manager.stop()
            self._world.note(f"{self.name} stopped")
        except AssignError as error:
            self._world.note(f"{self.name} did not stop well: {type(error).__name__}")

    async def _changed(self, added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        self._world.look()
        self._world.moves += len(added)
        world, rng = self._world, self._rng
        await asyncio.sleep(max(self.sticks_until - world.loop.time(), rng.choice((0, 0.01, 0.1, 0.5))))
        if world.is_rough and rng.random() < 0.1:
            await asyncio.sleep(rng.uniform(0, 6))
        if world.is_rough and rng.random() < 0.1:
            raise RuntimeError("the user's hook failed")


class World:
    """Everything of one run. It is also the partitions' source."""

    def __init__(self, loop: SimLoop, seed: int, config: Config = CONFIG) -> None:
        self.loop, self.seed, self.config = loop, seed, config
        self.rng = random.Random(f"crowd {seed}")
        self.faults = Faults()
        self.holders, self.leaders = SingleHolder(), SingleLeader()
        self.store = Store(loop.time, self._written)
        self.partitions = [Partition(("p", f"{n:02}")) for n in range(self.rng.choice((8, 16, 24)))]
        self.everything = list(self.partitions)
        self.workers: list[Worker] = []
        self.is_rough = False
        self.moves = 0
        self.lines: list[str] = []
        self.events: dict[str, int] = {}
        self._made = 0

    def new_session(self) -> str:
        self._made += 1
        return f"s{self._made}"

    async def list_partitions(self) -> list[Partition]:
        return list(self.partitions)

    def note(self, line: str) -> None:
        self.lines.append(f"{self.loop.time():9.3f} {line}")

    def _written(self, entry: Entry) -> None:
        self.leaders.written(entry, self.loop.time())

    def look(self) -> None:
        self.holders.look(self.workers, self.loop.time())

    async def keep_looking(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(SAMPLE)

    # --- workers

    def add(self, rate: float | None = None) -> Worker:
        self._made += 1
        worker = Worker(self, f"w{self._made}", rate)
        self.workers = [each for each in self.workers if not each.process.is_dead]
        self.workers.append(worker)
        worker.starting = worker.process.start(worker.run)
        return worker

    async def stop(self, worker: Worker) -> None:
        await asyncio.wait([worker.process.start(worker.stop)])
        worker.process.kill()

    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.process.is_running]

    def places(self) -> dict[Partition, str]:
        return {p: worker.manager.worker_id for worker in self.running() for p in worker.held()}

    @property
    def complaints(self) -> list[str]:
        return self.holders.complaints + self.leaders.complaints


class Chaos:
    """Draws what goes wrong, and when."""

    def __init__(self, world: World, workers_max: int) -> None:
        self._world, self._rng, self._max = world, random.Random(f"chaos {world.seed}"), workers_max

    async def run(self, seconds: float) -> None:
        world, rng = self._world, self._rng
        end = world.loop.time() + seconds
        world.is_rough = True
        faults = world.faults
        faults.slow, faults.slow_max = rng.choice((0.0, 0.02, 0.1, 0.6)), rng.choice((0.9, 4.0))
        faults.lost_answers = rng.choice((0.0, 0.01, 0.05))
        faults.lost_requests, faults.lost_events = rng.choice((0.0, 0.01, 0.05)), rng.choice((0.0, 0.1, 1.0))
        faults.stale = rng.choice((0.0, 0.05, 0.3))
        kinds = ("join", "join", "stop", "restart", "crash", "crash", "pause", "pause", "cut", "cut", "lag", "deaf",
                 "leader", "split", "partitions", "stick")  # fmt: skip
        async with asyncio.TaskGroup() as self._group:
            while world.loop.time() < end:
                await asyncio.sleep(rng.expovariate(0.8))
                kind = rng.choice(kinds)
                world.events[kind] = world.events.get(kind, 0) + 1
                self._group.create_task(getattr(self, f"_{kind}")())
        world.is_rough = False
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
        """A worker's hooks hang, and it is cut off when a slow renewal has just been answered: only its own clock can
        stop it."""
        if (worker := self._one()) is not None:
            worker.sticks_until = self._world.loop.time() + 12
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
        """By chance alone a leader would be hit too rarely."""
        leaders = [worker for worker in self._world.running() if worker.manager.is_leader]
        if leaders:
            await self._rng.choice((self._pause_one, self._cut_one))(leaders[0])

    async def _pause_one(self, worker: Worker) -> None:
        seconds = self._rng.choice((0.5, 2.0, 3.0, 5.0, 12.0))
        self._world.note(f"{worker.name} is paused for {seconds} s")
        worker.process.pause()
        await asyncio.sleep(seconds)
        worker.process.resume()
        self._world.look()

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
        """Half of the crowd cannot reach the store."""
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

    async def _partitions(self) -> None:
        world = self._world
        if self._rng.random() < 0.5 and len(world.partitions) > 4:
            world.partitions.remove(self._rng.choice(world.partitions))
        else:
            fresh = Partition(("q", f"{len(world.everything):02}"))
            world.everything.append(fresh)
            world.partitions.append(fresh)
        if (worker := self._one()) is not None and worker.is_started:
            await asyncio.wait([worker.process.start(lambda: _quietly(worker.manager.refresh_partitions()))])


async def _quietly(work: Any) -> None:
    with contextlib.suppress(AssignError):
        await work


async def scenario(world: World, seconds: float, workers_max: int) -> list[str]:
    """Start, chaos, quiet, verdict; then a rolling restart, and a verdict on that."""
    looking = world.loop.create_task(world.keep_looking())
    for _ in range(world.rng.randint(1, workers_max)):
        world.add()
    await asyncio.sleep(world.rng.choice((0.5, 6.0)))
    await Chaos(world, workers_max).run(seconds)
    await settle(world)
    complaints = verdict(world)
    if not complaints:
        complaints += await rolling_restart(world)
    looking.cancel()
    return world.complaints + complaints


async def settle(world: World) -> None:
    """Quiet: nobody is paused or cut off any more; somebody is there; what is under way comes to its end."""
    config = world.config
    await asyncio.sleep(config.heartbeat_ttl)
    started = [worker for worker in world.running() if worker.is_started]
    for worker in started[:1]:
        # Whoever changed the partitions while nobody could hear it says it again.
        await asyncio.wait([worker.process.start(lambda: _quietly(worker.manager.refresh_partitions()))])  # noqa: B023
    end = world.loop.time() + 2 * config.startup_timeout + config.worker_id_ttl + config.cold_start_window
    good = 0
    while good < 8 and world.loop.time() < end:
        while len(world.running()) < 2:
            world.add()  # the last ones could not start because of what went wrong before
        await asyncio.sleep(0.5)
        good = 0 if verdict(world) else good + 1


def verdict(world: World) -> list[str]:
    waiting = [worker.name for worker in world.running() if not worker.is_started]
    late = [f"EventuallyAssigned: {', '.join(waiting)} has no assignment yet"] if waiting else []
    if world.leaders.last is not None and any(world.leaders.last.revoked):
        late.append("EventuallyAssigned: moves are under way")
    return late + eventually_assigned(world.running(), world.partitions)


async def rolling_restart(world: World) -> list[str]:
    """One after the other stops and is started anew at once: ids and partitions stay in place."""
    before, ids = world.places(), {worker.manager.worker_id for worker in world.running()}
    for worker in world.running():
        await world.stop(worker)
        fresh = world.add()
        await asyncio.wait([fresh.starting])
    await asyncio.sleep(1.0)
    complaints = affinity_kept(before, world.places(), 0.95)
    after = {worker.manager.worker_id for worker in world.running()}
    if after != ids:
        complaints.append(f"AffinityKept: the ids were {sorted(ids)} and are {sorted(after)}")
    return complaints


async def only_its_clock_can_stop_it(world: World, seconds: float, workers_max: int) -> list[str]:
    """Directed: the holder with the slowest clock hangs in its hook and is cut off right after a renewal that was
    answered as late as can be, while all others' clocks run fast."""
    for rate in (1 + DRIFT, 1 + DRIFT, 1 - DRIFT):
        slow = world.add(rate)
        await asyncio.sleep(0.5)
    await asyncio.sleep(8)
    slow.sticks_until = world.loop.time() + 100
    slow.client.answer_delay = 0.9
    await asyncio.sleep(3 + world.rng.random())
    slow.client.cuts_after_write = True
    for _ in range(1000):
        world.look()
        await asyncio.sleep(0.01)
    return world.complaints + verdict(world)


def run_seed(
    seed: int, seconds: float = 40.0, workers_max: int = 5, play: Callable[..., Any] = scenario
) -> Report:  # fmt: skip
    loop = SimLoop(FakeClock())
    loop.set_task_factory(task_factory)
    world = World(loop, seed)
    try:
        complaints = loop.run_until_complete(play(world, seconds, workers_max))
    finally:
        for worker in world.workers:
            worker.process.kill()
        cancel_all(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    return Report(
        seed, complaints, world.lines, world.events, world.leaders.documents, world.moves, loop.time()
    )  # fmt: skip
