"""Tasks with an empty handler: enqueued in batches and run concurrently, compared with other task libraries.

Producer and worker share a process where the library allows it: Celery's worker is a process with two
more below it. A turn enqueues a batch and ends when as many have been run. A missing or failing peer
is a row with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.drivers.window import Job, Outcome
from benchmarks.engine import Figure, figure
from benchmarks.peers import TASK_PEERS
from benchmarks.peers.peer import Peer, PeerMissing, Running
from benchmarks.rows import Step
from benchmarks.sdk import targets
from benchmarks.server.driving import DriverFailed, drive, typical
from benchmarks.server.lifecycle import job_of
from benchmarks.server.next_to_peers import HOME, opened
from benchmarks.server.spawned import Serving, heapline_server
from benchmarks.server.targets import Bound

WHAT = f"tasks, empty handler, {targets.CONCURRENCY} at once"
CONCURRENCY = {"concurrency": str(targets.CONCURRENCY)}


def run(quick: bool, directory: Path, peers: Sequence[str]) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 2.0) if quick else (5, 3.0)
    with heapline_server(directory / "ours") as server:
        yield Step(WHAT, 0, len(peers) + 1)
        yield from alone(server, rounds, seconds)
        for number, name in enumerate(peers):
            yield Step(f"{name}: installing", number + 1, len(peers) + 1)
            peer = TASK_PEERS[name](HOME / name.partition("-")[0])
            about = {"peer": name, "durability": peer.durability}
            try:
                peer.install()
                about["version"] = peer.version
                yield Step(f"{name} and ours in turns", number + 1, len(peers) + 1)
                theirs, ours = in_turns(peer, directory / name, server, rounds, seconds)
            except (PeerMissing, DriverFailed, RuntimeError, OSError) as error:
                yield missing(name, about, str(error))
            else:
                yield from next_to(name, about, typical(theirs), typical(ours))


def ours_job(server: Serving, seconds: float, messages_max: int | None = None) -> Job:
    job = job_of(server, "tasks", targets.TASK_BATCHES, seconds, messages_max)
    return Job(**{**vars(job), "options": {**job.options, **CONCURRENCY}})


def alone(server: Serving, rounds: int, seconds: float) -> Iterator[Figure]:
    """Compare with single calls without tasks: the part of the SDK that tasks use."""
    tasks, singles = [], []
    for _ in range(rounds):
        tasks.append(drive("tasks", ours_job(server, seconds)))
        singles.append(drive("singles", job_of(server, "single", (1, targets.SINGLES), seconds)))
    ours, calls = typical(tasks), typical(singles)
    bound = Bound("≥", targets.TASKS_PER_S, "tasks/s")
    yield figure(WHAT, ours.rate, "tasks/s", calls.rate, ours.rate / calls.rate, str(bound), bound.holds(ours.rate))
    for side in ("server_us", "client_us"):
        spent, least = getattr(ours, side), getattr(calls, side)
        name = f"{WHAT}: CPU of the {'server' if side == 'server_us' else 'worker'}"
        yield figure(name, spent, "µs/task", least, spent / least, None, None, "lower")


def in_turns(
    peer: Peer, directory: Path, server: Serving, rounds: int, seconds: float
) -> tuple[list[Outcome], list[Outcome]]:
    theirs, ours = [], []
    with opened(peer, directory) as running:
        for _ in range(rounds):
            theirs.append(drive(peer.driver, peer_job(running, seconds), running.python))
            ours.append(drive("tasks", ours_job(server, seconds)))
    return theirs, ours


def peer_job(running: Running, seconds: float) -> Job:
    batch, in_flight = targets.TASK_BATCHES
    return Job(
        port=running.port, batch=batch, in_flight=in_flight, seconds=seconds, server_pid=running.pid,
        options=CONCURRENCY,
    )  # fmt: skip


def next_to(name: str, about: dict[str, str], theirs: Outcome, ours: Outcome) -> Iterator[Figure]:
    what, ratio = f"{WHAT}, next to {name}", ours.rate / theirs.rate
    bound = Bound("≥", targets.PEERS[name], "×")
    row = figure(what, ours.rate, "tasks/s", theirs.rate, ratio, str(bound), bound.holds(ratio))
    yield {**row, "about": about}
    spent, spent_there = ours.server_us + ours.client_us, theirs.server_us + theirs.client_us
    yield figure(
        f"{what}: CPU of server and worker", spent, "µs/task", spent_there, spent / spent_there, None, None, "lower"
    )


def missing(name: str, about: dict[str, str], why: str) -> Figure:
    row: Figure = dict.fromkeys(("value", "unit", "baseline", "ratio", "met"))
    bound = Bound("≥", targets.PEERS[name], "×")
    return {**row, "name": f"{WHAT}, next to {name}", "target": str(bound), "error": why, "about": about}
