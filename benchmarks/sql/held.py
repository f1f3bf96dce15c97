"""Lifecycles per second while another session keeps a transaction open, and the dead rows that vacuum cannot remove.

The transaction is open for the whole run. The rate is that of its last part, compared with a run without it. The seed's
table is measured in the same way, for comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncpg

from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.sql import targets
from benchmarks.sql.database import Database, started

DEAD = """
SELECT coalesce(sum(pg_stat_get_dead_tuples(oid)), 0)::bigint FROM pg_class
WHERE relkind = 'r' AND relnamespace = to_regnamespace($1)
"""
SCHEMAS = {"sql": "heapline", "seed_table": "public"}


def run(quick: bool, directory: Path, seconds: float | None = None) -> Iterator[Figure | Step]:
    length = seconds or (targets.HELD_SECONDS_QUICK if quick else targets.HELD_SECONDS)
    last = min(10.0, length / 4)
    for number, name in enumerate(SCHEMAS):
        with started(directory / name) as database:
            yield Step(f"{name}, fresh", 2 * number, 2 * len(SCHEMAS))
            fresh = database.drive(name, last).rate
            yield Step(f"{name}, held", 2 * number + 1, 2 * len(SCHEMAS))
            with held(database):
                database.drive(name, (length - last) / 2)
                halfway = dead(database, name)
                database.drive(name, (length - last) / 2, keep="1")
                rate = database.drive(name, last, keep="1").rate
                end = dead(database, name)
        what = f"{name}: lifecycle after {length:g} s with an open transaction, next to fresh"
        target = targets.HELD if name == "sql" else None
        met = None if target is None else target.holds(rate / fresh)
        yield figure(what, rate, "messages/s", fresh, rate / fresh, target and str(target), met)
        what = f"{name}: dead rows at the end, next to halfway"
        yield figure(what, end, "rows", halfway, end / max(halfway, 1), None, None, "lower")


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
