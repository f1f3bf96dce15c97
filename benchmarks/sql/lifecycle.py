"""Lifecycles per second next to other queues on PostgreSQL: hand-written SQL, pgmq's table, the seed's table, awa.

All but awa start from a backlog of 10 000 messages; awa's workers take everything at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.drivers.window import Outcome
from benchmarks.engine import Figure, figure
from benchmarks.harness import SCRATCH
from benchmarks.peers.awa import Awa
from benchmarks.peers.peer import PeerMissing
from benchmarks.rows import Step
from benchmarks.server.driving import DriverFailed, typical
from benchmarks.server.targets import Bound
from benchmarks.sql import targets
from benchmarks.sql.database import Database, started

WHAT = f"lifecycle, {targets.BATCH} × {targets.IN_FLIGHT}"


def run(quick: bool, directory: Path, peers: Sequence[str]) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 3.0) if quick else (5, 5.0)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in ("sql", *peers)}
    recorded: list[Outcome] = []  # with `retention`, so that events are recorded
    missing: dict[str, str] = {}
    with started(directory) as database:
        for number in range(rounds):
            for at, name in enumerate(outcomes):
                yield Step(f"{name}, round {number + 1}", number * len(outcomes) + at, rounds * len(outcomes))
                try:
                    if name not in missing:
                        outcomes[name].append(measured(database, name, seconds))
                except (PeerMissing, DriverFailed) as error:
                    missing[name] = str(error)
            recorded.append(database.drive("sql", seconds, retention="86400"))
    if "sql" in missing:
        raise RuntimeError(missing["sql"])
    ours = typical(outcomes["sql"])
    yield from figures("without recorded events", typical(recorded), ours, None)
    for name in peers:
        bound = targets.PEERS[name]
        target = None if bound is None else Bound("≥", bound, "×")
        if name in missing:
            none = dict.fromkeys(("value", "unit", "baseline", "ratio", "met"))
            yield {**none, "name": f"{WHAT}, next to {name}", "target": target and str(target), "error": missing[name]}
        else:
            yield from figures(name, ours, typical(outcomes[name]), target)


def measured(database: Database, name: str, seconds: float) -> Outcome:
    if name != "awa":
        return database.drive(name, seconds)
    awa = Awa(SCRATCH / "peers" / "awa")
    awa.install()
    return database.drive(name, seconds, awa.python)


def figures(name: str, ours: Outcome, theirs: Outcome, target: Bound | None) -> Iterator[Figure]:
    ratio = ours.rate / theirs.rate
    met = None if target is None else target.holds(ratio)
    yield figure(
        f"{WHAT}, next to {name}", ours.rate, "messages/s", theirs.rate, ratio, target and str(target), met
    )  # fmt: skip
    spent, there = ours.server_us + ours.client_us, theirs.server_us + theirs.client_us
    what = f"{WHAT}, next to {name}: CPU of server and client"
    yield figure(what, spent, "µs/message", there, spent / there, None, None, "lower")
