"""The HTTP port: uvicorn on this process's event loop, without its signal handlers and logs, and with bounded heads.

Bodies are bounded by the application, once the sender is known. A head is what comes before that, from anyone. It is
bounded in size and time; then the connection is closed. The same bound holds for everything else that is not a body:
the extensions of chunk sizes, and the trailers, which are dropped. uvicorn would add trailers to the headers of a
request that was already judged by its headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 64 << 10
HEAD_SECONDS_MAX = 30.0
KEEP_ALIVE = 75  # seconds that a connection may be idle
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    _bytes = 0  # received since the last part of a body, or the end of a head or a request
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        if self._bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            if self._in_head:
                self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self._head_timer is None:
            self._watch_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _watch_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS_MAX, self.transport.close)

    def _end_head(self) -> None:
        self._in_head, self._bytes = False, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `serve` in server.py handles them


class HttpServer:
    def __init__(self, app: Any, host: str, port: int, stop_grace: float, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._port = host, port
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=max(1, round(stop_grace)),
        )
        if tls is not None:
            config.load()  # uvicorn's own context has neither mTLS nor our minimum version
            config.ssl = tls
        self._server = _QuietServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen, and return the port."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        made = socket.create_server((self._host, self._port), family=family, backlog=2048)
        # create_server leaves the protocol unset. asyncio disables Nagle's algorithm only if it is TCP; with it, an
        # answer in two writes takes 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=made.detach())
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.005)
        port: int = listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
