"""Spare segments: reserved disk space, so that a full disk can still be drained.

Acks, nacks and reclaiming write to the journal, too. A few empty segment files, shared by all topics of a broker, are
reserved for them: taken when a journal cannot grow, and recreated as soon as there is space. While fewer than `count`
are left and no more can be created, enqueues must be refused (`plenty` is False); everything else continues.

A spare is reserved with fallocate, so it costs no writing and reads as zeros. It gets its name only when its space is
reserved and durable: a file with that name and the full size is a valid spare, whatever crash came before. Several
committer threads may call concurrently.
"""

from __future__ import annotations

import contextlib
import threading

from heapline.journal.disk import Disk, is_no_space


class SparePool:
    """Keeps `count` spare files of `segment_bytes` in its own directory."""

    def __init__(self, disk: Disk, directory: str, segment_bytes: int, count: int = 2) -> None:
        self.disk = disk
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.count = count
        self._mutex = threading.Lock()
        self._serial = 0
        self._spares: list[str] = []
        disk.mkdir(directory)
        self._adopt()

    def _adopt(self) -> None:
        """Keep complete spares of an earlier run and remove the rest."""
        for name in self.disk.listdir(self.directory):
            path = f"{self.directory}/{name}"
            file = self.disk.open(path)
            size = file.size()
            file.close()
            if name.endswith(".spare") and name[:-6].isdigit() and size == self.segment_bytes:
                self._spares.append(path)
                self._serial = max(self._serial, int(name[:-6]))
            else:
                self.disk.unlink(path)

    @property
    def available(self) -> int:
        return len(self._spares)

    @property
    def plenty(self) -> bool:
        """Whether enqueues may continue."""
        return len(self._spares) >= self.count

    def fill(self) -> bool:
        """Try to have `count` spares and return whether there are. Only "no space" errors are ignored."""
        with self._mutex:
            while len(self._spares) < self.count:
                try:
                    self._make()
                except OSError as error:
                    if is_no_space(error):
                        return False
                    raise
            return True

    def _make(self) -> None:
        self._serial += 1
        path = f"{self.directory}/{self._serial}.spare"
        temporary = path + ".tmp"
        file = self.disk.create(temporary)
        try:
            file.fallocate(0, self.segment_bytes)
            file.fdatasync()
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.unlink(temporary)
            raise
        finally:
            file.close()
        self.disk.rename(temporary, path)
        self.disk.fsync_dir(self.directory)
        self._spares.append(path)

    def take(self) -> str | None:
        """Return the path of a spare, now owned by the caller: rename it immediately, then fsync both directories."""
        with self._mutex:
            return self._spares.pop() if self._spares else None
