"""The time that the bare disk takes to sync 4 KiB: the yardstick for answers."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

BLOCK = bytes(4096)


def fsync_ms(directory: Path, count: int = 200) -> list[float]:
    """Return the milliseconds of each pwrite + fdatasync into a preallocated file."""
    path = directory / "fsync-probe"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(fd, BLOCK * count, 0)
        os.fsync(fd)
        samples = []
        for number in range(count):
            began = perf_counter()
            os.pwrite(fd, BLOCK, number * len(BLOCK))
            os.fdatasync(fd)
            samples.append((perf_counter() - began) * 1e3)
        return samples
    finally:
        os.close(fd)
        path.unlink()
