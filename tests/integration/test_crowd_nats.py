"""Real crowds: worker processes and three NATS nodes, with SIGKILL and SIGSTOP of both, and a rolling restart.

Each worker writes down what it held when, by its own clock and its manager's word; afterwards all records are laid
over each other. The short run is in `make test`, the long ones in `make soak`.
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
from tests.integration.crowd_processes import Crowd, Worker
from tests.integration.nats_rig import Node, Servers, until

BRISK: dict[str, Any] = {  # leases shorter than an election of NATS: all of them end in one, and nobody may overlap
    "heartbeat_interval": "500ms", "heartbeat_ttl": "4s", "worker_id_ttl": "20s", "cold_start_window": "3s",
    "planned_scale_window": "12s", "startup_timeout": "60s", "shutdown_timeout": "20s", "operation_timeout": "5s",
    "assignment": {"rebalance_cooldown": "1s", "min_rebalance_threshold": 0.0},
    "retry": {"initial_delay": "200ms", "max_delay": "1s"},
}  # fmt: skip
CALM: dict[str, Any] = {  # leases that ride an election out: nothing moves because of it
    **BRISK, "heartbeat_interval": "1500ms", "heartbeat_ttl": "18s", "worker_id_ttl": "40s", "cold_start_window": "8s",
    "planned_scale_window": "15s",
}  # fmt: skip
HASTY: dict[str, Any] = {**BRISK, "worker_id_ttl": "5s"}  # keys expire while their workers stand still
STAYS = 0.95


def bucket_leader(servers: Servers) -> Node:
    """The node that leads the crowd's bucket; there may be none for a while."""

    async def ask() -> str:
        async with asyncio.timeout(5):
            client = await nats.connect(servers.urls, max_reconnect_attempts=2)
            try:
                info = await client.jetstream(timeout=2).stream_info("KV_crowd")
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
def test_crowd_survives_killed_and_paused_workers_and_a_killed_nats_node(tmp_path: Path) -> None:
    with Servers(tmp_path, 3) as servers, Crowd(tmp_path, servers, 40, BRISK) as crowd:
        crowd.start(5)
        crowd.until_started()
        crowd.until_all_is_held()
        before = crowd.holders()
        crowd.restart_one_by_one(crowd.workers[:2])
        crowd.until_all_is_held()
        assert share_that_stays(before, crowd.holders()) >= STAYS

        leader = crowd.leader()
        paused, killed = [worker for worker in crowd.workers if worker is not leader][:2]
        crowd.remove(paused)
        crowd.remove(killed)
        paused.pause()
        killed.kill()
        crowd.until_all_is_held()
        paused.resume()
        crowd.workers.append(paused)

        crowd.remove(leader)
        leader.kill()
        bucket_leader(servers).kill()
        crowd.until_all_have_renewed(boot_time() + 0.5)
        crowd.until_all_is_held()
        crowd.stop()
        crowd.check()


@pytest.mark.soak
def test_leases_longer_than_an_election_of_nats_ride_it_out(tmp_path: Path) -> None:
    with Servers(tmp_path, 3) as servers, Crowd(tmp_path, servers, 60, CALM) as crowd:
        crowd.start(6)
        crowd.until_started()
        crowd.until_all_is_held()
        before, ends = crowd.holders(), []
        for hurt in (Node.kill, Node.pause, Node.kill):
            node = bucket_leader(servers)
            hurt(node)
            crowd.until_all_have_renewed(boot_time() + 0.5)
            if node.process.poll() is None:
                node.send(signal.SIGCONT)
            else:
                node.start()
            servers.await_health()
            ends.append(crowd.holders())
        assert ends == [before] * 3
        granted = [holding for worker in crowd.all for holding in worker.record.holdings()]
        assert len(granted) == 60, "something moved, or was dropped and taken again"
        crowd.stop()
        crowd.check()


@pytest.mark.soak
@pytest.mark.parametrize(("config", "seed"), [(BRISK, 1), (HASTY, 2), (CALM, 3)])
def test_twenty_workers_through_a_rolling_restart_and_chaos(tmp_path: Path, config: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    with Servers(tmp_path, 3) as servers, Crowd(tmp_path, servers, 200, config) as crowd:
        crowd.start(20)
        crowd.until_started()
        crowd.until_all_is_held()
        before = crowd.holders()
        crowd.restart_one_by_one(crowd.workers)
        crowd.until_all_is_held()
        assert share_that_stays(before, crowd.holders()) >= STAYS
        for _ in range(10):
            hurt(chance, crowd, servers, config)
            crowd.until_all_is_held()
        crowd.stop()
        crowd.check()


def hurt(chance: random.Random, crowd: Crowd, servers: Servers, config: dict[str, Any]) -> None:
    """One blow, or two at once, and what makes it good again."""
    victims = chance.sample(crowd.workers, 2)
    node = chance.choice([bucket_leader(servers), *servers.nodes])
    match chance.choice(("kill workers", "kill leader", "pause workers", "kill node", "pause node", "restart node")):
        case "kill workers":
            for worker in victims:
                kill(crowd, worker)
            crowd.start(2)
        case "kill leader":
            kill(crowd, crowd.leader())
            crowd.start(1)
        case "pause workers":
            for worker in victims:
                worker.pause()
            rest(chance.uniform(0.5, 2.5) * float(config["heartbeat_ttl"][:-1]))
            for worker in victims:
                worker.resume()
        case "kill node":
            node.kill()
            kill(crowd, victims[0])
            crowd.start(1)
            crowd.until_all_have_renewed(boot_time() + 0.5)
            node.start()
        case "pause node":
            node.pause()
            rest(chance.uniform(2, 12))
            node.send(signal.SIGCONT)
        case "restart node":
            node.terminate()
            node.start()
    servers.await_health()


def kill(crowd: Crowd, worker: Worker) -> None:
    crowd.remove(worker)
    worker.kill()


def rest(seconds: float) -> None:
    """Let processes stand still for a while: that is the blow."""
    time.sleep(seconds)
