"""A producer's identity: its name, its epoch on each topic, its numbers.

A retry of the same numbered message never doubles it. The epoch comes from the broker on first use, and opening a new
one fences whoever used the name before. A forked child must not go on with its parent's numbers: it gets its own name.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from heapline.config import NAME
from heapline.errors import BadName

if TYPE_CHECKING:
    from heapline.broker import Broker


class _Line:
    """The numbers on one topic: next to give out, and which are not answered yet."""

    __slots__ = ("epoch", "next_seq", "open")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.next_seq = 0
        self.open: dict[int, int] = {}  # first number of a call under way -> how many

    @property
    def answered_below(self) -> int:
        return min(self.open, default=self.next_seq)


class Producer:
    """Numbers messages so that a repeated enqueue is recognised.

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
        # By broker first: two directories, or one opened again, may each have a topic of the same name.
        self._lines: WeakKeyDictionary[Broker, dict[str, _Line]] = WeakKeyDictionary()
        self._opening: WeakKeyDictionary[Broker, dict[str, asyncio.Task[int]]] = WeakKeyDictionary()

    async def line(self, broker: Broker, topic: str) -> _Line:
        """The numbers on a topic, opening an epoch on first use."""
        name = self.producer_id
        lines = self._lines.setdefault(broker, {})
        if topic not in lines:
            opening = self._opening.setdefault(broker, {})
            task = opening.get(topic)
            if task is None:  # first uses at once share one opening, else they would fence each other
                task = opening[topic] = asyncio.ensure_future(broker.open_producer(topic, name))
            try:
                epoch = await asyncio.shield(task)
            finally:
                if task.done():
                    opening.pop(topic, None)
            lines.setdefault(topic, _Line(epoch))
        return lines[topic]

    @staticmethod
    def take(line: _Line, count: int) -> int:
        first = line.next_seq
        line.next_seq += count
        line.open[first] = count
        return first

    @staticmethod
    def answered(line: _Line, first: int) -> None:
        line.open.pop(first, None)
