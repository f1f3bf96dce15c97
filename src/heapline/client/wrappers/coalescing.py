"""Join single enqueues, small atomic batches and single acks of many coroutines into few calls.

Each topic has one lane (lanes.py) per kind. A call with a deadline of its own is not joined.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from msgspec.structs import replace

from heapline.client import message_rows
from heapline.client.backoff import IN_DOUBT, UNSENT, deadline_exceeded
from heapline.client.wrappers.idempotent import Idempotent
from heapline.client.wrappers.lanes import Batcher, Lane, Pacer, Pending, Send
from heapline.contract.call import Command, Feed
from heapline.contract.config import canonical_topic
from heapline.contract.context import HERE, Context
from heapline.contract.leases import Ack, LeaseKeys, Settled
from heapline.contract.messages import Enqueue, EnqueueBatch, enqueued, pack_messages

R = TypeVar("R")
JOINED_MAX, JOINED_BYTES_MAX = 500, 512 << 10  # a larger batch is sent alone
Own = Callable[[Coroutine[Any, Any, None]], object]


class Coalescing:
    """Needs an Idempotent below it: batches that were joined and refused are sent again under their numbers.

    `own` runs a task in the background; `deadline` is in seconds.
    """

    def __init__(self, inner: Idempotent, own: Own, deadline: float) -> None:
        self._inner, self._own, self._deadline = inner, own, deadline
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

    def end(self, error: Exception) -> None:
        """Send nothing more; waiting callers raise `error`."""
        for lane in self._lanes.values():
            lane.end(error)

    # -- lanes -----------------------------------------------------------------------------------------------------

    def _open_lane(self, kind: type[Any], topic: str) -> Lane:
        name = canonical_topic(topic)
        lane = self._lanes.get((kind, name)) or self._new_lane(kind, name)
        self._lanes[kind, name] = self._lanes[kind, topic] = lane
        return lane

    def _new_lane(self, kind: type[Any], topic: str) -> Lane:
        def deadline_error(is_sent: bool) -> Exception:
            rpc = "Ack" if kind is Ack else "EnqueueBatch"
            return deadline_exceeded(rpc, self._deadline, IN_DOUBT if is_sent else UNSENT)

        if kind is EnqueueBatch:
            return Lane(Batcher(), self._send_batches(topic), self._own, deadline_error, width=2)
        pacer = self._pacers[topic]
        if kind is Enqueue:
            return Lane(Batcher(), self._send_enqueues(topic), self._own, deadline_error, pacer=pacer)
        # The result names lost leases by message, so two leases of one message go in different batches.
        batcher = Batcher(distinct_by=lambda leases: bytes(leases.ids))
        return Lane(batcher, self._send_acks(topic), self._own, deadline_error, pacer=pacer)

    def _send_enqueues(self, topic: str) -> Send:
        async def send(batch: list[Pending], until: float) -> list[Any]:
            messages = pack_messages([pending.call for pending in batch])
            result = await self._inner.do(EnqueueBatch(topic, messages, False), Context(deadline=until))
            return [row if row.error is None else row.error for row in enqueued(result)]

        return send

    def _send_batches(self, topic: str) -> Send:
        """All of several batches are enqueued, or, if that is refused, each by itself."""

        async def send(batch: list[Pending], until: float) -> list[Any]:
            context = Context(deadline=until)
            if len(batch) == 1:
                return [await self._inner.do(EnqueueBatch(topic, batch[0].call), context)]
            return await self._inner.enqueue_each(topic, [pending.call for pending in batch], context)

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
