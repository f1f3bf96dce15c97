"""The loads of `heapline bench`, and the baselines that they are compared with.

Each load uses an empty topic of the bench, through the client that users have. The baselines are fsynced writes to a
file and bare TCP calls, both on this machine: if the server runs on another one, they describe the client's side only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from heapline.cli.serve import run_fast
from heapline.client.consumer import consume
from heapline.contract.broker import Broker
from heapline.contract.errors import BadRequest, DeadlineExceeded
from heapline.contract.message import Message, Outgoing

BATCH = 100
BATCH_BYTES_MAX = 1 << 20
CONCURRENT_BATCHES = 8
BYTES_MAX = 1 << 30  # per load, so that a fast disk is not filled
PRIORITIES = 1 << 20
NUMBER_BYTES = 8  # of a payload, which identify the message
DELIVERIES_PER_SECOND = 100
VISIBILITY = 60.0
FILE_BYTES = 64 << 20  # of the baseline's file, which is allocated first and written in circles
ECHO_PROGRAM = "from heapline.cli.bench.load import run_echo_server; run_echo_server()"
START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load, or one baseline."""

    name: str
    messages: int
    seconds: float
    samples: Sequence[float]  # seconds
    each: str  # what one sample measures
    calls: int = 1  # the bare calls that one message corresponds to
    is_baseline: bool = False

    @property
    def rate(self) -> float:
        return self.messages / max(self.seconds, 1e-9)

    def plus(self, other: Measurement) -> Measurement:
        """Join two parts of the same measurement."""
        messages, seconds = self.messages + other.messages, self.seconds + other.seconds
        return replace(self, messages=messages, seconds=seconds, samples=[*self.samples, *other.samples])

    def ms(self, percent: float) -> float | None:
        return None if not self.samples else percentile(self.samples, percent) * 1000


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that is not exceeded by this share of the samples.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50), percentile([4.0, 1.0, 3.0, 2.0], 99)
    (2.0, 4.0)
    """
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]


class Drive:
    """Repeats one turn from many coroutines until the time is up, and records how long each turn took."""

    def __init__(self, seconds: float, messages_max: int | None = None) -> None:
        self._seconds, self._messages_max = seconds, messages_max
        self.messages = 0  # can be read while it runs
        self.samples: list[float] = []
        self.seconds = 0.0

    async def run(self, turn: Callable[[], Awaitable[int]], concurrency: int) -> None:
        """Run until the last turn has ended. `turn` returns its number of messages. The first error ends all."""
        start = perf_counter()
        until = start + self._seconds

        async def repeat() -> None:
            now = perf_counter()
            while now < until and (self._messages_max is None or self.messages < self._messages_max):
                number = await turn()
                after = perf_counter()
                self.samples.append(after - now)
                self.messages += number
                now = after

        tasks = [asyncio.ensure_future(repeat()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self.seconds = perf_counter() - start


class Loads:
    """Enqueue in batches and one by one, full cycles of enqueue, pop and ack, and the latency of deliveries."""

    def __init__(self, broker: Broker, topic: str, size: int, concurrency: int, seconds: float) -> None:
        self._broker, self._topic, self._size = broker, topic, size
        self._concurrency, self._seconds = concurrency, seconds
        self._filler = random.randbytes(size - NUMBER_BYTES)
        self._number = count()
        self.batch = max(1, min(BATCH, BATCH_BYTES_MAX // size))
        self.drive = self._new_drive()  # of the running load

    def _new_drive(self) -> Drive:
        return Drive(self._seconds, max(1, BYTES_MAX // self._size))

    @property
    def names(self) -> tuple[str, ...]:
        batch = f"{self.batch} per call"
        cycles = f"full cycle, {batch}", "full cycle, 1 per call"
        return f"enqueue, {batch}", "enqueue, 1 per call", *cycles, f"delivery, {DELIVERIES_PER_SECOND} per second"

    async def run(self, index: int) -> Measurement:
        """Run one of `names`, by its index."""
        self.drive = self._new_drive()
        load = (self._batches, self._singles, self._batch_cycles, self._cycles, self._delivery)[index]
        try:
            each, calls = await load()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        except TimeoutError:
            raise DeadlineExceeded("bench") from None
        drive = self.drive
        return Measurement(self.names[index], drive.messages, drive.seconds, drive.samples, each, calls)

    # -- each load returns what one sample measures, and how many bare calls a message corresponds to ---------------

    async def _batches(self) -> tuple[str, int]:
        async def turn() -> int:
            return len(await self._broker.enqueue_batch(self._topic, self._messages()))

        await self.drive.run(turn, min(self._concurrency, CONCURRENT_BATCHES))
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

        await self.drive.run(turn, min(self._concurrency, CONCURRENT_BATCHES))
        return "cycle: enqueue, pop, ack", 1

    async def _cycles(self) -> tuple[str, int]:
        """Each coroutine enqueues a message, and continues when the message was delivered and acked."""
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

        async with self._consumers(handle):
            await self.drive.run(turn, self._concurrency)
        return "cycle: enqueue, pop, ack", 3

    async def _delivery(self) -> tuple[str, int]:
        """Send at an even pace. The latency counts from the planned time, so time spent in a queue counts too."""
        loop = asyncio.get_running_loop()
        total = max(10, round(self._seconds * DELIVERIES_PER_SECOND))
        due: dict[int, float] = {}
        all_delivered = loop.create_future()
        drive = self.drive

        async def handle(message: Message) -> None:
            drive.samples.append(perf_counter() - due[_number_of(message)])
            drive.messages += 1
            if drive.messages == total and not all_delivered.done():
                all_delivered.set_result(None)
            await message.ack()

        async with self._consumers(handle), asyncio.TaskGroup() as sending:
            start = perf_counter() + 0.1  # the consumer's stream is open by then
            for index in range(total):
                at = start + index / DELIVERIES_PER_SECOND
                await asyncio.sleep(max(0.0, at - perf_counter()))
                due[number := next(self._number)] = at
                sending.create_task(self._broker.enqueue(self._topic, self._payload(number)))
            async with asyncio.timeout(VISIBILITY):
                await all_delivered
        drive.seconds = perf_counter() - start
        return "message, from its due time to its arrival at a waiting consumer", 1

    @contextlib.asynccontextmanager
    async def _consumers(self, handle: Callable[[Message], Awaitable[None]]) -> AsyncIterator[None]:
        """Handle messages in coroutines, each with one message at a time. If one fails, all fail."""

        async def work() -> None:
            async for message in messages:
                await handle(message)

        consuming = consume(self._broker, self._topic, prefetch=self._concurrency, visibility=VISIBILITY)
        async with consuming as messages, asyncio.TaskGroup() as working:
            tasks = [working.create_task(work()) for _ in range(self._concurrency)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    def _messages(self) -> list[Outgoing]:
        return [Outgoing(self._payload(next(self._number)), _priority()) for _ in range(self.batch)]

    def _payload(self, number: int) -> bytes:
        return number.to_bytes(NUMBER_BYTES, "little") + self._filler


def _first(error: BaseException) -> BaseException:
    """Return the first of several errors, which caused the others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return DeadlineExceeded("bench") if isinstance(error, TimeoutError) else error


def _number_of(message: Message) -> int:
    return int.from_bytes(message.payload[:NUMBER_BYTES], "little")


def _priority() -> int:
    return random.randrange(PRIORITIES)


# -- baselines ---------------------------------------------------------------------------------------------------------


def fsynced_writes(directory: Path, name: str, size: int, messages: int, seconds: float) -> Measurement:
    """Write `messages` of `size` bytes at a time, and sync each write before the next."""
    block = os.urandom(size * messages)
    limit = max(FILE_BYTES, len(block))
    samples: list[float] = []
    try:
        fd, path = tempfile.mkstemp(prefix="heapline-bench-", dir=directory)
    except OSError as error:
        raise BadRequest(
            f"cannot measure the disk in {str(directory)!r}: {error.strerror}; choose another directory with --scratch"
        ) from None
    try:
        for _ in range(0, limit, 1 << 20):
            os.write(fd, bytes(1 << 20))
        os.fsync(fd)
        at, start = 0, perf_counter()
        now = start
        while now < start + seconds:
            os.pwrite(fd, block, at)
            os.fdatasync(fd)
            at = at + len(block) if at + 2 * len(block) <= limit else 0
            after = perf_counter()
            samples.append(after - now)
            now = after
        return Measurement(name, len(samples) * messages, now - start, samples, "write", is_baseline=True)
    finally:
        os.close(fd)
        os.unlink(path)


async def bare_calls(name: str, size: int, concurrency: int, seconds: float) -> Measurement:
    """Call a TCP server that returns the bytes it receives, over one connection per coroutine."""
    drive, payload = Drive(seconds), os.urandom(size)
    async with _echo_server() as port, contextlib.AsyncExitStack() as stack:
        idle = [await _open_echo(stack, port) for _ in range(concurrency)]

        async def turn() -> int:
            reader, writer = idle.pop()
            writer.write(payload)
            await reader.readexactly(size)
            idle.append((reader, writer))
            return 1

        await drive.run(turn, concurrency)
    return Measurement(name, drive.messages, drive.seconds, drive.samples, "call", is_baseline=True)


async def _open_echo(stack: contextlib.AsyncExitStack, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    return reader, writer


@contextlib.asynccontextmanager
async def _echo_server() -> AsyncIterator[int]:
    """Start an echo server in a process of its own, and yield its port. It ends when its stdin is closed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ECHO_PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield int(await asyncio.wait_for(process.stdout.readline(), START_SECONDS))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def run_echo_server() -> None:
    """Serve until stdin is closed. Print the port first."""

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Echo, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        server.close()

    run_fast(serve())


class _Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)
