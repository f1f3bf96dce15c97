"""Poll the store, watch it for hints to poll sooner, and pass on what was read to leadership and member.

The newest assignment ever read is kept, so a stale reading changes nothing. What follows from a reading is decided
elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from heapline.assign.assignment import ASSIGNMENT_KEY, Document
from heapline.assign.cancellation import is_cancelled, wait_for_event, within
from heapline.assign.config import Config
from heapline.assign.election import LEADER_KEY, LeaderRecord
from heapline.assign.errors import ConnectionLost
from heapline.assign.kv import KV, Entry, decode_record
from heapline.assign.leadership import Leadership
from heapline.assign.status import Status
from heapline.assign.worker_ids import WORKER_PREFIX

COALESCE = 0.02  # seconds in which events are gathered and handled together


class Watcher:
    """Reads the store. `wakeup` wakes the poll loop; `on_document` receives each document that was read."""

    def __init__(
        self,
        config: Config,
        kv: KV,
        clock: Callable[[], float],
        status: Status,
        leadership: Leadership,
        wakeup: asyncio.Event,
        on_document: Callable[[Document], None],
    ) -> None:
        self._config, self._kv, self._clock, self._status, self._leadership = config, kv, clock, status, leadership
        self._wakeup, self._on_document = wakeup, on_document
        self._timeout = config.store_timeout
        self._newest: tuple[int, Document | None] = (0, None)  # revision and content of the newest assignment ever read
        self._poll_wanted = False
        self.elect_wanted = asyncio.Event()  # set when no worker leads as far as is known

    def note_write(self, revision: int) -> bool:
        """Note this worker's write at a revision. Return False if a higher revision was read before.

        Revisions never fall, so the store was recreated and what is known is about the old one.
        """
        if revision > self._newest[0]:
            return True
        self._newest = (0, None)
        return False

    async def watch_loop(self, prefix: str) -> None:
        """Receive hints to poll sooner. Only a leader watches other workers' keys."""
        while True:
            if prefix == WORKER_PREFIX:
                await self._leadership.acquired.wait()
            try:
                await self._watch(prefix)
            except Exception as error:
                if is_cancelled():  # an error raised during cancellation hides it
                    raise asyncio.CancelledError from error
                self._status.report_error(error)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                self._status.report_error(ConnectionLost("a watch was cancelled internally"))
            else:
                continue
            await asyncio.sleep(self._config.heartbeat_interval)

    async def _watch(self, prefix: str) -> None:
        async with contextlib.aclosing(self._kv.watch(prefix)) as events:
            async for entry in events:
                self._handle_event(entry)
                if prefix == WORKER_PREFIX and not self._leadership.acquired.is_set():
                    return
        raise ConnectionLost("a watch ended")

    def _handle_event(self, entry: Entry | None) -> None:
        if entry is None:
            self._poll_wanted = True
            self._wakeup.set()
        else:
            self.observe(entry)

    def observe(self, entry: Entry) -> None:
        """Handle a key as it was written, now or some time ago."""
        if entry.key == ASSIGNMENT_KEY:
            if entry.revision > self._newest[0]:
                self._newest = (entry.revision, Document.decode(entry.value))
            revision, document = self._newest
            self._leadership.observe_document(document, revision)
            if document is not None:
                self._on_document(document)
        elif entry.key == LEADER_KEY:
            leader = decode_record(entry.value, LeaderRecord)
            self._status.note_leader("" if leader is None or leader.released else leader.worker)
            if leader is None or leader.released:
                self.elect_wanted.set()
        else:
            self._leadership.observe_worker(entry)

    async def poll_loop(self) -> None:
        """Poll every heartbeat interval or when woken, and run the leader's decisions."""
        interval = self._config.heartbeat_interval
        poll_at, failures = self._clock(), 0
        while True:
            self._wakeup.clear()
            wake_at = poll_at
            try:
                if self._clock() >= poll_at or self._poll_wanted or self._leadership.is_new:
                    poll_at, self._poll_wanted = self._clock() + interval, False
                    await self._poll()
                wake_at = min(poll_at, await self._leadership.run_leader())
                if self._leadership.document is not None:
                    self._on_document(self._leadership.document)
                failures = 0
            except Exception as error:
                self._status.report_error(error)
                wake_at = min(poll_at, self._clock() + self._config.retry.endless_delay(failures))
                failures += 1
            await asyncio.sleep(COALESCE)
            await wait_for_event(self._wakeup, wake_at - self._clock())

    async def _poll(self) -> None:
        entry = await within(self._timeout, self._kv.get(ASSIGNMENT_KEY))
        if entry is None:
            self._leadership.observe_document(None, 0)
        else:
            self.observe(entry)
        await self._leadership.read_workers(self._newest[1])
