"""CPU time until Heapline is ready: imported, opened up to the first enqueue, serving, and running a first task.

The baseline is `import numpy, msgspec`, or numpy alone for imports. All run in new processes that alternate; each
figure is a median. CPU time includes the interpreter's own start. Byte code is written before the first round, to a
separate directory, as when a package is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.drivers.proc import cpu_seconds
from benchmarks.engine import Figure, figure
from benchmarks.rows import Step
from benchmarks.sdk.targets import IMPORT_OF_NUMPY, OPEN_OF_NUMPY_AND_MSGSPEC, SERVE_CPU_S, WORKER_CPU_S
from benchmarks.server.spawned import Serving, child, heapline_server, wait_for
from benchmarks.server.targets import Bound, judged

NUMPY = "import numpy"
NUMPY_AND_MSGSPEC = "import numpy, msgspec"
OPEN = """
import asyncio, heapline, tempfile
async def main():
    with tempfile.TemporaryDirectory() as directory:
        async with heapline.open(directory) as hl:
            await hl.create_topic("jobs")
            await hl.enqueue("jobs", b"hello")
            print(time.process_time())
asyncio.run(main())
"""
#: Measured program → (the program, its baseline, its bound).
PROGRAMS: dict[str, tuple[str, str, Bound | None]] = {
    "import heapline": ("import heapline", NUMPY, Bound("≤", IMPORT_OF_NUMPY, "×")),
    "import heapline, and heapline.connect(…)": ("import heapline; heapline.connect('localhost:7400')", NUMPY, None),
    "heapline.open(…) to the first enqueue": (OPEN, NUMPY_AND_MSGSPEC, Bound("≤", OPEN_OF_NUMPY_AND_MSGSPEC, "×")),
    "the same, with asyncio in the baseline": (OPEN, "import numpy, msgspec, asyncio", None),
}
APP = """
import heapline, time
app = heapline.App()
@app.task
async def hello() -> None:
    print("ready", time.process_time(), flush=True)
"""
SEND = "import asyncio, startup_app; asyncio.run(startup_app.hello.enqueue())"


def run(quick: bool, directory: Path) -> Iterator[Figure | Step]:
    rounds = 5 if quick else 15
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(directory / "byte-code")
    (directory / "startup_app.py").write_text(APP)
    with heapline_server(directory / "server") as server:
        measured: dict[str, Callable[[], float]] = {
            program: lambda program=program: program_cpu_s(program)  # type: ignore[misc]
            for program, baseline, _ in PROGRAMS.values()
            for program in (program, baseline)
        }
        measured["serve"] = lambda: serve_cpu_s(directory)
        measured["worker"] = lambda: worker_cpu_s(directory, server)
        seen: dict[str, list[float]] = {name: [] for name in measured}
        for number in range(rounds + 1):
            yield Step("starting", number, rounds + 1)
            for name, measure in measured.items():
                seen[name].append(measure())
    yield from figures({name: median(seconds[1:]) * 1000 for name, seconds in seen.items()})


def program_cpu_s(program: str) -> float:
    """Return the CPU time of a process when the program first prints, or at its end."""
    command = [sys.executable, "-c", f"import time\n{program}\nprint(time.process_time())"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def serve_cpu_s(directory: Path) -> float:
    """Return the CPU time of `heapline serve` when it prints its ports, on a new directory."""
    with heapline_server(directory / f"serve-{os.urandom(4).hex()}") as server:
        return cpu_seconds(server.pid)


def worker_cpu_s(directory: Path, server: Serving) -> float:
    """Return the CPU time of `heapline worker` when it runs the handler of a waiting message."""
    environment = {**os.environ, "HEAPLINE_URL": f"heapline://{server.target}"}
    environment["HEAPLINE_API_KEY_FILE"] = str(server.key_file.resolve())
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(directory.resolve()))))
    subprocess.run([sys.executable, "-c", SEND], env=environment, check=True)
    said = directory / "worker.log"
    command = [sys.executable, "-m", "heapline", "worker", "startup_app:app"]
    with said.open("w") as log, child(command, log, env=environment) as process:
        found = wait_for(process, said, lambda: re.search(r"ready ([\d.]+)\n", said.read_text()))
    return float(found.group(1))


def figures(ms: dict[str, float]) -> Iterator[Figure]:
    for name, (program, baseline, bound) in PROGRAMS.items():
        ratio = ms[program] / ms[baseline]
        title = f"{name}, next to {baseline}: CPU"
        yield figure(title, ms[program], "ms", ms[baseline], ratio, *judged(bound, ratio), "lower")
    base = ms[NUMPY_AND_MSGSPEC]
    for name, limit_s in (("serve", SERVE_CPU_S), ("worker", WORKER_CPU_S)):
        bound = Bound("≤", limit_s * 1000, "ms")
        title = f"heapline {name} ready, next to {NUMPY_AND_MSGSPEC}: CPU"
        yield figure(title, ms[name], "ms", base, ms[name] / base, *judged(bound, ms[name]), "lower")
