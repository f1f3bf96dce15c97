"""Scenarios of a run: chaos followed by quiet, or one directed fault; then the verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from heapline.assign.states import State
from heapline.testing.clock import FakeClock
from tests.simulation.loop import SimLoop, cancel_all
from tests.simulation.worker_pool.chaos import Chaos, quietly
from tests.simulation.worker_pool.checkers import affinity_kept, eventually_assigned
from tests.simulation.worker_pool.process import task_factory
from tests.simulation.worker_pool.world import DRIFT, LONG, Report, World


async def chaos_then_quiet(world: World, seconds: float, workers_max: int) -> list[str]:
    """Start, chaos, quiet, verdict; then a rolling restart and its verdict."""
    if world.rng.random() < 0.3:
        world.configs.append(LONG)
    for _ in range(world.rng.randint(1, workers_max)):
        world.add()
    await asyncio.sleep(world.rng.choice((0.5, 6.0)))
    await Chaos(world, workers_max).run(seconds)
    await settle(world)
    complaints = verdict(world)
    if not complaints:
        complaints += await rolling_restart(world)
    return world.complaints + complaints


async def settle(world: World) -> None:
    """Wait until the pool is quiet: no worker is paused or cut off, some are running, and pending work completes."""
    config = world.config
    await asyncio.sleep(config.heartbeat_ttl)
    started = [worker for worker in world.running() if worker.is_started]
    for worker in started[:1]:
        # Repeat the refresh in case it was requested while no leader could receive it.
        await asyncio.wait([worker.process.start(lambda: quietly(worker.manager.refresh_partitions))])  # noqa: B023
    end = world.loop.time() + 2 * config.startup_timeout + config.worker_id_ttl + config.cold_start_window
    good = 0
    while good < 8 and world.loop.time() < end:
        while len(world.running()) < 2:
            world.add()  # earlier faults kept the last ones from starting
        await asyncio.sleep(0.5)
        good = 0 if verdict(world) else good + 1


def verdict(world: World) -> list[str]:
    waiting = [worker.name for worker in world.running() if not worker.is_started]
    late = [f"EventuallyAssigned: {', '.join(waiting)} has no assignment yet"] if waiting else []
    if world.leaders.last is not None and any(world.leaders.last.revoked):
        late.append("EventuallyAssigned: moves are in progress")
    if any(worker.manager.state is State.SCALING for worker in world.running()):  # an ended worker is still listed
        late.append("EventuallyAssigned: the leader is about to rebalance")
    return late + eventually_assigned(world.running(), world.partitions)


async def rolling_restart(world: World) -> list[str]:
    """Stop the workers one after the other and replace each immediately: ids and partitions stay in place."""
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
    """Directed: cut off the holder with the slowest clock while its hook hangs.

    It is cut off right after a renewal that was answered as late as possible, while all other clocks run fast.
    """
    for rate in (1 + DRIFT, 1 + DRIFT, 1 - DRIFT):
        slow = world.add(rate)
        await asyncio.sleep(0.5)
    await asyncio.sleep(8)
    slow.hooks_hang_until = world.loop.time() + 100
    slow.client.answer_delay = 0.9
    await asyncio.sleep(3 + world.rng.random())
    slow.client.cuts_after_write = True
    for _ in range(1000):
        world.check_holders()
        await asyncio.sleep(0.01)
    return world.complaints + verdict(world)


async def holder_counts_longer(world: World, seconds: float, workers_max: int) -> list[str]:
    """Directed: block or cut off a worker whose lease is longer than the leader's.

    Only waiting for the end of its own lease keeps other workers from its partitions.
    """
    world.add()
    await asyncio.sleep(2)
    longer = world.add(config=LONG)
    await asyncio.sleep(10)
    assert longer.held()
    if world.seed % 2:
        longer.process.block()
    else:
        longer.hooks_hang_until = world.loop.time() + 100
        longer.client.is_cut = True
    for _ in range(1500):
        world.check_holders()
        await asyncio.sleep(0.01)
    complaints = eventually_assigned(set(world.running()) - {longer}, world.partitions)
    return world.complaints + complaints


async def holders_drop_slowly(world: World, seconds: float, workers_max: int) -> list[str]:
    """Directed: partitions must move to a worker that has just joined, while their holders hang in their hooks."""
    others = [world.add(), world.add()]
    await asyncio.sleep(8)
    for worker in others:
        worker.hooks_hang_until = world.loop.time() + 8
    world.add()
    for _ in range(800):
        world.check_holders()
        await asyncio.sleep(0.01)
    await settle(world)
    return world.complaints + verdict(world)


async def stops_slowly(world: World, seconds: float, workers_max: int) -> list[str]:
    """Directed: a stopping worker drops slowly while another is started in its place."""
    for _ in range(2):
        world.add()
    await asyncio.sleep(8)
    slow = world.running()[world.seed % 2]
    slow.hooks_hang_until = world.loop.time() + 2.5
    stopping = asyncio.create_task(world.stop(slow))
    world.add()
    for _ in range(400):
        world.check_holders()
        await asyncio.sleep(0.01)
    await stopping
    await settle(world)
    return world.complaints + verdict(world)


async def others_read_the_past(world: World, seconds: float, workers_max: int) -> list[str]:
    """Directed: after a worker has joined and got partitions, all others read stale data and get no events."""
    others = [world.add(), world.add()]
    await asyncio.sleep(8)
    late = world.add()
    await asyncio.wait([late.starting])
    await asyncio.sleep(1)
    for worker in others:
        worker.client.is_deaf, worker.client.lag = True, 6.0
    await asyncio.sleep(5)
    for worker in others:
        worker.client.is_deaf, worker.client.lag = False, 0.0
    await settle(world)
    return world.complaints + verdict(world)


def run_seed(
    seed: int, seconds: float = 40.0, workers_max: int = 5, scenario: Callable[..., Any] = chaos_then_quiet
) -> Report:
    loop = SimLoop(FakeClock())
    loop.set_task_factory(task_factory)
    world = World(loop, seed)
    try:
        loop.create_task(world.check_loop())
        complaints = loop.run_until_complete(scenario(world, seconds, workers_max))
    finally:
        for worker in world.workers:
            worker.process.kill()
        cancel_all(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    return Report(seed, complaints, world.lines, world.events, world.leaders.documents, world.moves, loop.time())
