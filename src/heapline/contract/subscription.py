"""A subscription: one member of a consumer group, over the four primitives of any broker (fetch, ack, nack, leave).

It keeps fetching while fewer than `credits` rows are outstanding, sends heartbeats while its consumer is slow, and
reports assigned and revoked partitions. Acks made while one is in flight are sent together in the next. The broker
alone decides which rows a member holds. This module only counts them, and forgets a row after its ack timeout, because
the row is redelivered then.

A separate task fetches; the iterating consumer reads from its queue. Transient errors (UnavailableError) are retried;
any other error ends the iteration.

Rows that timed out before the consumer saw them are not delivered, because other members may have them. If a consumer
is too slow for the prefetched rows, fewer are fetched: rows that only wait here would fail repeatedly, and become dead
letters unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from heapline.contract.check import fail
from heapline.contract.errors import (
    Closed,
    DeliveryLost,
    HeaplineError,
    ResourceExhausted,
    UnavailableError,
)
from heapline.contract.member_rows import I64, Acks, RowsOut, offsets_of
from heapline.contract.stream import Fetched, GroupEvents, GroupInfo, Offsets, Place, StreamBatch, StreamMessage

PAUSE, PAUSE_MAX = 0.05, 2.0  # seconds between retries
WAIT_MAX = 10.0  # most seconds that a fetch waits
BEATS = 3  # heartbeats within a member's lease
CREDITS_MAX = 1_000_000
LEAVE_SECONDS = 5.0  # for the broker to receive the leave; the member's lease ends anyway


class _Chunk(NamedTuple):
    batch: StreamBatch
    until: float  # loop time at which the member loses the rows


class GroupBroker(Protocol):
    """The calls of a broker that a subscription needs. Every `Broker` has them."""

    def group_fetch(
        self,
        topic: str,
        group: str,
        member: str,
        /,
        *,
        session: str,
        max_messages: int,
        wait: float,
        start: Place,
        config: Mapping[str, Any] | None,
    ) -> Coroutine[Any, Any, Fetched]: ...
    def get_group(self, topic: str, group: str, /) -> Coroutine[Any, Any, GroupInfo]: ...
    def group_ack(
        self, topic: str, group: str, member: str, offsets: Offsets, /, *, session: str
    ) -> Coroutine[Any, Any, None]: ...
    def group_nack(
        self, topic: str, group: str, member: str, offsets: Offsets, /, *, session: str, reason: str | None
    ) -> Coroutine[Any, Any, None]: ...
    def group_leave(self, topic: str, group: str, member: str, /, *, session: str) -> Coroutine[Any, Any, None]: ...


class Subscription:
    """Created by `subscribe`; use it with `async with`, and iterate. Safe for one iterating task and many that ack."""

    def __init__(
        self,
        broker: GroupBroker,
        topic: str,
        *,
        group: str,
        member: str | None = None,
        credits: int = 1000,
        batches: bool = False,
        start: Place = "earliest",
        on_assigned: GroupEvents | None = None,
        on_revoked: GroupEvents | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if type(credits) is not int or not 1 <= credits <= CREDITS_MAX:
            fail("credits", f"an integer from 1 to {CREDITS_MAX}", credits)
        self.topic, self.group = topic, group
        self.member = member if member is not None else f"member-{os.urandom(8).hex()}"
        self._broker = broker
        self._session = os.urandom(16).hex()
        self._credits, self._by_batches = credits, batches
        self._start, self._config = start, dict(config or {})
        self._on_assigned, self._on_revoked = on_assigned, on_revoked
        self._partitions: list[int] = []
        self._ack_timeout = self._beat_every = 0.0
        self._out = RowsOut()
        self._queue: deque[_Chunk] = deque()
        self._rows: deque[StreamMessage] = deque()  # of the batch being iterated
        self._rows_until = 0.0
        self._window = credits  # most outstanding rows for a consumer of this speed
        self._error: BaseException | None = None
        self._closed = False
        self._changed = asyncio.Event()  # rows were settled: credits may be available
        self._arrived = asyncio.Event()  # there are rows to iterate, or the end
        self._joining: asyncio.Task[None] | None = None
        self._has_joined = False
        self._pump: asyncio.Task[None] | None = None
        self._acks: Acks | None = None  # waiting for the acks in flight
        self._acking: asyncio.Task[None] | None = None

    @property
    def partitions(self) -> list[int]:
        """The partitions that it reads now."""
        return list(self._partitions)

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Subscription:
        await self._begin()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def _begin(self) -> None:
        """Join the group. Raises if the request is invalid. A failed join leaves nothing behind and can be retried."""
        if self._pump is not None or self._closed:
            return
        self._joining = joining = asyncio.ensure_future(self._join())
        try:
            await joining
        except BaseException:
            if self._closed and not _is_cancelled():
                return  # cancelled by `close`, which leaves the group
            await self._leave()
            raise
        if not self._closed:
            self._pump = asyncio.ensure_future(self._keep_fetching())

    async def _join(self) -> None:
        fetched = await self._patiently(lambda: self._fetch(0, 0.0))  # fetch no rows before their timeout is known
        self._has_joined = True
        await self._heard(fetched)
        info = await self._patiently(lambda: self._broker.get_group(self.topic, self.group))
        self._ack_timeout = info.config.ack_timeout
        self._beat_every = min(WAIT_MAX, info.config.member_lease / BEATS)

    async def close(self) -> None:
        """Leave the group: unacked rows go to other members. Waits for acks in flight."""
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        for task in (self._joining, self._pump):
            if task is not None and task is not asyncio.current_task():  # it is, in `on_assigned` and `on_revoked`
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._acking is not None:
            await asyncio.gather(self._acking, return_exceptions=True)
        await self._leave()
        self._queue.clear()
        self._rows.clear()

    async def _leave(self) -> None:
        """Leave the group, even after an error: a member without a consumer must not keep its partitions."""
        has_joined, self._has_joined = self._has_joined, False
        self._partitions = []
        if has_joined:
            with contextlib.suppress(HeaplineError, TimeoutError):  # already removed, or will be when its lease ends
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._broker.group_leave(self.topic, self.group, self.member, session=self._session)

    # -- fetching --------------------------------------------------------------------------------------------------

    def _fetch(self, count: int, wait: float) -> Awaitable[Fetched]:
        return self._broker.group_fetch(
            self.topic,
            self.group,
            self.member,
            session=self._session,
            max_messages=count,
            wait=wait,
            start=self._start,
            config=self._config or None,
        )

    async def _patiently(self, ask: Callable[[], Awaitable[Any]], seconds: float = float("inf")) -> Any:
        """Retry while the broker is unavailable. Raise if a limit prevents joining."""
        pause, end = PAUSE, _now() + seconds
        while True:
            try:
                return await ask()
            except UnavailableError as error:
                if _now() >= end or (isinstance(error, ResourceExhausted) and not self._has_joined):
                    raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, PAUSE_MAX)

    async def _keep_fetching(self) -> None:
        try:
            while not self._closed:
                room = self._room()
                if room <= 0 or (room < self._credits // 4 and self._queue):
                    await self._wait_for_room()
                    room = self._room() if not self._queue else 0
                wait = self._beat_every if room > 0 else 0.0
                await self._heard(await self._patiently(partial(self._fetch, max(0, room), wait)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = error
            self._arrived.set()

    def _room(self) -> int:
        now = _now()
        if self._is_stuck(now):
            return 0
        if self._out.rows >= self._window:
            self._out.forget(now)
        return self._window - self._out.rows

    def _is_stuck(self, now: float) -> bool:
        """Return whether rows have waited here until they timed out: more rows would wait as long."""
        return bool(self._rows and self._rows_until <= now) or bool(self._queue and self._queue[0].until <= now)

    async def _wait_for_room(self) -> None:
        """Wait until enough rows are settled, but at most until the next heartbeat is due."""
        end = _now() + self._beat_every
        while (left := end - _now()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return
            if self._room() >= max(1, self._credits // 4) or not self._queue:
                return

    async def _heard(self, fetched: Fetched) -> None:
        until = _now() - fetched.waited + (self._ack_timeout or float("inf"))
        for batch in fetched.batches:
            batch._settles = self
            self._out.add(batch.partition, batch.offsets, until)
        before, self._partitions = self._partitions, list(fetched.partitions)
        await _tell(self._on_revoked, [p for p in before if p not in fetched.partitions])
        await _tell(self._on_assigned, [p for p in fetched.partitions if p not in before])
        if fetched.batches:
            self._queue.extend(_Chunk(batch, until) for batch in fetched.batches)
            self._arrived.set()

    # -- iterating -------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._pump is None:
            await self._begin()
        while True:
            if self._closed:
                raise StopAsyncIteration
            if self._rows:
                if self._rows_until > _now():
                    return self._rows.popleft()
                self._too_slow()
                self._rows.clear()  # the rest waited here for too long
            chunk = self._next_chunk()
            if chunk is not None and self._by_batches:
                return chunk.batch
            if chunk is not None:
                self._rows.extend(chunk.batch.messages())
                self._rows_until = chunk.until
                continue
            if self._error is not None:
                if isinstance(self._error, Closed):
                    raise StopAsyncIteration from None
                raise self._error
            self._window = min(self._credits, self._window + max(1, self._window // 8))
            self._changed.set()  # the queue is empty: any free credits are enough
            self._arrived.clear()
            await self._arrived.wait()

    def _next_chunk(self) -> _Chunk | None:
        """Return the next chunk, without those that timed out while waiting here."""
        while self._queue:
            chunk = self._queue.popleft()
            if chunk.until > _now():
                return chunk
            self._too_slow()
        return None

    def _too_slow(self) -> None:
        """Halve the window, because the consumer is too slow for it."""
        self._window = max(1, self._window // 2)

    # -- settling --------------------------------------------------------------------------------------------------

    async def ack(self, rows: Any) -> None:
        """Ack rows or batches, one or many, or {partition: offsets}. Acks all it can, then raises DeliveryLost if this
        member no longer held some of them."""
        offsets = offsets_of(rows)
        if not offsets:
            return
        if self._acks is None:
            self._acks = Acks()
        acks = self._acks
        acks.add(offsets)
        if self._acking is None or self._acking.done():
            self._acking = asyncio.ensure_future(self._send_acks())
        lost = await asyncio.shield(acks.done)
        if lost is not None:
            named = {p: set(some.tolist()) for p, some in offsets.items()}
            mine = [(p, o) for p, o in zip(lost.partitions, lost.offsets, strict=True) if o in named.get(p, ())]
            if mine:
                raise DeliveryLost([p for p, _ in mine], [o for _, o in mine], self.topic, self.group)

    async def _send_acks(self) -> None:
        while self._acks is not None:
            acks, self._acks = self._acks, None
            try:
                await self._settle(self._broker.group_ack, acks.offsets())
            except DeliveryLost as lost:
                self._too_slow()
                _resolve(acks.done, lost)
            except BaseException as error:
                if not acks.done.done():
                    acks.done.set_exception(error)
                    acks.done.exception()  # retrieved, because its caller may have been cancelled
                if isinstance(error, asyncio.CancelledError):
                    raise
            else:
                _resolve(acks.done, None)

    async def nack(self, rows: Any, *, reason: str | None = None) -> None:
        offsets = offsets_of(rows)
        if offsets:
            await self._settle(self._broker.group_nack, offsets, reason=reason)

    async def _settle(self, act: Callable[..., Awaitable[None]], offsets: dict[int, I64], **more: Any) -> None:
        """Settle rows. Afterwards they are no longer outstanding: they are done, or will be redelivered."""

        def ask() -> Awaitable[None]:
            return act(self.topic, self.group, self.member, offsets, session=self._session, **more)

        try:
            await self._patiently(ask, self._ack_timeout)
        finally:
            for partition, some in offsets.items():
                self._out.end(partition, some)
            self._changed.set()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


async def _tell(hook: GroupEvents | None, partitions: list[int]) -> None:
    if hook is not None and partitions:
        answer = hook(partitions)
        if inspect.isawaitable(answer):
            await answer
