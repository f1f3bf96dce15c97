"""The least that a durable server on gRPC can do, to measure ours by: `python -m benchmarks.server.bare_server FILE`.

A call says how long its answer is to be, and brings bytes that are to be safe before it. They go into one file, all
that wait together with one fdatasync in a thread. There is no queue, no guard and nothing to parse.
"""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from benchmarks.drivers.window import run_loop

METHOD = "/bare.Bare/Call"
SIZE = 4  # bytes that tell the answer's length
ROOM = 64 << 20  # of the file, which has its blocks from the start and is written round and round


class Bare:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.pwrite(self._fd, bytes(ROOM), 0)
        os.fsync(self._fd)
        self._at = 0
        self._pool = ThreadPoolExecutor(1)
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def call(self, request: bytes, context: Any) -> bytes:
        safe = asyncio.get_running_loop().create_future()
        self._waiting.append((request, safe))
        if self._committing is None:
            self._committing = asyncio.ensure_future(self._commit())
        await safe
        return bytes(int.from_bytes(request[:SIZE], "little"))

    async def _commit(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            taken, self._waiting = self._waiting, []
            await loop.run_in_executor(self._pool, self._write, b"".join(data for data, _ in taken))
            for _, safe in taken:
                if not safe.done():
                    safe.set_result(None)
        self._committing = None

    def _write(self, data: bytes) -> None:
        if self._at + len(data) > ROOM:
            self._at = 0
        self._at += os.pwrite(self._fd, data, self._at)
        os.fdatasync(self._fd)


async def serve(path: str) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.unary_unary_rpc_method_handler(Bare(path).call)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"serving on port {port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    run_loop(serve(sys.argv[1]))
