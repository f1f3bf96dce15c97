"""`kill -9` of nodes of the Postgres broker, two at a time, each with its own record of its answers.

At the end everything that is left is popped: nothing that was answered is lost, no acked message is redelivered,
and no message was held by two at the same time. A node repeats its predecessor's last batches with idempotency keys:
they count once, under the ids of the first time.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import heapline
import heapline.sql
from heapline.core.ids import partition_of
from heapline.sql import node_id
from heapline.sql.redis import buffer_key
from tests.integration import sql_node
from tests.integration.sql_node import TOPIC, VISIBILITY
from tests.postgres import UNSYNCED, KillablePostgres, fresh_schema, shared_url
from tests.valkey import Valkey

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NODES, KILLS, SEED = 2, 6, 18
REPEATS = 20  # batches
PATIENCE = 60.0  # seconds for a node to open on a busy machine


class Rig:
    """Nodes in separate processes, and the servers that they use. A node's successor has its directory."""

    def __init__(self, place: Path, url: str, schema: str, settings: dict[str, Any], uses_wal: bool) -> None:
        self.place, self.url, self.schema, self._settings, self._uses_wal = place, url, schema, settings, uses_wal
        self.records: list[Path] = []
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}  # by seat
        self._last: dict[int, Path] = {}  # the newest record of each seat

    def settings(self, seat: int) -> dict[str, Any]:
        return {**self._settings, "wal": str(self.place / f"wal-{seat}")} if self._uses_wal else self._settings

    def start(self, seat: int) -> None:
        number = len(self.records)
        record = self.place / f"{number}.jsonl"
        self.records.append(record)
        settings = {**self.settings(seat), "repeats": self._keyed(seat)}
        self._last[seat] = record
        arguments = [self.url, self.schema, str(record), str(number + 1), json.dumps(settings)]
        command = [sys.executable, "-m", "tests.integration.sql_node", *arguments]
        child = self.nodes[seat] = subprocess.Popen(command, cwd=ROOT)
        deadline = time.monotonic() + PATIENCE
        while not (record.exists() and record.stat().st_size) and time.monotonic() < deadline:
            self.check(child)
            time.sleep(0.02)

    def _keyed(self, seat: int) -> list[list[str]]:
        """Return the last batches with keys that a killed node sent; the outcome of the very last is unknown."""
        if seat not in self._last:
            return []
        lines = [json.loads(line) for line in self._last[seat].read_text().splitlines()]
        return [facts[0] for kind, *facts in lines if kind == "asks enqueue" and facts[1]][-REPEATS:]

    def check(self, child: subprocess.Popen[bytes]) -> None:
        assert child.poll() is None, f"the node ended by itself with code {child.returncode}"

    def kill(self, seat: int) -> None:
        self.check(self.nodes[seat])
        self.nodes[seat].kill()
        self.nodes[seat].wait()

    def run(self, kills: int, servers: list[Any], paused_seconds: float = 0.0) -> list[list[Any]]:
        """Kill nodes and servers at random times and start them again; return the lines of all records."""
        rng = random.Random(SEED)
        try:
            for seat in range(NODES):
                self.start(seat)
            if paused_seconds:
                time.sleep(1.0)
                self.nodes[0].send_signal(signal.SIGSTOP)
                time.sleep(paused_seconds)
                self.kill(1)
                self.start(1)  # takes the paused node's number
                self.nodes[0].send_signal(signal.SIGCONT)
            for n in range(kills):
                time.sleep(rng.uniform(0.2, 1.5))
                if servers and n % 2:
                    server = servers[n // 2 % len(servers)]
                    server.kill()
                    time.sleep(rng.uniform(0.0, 0.8))
                    server.start()
                else:
                    self.kill(n % NODES)
                    self.start(n % NODES)
            time.sleep(1.0)
            for seat in range(NODES):
                self.kill(seat)
        finally:
            for node in self.nodes.values():
                node.kill()
                node.wait()
        return [json.loads(line) for record in self.records for line in record.read_text().splitlines()]

    async def drain(self) -> list[str]:
        """Pop and ack everything, and wait for leases of killed nodes. Unflushed messages are flushed first."""
        found: list[str] = []
        settings = {name: value for name, value in self._settings.items() if name != "k"}
        for seat in range(NODES if self._uses_wal else 0):
            wal = str(self.place / f"wal-{seat}")
            async with heapline.sql.open([self.url], schema=self.schema, **settings, wal=wal) as hl:
                await hl.stats(TOPIC)
        if self._uses_wal:
            settings.pop("durability", None)
        if settings.get("durability") == "redis":
            async with heapline.sql.open([self.url], schema=self.schema, **settings) as hl:
                while await hl.node.redis.run(lambda client: client.llen(buffer_key(0))):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        connection = await asyncpg.connect(self.url, server_settings={"search_path": self.schema})
        assert await connection.fetch("SELECT * FROM miscounted") == []
        await connection.close()
        async with heapline.sql.open([self.url], schema=self.schema, **settings) as hl:
            while True:
                messages = await hl.pop(TOPIC, 1000, wait=0.3)
                await hl.ack(messages)
                found += [m.payload.decode() for m in messages]
                stats = await hl.stats(TOPIC)
                if not messages and not (stats.ready or stats.delayed or stats.leased):
                    assert stats.dead == 0
                    return found


class Evidence:
    def __init__(self, lines: list[list[Any]]) -> None:
        self.asked = {tag for kind, *facts in lines if kind == "asks enqueue" for tag in facts[0]}
        self.ids = {t: id for kind, *f in lines if kind == "enqueued" for t, id in zip(f[0], f[1], strict=True)}
        times = Counter(tag for kind, *facts in lines if kind == "enqueued" for tag in facts[0])
        self.acknowledged_again = {tag: count - 1 for tag, count in times.items()}
        self.may_be_acked = {tag for kind, *facts in lines if kind == "asks ack" for tag in facts[0]}
        self.acked_at = {tag: facts[-1] for kind, *facts in lines if kind == "acked" for tag in facts[0]}
        self.pops = [(*p, facts[1]) for kind, *facts in lines if kind == "popped" for p in facts[0]]

    def with_two_ids(self, lines: list[list[Any]]) -> list[str]:
        """Messages that were acknowledged or delivered under different ids, so a repeat of their key counted twice."""
        ids: dict[str, set[int]] = {}
        for kind, *facts in lines:
            if kind == "enqueued":
                for tag, id in zip(facts[0], facts[1], strict=True):
                    ids.setdefault(tag, set()).add(id)
        for tag, id, *_ in self.pops:
            ids.setdefault(tag, set()).add(id)
        return [tag for tag, some in ids.items() if len(some) > 1]

    def pops_after_ack(self) -> list[str]:
        return [tag for tag, *_, began in self.pops if tag in self.acked_at and began > self.acked_at[tag]]

    def held_twice(self) -> list[str]:
        """Messages that were leased again, by the database's clock, before the previous lease had ended."""
        found = []
        leases: dict[str, list[float]] = {}
        for tag, _, _, deadline, _ in self.pops:
            leases.setdefault(tag, []).append(deadline)
        for tag, deadlines in leases.items():
            deadlines.sort()
            found += [tag for first, second in pairwise(deadlines) if second - VISIBILITY < first - 0.0005]
        return found


def check(lines: list[list[Any]], rest: Counter[str]) -> None:
    evidence = Evidence(lines)
    assert len(evidence.ids) > 200, "too little was enqueued to prove anything"
    assert len(evidence.acked_at) > 100
    popped = {tag for tag, *_ in evidence.pops}
    lost = [t for t in evidence.ids if t not in rest and t not in evidence.may_be_acked]
    assert lost == []
    assert [tag for tag in evidence.acked_at if tag in rest] == [], "acked but left in the queue"
    assert evidence.pops_after_ack() == []
    assert evidence.held_twice() == []
    assert evidence.with_two_ids(lines) == []
    assert sum(evidence.acknowledged_again.values()) > 100, "too few repeats to prove anything"
    assert max(rest.values(), default=1) == 1
    assert len(set(evidence.ids.values())) == len(evidence.ids), "two messages have the same id"
    assert (popped | set(rest)) <= evidence.asked


@pytest.mark.parametrize("policy", ["postgres", "wal"])
async def test_killed_nodes_lose_nothing_and_redeliver_nothing_acked(tmp_path: Path, policy: str) -> None:
    uses_wal = policy == "wal"
    rig = Rig(tmp_path, shared_url(), fresh_schema(), {"k": 100} if uses_wal else {}, uses_wal)
    lines = await asyncio.to_thread(rig.run, KILLS, [])
    check(lines, Counter(await rig.drain()))


@pytest.mark.parametrize("policy", ["wal", "redis"])
async def test_killed_valkey_postgres_and_nodes_lose_nothing(tmp_path: Path, policy: str) -> None:
    """Pops use the ready queue. Its server's file may be old, and it is killed most often."""
    fsync = "always" if policy == "redis" else "everysec"
    postgres, valkey = KillablePostgres(UNSYNCED), Valkey("--appendonly", "yes", "--appendfsync", fsync)
    try:
        postgres.start()
        valkey.start()
        settings = {"k": 100, "redis": valkey.url(), "durability": policy}
        rig = Rig(tmp_path, postgres.url, "heapline", settings, policy == "wal")
        lines = await asyncio.to_thread(rig.run, 2 * KILLS, [valkey, valkey, postgres])
        assert max(facts[0] for kind, *facts in lines if kind == "prefetched") > 0, "nothing was prefetched"
        check(lines, Counter(await rig.drain()))
    finally:
        valkey.close()
        postgres.close()


@pytest.mark.soak  # 30 s, most of them asleep
async def test_node_that_wakes_after_another_took_its_number_mints_no_id_twice(tmp_path: Path) -> None:
    rig = Rig(tmp_path, shared_url(), fresh_schema(), {"k": 100}, True)
    paused = sql_node.NODE_LEASE + node_id.GRACE_MS / 1000 + 1
    lines = await asyncio.to_thread(rig.run, 2, [], paused)
    first, _, third = (owners(record) for record in rig.records[:3])
    assert first & third, "the third node has not taken the first one's number, so this proves nothing"
    check(lines, Counter(await rig.drain()))


def owners(record: Path) -> set[int]:
    """Return the node numbers in the ids that a node minted."""
    lines = map(json.loads, record.read_text().splitlines())
    return {partition_of(id) for kind, *facts in lines if kind == "enqueued" for id in facts[1]}


async def test_killed_postgres_and_nodes_lose_nothing(tmp_path: Path) -> None:
    postgres = KillablePostgres(UNSYNCED)
    try:
        postgres.start()
        rig = Rig(tmp_path, postgres.url, "heapline", {"k": 100}, True)
        lines = await asyncio.to_thread(rig.run, KILLS, [postgres])
        check(lines, Counter(await rig.drain()))
    finally:
        postgres.close()
