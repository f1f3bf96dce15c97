"""The ready path with millions of delayed messages, compared with none; and the delay of a delayed message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import time

import heapline.sql
from benchmarks.drivers.sql import SCHEMA
from benchmarks.drivers.window import PAYLOAD, Outcome, run_loop
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server.driving import typical
from benchmarks.server.schedule import percentile
from benchmarks.sql import targets
from benchmarks.sql.database import Database, started
from heapline.contract.message import Outgoing

#: Two databases, so that both kinds alternate.
EMPTY, FULL = "bench_empty", "bench_full"
TIMED, DELAY_S = 200, 2.0


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rows = targets.DELAYED_ROWS_QUICK if quick else targets.DELAYED_ROWS
    rounds, seconds = (2, 3.0) if quick else (5, 5.0)
    rates: dict[str, list[Outcome]] = {EMPTY: [], FULL: []}
    late: dict[str, list[float]] = {EMPTY: [], FULL: []}
    with started(directory, max_wal_size="16GB") as database:
        for name in rates:
            database.query(f"CREATE DATABASE {name}")
            database.drive("sql", 0.1, databases=name)
        yield Step(f"inserting {rows} delayed rows", 0, rounds + 1)
        run_loop(fill(database, rows))
        for number in range(rounds):
            yield Step(f"round {number + 1}", number + 1, rounds + 1)
            for name in rates:
                rates[name].append(database.drive("sql", seconds, databases=name, keep="1"))
            for name in late:
                late[name] += run_loop(lateness(database, name))
    full, empty = typical(rates[FULL]), typical(rates[EMPTY])
    what, ratio = f"lifecycle with {rows:,} delayed messages, time per message next to none", empty.rate / full.rate
    bound = targets.DELAYED
    yield figure(
        what, 1e6 / full.rate, "µs", 1e6 / empty.rate, ratio, str(bound), bound.holds(ratio), "lower"
    )  # fmt: skip
    for percent in (50, 99):
        ms, without = (percentile(late[name], percent) * 1e3 for name in (FULL, EMPTY))
        what = f"delayed message delivered late, with {rows:,} others, p{percent}"
        yield figure(what, ms, "ms", without, ms / without, None, None, "lower")


async def fill(database: Database, count: int) -> None:
    """Enqueue delayed messages that become due in one hour to one month, in the node's largest batches."""
    async with heapline.sql.open([database.url(FULL)], schema=SCHEMA) as hl:
        await hl.create_topic("later")
        batch = 5000
        for first in range(0, count, batch):
            delays = [3600 + (first + i) * 7919 % 2_592_000 for i in range(batch)]
            await hl.enqueue_batch("later", [Outgoing(PAYLOAD, delay=float(d)) for d in delays])


async def lateness(database: Database, name: str) -> list[float]:
    """Return the seconds by which delayed messages reached a waiting consumer after they were due."""
    late: list[float] = []
    async with heapline.sql.open([database.url(name)], schema=SCHEMA) as hl:
        await hl.create_topic("timed")
        base = time() + DELAY_S
        dues = [base + n * 0.01 for n in range(TIMED)]
        await hl.enqueue_batch("timed", [Outgoing(repr(due).encode(), delay=due - time()) for due in dues])
        while len(late) < TIMED:
            messages = await hl.pop("timed", 100, wait=5.0)
            late += [time() - float(message.payload) for message in messages]
            await hl.ack(messages)
    return late
