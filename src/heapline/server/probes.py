"""`/healthz` (the process lives) and `/readyz` (it takes calls) over HTTP; the HTTP face will take their place."""

from __future__ import annotations

import asyncio
import contextlib

REQUEST_SECONDS_MAX = 5.0
_ANSWERS = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}


class Probes:
    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        self._server = await asyncio.start_server(self._answer, host, port, limit=8192)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                head = await reader.readuntil(b"\r\n\r\n")
                status = self._status(head.split(b"\r\n", 1)[0].split(b" "))
                body = _ANSWERS[status].lower() + "\n"
                writer.write(
                    f"HTTP/1.1 {status} {_ANSWERS[status]}\r\nContent-Type: text/plain\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
                )
                await writer.drain()
        writer.close()

    def _status(self, line: list[bytes]) -> int:
        if len(line) != 3 or line[0] not in (b"GET", b"HEAD"):
            return 400
        if line[1] == b"/healthz":
            return 200
        if line[1] == b"/readyz":
            return 503 if self._stopping.is_set() else 200
        return 404
