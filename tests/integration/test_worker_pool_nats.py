"""Real worker pools: worker processes and three NATS nodes, with SIGKILL and SIGSTOP of both, and a rolling restart.

Each worker records what it held and when, by its own clock and its manager; afterwards the records are compared. The
short run is in `make test`, the long ones in `make soak`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from pathlib import Path
from typing import Any

import nats
import pytest

from heapline.assign.manager import boot_time
from tests.integration.nats_rig import Node, Servers, until
from tests.integration.pool_processes import Pool, Worker

BRISK: dict[str, Any] = {  # leases shorter than a NATS election: all end in one, and no holders may overlap
    "heartbeat_interval": "500ms", "heartbeat_ttl": "4s", "worker_id_ttl": "20s", "cold_start_window": "3s",
    "planned_scale_window": "12s", "startup_timeout": "60s", "shutdown_timeout": "20s", "operation_timeout": "5s",
    "assignment": {"rebalance_cooldown": "1s", "min_rebalance_threshold": 0.0},
    "retry": {"initial_delay": "200ms", "max_delay": "1s"},
}  # fmt: skip
CALM: dict[str, Any] = {  # leases that outlast an election: nothing moves because of it
    **BRISK, "heartbeat_interval": "1500ms", "heartbeat_ttl": "18s", "worker_id_ttl": "40s", "cold_start_window": "8s",
    "planned_scale_window": "15s",
}  # fmt: skip
HASTY: dict[str, Any] = {**BRISK, "worker_id_ttl": "5s"}  # keys expire while their workers are paused
STAYS = 0.95


def bucket_leader(servers: Servers) -> Node:
    """Return the node that leads the pool's bucket; there may be none for a while."""

    async def ask() -> str:
        async with asyncio.timeout(5):
            client = await nats.connect(servers.urls, max_reconnect_attempts=2)
            try:
                info = await client.jetstream(timeout=2).stream_info("KV_pool")
            finally:
                await client.close()
        return "" if info.cluster is None else str(info.cluster.leader)

    found: list[Node] = []

    def is_found() -> bool:
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            name = asyncio.run(ask())
            found[:] = [node for node in servers.nodes if node.name == name]
        return bool(found)

    until(is_found)
    return found[0]


def share_that_stays(before: dict[str, str], after: dict[str, str]) -> float:
    return sum(after.get(id) == worker for id, worker in before.items()) / len(before)


@pytest.mark.slow
def test_pool_survives_killed_and_paused_workers_and_a_killed_nats_node(tmp_path: Path) -> None:
    with Servers(tmp_path, 3) as servers, Pool(tmp_path, servers, 40, BRISK) as pool:
        pool.start(5)
        pool.until_started()
        pool.until_all_is_held()
        before = pool.holders()
        pool.restart_one_by_one(pool.workers[:2])
        pool.until_all_is_held()
        assert share_that_stays(before, pool.holders()) >= STAYS

        leader = pool.leader()
        paused, killed = [worker for worker in pool.workers if worker is not leader][:2]
        pool.remove(paused)
        pool.remove(killed)
        paused.pause()
        killed.kill()
        pool.until_all_is_held()
        paused.resume()
        pool.workers.append(paused)

        pool.remove(leader)
        leader.kill()
        bucket_leader(servers).kill()
        pool.until_all_have_renewed(boot_time() + 0.5)
        pool.until_all_is_held()
        pool.stop()
        pool.check()


@pytest.mark.soak
def test_leases_longer_than_a_nats_election_outlast_it(tmp_path: Path) -> None:
    with Servers(tmp_path, 3) as servers, Pool(tmp_path, servers, 60, CALM) as pool:
        pool.start(6)
        pool.until_started()
        pool.until_all_is_held()
        before, ends = pool.holders(), []
        for hurt in (Node.kill, Node.pause, Node.kill):
            node = bucket_leader(servers)
            hurt(node)
            pool.until_all_have_renewed(boot_time() + 0.5)
            if node.process.poll() is None:
                node.send(signal.SIGCONT)
            else:
                node.start()
            servers.await_health()
            ends.append(pool.holders())
        assert ends == [before] * 3
        granted = [holding for worker in pool.all for holding in worker.record.holdings()]
        assert len(granted) == 60, "a partition moved, or was dropped and added again"
        pool.stop()
        pool.check()


@pytest.mark.soak
@pytest.mark.parametrize(("config", "seed"), [(BRISK, 1), (HASTY, 2), (CALM, 3)])
def test_twenty_workers_through_a_rolling_restart_and_chaos(tmp_path: Path, config: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    with Servers(tmp_path, 3) as servers, Pool(tmp_path, servers, 200, config) as pool:
        pool.start(20)
        pool.until_started()
        pool.until_all_is_held()
        before = pool.holders()
        pool.restart_one_by_one(pool.workers)
        pool.until_all_is_held()
        assert share_that_stays(before, pool.holders()) >= STAYS
        for _ in range(10):
            hurt(chance, pool, servers, config)
            pool.until_all_is_held()
        pool.stop()
        pool.check()


def hurt(chance: random.Random, pool: Pool, servers: Servers, config: dict[str, Any]) -> None:
    """Inflict one or two faults at the same time, then repair them."""
    victims = chance.sample(pool.workers, 2)
    node = chance.choice([bucket_leader(servers), *servers.nodes])
    match chance.choice(("kill workers", "kill leader", "pause workers", "kill node", "pause node", "restart node")):
        case "kill workers":
            for worker in victims:
                kill(pool, worker)
            pool.start(2)
        case "kill leader":
            kill(pool, pool.leader())
            pool.start(1)
        case "pause workers":
            for worker in victims:
                worker.pause()
            rest(chance.uniform(0.5, 2.5) * float(config["heartbeat_ttl"][:-1]))
            for worker in victims:
                worker.resume()
        case "kill node":
            node.kill()
            kill(pool, victims[0])
            pool.start(1)
            pool.until_all_have_renewed(boot_time() + 0.5)
            node.start()
        case "pause node":
            node.pause()
            rest(chance.uniform(2, 12))
            node.send(signal.SIGCONT)
        case "restart node":
            node.terminate()
            node.start()
    servers.await_health()


def kill(pool: Pool, worker: Worker) -> None:
    pool.remove(worker)
    worker.kill()


def rest(seconds: float) -> None:
    """Let processes stay paused for a while."""
    time.sleep(seconds)
