"""A producer's identity: its name, its epoch on each topic, its sequence numbers.

A retry of the same numbered message never duplicates it. The broker assigns the epoch on first use, and opening a new
one fences the previous user of the name. A forked child must not continue its parent's numbers: it gets its own name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec

from heapline.contract.config import NAME
from heapline.contract.errors import BadName, DeadlineExceeded, TopicReloading, UnavailableError
from heapline.contract.message import Enqueued, Outgoing

REPEAT_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # seconds
#: One attempt to enqueue numbered messages, with their producer's epoch and the number below which all are answered.
Send = Callable[[list[Outgoing], int, int], Awaitable[list[Enqueued]]]


class EpochSource(Protocol):
    """Assigns epochs to producers. Every `Broker` does."""

    def open_producer(self, topic: str, producer_id: str, /) -> Coroutine[Any, Any, int]: ...


class Line:
    """The numbers on one topic: the next one, and those not answered yet."""

    __slots__ = ("epoch", "next_seq", "open")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.next_seq = 0
        self.open: dict[int, int] = {}  # first number of a call in progress -> count

    def take(self, count: int) -> tuple[int, int]:
        """Return the first of `count` new numbers, and the number below which all are answered."""
        first, answered_below = self.next_seq, min(self.open, default=self.next_seq)
        self.next_seq += count
        self.open[first] = count
        return first, answered_below

    def answered(self, first: int) -> None:
        """Record that these numbers will not be sent again, whatever their result."""
        self.open.pop(first, None)


class Producer:
    """Numbers messages so that a repeated enqueue is recognized.

    >>> producer = Producer("billing")
    >>> producer.producer_id
    'billing'
    """

    def __init__(self, producer_id: str) -> None:
        if not isinstance(producer_id, str) or not NAME.match(producer_id):
            raise BadName("producer", str(producer_id))
        self._name = producer_id
        self._pid = os.getpid()
        self._forget()

    @property
    def producer_id(self) -> str:
        if os.getpid() != self._pid:  # a forked child is another producer
            self._pid = os.getpid()
            self._name = f"{self._name[:100]}.fork{self._pid}"
            self._forget()
        return self._name

    def _forget(self) -> None:
        # By broker first: two directories, or one reopened, may each have a topic of the same name.
        self._lines: WeakKeyDictionary[EpochSource, dict[str, Line]] = WeakKeyDictionary()
        self._opening: WeakKeyDictionary[EpochSource, dict[str, asyncio.Task[int]]] = WeakKeyDictionary()

    async def line(self, broker: EpochSource, topic: str) -> Line:
        """Return the numbers on a topic, opening an epoch on first use."""
        name = self.producer_id
        origin = getattr(broker, "origin", broker)  # a client with another deadline shares the numbers of its client
        lines = self._lines.setdefault(origin, {})
        if topic not in lines:
            opening = self._opening.setdefault(origin, {})
            task = opening.get(topic)
            if task is None:  # concurrent first uses share one opening, else they would fence each other
                task = opening[topic] = asyncio.ensure_future(broker.open_producer(topic, name))
            try:
                epoch = await asyncio.shield(task)
            finally:
                if task.done():
                    opening.pop(topic, None)
            lines.setdefault(topic, Line(epoch))
        return lines[topic]

    async def enqueue(
        self, broker: EpochSource, topic: str, messages: Sequence[Outgoing], send: Send
    ) -> list[Enqueued]:
        """Number the messages and send them until their result is known. For brokers."""
        line = await self.line(broker, topic)
        first, answered_below = line.take(len(messages))
        try:
            return await _until_known(numbered(messages, first), line.epoch, answered_below, send)
        finally:
            line.answered(first)  # even if the result is unknown: these numbers are not sent again


async def _until_known(messages: list[Outgoing], epoch: int, answered_below: int, send: Send) -> list[Enqueued]:
    """Send numbered messages, and retry while the topic reloads: repeating them creates no duplicates."""
    for pause in (*REPEAT_PAUSES, None):
        try:
            results = hide_own_duplicates(messages, await send(messages, epoch, answered_below))
        except TopicReloading:
            if pause is None:
                raise
        else:
            if pause is None or not any(in_doubt(result.error) for result in results):
                return results
        await asyncio.sleep(pause)
    raise AssertionError("unreachable: the last try returns or raises")


def numbered(messages: Sequence[Outgoing], first: int) -> list[Outgoing]:
    return [msgspec.structs.replace(m, seq=first + i) for i, m in enumerate(messages)]


def hide_own_duplicates(messages: Sequence[Outgoing], results: list[Enqueued]) -> list[Enqueued]:
    """Hide duplicates caused by retries of this call. Numbers are assigned once, so an earlier attempt of the same call
    enqueued a message that is a duplicate by number. With an idempotency key it may repeat another call, and is
    reported."""
    if not any(result.duplicate for result in results):
        return results
    return [
        msgspec.structs.replace(r, duplicate=False) if r.duplicate and m.idempotency_key is None else r
        for m, r in zip(messages, results, strict=True)
    ]


def in_doubt(error: BaseException | None) -> bool:
    """Return whether the failed call may have succeeded: the connection broke, it timed out, a write failed."""
    kind = type(error)
    return kind in (UnavailableError, DeadlineExceeded, TopicReloading) or isinstance(error, asyncio.CancelledError)
