"""Batches through `heapline.connect`, compared with the thin wire client on the same server.

The difference is what the SDK adds: sequence numbers, so that a repeated batch counts once; joined calls; deadlines.
Rounds alternate, also in which side is first; each round gives a ratio, and the median counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.drivers.window import Outcome
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.sdk.targets import BATCHES, OF_THE_WIRE
from benchmarks.server.driving import drive, typical
from benchmarks.server.lifecycle import job_of, name_of
from benchmarks.server.spawned import heapline_server
from benchmarks.server.targets import Bound

KINDS = ("lifecycle", "enqueue")


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds, seconds = (3, 1.0) if quick else (7, 2.0)
    seen: dict[tuple[str, str], list[Outcome]] = {(kind, who): [] for kind in KINDS for who in ("sdk", "ours")}
    with heapline_server(directory / "ours") as server:
        for number in range(rounds):
            for at, kind in enumerate(KINDS):
                yield Step(f"{kind}, {name_of(BATCHES)}", number * len(KINDS) + at, rounds * len(KINDS))
                for who in ("sdk", "ours") if number % 2 else ("ours", "sdk"):
                    seen[kind, who].append(drive(who, job_of(server, kind, BATCHES, seconds)))
    for kind in KINDS:
        yield from figures(kind, seen[kind, "sdk"], seen[kind, "ours"])


def figures(kind: str, sdk: list[Outcome], wire: list[Outcome]) -> Iterator[Figure]:
    what = f"{kind}, {name_of(BATCHES)}, next to the wire client"
    bound = Bound("≥", OF_THE_WIRE, "×")
    ratio = median(ours.rate / thin.rate for ours, thin in zip(sdk, wire, strict=True))
    middling, thin = typical(sdk), typical(wire)
    yield figure(what, middling.rate, "messages/s", thin.rate, ratio, str(bound), bound.holds(ratio))
    for side in ("server_us", "client_us"):
        spent, least = getattr(middling, side), getattr(thin, side)
        name = f"{what}: CPU of the {side.removesuffix('_us')}"
        yield figure(name, spent, "µs/message", least, spent / least, None, None, "lower")
