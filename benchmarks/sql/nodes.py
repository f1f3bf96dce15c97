"""CPU per message of two nodes on two shards, next to one node on one shard. Both shards are in one server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from benchmarks.drivers.window import Outcome
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.sql import targets
from benchmarks.sql.database import Database, started
from heapline.sql.placement import shard_of

SHARDS = ("one", "two")


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 3.0) if quick else (5, 5.0)
    alone: list[float] = []
    together: list[float] = []
    with started(directory) as database:
        for shard in SHARDS:
            database.query(f"CREATE DATABASE {shard}")
        for number in range(rounds):
            yield Step("one node", 2 * number, 2 * rounds)
            alone.append(cpu_us([database.drive("sql", seconds)]))
            yield Step("two nodes", 2 * number + 1, 2 * rounds)
            together.append(cpu_us(both(database, seconds)))
    ratio = median(together) / median(alone)
    what = "CPU of server and clients, two nodes on two shards, next to one on one"
    yield figure(
        what, median(together), "µs/message", median(alone), ratio, str(targets.NODES), targets.NODES.holds(ratio)
    )  # fmt: skip


def both(database: Database, seconds: float) -> list[Outcome]:
    """Run two nodes that both use both shards."""
    names = [next(n for n in candidates() if shard_of("default", n, 2) == index) for index in range(2)]
    options = {"databases": ",".join(SHARDS), "topics": ",".join(names)}
    database.drive("sql", 0.1, **options)  # creates the tables, which the nodes keep
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(database.drive, "sql", seconds, **options, keep="1") for _ in SHARDS]
        return [each.result() for each in runs]


def candidates() -> Iterator[str]:
    return (f"bench{n}" for n in range(100))


def cpu_us(outcomes: list[Outcome]) -> float:
    """CPU microseconds per message. Each outcome has the CPU of the whole server in its window."""
    server = sum(outcome.server_cpu_s for outcome in outcomes) / len(outcomes)
    clients = sum(outcome.client_cpu_s for outcome in outcomes)
    return (server + clients) / sum(outcome.messages for outcome in outcomes) * 1e6
