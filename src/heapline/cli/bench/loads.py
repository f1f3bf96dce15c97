"""The loads: into the queue in batches and one by one, all the way through it, and how soon a message arrives.

Each works on a topic that is empty and this bench's own. What is measured is what a user of the same client sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from time import perf_counter

from heapline.broker import Broker
from heapline.cli.bench.driving import BYTES_MAX, Drive
from heapline.cli.bench.result import Measured
from heapline.client.consuming import consume
from heapline.errors import DeadlineExceeded
from heapline.model import Message, Outgoing

BATCH = 100
BATCH_BYTES_MAX = 1 << 20
BATCHES_AT_ONCE = 8
PRIORITIES = 1 << 20
NUMBER = 8  # bytes of a payload that tell which message it is
PER_SECOND = 100  # messages, when it is measured how soon they arrive
VISIBILITY = 60.0


class Loads:
    def __init__(self, broker: Broker, topic: str, size: int, concurrency: int, seconds: float) -> None:
        self._broker, self._topic, self._size = broker, topic, size
        self._concurrency, self._seconds = concurrency, seconds
        self._filler = random.randbytes(size - NUMBER)
        self._number = count()
        self.batch = max(1, min(BATCH, BATCH_BYTES_MAX // size))
        self.drive = self._new_drive()  # of the load that runs

    def _new_drive(self) -> Drive:
        return Drive(self._seconds, max(1, BYTES_MAX // self._size))

    @property
    def names(self) -> tuple[str, ...]:
        return (f"enqueue, {self.batch} a call", "enqueue, 1 a call", f"full cycle, {self.batch} a call",
                "full cycle, 1 a call", f"delivery, {PER_SECOND} a second")  # fmt: skip

    async def run(self, index: int) -> Measured:
        """One of `names`, by its place."""
        self.drive = self._new_drive()
        load = (self._batches, self._singles, self._batch_cycles, self._cycles, self._delivery)[index]
        try:
            each, calls = await load()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        except TimeoutError:
            raise DeadlineExceeded("bench") from None
        drive = self.drive
        return Measured(self.names[index], drive.messages, drive.seconds, drive.samples, each, calls)

    # -- the loads: what one sample is of, and how many bare calls a message is worth --------------------------------

    async def _batches(self) -> tuple[str, int]:
        async def turn() -> int:
            return len(await self._broker.enqueue_batch(self._topic, self._messages()))

        await self.drive.run(turn, min(self._concurrency, BATCHES_AT_ONCE))
        return "call", 1

    async def _singles(self) -> tuple[str, int]:
        async def turn() -> int:
            await self._broker.enqueue(self._topic, self._payload(next(self._number)), priority=_priority())
            return 1

        await self.drive.run(turn, self._concurrency)
        return "call", 1

    async def _batch_cycles(self) -> tuple[str, int]:
        async def turn() -> int:
            await self._broker.enqueue_batch(self._topic, self._messages())
            messages = await self._broker.pop(self._topic, self.batch, visibility=VISIBILITY, wait=VISIBILITY)
            await self._broker.ack(messages)
            return len(messages)

        await self.drive.run(turn, min(self._concurrency, BATCHES_AT_ONCE))
        return "cycle: enqueue, pop, ack", 1

    async def _cycles(self) -> tuple[str, int]:
        """Each coroutine enqueues, and goes on when its message has come and was acked."""
        acked: dict[int, asyncio.Future[None]] = {}

        async def handle(message: Message) -> None:
            await message.ack()
            acked.pop(_number_of(message)).set_result(None)

        async def turn() -> int:
            number = next(self._number)
            done = acked[number] = asyncio.get_running_loop().create_future()
            await self._broker.enqueue(self._topic, self._payload(number), priority=_priority())
            async with asyncio.timeout(VISIBILITY):
                await done
            return 1

        async with self._workers(handle):
            await self.drive.run(turn, self._concurrency)
        return "cycle: enqueue, pop, ack", 3

    async def _delivery(self) -> tuple[str, int]:
        """At an even pace, from when each was due to be sent until a consumer has it: waiting in line counts."""
        loop = asyncio.get_running_loop()
        total = max(10, round(self._seconds * PER_SECOND))
        due: dict[int, float] = {}
        all_here = loop.create_future()
        drive = self.drive

        async def handle(message: Message) -> None:
            drive.samples.append(perf_counter() - due[_number_of(message)])
            drive.messages += 1
            if drive.messages == total and not all_here.done():
                all_here.set_result(None)
            await message.ack()

        async with self._workers(handle), asyncio.TaskGroup() as sending:
            begun = perf_counter() + 0.1  # the consumer's stream is open by then
            for index in range(total):
                at = begun + index / PER_SECOND
                await asyncio.sleep(max(0.0, at - perf_counter()))
                due[number := next(self._number)] = at
                sending.create_task(self._broker.enqueue(self._topic, self._payload(number)))
            async with asyncio.timeout(VISIBILITY):
                await all_here
        drive.seconds = perf_counter() - begun
        return "message, from being due to its arrival at a waiting consumer", 1

    # -- parts -----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _workers(self, handle: Callable[[Message], Awaitable[None]]) -> AsyncIterator[None]:
        """As many coroutines as are to work at once, each with one message at a time. If one fails, so does all."""

        async def work() -> None:
            async for message in messages:
                await handle(message)

        taking = consume(self._broker, self._topic, prefetch=self._concurrency, visibility=VISIBILITY)
        async with taking as messages, asyncio.TaskGroup() as working:
            tasks = [working.create_task(work()) for _ in range(self._concurrency)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    def _messages(self) -> list[Outgoing]:
        return [Outgoing(self._payload(next(self._number)), _priority()) for _ in range(self.batch)]

    def _payload(self, number: int) -> bytes:
        return number.to_bytes(NUMBER, "little") + self._filler


def _first(error: BaseException) -> BaseException:
    """Of several that failed together, the first is the reason of the others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return DeadlineExceeded("bench") if isinstance(error, TimeoutError) else error


def _number_of(message: Message) -> int:
    return int.from_bytes(message.payload[:NUMBER], "little")


def _priority() -> int:
    return random.randrange(PRIORITIES)
