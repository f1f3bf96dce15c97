"""The minimal durable server of frames, as a baseline: `python -m benchmarks.server.bare_server FILE`.

A frame contains the length of its answer, and bytes that must be durable before it. They are written to one file: a
separate thread writes all waiting bytes together, with one fdatasync. There is no queue, no guard and no parsing.
`FrameClient` is its client.
"""

from __future__ import annotations

import asyncio
import os
import queue
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.drivers.window import run_loop

HEAD = struct.Struct("<III")  # bytes of the body, number of the request, bytes of its answer
ROOM = 64 << 20  # of the file, which is allocated at the start and overwritten cyclically


def frames(buffer: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """Take complete frames off the buffer: number, answer's length, body."""
    at = 0
    while len(buffer) - at >= HEAD.size:
        length, number, answer = HEAD.unpack_from(buffer, at)
        if len(buffer) - at - HEAD.size < length:
            break
        yield number, answer, bytes(buffer[at + HEAD.size : at + HEAD.size + length])
        at += HEAD.size + length
    del buffer[:at]


class Committer:
    """Makes waiting bytes durable, with one write and one fdatasync, while more gathers."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.pwrite(self._fd, bytes(ROOM), 0)
        os.fsync(self._fd)
        self._at = 0
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[bytes, Callable[[], None]]] = []
        self._is_writing = False
        self._units: queue.SimpleQueue[list[tuple[bytes, Callable[[], None]]]] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    def add(self, data: bytes, done: Callable[[], None]) -> None:
        self._waiting.append((data, done))
        if not self._is_writing:
            self._is_writing = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        unit, self._waiting = self._waiting, []
        self._is_writing = bool(unit)
        if unit:
            self._units.put(unit)

    def _write(self) -> None:
        while True:
            unit = self._units.get()
            data = b"".join(data for data, _ in unit)
            if self._at + len(data) > ROOM:
                self._at = 0
            self._at += os.pwrite(self._fd, data, self._at)
            os.fdatasync(self._fd)
            self._loop.call_soon_threadsafe(self._answer, unit)

    def _answer(self, unit: list[tuple[bytes, Callable[[], None]]]) -> None:
        for _, done in unit:
            done()
        self._next()


class FrameServer(asyncio.Protocol):
    def __init__(self, committer: Committer) -> None:
        self._committer, self._buffer = committer, bytearray()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for number, answer, body in frames(self._buffer):
            response = HEAD.pack(answer, number, 0) + bytes(answer)
            self._committer.add(body, lambda response=response: self._transport.write(response))  # type: ignore[misc]


class FrameClient(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = bytearray()
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._number = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for number, _, _ in frames(self._buffer):
            self._calls.pop(number).set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for call in self._calls.values():
            call.set_exception(error or ConnectionError("the bare server closed the connection"))

    async def call(self, body: bytes, answer: int) -> None:
        self._number += 1
        call = self._calls[self._number] = asyncio.get_running_loop().create_future()
        self._transport.write(HEAD.pack(len(body), self._number, answer) + body)
        await call


async def connected(port: int) -> FrameClient:
    _, client = await asyncio.get_running_loop().create_connection(FrameClient, "127.0.0.1", port)
    return client


async def serve(path: str) -> None:
    committer = Committer(path)
    server = await asyncio.get_running_loop().create_server(lambda: FrameServer(committer), "127.0.0.1", 0)
    print(f"serving on port {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    run_loop(serve(sys.argv[1]))
