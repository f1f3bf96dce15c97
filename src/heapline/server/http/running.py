"""The HTTP application on a port of this process's own event loop: uvicorn, without its signals and its logs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn

from heapline.server.http.protocol import BoundedProtocol

KEEP_ALIVE = 75  # seconds that a connection may idle


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # app.serve has them


class HttpFace:
    def __init__(
        self, app: Any, host: str, port: int, stop_grace: float, tls: ssl.SSLContext | None = None
    ) -> None:  # fmt: skip
        self._host, self._port = host, port
        config = uvicorn.Config(
            app, http=BoundedProtocol, lifespan="off", log_config=None, access_log=False, server_header=False,
            date_header=False, timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=max(1, round(stop_grace)),
        )  # fmt: skip
        if tls is not None:
            config.load()  # it would make a context of its own, which knows neither mTLS nor our least version
            config.ssl = tls
        self._server = _Quiet(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Returns the port."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        made = socket.create_server((self._host, self._port), family=family, backlog=2048)
        # Named as TCP, which create_server leaves open: asyncio turns Nagle's waiting off only where it sees that, and
        # an answer in two writes would take 40 ms.
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
