"""A real disk that measures each fdatasync."""

from __future__ import annotations

from threading import Lock
from time import perf_counter

from heapline.core.latency import Latency, Tally
from heapline.journal.disk import File, RealDisk, RealFile


class TimedDisk(RealDisk):
    def __init__(self) -> None:
        self._syncs, self._lock = Latency(), Lock()

    def open(self, path: str, *, write: bool = False) -> File:
        return self._timed(super().open(path, write=write))

    def create(self, path: str) -> File:
        return self._timed(super().create(path))

    def _timed(self, file: File) -> File:
        assert isinstance(file, RealFile)
        return _TimedFile(self, file)

    def synced(self, seconds: float) -> None:
        with self._lock:  # several threads sync
            self._syncs.add(seconds)

    def tally(self) -> Tally:
        with self._lock:
            return self._syncs.tally()


class _TimedFile(RealFile):
    def __init__(self, disk: TimedDisk, file: RealFile) -> None:
        super().__init__(file.path, file._fd)
        self._disk = disk

    def fdatasync(self) -> None:
        began = perf_counter()
        super().fdatasync()
        self._disk.synced(perf_counter() - began)
