"""The simulator of one node: seeded clients, seeded faults, and the checkers over everything that was seen.

    python -m tests.simulation.simulate --seed 7            one run; the same seed is the same run
    python -m tests.simulation.simulate --soak 600          seed after seed for ten minutes

A run: topics are created, clients work on them while the node crashes, its disk fills up, fails and decays and the
clock jumps; at the end the faults stop, everything is drained, and every promise is checked. A failure prints the seed,
the complaints and the last lines of the history.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hashlib
import logging
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from heapline.contract.config import Backoff, BrokerConfig, aging
from heapline.server.settings import GATHER_STEPS
from tests.simulation.batch_client import Batcher
from tests.simulation.checkers import judge
from tests.simulation.clients import Budget, Client, Drainer, Operator, Producer, Worker
from tests.simulation.group_checker import group_complaints
from tests.simulation.group_client import GROUPS, GroupDrainer, Member, make_groups
from tests.simulation.history import History
from tests.simulation.node import Node
from tests.simulation.rank_audit import ranks
from tests.simulation.wire import WiredNode

STEPS = 400
TAIL = 60
MEBIBYTE = 1 << 20


@dataclass
class Report:
    seed: int
    history: History
    complaints: list[str] = field(default_factory=list)
    crashes: int = 0
    opens: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    disk_steps: int = 0
    ranked: int = 0  # leases whose rank was computed
    wire: dict[str, int] = field(default_factory=dict)  # events and faults of connections
    options: str = ""  # in addition to the seed, to replay the run

    @property
    def messages(self) -> int:
        return len(self.history.sent)

    @property
    def digest(self) -> str:
        """Return one short word for the whole history: equal for equal runs."""
        return hashlib.sha256("\n".join(self.history.lines()).encode()).hexdigest()[:16]

    def text(self) -> str:
        shown = [f"seed {self.seed}: {len(self.complaints)} complaint(s)", "", *self.history.lines()[-TAIL:], ""]
        replay = f"replay: python -m tests.simulation.simulate --seed {self.seed}{self.options}"
        return "\n".join([*shown, *self.complaints[:20], "", replay])


class Chaos:
    """Draws faults and their times."""

    def __init__(self, node: Node, seed: int, topics: list[str], rot: bool, reads: bool = True) -> None:
        self.node, self.topics, self.rot, self.reads = node, topics, rot, reads
        self.rng = random.Random(f"chaos {seed}")
        self.counts: dict[str, int] = {}

    async def run(self) -> None:
        kinds = ["crash", "crash", "cut", "cut", "commit", "close", "full", "fsync", "fsync", "write", "read", "wall"]
        kinds += ["rot"] if self.rot else []
        if not self.reads:
            kinds.remove("read")
        while True:
            await asyncio.sleep(self.rng.expovariate(1.0))
            kind = self.rng.choice(kinds)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            await getattr(self, f"_{kind}")()

    async def _crash(self) -> None:
        self.node.end("crash")

    async def _cut(self) -> None:
        steps = self.rng.choice((0, 1, 2, 3, 5, 8, 13, 21, 50))
        self.node.history.note(f"power will be cut in {steps} disk operations")
        self.node.disk.cut_power_in(steps)

    async def _commit(self) -> None:
        """Cut the power while a batch is being committed: by chance alone that would be rare."""
        for _ in range(2000):
            if any(c.verb == "commit_batch" and c.outcome == "open" for c in self.node.history.calls[-20:]):
                await self._cut()
                return
            await asyncio.sleep(0.001)

    async def _close(self) -> None:
        self.node.end("close")

    async def _full(self) -> None:
        disk = self.node.disk
        disk.capacity = disk.used + self.rng.choice((0, 4096, 100_000, MEBIBYTE))
        self.node.history.note("the disk is full")
        await asyncio.sleep(self.rng.choice((0.1, 3.0, 20.0)))
        self.node.disk.capacity = None
        self.node.history.note("the disk has room again")

    async def _fsync(self) -> None:
        self._fail("fdatasync", after=self.rng.choice((0, 0, 1, 3)))

    async def _write(self) -> None:
        self._fail("pwritev", after=self.rng.choice((0, 0, 1, 3)))

    async def _read(self) -> None:
        self.node.history.reads_will_fail()
        self._fail("pread", after=self.rng.choice((0, 1, 5)))

    def _fail(self, operation: str, after: int) -> None:
        times = self.rng.choice((1, 1, 2))
        self.node.history.note(f"{operation} will fail {times}×, after {after} more")
        path = ".seg" if self.rng.random() < 0.7 else ""
        self.node.disk.inject(operation, errno.EIO, path=path, after=after, times=times)

    async def _wall(self) -> None:
        seconds = self.rng.choice((-100.0, -10.0, -1.5, 1.5, 10.0, 100.0))
        self.node.history.note(f"the wall clock jumps by {seconds} s")
        self.node.clock.jump_wall(seconds)
        self.node.history.note("after the jump")

    async def _rot(self) -> None:
        """Damage a sector of a written segment: not in its last unit, which could be a torn write."""
        segments = [(path, inode) for path, inode in self.node.disk.walk() if path.endswith(".seg")]
        segments = [found for found in segments if "/_system/" not in found[0]]  # clients do not see that one
        if not segments:
            return
        path, inode = self.rng.choice(segments)
        written = len(bytes(inode.data).rstrip(b"\0")) // 512
        if written < 8:
            return
        sector = self.rng.randrange(written // 2)
        how = self.rng.choice(("eio", "garbage", "zeros", "flip"))
        topic = next(t for t in self.topics if f"/{t}." in path)
        self.node.history.damaged.add(topic)
        self.node.history.note(f"sector {sector} of {path} goes bad: {how}")
        self.node.disk.damage(path, sector, how)


def broker_config(rng: random.Random, seed: int) -> BrokerConfig:
    """Small sizes, so that much happens."""
    return BrokerConfig(
        gather_steps=random.Random(f"gather {seed}").choice((0, GATHER_STEPS)),  # embedded, and like a server
        cache_bytes=rng.choice((0, 50_000, 4 * MEBIBYTE)),
        uncommitted_bytes_max=rng.choice((200_000, 4 * MEBIBYTE)),
        uncommitted_wait=2.0,
        snapshot_bytes=rng.choice((100_000, MEBIBYTE)),
        snapshot_interval=rng.choice((5.0, 60.0)),
        fire_slice=rng.choice((3, 64)),
        rewrite_below=rng.choice((0.25, 0.9)),
        reclaim_interval=rng.choice((0.5, 3.0)),
        spare_segment_bytes=MEBIBYTE,
        batch_timeout=rng.choice((5.0, 3600.0)),
        decision_retention=3600.0,
    )


def topic_config(rng: random.Random) -> dict[str, Any]:
    return {
        "mode": rng.choice(("min", "max")),
        "partitions": rng.choice((1, 3, 8)),
        "ordering": rng.choice(("strict", "strict", aging(2.0))),
        "streams": rng.random() < 0.7,
        "visibility_default": 5.0,
        "max_retries_default": rng.choice((1, 3)),
        "backoff": Backoff(base=rng.choice((0.0, 0.2)), factor=2.0, max=2.0, jitter=0.2),
        "max_payload_bytes": 128 << 10,
        "segment_bytes": MEBIBYTE,
        "tick": rng.choice((0.01, 0.1)),
        "retention": rng.choice((0.0, 0.0, 20.0)),
        "max_backlog": rng.choice((0, 0, 60)),
    }


def delivery_config(rng: random.Random) -> dict[str, Any]:
    """Settings that affect delivery; most topics have none of them. Drawn by a separate generator, so that the
    other draws stay the same."""
    found: dict[str, Any] = {}
    if rng.random() < 0.3:
        limit = rng.choice((0, 1, 2, 5))
        found |= {"ordering": "strict", "fairness": "keys", "max_inflight_per_key": limit}
    if rng.random() < 0.1:
        found["max_pops_per_second"] = rng.choice((50.0, 1000.0))
    if rng.random() < 0.1:
        found["strategy"] = rng.choice(("round_robin", "weighted"))
        found["partition_weights"] = {0: 3.0}
    if rng.random() < 0.1:
        found["min_freshness"] = rng.choice((0.01, 0.5))
    return found


class Simulation:
    def __init__(
        self, seed: int, steps: int = STEPS, *, rot: bool | None = None, groups: bool = False, wire: bool = False
    ) -> None:
        rng = random.Random(f"simulation {seed}")
        self.seed = seed
        self._options = f" --steps {steps}" if steps != STEPS else ""
        self._options += (" --groups" if groups else "") + (" --wire" if wire else "")
        config = self.config = broker_config(rng, seed)
        self.node = WiredNode(seed, config) if wire else Node(seed, config)
        self.node.history.small_slices = config.fire_slice < 32
        who = random.Random(f"delivery {seed}")
        self._wanted = {f"t{i}": topic_config(rng) | delivery_config(who) for i in range(rng.choice((1, 2)))}
        topics = list(self._wanted)
        budget = Budget(steps)
        self._budget = budget
        self._clients: list[Client] = [
            *(Producer(self.node, f"producer{i}", seed, topics, budget) for i in range(2)),
            *(Worker(self.node, f"worker{i}", seed, topics, budget) for i in range(3)),
            Operator(self.node, "operator", seed, topics, budget),
            Batcher(self.node, "batcher", seed, topics, budget),
        ]
        self._followed = [name for name, wanted in self._wanted.items() if groups and wanted["streams"]]
        if self._followed:
            self._clients += [Member(self.node, f"member{i}", seed, self._followed, budget) for i in range(4)]
        # Groups skip a record that cannot be read, so it would be unknown what they must see.
        rot = (rng.random() < 0.2 if rot is None else rot) and not groups
        self._chaos = Chaos(self.node, seed, topics, rot, reads=not groups)
        self._drainer = Drainer(self.node, "drain", seed, topics, budget)
        self._ranked = 0

    def run(self) -> Report:
        report = Report(self.seed, self.node.history, options=self._options)
        try:
            self._work()
        except Exception:
            report.complaints.append(traceback.format_exc())
        report.complaints += judge(self.node.history)
        if self._followed:
            report.complaints += group_complaints(self.node.history)
        report.crashes, report.opens, report.faults = self.node.crashes, self.node.opens, self._chaos.counts
        report.disk_steps = self.node.steps
        report.ranked = self._ranked
        if isinstance(self.node, WiredNode):
            report.wire = self.node.counts
        return report

    def _work(self) -> None:
        self.node.live(lambda: [self._make_topics()])
        self.node.is_faulty = True
        while self._budget.left > 0:
            self.node.live(lambda: [self._until_spent()])
            self.node.disk.capacity = None
        self.node.disk.clear_faults()
        self.node.is_faulty = False
        self.node.live(lambda: [self._drainer.run()])
        for i, _ in enumerate(GROUPS if self._followed else ()):
            drainer = GroupDrainer(self.node, f"reader{i}", self.seed, self._followed, self._budget)
            self.node.live(lambda drainer=drainer: [drainer.run()])  # type: ignore[misc]
        self.node.live(lambda: [self._audit()])

    async def _audit(self) -> None:
        """Compute from the log how good every leased message was when it was leased."""
        for name in self._wanted:
            if name not in self.node.history.damaged:
                config = self.node.history.topics[name]
                if config.strategy != "best_first":
                    continue  # which gives up the bound
                found = await ranks(self.node.hl, name)
                self._ranked += len(found)
                worse = [r for r in found if r.rank > config.k]
                assert not worse, f"topic {name}, k = {config.k}: {len(worse)} leases of too high a rank: {worse[:3]}"

    async def _make_topics(self) -> None:
        for name, wanted in self._wanted.items():
            info = await self.node.hl.create_topic(name, **wanted)
            self.node.history.topics[name] = info.config
            if name in self._followed:
                await make_groups(self.node.hl, name)

    async def _until_spent(self) -> None:
        chaos = asyncio.ensure_future(self._chaos.run())
        clients = [asyncio.ensure_future(client.run()) for client in self._clients]
        try:
            await asyncio.gather(*clients)
        finally:
            for task in (chaos, *clients):
                task.cancel()


def simulate(
    seed: int, steps: int = STEPS, *, rot: bool | None = None, groups: bool = False, wire: bool = False
) -> Report:
    """One run. Judge it by `complaints`; compare runs by `digest`."""
    logger = logging.getLogger("heapline")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        return Simulation(seed, steps, rot=rot, groups=groups, wire=wire).run()
    finally:
        logger.setLevel(before)


class Totals:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.counts: dict[str, int] = {}

    def add(self, report: Report) -> None:
        rows = {
            "seeds": 1, "calls": len(report.history.calls), "messages": report.messages, "crashes": report.crashes,
            "opens": report.opens, "ranks checked": report.ranked, "disk operations": report.disk_steps,
            "failures": bool(report.complaints),
            **{f"fault: {kind}": n for kind, n in report.faults.items()},
            **{f"wire: {kind}": n for kind, n in report.wire.items()},
        }  # fmt: skip
        for name, count in rows.items():
            self.counts[name] = self.counts.get(name, 0) + int(count)

    def line(self) -> str:
        seconds = time.monotonic() - self.began
        shown = ", ".join(f"{self.counts[n]} {n}" for n in ("seeds", "calls", "messages", "crashes", "failures"))
        return f"{seconds:6.0f} s: {shown}"

    def table(self) -> str:
        width = max(map(len, self.counts))
        return "\n".join(f"  {name:{width}}  {count:>10,}" for name, count in self.counts.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.simulate", description="Simulate one node.")
    parser.add_argument("--seed", type=int, default=1, help="the (first) seed")
    parser.add_argument("--steps", type=int, default=STEPS, help="client steps in a run")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--soak", type=float, default=0.0, help="continue with new seeds for this many seconds")
    parser.add_argument("--groups", action="store_true", help="consumer groups follow the topics")
    parser.add_argument("--wire", action="store_true", help="clients use native connections, which are cut")
    parser.add_argument("--tail", action="store_true", help="print the history even if all is well")
    options = parser.parse_args(arguments)
    totals = Totals()
    seed, shown_at = options.seed, 0.0
    while True:
        report = simulate(seed, options.steps, groups=options.groups, wire=options.wire)
        totals.add(report)
        if report.complaints:
            print(report.text(), flush=True)
        elif options.tail:
            print("\n".join(report.history.lines()))
        seconds = time.monotonic() - totals.began
        if seconds - shown_at > 10:
            shown_at = seconds
            print(totals.line(), flush=True)
        seed += 1
        if seconds >= options.soak and seed >= options.seed + options.seeds:
            break
    print(f"last seed {seed - 1}, history {report.digest}")
    print(totals.table())
    return 1 if totals.counts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
