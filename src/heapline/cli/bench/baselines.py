"""What the machine does without a queue: appends to a file made safe one after the other, and bare calls over gRPC.

Both are of this machine: where the server is another one, they tell of the client's side alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter

from heapline.cli.bench.driving import Drive
from heapline.cli.bench.result import Measured
from heapline.errors import BadRequest

ROOM = 64 << 20  # of the file, which has its blocks from the start and is written round and round
ECHO = "/heapline.bench.Echo/Call"
START_SECONDS = 30.0


def appends(directory: Path, name: str, size: int, messages: int, seconds: float) -> Measured:
    """`messages` of `size` bytes with each write, and each write made safe before the next."""
    block = os.urandom(size * messages)
    room = max(ROOM, len(block))
    samples: list[float] = []
    try:
        fd, path = tempfile.mkstemp(prefix="heapline-bench-", dir=directory)
    except OSError as error:
        raise BadRequest(
            f"the disk cannot be measured in {str(directory)!r}: {error.strerror}. Name another place: --scratch DIR"
        ) from None
    try:
        for _ in range(0, room, 1 << 20):
            os.write(fd, bytes(1 << 20))
        os.fsync(fd)
        at, begun = 0, perf_counter()
        now = begun
        while now < begun + seconds:
            os.pwrite(fd, block, at)
            os.fdatasync(fd)
            at = at + len(block) if at + 2 * len(block) <= room else 0
            after = perf_counter()
            samples.append(after - now)
            now = after
        return Measured(name, len(samples) * messages, now - begun, samples, "write", is_baseline=True)
    finally:
        os.close(fd)
        os.unlink(path)


async def bare_calls(name: str, size: int, concurrency: int, seconds: float) -> Measured:
    import grpc

    drive, payload = Drive(seconds), os.urandom(size)
    async with _echo_server() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(ECHO)
        await call(payload, wait_for_ready=True, timeout=START_SECONDS)

        async def turn() -> int:
            await call(payload)
            return 1

        await drive.run(turn, concurrency)
    return Measured(name, drive.messages, drive.seconds, drive.samples, "call", is_baseline=True)


@contextlib.asynccontextmanager
async def _echo_server() -> AsyncIterator[int]:
    """echo.py in a process of its own, as a server is. It ends when its stdin does: it cannot outlive us."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "heapline.cli.bench.echo", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield int(await asyncio.wait_for(process.stdout.readline(), START_SECONDS))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
