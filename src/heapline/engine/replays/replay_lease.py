"""Keep the journal from being reclaimed during a long replay, with a reader lease as any reader may have.

The lease is taken only after a while: most replays end before that, and a lease costs two syncs. The lease of a killed
replay expires. A replay that waits long between two pages (for its rate, or for space in a topic) renews it meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import secrets

from heapline.clock import Clock
from heapline.engine.runner import TopicRunner
from heapline.journal.reclaim import ReaderLease, end_lease, write_lease
from heapline.logs import Log

log = Log("heapline.replay")
AFTER_MS = 3_000  # ms that a replay runs without a lease
RENEW_MS = 60_000
LEASE_MS = 10 * 60_000


class Hold:
    """The lease of one replay. With `name`, a replay that continues after a restart finds its lease again."""

    def __init__(self, runner: TopicRunner, clock: Clock, name: str | None = None, after_ms: int = AFTER_MS) -> None:
        self._runner, self._clock = runner, clock
        token = secrets.token_hex(8) if name is None else hashlib.sha256(name.encode()).hexdigest()[:32]
        self._name = f"replay-{token}"
        self._next_ms = clock.boot_ms() + after_ms
        self._segment: int | None = None
        self._holds = False

    async def keep(self, segment: int) -> None:
        """Keep the segment and all segments after it."""
        self._segment = segment
        await self.renew()

    async def renew(self) -> None:
        """Renew the lease on the segments kept so far."""
        if self._segment is None or self._clock.boot_ms() < self._next_ms:
            return
        self._next_ms = self._clock.boot_ms() + RENEW_MS
        self._holds = True
        lease = ReaderLease(self._name, os.getpid(), self._segment, self._clock.wall_ms() + LEASE_MS)
        loader = self._runner.loader
        try:
            await self._runner.io.run(write_lease, loader.disk, loader.directory, lease)
        except OSError as error:  # the replay may succeed without the lease
            log.warning("the journal cannot be held for a replay", topic=self._runner.name, error=str(error))

    async def end(self) -> None:
        if self._holds:
            self._holds = False
            loader = self._runner.loader
            await self._runner.io.run(end_lease, loader.disk, loader.directory, self._name)
