"""The three kinds of calls that join: single enqueues, small atomic batches, single acks. One lane a topic and kind.

Here stands how a joined batch is sent and how its answer is told to each caller. What goes together decides
coalescing.py, and how often it is sent retrying.py.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from heapline.client.coalescing import Crowd, Gathering, Lane, Single, answer, refuse
from heapline.client.numbered import Numbered
from heapline.client.numbering import one_name
from heapline.client.patience import IN_DOUBT, UNSENT, out_of_time
from heapline.client.retrying import RetryingCalls
from heapline.errors import LeaseLost
from heapline.model import Enqueued, Outgoing
from heapline.wire.columns import ints, read_ints
from heapline.wire.schema import pb

JOINED_MAX, JOINED_BYTES_MAX = 500, 512 << 10  # a batch that is larger goes by itself
Carry = Callable[[list[Single]], Awaitable[None]]
Own = Callable[[Coroutine[Any, Any, None]], None]


class Lanes:
    def __init__(self, calls: RetryingCalls, own: Own, deadline: float) -> None:
        self._calls, self._own, self._deadline = calls, own, deadline
        self._loop = asyncio.get_running_loop()
        self._crowds: defaultdict[str, Crowd] = defaultdict(Crowd)
        self._numbers: dict[str, Numbered] = {}
        self._enqueues: dict[str, Lane] = {}
        self._batches: dict[str, Lane] = {}
        self._acks: dict[str, Lane] = {}

    def enqueue(self, topic: str, message: Outgoing) -> asyncio.Future[Enqueued]:
        lane = self._enqueues.get(topic) or self._lane_of_enqueues(topic)
        return lane.put(message, self._until(), len(message.payload))

    def enqueue_batch(self, topic: str, messages: list[Outgoing]) -> Awaitable[list[Enqueued]]:
        """All or none of them."""
        nbytes, name = sum([len(m.payload) for m in messages]), one_name(topic)
        if len(messages) > JOINED_MAX or nbytes > JOINED_BYTES_MAX:
            return self.send(topic, messages, True)
        lane = self._batches.get(name) or self._lane_of_batches(name)
        return lane.put(messages, self._until(), nbytes, len(messages))

    def send(self, topic: str, messages: list[Outgoing], atomic: bool) -> Awaitable[list[Enqueued]]:
        """Numbered like all others, but in a call of its own."""
        return self.numbers(one_name(topic)).send(messages, atomic, self._calls.until())

    def ack(self, topic: str, id: int, token: int) -> asyncio.Future[None]:
        lane = self._acks.get(topic) or self._lane_of_acks(topic)
        return lane.put((id, token), self._until())

    def _until(self) -> float:
        """Calls that have a deadline of their own do not come here."""
        return self._loop.time() + self._deadline

    def end(self, error: Exception) -> None:
        for lane in (*self._enqueues.values(), *self._batches.values(), *self._acks.values()):
            lane.end(error)

    def numbers(self, topic: str) -> Numbered:
        if topic not in self._numbers:
            self._numbers[topic] = Numbered(topic, self._calls)
        return self._numbers[topic]

    def _lane(self, name: str, carry: Carry, *, width: int = 1, crowd: Crowd | None = None, **gathering: Any) -> Lane:
        def give_up(sent: bool) -> Exception:
            return out_of_time(name, self._deadline, IN_DOUBT if sent else UNSENT)

        return Lane(Gathering(**gathering), carry, self._own, give_up, width, crowd)

    def _lane_of_enqueues(self, topic: str) -> Lane:
        name = one_name(topic)
        numbers = self.numbers(name)

        async def carry(batch: list[Single]) -> None:
            results = await numbers.send([single.what for single in batch], False, _until(batch))
            for single, result in zip(batch, results, strict=True):
                if result.error is None:
                    answer(single, result)
                else:
                    refuse(single, result.error)

        lane = self._enqueues.get(name) or self._lane("EnqueueBatch", carry, crowd=self._crowds[name])
        self._enqueues[name] = self._enqueues[topic] = lane
        return lane

    def _lane_of_batches(self, topic: str) -> Lane:
        """All of several go in, or, if that is refused, each for itself."""
        numbers = self.numbers(topic)

        async def carry(batch: list[Single]) -> None:
            if len(batch) == 1:
                answer(batch[0], await numbers.send(batch[0].what, True, batch[0].until))
                return
            results = await numbers.send_joined([single.what for single in batch], _until(batch))
            for single, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    refuse(single, result)
                else:
                    answer(single, result)

        lane = self._batches[topic] = self._lane("EnqueueBatch", carry, width=2)
        return lane

    def _lane_of_acks(self, topic: str) -> Lane:
        async def carry(batch: list[Single]) -> None:
            ids, tokens = [s.what[0] for s in batch], [s.what[1] for s in batch]
            request = pb.LeasesRequest(topic=topic, ids=ints(ids), tokens=ints(tokens), tell_lost=True)
            told, _ = await self._calls.ask("Ack", request, _until(batch))
            lost = set(read_ints(told.lost).tolist()) if told.lost else ()
            for single in batch:
                if single.what[0] in lost:
                    refuse(single, LeaseLost([single.what[0]], topic))
                else:
                    answer(single, None)

        # An answer names lost leases by message: two leases of one message are not told apart in it.
        crowd = self._crowds[one_name(topic)]
        lane = self._acks[topic] = self._lane("Ack", carry, crowd=crowd, apart=lambda lease: lease[0])
        return lane


def _until(batch: list[Single]) -> float:
    return max([single.until for single in batch])
