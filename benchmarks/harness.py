"""Runs benchmark modules, each in a separate process, and passes on their rows as they arrive.

Separate, so that memory figures and caches do not disturb one another; with a time limit, because a hung
benchmark would hide the rest. This module does not know what is measured or how it is shown. Run as a program
(`python -m benchmarks.harness MODULE DIRECTORY`) it is the child that measures one module.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, Step

__all__ = ["Row", "Step", "SUITES", "measure", "run_module", "short_name"]

SUITES: dict[str, tuple[str, ...]] = {
    "core": (
        "benchmarks.heap", "benchmarks.wheel", "benchmarks.dedup", "benchmarks.journal", "benchmarks.engine",
        "benchmarks.failures", "benchmarks.accelerator",
    ),
    "spine": ("benchmarks.partitions", "benchmarks.herd"),
    "server": (
        "benchmarks.server.lifecycle", "benchmarks.server.latency", "benchmarks.server.connections",
        "benchmarks.server.idle", "benchmarks.server.dashboard", "benchmarks.server.memory",
        "benchmarks.server.next_to_peers",
    ),
    "sdk": (
        "benchmarks.sdk.importing", "benchmarks.sdk.batches", "benchmarks.sdk.singles", "benchmarks.sdk.trickle",
        "benchmarks.sdk.tasks",
    ),
    "assign": ("benchmarks.assign.strategies", "benchmarks.assign.failover"),
    "streams": (
        "benchmarks.streams.publishing", "benchmarks.streams.groups", "benchmarks.streams.remote",
        "benchmarks.streams.timers", "benchmarks.streams.seeking",
    ),
    "spark": (
        "benchmarks.spark.read", "benchmarks.spark.write", "benchmarks.spark.archive",
        "benchmarks.spark.audit", "benchmarks.spark.interference",
    ),
    "sql": (
        "benchmarks.sql.lifecycle", "benchmarks.sql.latency", "benchmarks.sql.nodes", "benchmarks.sql.held",
        "benchmarks.sql.delayed",
    ),
}  # fmt: skip

#: Seconds that a module may take before it is killed. A quick suite should take 45 s; the limit is for hung ones.
TIMEOUT_S = 1800
TIMEOUT_QUICK_S = 120
#: Modules that first download and install the products they compare with.
TIMEOUTS_S = {"benchmarks.server.next_to_peers": TIMEOUT_S, "benchmarks.sdk.tasks": TIMEOUT_S}
TIMEOUTS_S |= dict.fromkeys(SUITES["sql"], TIMEOUT_S)
TIMEOUTS_S |= dict.fromkeys(SUITES["spark"], TIMEOUT_S)  # Spark alone may take a minute to start on a busy machine

#: On the disk of the working directory: a temporary directory may be in memory, where every fsync is free.
SCRATCH = Path(".bench")


def short_name(module: str) -> str:
    return module.rpartition(".")[2]


def run_module(
    module: str, *, quick: bool, timeout_s: float | None = None, peers: Sequence[str] = (), scale: float = 1.0,
    seconds: float | None = None, on_step: Callable[[Step], None] = lambda step: None,
) -> Iterator[Row]:  # fmt: skip
    """Yield the module's rows; if it is missing, fails or hangs, a last row with the error."""
    if find_spec(module) is None:
        yield Row(name=module, error=f"module {module} does not exist")
        return
    SCRATCH.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{short_name(module)}-", dir=SCRATCH))
    limit_s = timeout_s or TIMEOUTS_S.get(module) or (TIMEOUT_QUICK_S if quick else TIMEOUT_S)
    options = [*(["--quick"] if quick else []), *(["--peers", ",".join(peers)] if peers else [])]
    options += ["--scale", str(scale)] if scale != 1 else []
    if seconds is not None:
        options += ["--seconds", str(seconds)]
        limit_s = max(limit_s, 4 * seconds + TIMEOUT_S)
    try:
        yield from _rows_of_child(module, directory, options, limit_s, on_step)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if not any(SCRATCH.iterdir()):
            SCRATCH.rmdir()


def _rows_of_child(
    module: str, directory: Path, options: list[str], limit_s: float, on_step: Callable[[Step], None]
) -> Iterator[Row]:
    command = [sys.executable, "-m", "benchmarks.harness", module, str(directory), *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    overdue = threading.Event()

    def give_up() -> None:
        overdue.set()
        _kill(child)

    timer = threading.Timer(limit_s, give_up)
    timer.start()
    try:
        for line in child.stdout:
            reported = json.loads(line)
            if "step" in reported:
                on_step(Step(**reported["step"]))
            else:
                yield Row(**reported)
        if code := child.wait():
            cause = f"took longer than {limit_s:g} s" if overdue.is_set() else f"ended with exit code {code}"
            yield Row(name=module, error=f"module {module} {cause}")
    finally:
        timer.cancel()
        _kill(child)
        child.stdout.close()
        child.wait()


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill the child and all processes that it started, which are one session."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def measure(
    module: str, directory: Path, *, quick: bool, peers: Sequence[str] = (), scale: float = 1.0,
    seconds: float | None = None,
) -> Iterator[Row | Step]:  # fmt: skip
    """In the child: yield the rows and steps of the module's `run`."""
    run = importlib.import_module(module).run
    wanted = inspect.signature(run).parameters
    offered = {"quick": quick, "directory": directory, "peers": peers, "scale": scale, "seconds": seconds}
    for yielded in run(**{name: value for name, value in offered.items() if name in wanted}):
        if isinstance(yielded, Step):
            yield yielded
        else:
            yield Row.from_yielded({key: _plain(value) for key, value in yielded.items()})


def _plain(value: Any) -> Any:
    """Convert numpy's scalars, which JSON does not support."""
    return value.item() if hasattr(value, "item") else value


def main() -> None:
    # Rows are written to the real standard output; other output of a benchmark goes to standard error.
    rows = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", type=lambda names: tuple(names.split(",")), default=())
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    given = {"quick": options.quick, "peers": options.peers, "scale": options.scale}
    given["seconds"] = options.seconds
    for reported in measure(options.module, options.directory, **given):
        line = {"step": vars(reported)} if isinstance(reported, Step) else vars(reported)
        print(json.dumps(line), file=rows, flush=True)


if __name__ == "__main__":
    main()
