"""A transport without a socket: a test sees what was written, and decides when it is read and when it breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import heapline.wire.connection as wire_connection
from heapline.wire import codec
from heapline.wire.frames import Hello, ServerFrames, Windows


class FakeTransport:
    def __init__(self, protocol: Any) -> None:
        self.protocol = protocol
        self.written: list[bytes] = []
        self.is_reading = True
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def writelines(self, buffers: Any) -> None:
        self.written += map(bytes, buffers)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def get_extra_info(self, name: str) -> Any:
        return ("192.0.2.1", 7400) if name == "peername" else None

    def taken(self) -> bytes:
        """Return what was written since the last time."""
        data, self.written = b"".join(self.written), []
        return data


class ConnectedClient:
    """A client's connection after the handshake, and the frames of its server, which a test answers by hand."""

    def __init__(self, windows: Windows | None = None) -> None:
        self.server = ServerFrames(windows, waiting_commands=codec.waiting_commands())
        self.connection = wire_connection.ClientConnection("key")
        self.transport = FakeTransport(self.connection)
        self.connection.connection_made(self.transport)
        (hello,) = self.events()
        assert isinstance(hello, Hello)
        self.server.send_welcome()
        self.answer()

    def events(self) -> list[Any]:
        """Return what has reached the server."""
        self.connection.flush()
        return self.server.receive(self.transport.taken())

    def answer(self) -> None:
        """Deliver what the server has sent."""
        while buffers := self.server.take():
            for buffer in buffers:
                self.connection.data_received(bytes(buffer))
