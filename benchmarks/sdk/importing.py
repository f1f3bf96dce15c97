"""How long `import heapline` takes, next to `import numpy`: in fresh processes that take turns; medians.

Timed from within, so that the interpreter's own start does not count. What `import heapline` leaves to be loaded when
it is first used is told too, without a target: a client that is made, and a broker of one's own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from statistics import median

from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.sdk.targets import IMPORT_OF_NUMPY
from benchmarks.server.targets import Bound

NUMPY = "import numpy"
OURS = {
    "import heapline": "import heapline",
    "import heapline, and heapline.connect(…)": "import heapline; heapline.connect('localhost:7400')",
    "import heapline, and heapline.open(…)": "import heapline; heapline.open('none')",
}
TIMED = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def run(quick: bool) -> Iterator[Figure | Step]:
    rounds = 9 if quick else 25
    statements = [NUMPY, *OURS.values()]
    for statement in statements:
        seconds_for(statement)  # its byte code is written, its files are in the page cache
    seen: dict[str, list[float]] = {statement: [] for statement in statements}
    for number in range(rounds):
        yield Step("importing", number, rounds)
        for statement in statements:
            seen[statement].append(seconds_for(statement))
    yield from figures({statement: median(seconds) * 1000 for statement, seconds in seen.items()})


def seconds_for(statement: str) -> float:
    command = [sys.executable, "-c", TIMED.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def figures(ms: dict[str, float]) -> Iterator[Figure]:
    for name, statement in OURS.items():
        ratio = ms[statement] / ms[NUMPY]
        bound = Bound("≤", IMPORT_OF_NUMPY, "×") if statement == "import heapline" else None
        target, met = (None, None) if bound is None else (str(bound), bound.holds(ratio))
        yield figure(f"{name}, next to numpy", ms[statement], "ms", ms[NUMPY], ratio, target, met, "lower")
