"""Holding a journal while it is read: a reader lease that is renewed as reading goes on, and ends with it.

If the directory cannot be written to, it is read without: what is reclaimed meanwhile is then missed, and said so.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from types import TracebackType

from heapline.journal.disk import Disk
from heapline.journal.reclaim import ReaderLease, end_lease, write_lease


class Hold:
    """The right to a topic's segments from some number on. Use it with `with`, or call `keep` and `end`."""

    def __init__(self, disk: Disk, directory: str, seconds: float) -> None:
        self._disk, self._directory, self._seconds = disk, directory, seconds
        self._name = f"spark-{os.getpid()}-{secrets.token_hex(6)}"
        self._segment: int | None = None
        self._renew_at = 0.0
        self._taken = False

    def keep(self, segment: int) -> float:
        """Hold this segment and all after it for as long again; says when others who rely on it should begin to hold it
        themselves. Cheap to call often."""
        now = time.time()
        if segment == self._segment and now < self._renew_at:
            return self._renew_at
        lease = ReaderLease(self._name, os.getpid(), segment, int((now + self._seconds) * 1000))
        with contextlib.suppress(OSError):
            write_lease(self._disk, self._directory, lease)
            self._taken = True
        self._segment, self._renew_at = segment, now + self._seconds / 3
        return self._renew_at

    def end(self) -> None:
        if self._taken:
            self._taken = False
            with contextlib.suppress(OSError):
                end_lease(self._disk, self._directory, self._name)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
