"""The lifecycle compared with other queues: same messages, batches and calls in flight, alternating in the same run.

A missing or failing peer is a row with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.drivers.window import Job, Outcome
from benchmarks.engine import Figure, figure
from benchmarks.harness import SCRATCH
from benchmarks.peers import PEERS
from benchmarks.peers.peer import Peer, PeerMissing, Running
from benchmarks.rows import Step
from benchmarks.server import targets
from benchmarks.server.driving import DriverFailed, drive, typical
from benchmarks.server.lifecycle import job_of, name_of
from benchmarks.server.spawned import Serving, heapline_server

SHAPE = (targets.PEER_BATCH, targets.PEER_IN_FLIGHT)
#: Installed here once; kept when a run's files are removed.
HOME = SCRATCH / "peers"


def run(quick: bool, directory: Path, peers: Sequence[str]) -> Iterator[Figure | Step]:
    rounds, seconds = (1, 2.0) if quick else (3, 4.0)
    if not peers:
        return
    with heapline_server(directory / "ours") as server:
        for number, name in enumerate(peers):
            yield Step(f"{name}: installing", number, len(peers))
            peer = PEERS[name](HOME / name)
            about = {"peer": name, "durability": peer.durability}
            try:
                peer.install()
                about["version"] = peer.version
                yield Step(f"{name} and ours in turns", number, len(peers))
                theirs, ours = in_turns(peer, directory / name, server, rounds, seconds)
            except (PeerMissing, DriverFailed, RuntimeError, OSError) as error:
                yield missing(name, about, str(error))
            else:
                yield from figures(name, about, typical(theirs), typical(ours))


def in_turns(
    peer: Peer, directory: Path, server: Serving, rounds: int, seconds: float
) -> tuple[list[Outcome], list[Outcome]]:
    theirs, ours = [], []
    with opened(peer, directory) as running:
        for _ in range(rounds):
            theirs.append(drive(peer.driver, peer_job(running, seconds), running.python))
            ours.append(drive("sdk", job_of(server, "lifecycle", SHAPE, seconds)))
    return theirs, ours


def opened(peer: Peer, directory: Path) -> AbstractContextManager[Running]:
    """Start the peer's server on a new directory."""
    directory.mkdir()
    for above in (directory, directory.parent):
        above.chmod(0o711)  # PostgreSQL may run as another user
    return peer.start(directory)


def peer_job(running: Running, seconds: float) -> Job:
    return Job(port=running.port, batch=SHAPE[0], in_flight=SHAPE[1], seconds=seconds, server_pid=running.pid)


def figures(name: str, about: dict[str, str], theirs: Outcome, ours: Outcome) -> Iterator[Figure]:
    what = f"lifecycle, {name_of(SHAPE)}, next to {name}"
    faster, cheaper = bounds_of(name)
    ratio = ours.rate / theirs.rate
    row = figure(what, ours.rate, "messages/s", theirs.rate, ratio, *targets.judged(faster, ratio))
    yield {**row, "about": about}
    spent, spent_there = ours.server_us + ours.client_us, theirs.server_us + theirs.client_us
    ratio = spent / spent_there
    name = f"{what}: CPU of server and client"
    yield figure(name, spent, "µs/message", spent_there, ratio, *targets.judged(cheaper, ratio), "lower")


def bounds_of(name: str) -> tuple[targets.Bound | None, targets.Bound | None]:
    """The targets of the ratio of rates, and of the ratio of CPU."""
    rate, cpu = targets.PEERS[name]
    return (rate and targets.Bound("≥", rate, "×")) or None, (cpu and targets.Bound("≤", cpu, "×")) or None


def missing(name: str, about: dict[str, str], why: str) -> Figure:
    row: Figure = dict.fromkeys(("value", "unit", "baseline", "ratio", "met"))
    what, target = f"lifecycle, {name_of(SHAPE)}, next to {name}", next(filter(None, bounds_of(name)), None)
    return {**row, "name": what, "target": target and str(target), "error": why, "about": about}
