"""Join single enqueues, small atomic batches and single acks of many coroutines into few calls.

Calls that wait while one is in flight are sent together in the next one. Each topic has one lane per kind of call. A
lane sends one batch at a time and in order, so the calls of one caller stay in order even if a batch is repeated. There
is no delay: an idle lane starts in the same turn of the event loop, with every call made in that turn. Each caller gets
its own result or its own error. A call with a deadline of its own is not joined.

`Batcher` decides which calls go together and knows neither event loop nor connection. `Coalescing` sends a batch and
returns the outcome of each call to the lane.
"""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from heapline.client import message_rows
from heapline.client.backoff import IN_DOUBT, UNSENT, deadline_exceeded
from heapline.client.wrappers.idempotent import Idempotent
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.config import canonical_topic
from heapline.contract.leases import Ack, LeaseKeys, Settled
from heapline.contract.messages import Enqueue, EnqueueBatch, enqueued, pack_messages
from heapline.owned_tasks import OwnedTasks

R = TypeVar("R")
JOINED_MAX, JOINED_BYTES_MAX = 500, 512 << 10  # a larger batch is sent alone
COUNT_MAX = 1000  # messages or leases in one batch
BYTES_MAX = 1 << 20  # of payloads in one batch; a larger call goes alone
FEW = 2  # a batch is small if the recent ones were more than this many times as large
PACE_SECONDS = 0.05  # that a small batch waits at most: some round trips, and little compared with a lease
#: Sends a batch, with the last deadline in it, and returns the result or the error of each call.
Send = Callable[[list["Pending"], float], Awaitable[Sequence[Any]]]


class Coalescing:
    """Needs an Idempotent below it: batches that were joined and refused are sent again under their numbers.

    `deadline` is in seconds.
    """

    def __init__(self, inner: Idempotent, deadline: float) -> None:
        self._inner, self._deadline = inner, deadline
        self._tasks = OwnedTasks()
        self._loop = asyncio.get_running_loop()
        self._pacers: defaultdict[str, Pacer] = defaultdict(Pacer)
        self._lanes: dict[tuple[Any, str], Lane] = {}  # by command and topic, as callers spell it

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        call: Any = command
        kind: Any = type(call)
        joined, nbytes, count = None, 0, 1
        if context is not HERE:
            pass
        elif kind is Enqueue:
            if call.producer_id is None:
                # A copy of the headers, because the caller may change them while the call waits.
                joined = replace(call, headers=dict(call.headers)) if call.headers else call
                nbytes = len(call.payload)
        elif kind is EnqueueBatch:
            count = len(call.messages) if call.atomic and call.producer_id is None else 0
            if 0 < count <= JOINED_MAX and (nbytes := message_rows.size(call.messages)) <= JOINED_BYTES_MAX:
                joined = call.messages
        elif kind is Ack and call.leases.ids.nbytes == 8:
            joined = call.leases
        if joined is None:
            return self._inner.do(command, context)
        lane = self._lanes.get((kind, call.topic)) or self._open_lane(kind, call.topic)
        return lane.put(joined, self._loop.time() + self._deadline, nbytes, count)

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        return self._inner.stream(feed, context)

    async def sent(self, seconds: float) -> None:
        """Wait until the calls that were made are answered, for `seconds` at most."""
        await self._tasks.join(seconds)

    def end(self, error: Exception) -> None:
        """Send nothing more; waiting callers raise `error`."""
        for lane in self._lanes.values():
            lane.end(error)

    # -- batches ---------------------------------------------------------------------------------------------------

    def _open_lane(self, kind: type[Any], topic: str) -> Lane:
        name = canonical_topic(topic)
        lane = self._lanes.get((kind, name)) or self._new_lane(kind, name)
        self._lanes[kind, name] = self._lanes[kind, topic] = lane
        return lane

    def _new_lane(self, kind: type[Any], topic: str) -> Lane:
        def deadline_error(is_sent: bool) -> Exception:
            return deadline_exceeded(kind.facts.rpc, self._deadline, IN_DOUBT if is_sent else UNSENT)

        if kind is EnqueueBatch:
            return Lane(Batcher(), self._send_batches(topic), self._tasks.spawn, deadline_error, width=2)
        pacer = self._pacers[topic]
        if kind is Enqueue:
            return Lane(Batcher(), self._send_enqueues(topic), self._tasks.spawn, deadline_error, pacer=pacer)
        # The result names lost leases by message, so two leases of one message go in different batches.
        batcher = Batcher(distinct_by=lambda leases: bytes(leases.ids))
        return Lane(batcher, self._send_acks(topic), self._tasks.spawn, deadline_error, pacer=pacer)

    def _send_enqueues(self, topic: str) -> Send:
        producer = self._inner.open_producer(topic)

        async def send(batch: list[Pending], until: float) -> list[Any]:
            context = Context(deadline=until)
            if len(batch) == 1:
                return [await producer.enqueue_one(batch[0].call, context)]
            messages = pack_messages([pending.call for pending in batch])
            result = await producer.enqueue(messages, False, context)
            return [row if row.error is None else row.error for row in enqueued(result)]

        return send

    def _send_batches(self, topic: str) -> Send:
        """Enqueue several batches together, or, if that is refused, each separately."""
        producer = self._inner.open_producer(topic)

        async def send(batch: list[Pending], until: float) -> list[Any]:
            context = Context(deadline=until)
            if len(batch) == 1:
                return [await producer.enqueue(batch[0].call, True, context)]
            return await producer.enqueue_each([pending.call for pending in batch], context)

        return send

    def _send_acks(self, topic: str) -> Send:
        async def send(batch: list[Pending], until: float) -> list[Any]:
            ids = b"".join(pending.call.ids for pending in batch)
            tokens = b"".join(pending.call.tokens for pending in batch)
            leases = LeaseKeys(memoryview(ids), memoryview(tokens))
            settled = await self._inner.do(Ack(topic, leases), Context(deadline=until))
            lost = set(settled.lost)
            return [Settled([id]) if id in lost else _ACKED for id in memoryview(ids).cast("q")]

        return send


_ACKED = Settled()


# -- lanes -------------------------------------------------------------------------------------------------------------


class Pending(Struct, eq=False):
    """One caller's call, and the future of its result."""

    call: Any
    future: Any
    until: float  # in the loop's time
    nbytes: int = 0
    count: int = 1


class Batcher:
    """Waiting calls in order, and how many of them go next."""

    def __init__(
        self,
        count_max: int = COUNT_MAX,
        bytes_max: int = BYTES_MAX,
        distinct_by: Callable[[Any], Any] | None = None,
    ) -> None:
        self._count_max, self._bytes_max = count_max, bytes_max
        self._distinct_by = distinct_by  # calls for which this returns the same go in different batches
        self.calls: deque[Pending] = deque()

    def take(self) -> list[Pending]:
        """Remove and return the next batch: as many calls as fit, without those that were cancelled."""
        waiting, batch, size, count = self.calls, list[Pending](), 0, 0
        names: set[Any] = set()
        while waiting:
            pending = waiting[0]
            if pending.future.done():  # cancelled before it was sent
                waiting.popleft()
                continue
            if batch and (count + pending.count > self._count_max or size + pending.nbytes > self._bytes_max):
                break
            if self._distinct_by is not None:
                name = self._distinct_by(pending.call)
                if name in names:
                    break
                names.add(name)
            size += pending.nbytes
            count += pending.count
            batch.append(waiting.popleft())
        return batch

    def waiting(self) -> list[Pending]:
        return [pending for pending in self.calls if not pending.future.done()]


class Pacer:
    """Lets small batches wait for the callers of large ones. The lanes of a topic share one.

    Of hundreds of coroutines that enqueue, pop and ack, a few are always ahead. By themselves they would cost as many
    calls as all the others. So a small batch waits for a response that is on its way, and the others catch up. If
    recent batches were small too, nothing waits. Nor does anything wait long: a call that the server holds, or that is
    repeated until its deadline, says nothing about the others.
    """

    def __init__(self) -> None:
        self._size = 0  # of recent batches
        self._in_flight = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def pace(self, count: int) -> None:
        """Wait if a batch of this many calls is small."""
        if 0 < count * FEW < self._size and self._in_flight:
            loop = asyncio.get_running_loop()
            waiting = loop.create_future()
            self._waiting.append(waiting)
            timer = loop.call_later(PACE_SECONDS, _end, waiting)
            try:
                await waiting
            finally:
                timer.cancel()

    def sent(self, count: int) -> None:
        self._size = max(count, self._size // 2)
        self._in_flight += 1

    def ended(self) -> None:
        self._in_flight -= 1
        for waiting in self._waiting:
            _end(waiting)
        self._waiting.clear()


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Lane:
    def __init__(
        self,
        batcher: Batcher,
        send: Send,
        own: Callable[[Coroutine[Any, Any, None]], object],
        deadline_error: Callable[[bool], Exception],
        width: int = 1,
        pacer: Pacer | None = None,
    ) -> None:
        self._batcher, self._send, self._own = batcher, send, own
        self._deadline_error = deadline_error  # of a call that was sent, or was not
        self._width = width  # batches in flight; calls are executed in order only if it is 1
        self._pacer = pacer or Pacer()
        self._running = 0
        self._in_flight: list[Pending] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # kept, because get_running_loop is a system call

    def put(self, call: Any, until: float, nbytes: int = 0, count: int = 1) -> asyncio.Future[Any]:
        """Return the future of the result. Cancelling it before the call is sent keeps it from being sent."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._batcher.calls.append(Pending(call, future, until, nbytes, count))
        if self._timer is None:
            self._timer = loop.call_at(until, self._check_deadlines)
        if self._running < self._width:
            self._running += 1
            self._own(self._run())
        return future

    async def _run(self) -> None:
        try:
            while True:
                await self._pacer.pace(len(self._batcher.calls))
                if not (batch := self._batcher.take()):
                    break
                self._in_flight += batch
                self._pacer.sent(len(batch))
                try:
                    outcomes = await self._send(batch, max([pending.until for pending in batch]))
                    for pending, outcome in zip(batch, outcomes, strict=True):
                        if isinstance(outcome, Exception):
                            reject(pending, outcome)
                        elif not pending.future.done():
                            pending.future.set_result(outcome)
                except Exception as error:
                    fail(batch, error)
                finally:
                    self._pacer.ended()
                    self._in_flight = [p for p in self._in_flight if not p.future.done()] if self._width > 1 else []
        finally:
            self._running -= 1

    def _check_deadlines(self) -> None:
        """Raise in callers whose deadline has passed. Their batch is repeated until the last deadline in it."""
        loop = asyncio.get_running_loop()
        calls = [(p, True) for p in self._in_flight if not p.future.done()]
        calls += [(p, False) for p in self._batcher.waiting()]
        for pending, is_sent in calls:
            if pending.until <= loop.time():
                reject(pending, self._deadline_error(is_sent))
        left = [pending.until for pending, _ in calls if not pending.future.done()]
        self._timer = loop.call_at(min(left), self._check_deadlines) if left else None

    def end(self, error: Exception) -> None:
        """Send nothing more; waiting callers raise `error`."""
        fail(self._batcher.waiting(), error)
        if self._timer is not None:
            self._timer.cancel()


def reject(pending: Pending, error: Exception) -> None:
    if not pending.future.done():
        pending.future.set_exception(error)


def fail(batch: list[Pending], error: Exception) -> None:
    """Reject all calls. Each caller raises a copy, because one object would collect the tracebacks of all."""
    for pending in batch:
        reject(pending, copy.copy(error))
