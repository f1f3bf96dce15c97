"""Runs one driver (benchmarks/drivers) in a separate process and reads its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.drivers.window import Job, Outcome

ROOT = Path(__file__).parents[2]
#: A driver connects and its last turns end within this, in addition to the measured seconds. Some peers are slow.
SPARE_S = 180.0


class DriverFailed(Exception):
    """Contains the last output of the driver."""


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
        raise DriverFailed(f"the driver of {name} completed no message in {job.seconds:g} s")
    return outcome


def typical(outcomes: list[Outcome]) -> Outcome:
    """Return the round with the median rate: a real one, so that its figures are consistent."""
    return sorted(outcomes, key=lambda outcome: outcome.rate)[len(outcomes) // 2]
