"""CPU and memory of a process, from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the process and all its descendants, including ended ones that were waited for."""
    return sum(_own_and_reaped(process) for process in (pid, *descendants(pid))) / TICKS


def descendants(pid: int) -> list[int]:
    found = []
    for thread in _list(Path(f"/proc/{pid}/task")):
        for child in _read(thread / "children").split():
            found += [int(child), *descendants(int(child))]
    return found


def anonymous_bytes(pid: int) -> int:
    """Return the process's own memory: neither mapped files nor the page cache."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ProcessLookupError(f"no process {pid}, or a kernel without RssAnon")


def _own_and_reaped(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime


def _list(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    """Return nothing if the process has ended meanwhile."""
    try:
        return path.read_text()
    except OSError:
        return ""
