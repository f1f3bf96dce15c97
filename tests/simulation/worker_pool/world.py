"""One run: workers join, leave, crash and pause on a store that misbehaves; after the faults the result is checked.

All randomness comes from the seed, so a run can be repeated.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heapline.assign.config import AssignmentConfig, Config, RetryConfig
from heapline.assign.errors import AssignError
from heapline.assign.hooks import Hooks
from heapline.assign.kv import Entry
from heapline.assign.manager import Manager
from heapline.assign.partitions import Partition
from tests.simulation.loop import SimLoop
from tests.simulation.worker_pool.checkers import SingleHolder, SingleLeader
from tests.simulation.worker_pool.process import Process
from tests.simulation.worker_pool.store import Client, Faults, Store

DRIFT = 0.02  # clocks run faster or slower by up to this share
SAMPLE = 0.1  # seconds between two checks of the holders
TAIL = 60

CONFIG = Config(
    worker_id_max=11, worker_id_ttl=8.0, heartbeat_interval=1.0, heartbeat_ttl=3.0, cold_start_window=4.0,
    planned_scale_window=2.0, operation_timeout=3.0, election_timeout=2.0, startup_timeout=15.0, shutdown_timeout=6.0,
    assignment=AssignmentConfig(min_rebalance_threshold=0.1, rebalance_cooldown=2.0),
    retry=RetryConfig(initial_delay=0.2, max_delay=1.0),
)  # fmt: skip


#: The same config with a longer lease.
LONG = dataclasses.replace(CONFIG, heartbeat_ttl=7.0)


@dataclass
class Report:
    seed: int
    complaints: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    documents: int = 0
    moves: int = 0
    seconds: float = 0.0  # virtual seconds

    def text(self) -> str:
        replay = f"replay: python -m tests.simulation.worker_pool --seed {self.seed}"
        head = f"seed {self.seed}: {len(self.complaints)} complaint(s)"
        return "\n".join([head, "", *self.lines[-TAIL:], "", *self.complaints[:20], "", replay])


class Worker:
    """A process with a manager, and user code whose hooks are slow and fail at times."""

    def __init__(self, world: World, name: str, rate: float | None = None, config: Config | None = None) -> None:
        rng = world.rng
        self.name, self._world = name, world
        rate = rate or 1 + rng.uniform(-DRIFT, DRIFT)
        self.process = Process(name, world.loop, rate, rng.uniform(0, 1000))
        self.client = Client(world.store, self.process, world.faults, random.Random(rng.random()))
        self._rng = random.Random(rng.random())
        self.hooks_hang_until = 0.0  # its hooks hang until this time
        self.is_started = False
        self.starting: asyncio.Task[None]
        self.manager = Manager(
            config or world.config,
            self.client,
            world,
            clock=self.process.clock,
            new_session=world.new_session,
            hooks=Hooks(on_assignment_changed=self._changed),
        )

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
            self._world.note(f"{self.name} did not stop cleanly: {type(error).__name__}")

    async def _changed(self, added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        self._world.check_holders()
        self._world.moves += len(added)
        world, rng = self._world, self._rng
        await asyncio.sleep(max(self.hooks_hang_until - world.loop.time(), rng.choice((0, 0.01, 0.1, 0.5))))
        if world.is_faulty and rng.random() < 0.1:
            await asyncio.sleep(rng.uniform(0, 6))
        if world.is_faulty and rng.random() < 0.1:
            raise RuntimeError("the user's hook failed")


class World:
    """Everything of one run. It is also the source of partitions."""

    def __init__(self, loop: SimLoop, seed: int, config: Config = CONFIG) -> None:
        self.loop, self.seed, self.config = loop, seed, config
        self.configs = [config]  # configs from which each worker draws one, as while a new setting is rolled out
        self.rng = random.Random(f"crowd {seed}")
        self.faults = Faults()
        self.holders, self.leaders = SingleHolder(), SingleLeader()
        self.store = Store(loop.time, self._written)
        self.partitions = [Partition(("p", f"{n:02}")) for n in range(self.rng.choice((8, 16, 24)))]
        self.everything = list(self.partitions)
        self.workers: list[Worker] = []
        self.is_faulty = False
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

    def check_holders(self) -> None:
        self.holders.check_holders(self.workers, self.loop.time())

    async def check_loop(self) -> None:
        while True:
            self.check_holders()
            await asyncio.sleep(SAMPLE)

    # --- workers

    def add(self, rate: float | None = None, config: Config | None = None) -> Worker:
        self._made += 1
        worker = Worker(self, f"w{self._made}", rate, config or self.rng.choice(self.configs))
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
