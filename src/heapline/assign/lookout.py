"""Where a worker looks: it polls the store, watches it for hints to look sooner, and passes on what it finds to whoever
leads here and to whoever holds.

The newest assignment ever read is kept, so that a reading from the past says nothing new. What follows from a reading
is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from heapline.assign.beating import is_cancelled, patience, within
from heapline.assign.board import Board
from heapline.assign.config import Config
from heapline.assign.document import Document
from heapline.assign.errors import ConnectionLost
from heapline.assign.kv import KV, Entry
from heapline.assign.office import Office
from heapline.assign.records import ASSIGNMENT_KEY, LEADER_KEY, WORKER_PREFIX, LeaderRecord, decode

COALESCE = 0.02  # seconds: news that come together are answered together


class Lookout:
    """`news` is set when there may be something to do; `see` takes each document that was read."""

    def __init__(
        self, config: Config, kv: KV, clock: Callable[[], float], board: Board, office: Office, news: asyncio.Event,
        see: Callable[[Document], None],
    ) -> None:  # fmt: skip
        self._config, self._kv, self._clock, self._board, self._office = config, kv, clock, board, office
        self._news, self._see = news, see
        self._patience = patience(config)
        self._newest: tuple[int, Document | None] = (0, None)  # the newest assignment ever read, and its revision
        self._poll_wanted = False
        self.elect_wanted = asyncio.Event()  # nobody leads, as far as we have heard

    def written(self, revision: int) -> bool:
        """We have just written at this revision. False if we have read a higher one: revisions never fall, so the
        store was made anew, and what we know is of the old one."""
        if revision > self._newest[0]:
            return True
        self._newest = (0, None)
        return False

    async def watching(self, prefix: str) -> None:
        """Hints to look sooner. Other workers' keys are a leader's business."""
        while True:
            if prefix == WORKER_PREFIX:
                await self._office.taken.wait()
            try:
                await self._hear(prefix)
            except Exception as error:
                if is_cancelled():  # whatever was raised on the way out hides it
                    raise asyncio.CancelledError from error
                self._board.tell(error)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                self._board.tell(ConnectionLost("a watch was given up from within"))
            else:
                continue
            await asyncio.sleep(float(self._config.heartbeat_interval))

    async def _hear(self, prefix: str) -> None:
        async with contextlib.aclosing(self._kv.watch(prefix)) as events:
            async for entry in events:
                self._hint(entry)
                if prefix == WORKER_PREFIX and not self._office.taken.is_set():
                    return
        raise ConnectionLost("a watch has ended")

    def _hint(self, entry: Entry | None) -> None:
        if entry is None:
            self._poll_wanted = True
            self._news.set()
        else:
            self.feed(entry)

    def feed(self, entry: Entry) -> None:
        """A key as somebody wrote it, now or a while ago."""
        if entry.key == ASSIGNMENT_KEY:
            if entry.revision > self._newest[0]:
                self._newest = (entry.revision, Document.decode(entry.value))
            revision, document = self._newest
            self._office.see_document(document, revision)
            if document is not None:
                self._see(document)
        elif entry.key == LEADER_KEY:
            leader = decode(entry.value, LeaderRecord)
            self._board.leads("" if leader is None or leader.released else leader.worker)
            if leader is None or leader.released:
                self.elect_wanted.set()
        else:
            self._office.see_worker(entry)

    async def looking(self) -> None:
        interval = float(self._config.heartbeat_interval)
        poll_at = self._clock()
        while True:
            self._news.clear()
            wake_at = poll_at
            try:
                if self._clock() >= poll_at or self._poll_wanted or self._office.is_new:
                    poll_at, self._poll_wanted = self._clock() + interval, False
                    await self._poll()
                wake_at = min(poll_at, await self._office.lead())
                if self._office.document is not None:
                    self._see(self._office.document)
            except Exception as error:
                self._board.tell(error)
                wake_at = min(poll_at, self._clock() + interval / 4)
            await asyncio.sleep(COALESCE)
            await event_within(self._news, wake_at - self._clock())

    async def _poll(self) -> None:
        entry = await within(self._patience, self._kv.get(ASSIGNMENT_KEY))
        if entry is None:
            self._office.see_document(None, 0)
        else:
            self.feed(entry)
        await self._office.read_workers(self._newest[1])


async def event_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but no longer than this."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
