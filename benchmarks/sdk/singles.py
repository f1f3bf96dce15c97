"""One message per call from many coroutines: `await enqueue`, `async for`, `await m.ack()`.

The baseline is the same load on the embedded broker, `heapline.open` in one process on the same disk: the cost of the
calls without a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.drivers.window import Job, Outcome
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.sdk.targets import SINGLES, SINGLES_CLIENT_US, SINGLES_PER_S, SINGLES_SERVER_US
from benchmarks.server.driving import drive, typical
from benchmarks.server.lifecycle import job_of
from benchmarks.server.spawned import Serving, heapline_server
from benchmarks.server.targets import Bound, judged

WHAT = f"one message a call, {SINGLES} coroutines"


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds, seconds = (3, 1.0) if quick else (5, 3.0)
    connected: list[Outcome] = []
    embedded: list[Outcome] = []
    with heapline_server(directory / "ours") as server:
        for number in range(rounds):
            yield Step(WHAT, number, rounds)
            connected.append(drive("singles", job_of(server, "single", (1, SINGLES), seconds)))
            embedded.append(drive("singles", embedded_job(server, directory / f"embedded-{number}", seconds)))
    yield from figures(typical(connected), typical(embedded))


def embedded_job(server: Serving, directory: Path, seconds: float) -> Job:
    return Job(
        port=0, batch=1, in_flight=SINGLES, seconds=seconds, server_pid=server.pid,
        options={"directory": str(directory), "topic": "single"},
    )  # fmt: skip


def figures(connected: Outcome, embedded: Outcome) -> Iterator[Figure]:
    bound = Bound("≥", SINGLES_PER_S, "messages/s")
    ratio = connected.rate / embedded.rate
    yield figure(
        WHAT, connected.rate, "messages/s", embedded.rate, ratio, str(bound), bound.holds(connected.rate)
    )  # fmt: skip
    least = embedded.client_us
    for side, spent, limit in (
        ("server", connected.server_us, SINGLES_SERVER_US),
        ("client", connected.client_us, SINGLES_CLIENT_US),
    ):
        bound = Bound("≤", limit, "µs")
        name = f"{WHAT}: CPU of the {side}, next to all of the embedded broker's"
        yield figure(name, spent, "µs/message", least, spent / least, *judged(bound, spent), "lower")
