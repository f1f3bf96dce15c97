"""Lifecycles per second while another session keeps a transaction open, and the dead rows that vacuum cannot remove.

The transaction is open for the whole run. Between its parts, a fresh server without one is driven for a while, so that
each rate is compared with one of about the same minute. The clock of ours runs SPEED times as fast, so that leases end,
slots by time change and what was acked is forgotten as often as in a run of SPEED times the length. The seed's table is
measured in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import asyncpg

from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.sql import targets
from benchmarks.sql.database import Database, started

DEAD = """
SELECT coalesce(sum(pg_stat_get_dead_tuples(oid)), 0)::bigint FROM pg_class
WHERE relkind = 'r' AND relnamespace = to_regnamespace($1)
"""
SPEED = 4
FASTER = """
CREATE OR REPLACE FUNCTION heapline.clock_ms() RETURNS bigint LANGUAGE sql VOLATILE
    RETURN {now} + ((extract(epoch FROM clock_timestamp()) * 1000)::bigint - {now}) * {speed}
"""
SCHEMAS = {"sql": "heapline", "seed_table": "public"}
PART = 60.0  # seconds of a part, if there are more than four of them


def run(quick: bool, directory: Path, seconds: float | None = None) -> Iterator[Figure | Step]:
    length = seconds or (targets.HELD_SECONDS_QUICK if quick else targets.HELD_SECONDS)
    parts = max(4, round(length / PART))
    for number, name in enumerate(SCHEMAS):
        with started(directory / f"{name}-held") as database, started(directory / f"{name}-fresh") as fresh:
            rates: list[tuple[float, float]] = []  # with the transaction, and without
            rows: list[int] = []
            database.drive(name, 1.0)  # creates its tables
            if name == "sql":
                now = database.query("SELECT heapline.clock_ms()")
                database.query(FASTER.format(now=now, speed=SPEED))
            with held(database):
                for part in range(parts):
                    yield Step(f"{name}, part {part + 1}", number * parts + part, len(SCHEMAS) * parts)
                    rate = database.drive(name, length / parts, keep="1").rate
                    rates.append((rate, fresh.drive(name, min(10.0, length / parts)).rate))
                    rows.append(dead(database, name))
        later = rates[parts // 2 :]
        what = f"{name}: lifecycle in the second half of {length:g} s with an open transaction, next to fresh"
        target = targets.HELD if name == "sql" else None
        value, ratio = median(pair[0] for pair in later), median(with_it / fresh for with_it, fresh in later)
        met = None if target is None else target.holds(ratio)
        yield figure(what, value, "messages/s", median(pair[1] for pair in later), ratio, target and str(target), met)
        what = f"{name}: most dead rows in the second half, next to the first"
        first, second = max(rows[: parts // 2]), max(rows[parts // 2 :])
        yield figure(what, second, "rows", first, second / max(first, 1), None, None, "lower")


def dead(database: Database, name: str) -> int:
    found: int = database.query(DEAD, SCHEMAS[name])
    return found


@contextlib.contextmanager
def held(database: Database) -> Iterator[None]:
    """Keep a transaction open whose snapshot keeps vacuum from removing anything."""
    begun, over = threading.Event(), threading.Event()

    async def hold() -> None:
        connection = await asyncpg.connect(database.url())
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetchval("SELECT txid_current()")
            begun.set()
            await asyncio.to_thread(over.wait)
        await connection.close()

    thread = threading.Thread(target=asyncio.run, args=(hold(),), daemon=True)
    thread.start()
    if not begun.wait(30):
        raise RuntimeError("the transaction did not begin")
    try:
        yield
    finally:
        over.set()
        thread.join()
