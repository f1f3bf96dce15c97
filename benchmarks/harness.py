"""Runs benchmark modules, each in a process of its own, and hands their rows on as they come.

A process each, because memory figures and caches must not disturb one another; with a time limit, because a hung
benchmark would hide the rest. It knows nothing of what is measured or how it is shown. Run as a program
(`python -m benchmarks.harness MODULE DIRECTORY`) it is the child that measures one module.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

SUITES: dict[str, tuple[str, ...]] = {
    "core": ("benchmarks.heap", "benchmarks.wheel", "benchmarks.dedup", "benchmarks.journal", "benchmarks.engine"),
    "spine": ("benchmarks.spine", "benchmarks.partitions", "benchmarks.herd"),
}

#: Seconds a module may take before it is killed. A quick suite should be done in 45 s; the limit is for what hangs.
TIMEOUT_S = 1800
TIMEOUT_QUICK_S = 120

#: On the disk of the working directory: a temporary directory may be memory, and would flatter every fsync.
SCRATCH = Path(".bench")

#: A target such as "≤ 1.5×": about the ratio itself, which is therefore better the lower it is.
RATIO_AT_MOST = re.compile(r"\s*(?:≤|<=?)\s*[\d.]+\s*[×x]")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, as `benchmarks/__init__.py` describes it; `error` is set if there is no figure."""

    name: str
    value: float | None = None
    unit: str | None = None
    baseline: float | None = None
    ratio: float | None = None
    target: float | str | None = None
    met: bool | None = None
    better: Literal["higher", "lower"] = "higher"
    error: str | None = None

    @classmethod
    def from_yielded(cls, yielded: dict[str, Any]) -> Row:
        missing = {"name", "value", "unit", "baseline", "ratio", "target", "met"} - yielded.keys()
        unknown = yielded.keys() - {field.name for field in fields(cls)}
        if missing or unknown:
            raise ValueError(f"a benchmark yielded {yielded!r}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        return cls(**{"better": "lower" if RATIO_AT_MOST.match(str(yielded["target"])) else "higher", **yielded})


def short_name(module: str) -> str:
    return module.rpartition(".")[2]


def run_module(module: str, *, quick: bool, timeout_s: float | None = None) -> Iterator[Row]:
    """The module's rows; if it is missing, fails or hangs, a last row that says so."""
    if find_spec(module) is None:
        yield Row(name=module, error=f"module {module} does not exist")
        return
    SCRATCH.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{short_name(module)}-", dir=SCRATCH))
    limit_s = timeout_s or (TIMEOUT_QUICK_S if quick else TIMEOUT_S)
    try:
        yield from _rows_of_child(module, directory, quick, limit_s)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if not any(SCRATCH.iterdir()):
            SCRATCH.rmdir()


def _rows_of_child(module: str, directory: Path, quick: bool, limit_s: float) -> Iterator[Row]:
    command = [sys.executable, "-m", "benchmarks.harness", module, str(directory), *(["--quick"] if quick else [])]
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
            yield Row(**json.loads(line))
        if code := child.wait():
            cause = f"took longer than {limit_s:g} s" if overdue.is_set() else f"ended with exit code {code}"
            yield Row(name=module, error=f"module {module} {cause}")
    finally:
        timer.cancel()
        _kill(child)
        child.stdout.close()
        child.wait()


def _kill(child: subprocess.Popen[str]) -> None:
    """The child and whatever it started; a session of its own makes that one call."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def measure(module: str, directory: Path, *, quick: bool) -> Iterator[Row]:
    """In the child: the rows that the module's `run` yields."""
    run = importlib.import_module(module).run
    wants_directory = "directory" in inspect.signature(run).parameters
    arguments = {"quick": quick, **({"directory": directory} if wants_directory else {})}
    for yielded in run(**arguments):
        yield Row.from_yielded({key: _plain(value) for key, value in yielded.items()})


def _plain(value: Any) -> Any:
    """numpy's scalars are not JSON."""
    return value.item() if hasattr(value, "item") else value


def main() -> None:
    # Rows go to the real standard output; whatever a benchmark prints goes to standard error, where it does no harm.
    rows = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, directory, *rest = sys.argv[1:]
    for row in measure(module, Path(directory), quick="--quick" in rest):
        print(json.dumps(vars(row)), file=rows, flush=True)


if __name__ == "__main__":
    main()
