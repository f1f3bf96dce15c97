"""Messages per second through one server process and one client process, and the CPU time of each side per message.

Through the SDK, numbered, on one partition. The baseline is a bare frame server that syncs as many bytes and has
no queue: the floor on this machine at this time. Each shape runs in several short alternating rounds, so that
a busy machine disturbs all alike; the median round counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.drivers.sdk import has_lazy_batches
from benchmarks.drivers.window import Job, Outcome
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.server.driving import drive, typical
from benchmarks.server.spawned import Serving, bare_server, heapline_server
from benchmarks.server.targets import LOADS, Bound, judged

Shape = tuple[int, int]
SPREAD, PARTITIONS = ("lifecycle", (100, 16)), 20


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 1.5) if quick else (5, 3.0)
    shapes = [(kind, (size, flight)) for kind, size, flight in LOADS if kind != "lazy" or has_lazy_batches()]
    ours: dict[tuple[str, Shape], list[Outcome]] = {each: [] for each in shapes}
    floor: dict[tuple[str, Shape], list[Outcome]] = {each: [] for each in shapes}
    spread: list[Outcome] = []
    with heapline_server(directory / "ours") as server, bare_server(directory / "bare") as bare:
        for number in range(rounds):
            for at, (kind, shape) in enumerate(shapes):
                yield Step(f"{kind} {name_of(shape)}", number * len(shapes) + at, rounds * len(shapes))
                ours[kind, shape].append(drive("sdk", job_of(server, kind, shape, seconds)))
                floor[kind, shape].append(drive("bare", job_of(bare, kind, shape, seconds)))
            spread.append(drive("sdk", spread_job(server, seconds)))
    for kind, shape in shapes:
        yield from figures(kind, shape, typical(ours[kind, shape]), typical(floor[kind, shape]))
    yield from spread_figures(typical(spread), typical(ours[SPREAD]))


def job_of(server: Serving, kind: str, shape: Shape, seconds: float, messages_max: int | None = None) -> Job:
    """Use a topic per kind, so that messages left by `enqueue` do not disturb other kinds."""
    options = {"key_file": str(server.key_file), "kind": kind, "topic": f"{kind}-{shape[0]}"}
    return Job(
        port=server.port, batch=shape[0], in_flight=shape[1], seconds=seconds, server_pid=server.pid,
        messages_max=messages_max, options=options,
    )  # fmt: skip


def spread_job(server: Serving, seconds: float) -> Job:
    kind, shape = SPREAD
    job = job_of(server, kind, shape, seconds)
    return replace(job, options={**job.options, "topic": "spread", "partitions": str(PARTITIONS)})


def spread_figures(spread: Outcome, one: Outcome) -> Iterator[Figure]:
    """The cost of many partitions, compared with one."""
    kind, shape = SPREAD
    what = f"{kind}, {name_of(shape)}, over {PARTITIONS} partitions, next to one"
    yield figure(what, spread.rate, "messages/s", one.rate, spread.rate / one.rate, None, None)
    for side in ("server_us", "client_us"):
        spent, least = getattr(spread, side), getattr(one, side)
        name = f"{what}: CPU of the {side.removesuffix('_us')}"
        yield figure(name, spent, "µs/message", least, spent / least, None, None, "lower")


def name_of(shape: Shape) -> str:
    return f"{shape[0]} × {shape[1]}"


def figures(kind: str, shape: Shape, ours: Outcome, floor: Outcome) -> Iterator[Figure]:
    what = f"{kind}, {name_of(shape)}"
    goal = LOADS[kind, *shape]
    bound = Bound("≥", goal.rate, "messages/s")
    yield figure(what, ours.rate, "messages/s", floor.rate, ours.rate / floor.rate, *judged(bound, ours.rate))
    for side in ("server_us", "client_us"):
        spent, least, bound = getattr(ours, side), getattr(floor, side), Bound("≤", getattr(goal, side), "µs")
        name = f"{what}: CPU of the {side.removesuffix('_us')}"
        yield figure(name, spent, "µs/message", least, spent / least, *judged(bound, spent), "lower")
