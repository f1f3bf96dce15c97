"""A proxy with TLS for clients and plain TCP to a server: the PostgreSQL and Valkey of the wheels have no TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
from pathlib import Path

SSL_REQUEST = struct.pack(">II", 8, 80877103)  # how a PostgreSQL client requests TLS


class TlsProxy:
    """With `is_postgres`, a connection begins with PostgreSQL's request for TLS; one without it is refused."""

    def __init__(self, port: int, certificates: Path, is_postgres: bool = False) -> None:
        self._to, self._is_postgres = port, is_postgres
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        self._links: set[asyncio.Task[None]] = set()
        self.accepted = 0  # connections that completed their handshake

    async def __aenter__(self) -> TlsProxy:
        context = None if self._is_postgres else self._context
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=context)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.ensure_future(self._link(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(
                OSError, asyncio.IncompleteReadError
            ):  # a client that does not trust the certificate, or left
                if self._is_postgres:
                    if await reader.readexactly(len(SSL_REQUEST)) != SSL_REQUEST:
                        return
                    writer.write(b"S")
                    await writer.start_tls(self._context)
                self.accepted += 1
                from_server, to_server = await asyncio.open_connection("127.0.0.1", self._to)
                try:
                    await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))
                finally:
                    to_server.close()
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
