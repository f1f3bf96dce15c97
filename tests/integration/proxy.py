"""A TCP proxy between a client and a server that misbehaves on request: it stalls, cuts, or cuts in mid-frame.

Bytes are passed on as they arrive. `cut()` ends all connections immediately, with a reset; `cut_after(n)` passes n more
bytes of the responses and then cuts, wherever in a frame that is; `stall()` stops reading from the server, so
that its responses back up as if the client did not read, until `flow()`; `hold()` reads the responses
and keeps them; `vanish()` drops everything in both directions without closing anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

CHUNK = 1 << 14
CONTROL = {4, 6, 8}  # types of HTTP/2 frames that answer no call: SETTINGS, PING, WINDOW_UPDATE


def _answers_nothing(data: bytes) -> bool:
    """Return whether these are only control frames of HTTP/2, which gRPC sends at any time."""
    while len(data) >= 9 and data[3] in CONTROL:
        data = data[9 + int.from_bytes(data[:3], "big") :]
    return not data


class Proxy:
    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._to = host, int(port)
        self._links: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._held = asyncio.Event()
        self._held.set()
        self._left: int | None = None  # bytes of responses until the cut
        self._vanished = False
        self.answered = 0  # bytes that were sent to the client
        self.taken = asyncio.Event()  # something is being kept from the client

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cut, and refuse connections from now on."""
        self._server.close()
        self.cut()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def reopen(self) -> None:
        """Accept connections again, on the same port."""
        host, _, port = self.target.rpartition(":")
        self._server = await asyncio.start_server(self._connected, host, int(port))

    @property
    def connections(self) -> int:
        return len(self._writers) // 2

    def cut(self) -> None:
        """Both sides see a reset: buffered bytes are lost."""
        for writer in list(self._writers):
            plug = writer.get_extra_info("socket")
            if plug.fileno() >= 0:  # otherwise it is closed already
                plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        for link in self._links:
            link.cancel()
        self._left = None
        self.flow()

    def cut_after(self, answered: int) -> None:
        self._left = answered

    def stall(self) -> None:
        self._flowing.clear()

    def hold(self) -> None:
        self.taken.clear()
        self._held.clear()

    def vanish(self) -> None:
        self._vanished = True

    def flow(self) -> None:
        self._flowing.set()
        self._held.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_server = await asyncio.open_connection(*self._to)
        self._writers |= {writer, to_server}
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._questions(reader, to_server), self._answers(there, writer)):
                    link = group.create_task(work)
                    self._links.add(link)
                    link.add_done_callback(self._links.discard)
        finally:
            self._writers -= {writer, to_server}
            for side in (writer, to_server):
                side.transport.abort()

    async def _questions(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if not self._vanished:
                    writer.write(data)
                    await writer.drain()
            writer.write_eof()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                await self._flowing.wait()
                if not (data := await reader.read(CHUNK)):
                    break
                if self._vanished:
                    continue
                if not self._held.is_set():
                    while _answers_nothing(data) and (more := await reader.read(CHUNK)):
                        data += more
                    self.taken.set()
                    await self._held.wait()
                if self._left is not None:
                    data, self._left = data[: self._left], self._left - len(data)
                writer.write(data)
                await writer.drain()
                self.answered += len(data)
                if self._left is not None and self._left <= 0:
                    break  # the client gets what was passed on, and then the end
            self._left = None
            self._end()

    def _end(self) -> None:
        for side in list(self._writers):
            side.close()
