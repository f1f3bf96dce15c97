"""Runs one driver (benchmarks/drivers) in a process of its own and reads what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.drivers.window import Job, Outcome

ROOT = Path(__file__).parents[2]
#: A driver connects and its last turns end within this, beyond the seconds it is to measure. Some peers are slow.
SPARE_S = 180.0


class DriverFailed(Exception):
    """With the last thing that the driver said."""


def drive(name: str, job: Job, python: str | Path = sys.executable) -> Outcome:
    command = [str(python), "-m", f"benchmarks.drivers.{name}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command, input=json.dumps(asdict(job)), capture_output=True, text=True, timeout=job.seconds + SPARE_S,
            env={**os.environ, "PYTHONPATH": path}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DriverFailed(f"the driver of {name} did not end") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip(" +-|")] or ["it said nothing"]
        raise DriverFailed(f"the driver of {name} failed: {said[-1].strip(' |')}")
    outcome = Outcome(**json.loads(done.stdout.strip().splitlines()[-1]))
    if not outcome.messages:
        raise DriverFailed(f"the driver of {name} got no message through in {job.seconds:g} s")
    return outcome


def typical(outcomes: list[Outcome]) -> Outcome:
    """The round of middling rate: one that was, so that its figures belong together."""
    return sorted(outcomes, key=lambda outcome: outcome.rate)[len(outcomes) // 2]
