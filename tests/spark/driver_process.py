"""Spark drivers in separate processes: started on a script beside the tests, watched line by line, killed.

A driver, its Java and all its workers are one process session, so one kill ends all of them, like a power failure.
Alternatively only the driver and its Java are killed, so that workers run for a while longer. A script receives its
arguments as JSON and reports as lines of JSON; all other output goes to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0  # seconds for the next line: a session takes a minute to start on a busy machine
Report = dict[str, Any]


class Driver:
    def __init__(self, script: str, log: Path, env: dict[str, str] | None = None, **given: Any) -> None:
        self._log = log
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(script)), json.dumps(given)], env=environment,
                stdout=subprocess.PIPE, stderr=out, start_new_session=True, text=True,
            )  # fmt: skip
        self.said: list[str] = []
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said.append(line)
                with self._log.open("a") as log:  # unbuffered, to show the progress of a slow run
                    log.write(line)
                self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def reported(self) -> Iterator[Report]:
        """Yield its reports until it ends or is killed."""
        while True:
            try:
                line = self._lines.get(timeout=PATIENCE)
            except Empty:
                raise AssertionError(f"nothing for {PATIENCE} s; before: {self.everything()[-3000:]}") from None
            if line is None:
                return
            if line.startswith("{"):
                yield json.loads(line)

    def wait_for(self, holds: Callable[[Report], bool]) -> Report | None:
        """Return the first report for which this holds, or None if it ended before."""
        return next((reported for reported in self.reported() if holds(reported)), None)

    def ended(self) -> int:
        code = self.process.wait(PATIENCE)
        self.kill()  # workers that are still running
        return code

    def kill(self) -> None:
        """Kill all of it with -9."""
        deadline = time.monotonic() + 30
        while found := processes_of_session(self.process.pid):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            assert time.monotonic() < deadline, f"these do not end: {found}"
            time.sleep(0.01)
        self.process.wait()
        self._ear.join()

    def behead(self) -> None:
        """Kill the driver and its Java with -9: its workers are another process group, and notice only later."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def everything(self) -> str:
        """Return everything it wrote, on both outputs."""
        return self._log.read_text(errors="replace")


def processes_of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def without_java(folder: Path) -> dict[str, str]:
    """An environment without Java: PATH with everything else."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for tool in Path(place).glob("*") if Path(place).is_dir() else ():
            if tool.exists() and not tool.name.startswith("java") and not (folder / tool.name).exists():
                (folder / tool.name).symlink_to(tool)
    assert shutil.which("java", path=str(folder)) is None
    return {"PATH": str(folder), "JAVA_HOME": ""}
