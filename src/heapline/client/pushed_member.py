"""The fetches of a subscription's member, with rows pushed over a Subscribe stream.

A subscription (contract/subscription.py) asks for rows and says how many it may have. Here that becomes credits, and
rows arrive before they are asked for, as far as the credits reach. If the connection breaks, rows that have arrived
stay valid, and a new stream of the same session continues, however long that takes. Rows that were on their way are
redelivered after the group's ack_timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

from heapline.client.backoff import log, pauses
from heapline.client.transports.transport import RowStream, closed
from heapline.contract.broker import settings
from heapline.contract.config import GroupConfig
from heapline.contract.errors import HeaplineError, ResourceExhausted, UnavailableError
from heapline.contract.groups import FetchedRows, GroupFetch, GroupSettings, fetched, position
from heapline.contract.stream import Fetched, Place, StreamBatch


class PushedMember:
    """One member and session of a group."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker  # a ConnectedBroker
        self._open: GroupFetch | None = None
        self._batches: deque[tuple[StreamBatch, float]] = deque()  # with their arrival, in the loop's time
        self._here = 0  # rows in `_batches`
        self._granted = 0  # rows that the server may send and has not sent yet
        self._wanted = 0  # rows that may be here or on their way
        self._more = asyncio.Event()  # credits can be granted
        self._news = asyncio.Event()  # rows, other partitions, or an error
        self._partitions: list[int] = []
        self._generation = 0
        self._is_open = False  # the server has answered
        self._error: Exception | None = None
        self._reader: asyncio.Task[None] | None = None

    # -- rows ------------------------------------------------------------------------------------------------------

    async def group_fetch(
        self,
        topic: str,
        group: str,
        member: str,
        *,
        session: str,
        max_messages: int = 1000,
        max_bytes: int = 2 << 20,
        wait: float = 0.0,
        start: Place = "earliest",
        config: Mapping[str, Any] | None = None,
    ) -> Fetched:
        if self._open is None:
            chosen = settings("group", config or {}, GroupConfig, GroupSettings)
            where = position("start", start)
            self._open = GroupFetch(topic, group, member, session, max_bytes=max_bytes, start=where, config=chosen)
        self._wanted = max_messages
        if self._reader is None and self._error is None:
            self._reader = asyncio.ensure_future(self._read(self._open))
        self._grant()
        if not self._news.is_set() and (wait or not self._is_open):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait if self._is_open else None):  # the first call raises what is wrong
                    await self._news.wait()
        return self._taken(max_messages)

    def _taken(self, limit: int) -> Fetched:
        if self._error is not None and not self._batches:
            raise copy.copy(self._error) if isinstance(self._error, HeaplineError) else self._error
        found: list[StreamBatch] = []
        first = now = asyncio.get_running_loop().time()
        while self._batches and (len(self._batches[0][0]) <= limit or (limit > 0 and not found)):
            batch, arrived_at = self._batches.popleft()
            limit -= len(batch)
            first = min(first, arrived_at)
            found.append(batch)
        self._here -= sum(map(len, found))
        if not self._batches and self._error is None:
            self._news.clear()
        return Fetched(found, list(self._partitions), self._generation, now - first)

    def _grant(self) -> None:
        """Grant credits when half of them are used, not for every row."""
        if self._more.is_set() or 2 * (self._here + self._granted) <= self._wanted:
            self._more.set()

    def _next_credits(self) -> int:
        credits = max(0, self._wanted - self._here - self._granted)
        self._granted += credits
        return credits

    async def _credits(self) -> AsyncIterator[int]:
        self._granted = 0
        self._more.clear()
        yield self._next_credits()  # even if there are none: the first request joins the group
        while True:
            await self._more.wait()
            self._more.clear()
            if credits := self._next_credits():
                yield credits

    async def _read(self, fetch: GroupFetch) -> None:
        tries, has_failed = pauses(), False
        names = {"topic": fetch.topic, "group": fetch.group}
        while True:
            try:
                async for rows in self._broker.stream(RowStream(fetch, self._credits())):
                    if has_failed:
                        log.info("subscription reconnected", **names)
                    tries, has_failed = pauses(), False
                    self._arrived(rows)
            except UnavailableError as error:
                if isinstance(error, ResourceExhausted) and not self._is_open:
                    self._error = error  # a limit keeps it from joining
                    self._news.set()
                    return
                if not has_failed:
                    log.warning("subscription disconnected; will retry", **names, error=str(error))
                has_failed = True
            except Exception as error:  # including a bug here: those who wait must not wait forever
                self._error = error
                self._news.set()
                return
            if self._reader is not asyncio.current_task():
                return  # stopped just as its connection broke
            await asyncio.sleep(next(tries))

    def _arrived(self, rows: FetchedRows) -> None:
        self._is_open = True
        arrived = fetched(rows)
        for batch in arrived.batches:
            self._batches.append((batch, asyncio.get_running_loop().time()))
            self._here += len(batch)
            self._granted = max(0, self._granted - len(batch))
        self._partitions, self._generation = list(arrived.partitions), arrived.generation
        self._news.set()

    # -- the end -----------------------------------------------------------------------------------------------------

    async def stop_pushing(self) -> None:
        """End the stream without leaving the group. The next fetch opens another stream."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait({reader})
        self._is_open, self._partitions = False, []
        self._batches.clear()
        self._here = 0

    async def end(self) -> None:
        """Stop because the client is closed. Those who wait for rows raise Closed."""
        self._error = self._error or closed()
        self._news.set()
        await self.stop_pushing()
