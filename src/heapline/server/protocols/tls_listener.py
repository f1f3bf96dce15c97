"""Accepts TLS connections of the native interface, each of which counts from the time it is accepted.

The event loop's own TLS server creates a connection's protocol with its address only after the handshake, so handshakes
that never end would not be counted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks

log = Log("heapline.server")
ACCEPT_PAUSE = 1.0  # seconds after an accept has failed, usually because no file descriptor is left
BACKLOG = 2048


class PendingClient:
    """A connection that is not authenticated. `until` is when it is closed, in the loop's time."""

    def __init__(self, counts: Counter[str], address: str, until: float) -> None:
        counts[address] += 1
        self.until = until
        self._counts, self._address = counts, address
        self._is_counted = True

    def leave(self) -> None:
        """Stop counting it."""
        if self._is_counted:
            self._is_counted = False
            self._counts[self._address] -= 1
            if not self._counts[self._address]:
                del self._counts[self._address]


class TlsListener:
    """`admit` counts a connection from an address, or returns None if it is one too many."""

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLContext,
        admit: Callable[[str], PendingClient | None],
        make: Callable[[PendingClient], asyncio.Protocol],
    ) -> None:
        self.sockets = (sock,)
        self._tls, self._admit, self._make = tls, admit, make
        self._loop = asyncio.get_running_loop()
        self._handshakes = OwnedTasks()
        self._accepting = self._loop.create_task(self._accept(sock))
        self._accepting.add_done_callback(lambda _: sock.close())

    @classmethod
    def listen(
        cls,
        host: str,
        port: int,
        tls: ssl.SSLContext,
        admit: Callable[[str], PendingClient | None],
        make: Callable[[PendingClient], asyncio.Protocol],
    ) -> TlsListener:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
        sock.setblocking(False)
        return cls(sock, tls, admit, make)

    def close(self) -> None:
        """Accept no more connections."""
        self._accepting.cancel()

    async def end_handshakes(self) -> None:
        await self._handshakes.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, peer = await self._loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot accept a connection; will retry", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            pending = self._admit(peer[0])
            if pending is None:
                sock.close()
            else:
                self._handshakes.spawn(self._handshake(sock, pending))

    async def _handshake(self, sock: socket.socket, pending: PendingClient) -> None:
        left = max(0.001, pending.until - self._loop.time())
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(pending), sock, ssl=self._tls, ssl_handshake_timeout=left
            )
        except OSError:  # the peer failed the handshake or was too slow, and the connection is closed
            pending.leave()
        except Exception as error:
            pending.leave()
            log.exception("a TLS handshake failed", error)
