"""A client of the native wire for tests of the server: it sends frames as a test wants them, and reads when asked."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from typing import Any, Self

from heapline.wire import codec
from heapline.wire.frames import ClientFrames, Error, GoAway, Headers, ProtocolError, Response, Welcome
from heapline.wire.frames.client import WINDOWS

SECONDS = 20.0


class RawNative:
    """`async with RawNative(rig.target) as client:` is a connection after the handshake."""

    def __init__(
        self,
        target: str,
        credential: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        windows: Any = WINDOWS,
    ) -> None:
        self._target, self._tls = target, tls
        self.frames = ClientFrames(credential, client="test", windows=windows)
        self._events: deque[Any] = deque()

    async def connect(self) -> None:
        if self._target.startswith("unix://"):
            path = self._target.removeprefix("unix://")
            self.reader, self.writer = await asyncio.open_unix_connection(path)
            return
        host, _, port = self._target.rpartition(":")
        name = None if self._tls is None else "localhost"
        self.reader, self.writer = await asyncio.open_connection(host, int(port), ssl=self._tls, server_hostname=name)

    async def __aenter__(self) -> Self:
        await self.connect()
        self.flush()
        assert isinstance(await self.event(), Welcome)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    # -- out -------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        while buffers := self.frames.take():
            self.writer.writelines(buffers)

    def send(self, *commands: Any, **headers: Any) -> list[int]:
        """Send requests together, and return their numbers."""
        block = Headers(**headers) if headers else None
        numbers = [self.frames.send_request(type(c).facts.id, codec.encode(c), block) for c in commands]
        self.flush()
        return numbers

    def cancel(self, number: int) -> None:
        self.frames.send_cancel(number)
        self.flush()

    def credit(self, number: int, items: int) -> None:
        self.frames.send_credit(number, items)
        self.flush()

    # -- in --------------------------------------------------------------------------------------------------------

    async def event(self) -> Any:
        """Return the next event; None if the server closed the connection."""
        async with asyncio.timeout(SECONDS):
            while not self._events:
                data = await self.read()
                if not data:
                    return None
                try:
                    self._events += self.frames.receive(data)
                except ProtocolError as violation:
                    raise AssertionError(f"the server violates the protocol: {violation}") from None
        return self._events.popleft()

    async def read(self) -> bytes:
        try:
            return await self.reader.read(1 << 16)
        except ConnectionError:
            return b""

    async def answers(self, *numbers: int) -> list[Any]:
        """Return the answers of requests, in the order of their numbers; other events are dropped."""
        found: dict[int, Any] = {}
        while set(numbers) - set(found):
            event = await self.event()
            assert event is not None, f"the connection ended without answers to {set(numbers) - set(found)}"
            if isinstance(event, Response | Error):
                found[event.request] = event
        return [found[number] for number in numbers]

    async def do(self, command: Any, **headers: Any) -> Any:
        """Make a call, return its result or raise its error."""
        (answer,) = await self.answers(*self.send(command, **headers))
        if isinstance(answer, Error):
            raise answer.error
        return codec.decode_result(answer.body, type(command))

    async def end(self) -> list[Any]:
        """Return the events until the server closes the connection."""
        found = []
        while (event := await self.event()) is not None:
            found.append(event)
        return found


async def refusal(target: str, sent: bytes) -> list[Any]:
    """Return what a server answers to bytes of an unauthenticated client, until it closes the connection."""
    client = RawNative(target)
    await client.connect()
    client.writer.write(sent)
    try:
        return await client.end()
    finally:
        await client.close()


def code_of(event: Any) -> str:
    """Return the code of an ERROR or a GOAWAY."""
    return event.code if isinstance(event, GoAway) else codec.decode(event.body, dict)["code"]
