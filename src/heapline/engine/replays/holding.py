"""Keeps the journal from being reclaimed under a replay that lasts: by a reader lease, as any reader may have one.

Only once it has lasted a while: most are over before that, and a lease costs two syncs. One that is killed lets go when
its lease runs out.
"""

from __future__ import annotations

import os
import secrets

from heapline.clock import Clock
from heapline.engine.runner import TopicRunner
from heapline.journal.reclaim import ReaderLease, end_lease, write_lease

AFTER_MS = 3_000  # that a replay may last without
RENEW_MS = 60_000
LEASE_MS = 10 * 60_000


class Hold:
    def __init__(self, runner: TopicRunner, clock: Clock) -> None:
        self._runner, self._clock = runner, clock
        self._name = f"replay-{secrets.token_hex(8)}"
        self._next_ms = clock.boot_ms() + AFTER_MS
        self._holds = False

    async def keep(self, segment: int) -> None:
        """The segment and all after it."""
        if self._clock.boot_ms() < self._next_ms:
            return
        self._next_ms = self._clock.boot_ms() + RENEW_MS
        self._holds = True
        lease = ReaderLease(self._name, os.getpid(), segment, self._clock.wall_ms() + LEASE_MS)
        loader = self._runner.loader
        await self._runner.io.run(write_lease, loader.disk, loader.directory, lease)

    async def end(self) -> None:
        if self._holds:
            self._holds = False
            loader = self._runner.loader
            await self._runner.io.run(end_lease, loader.disk, loader.directory, self._name)
