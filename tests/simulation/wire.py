"""A native connection in virtual time: the two sides of `wire/frames`, and a faulty pipe between them.

The pipe splits sent bytes anywhere, delays them and is cut, but keeps the order, as TCP does. A broker behind such
connections is used like any other; a cut raises ConnectionResetError in every call in progress, whose outcome is then
not known. The next call connects again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from heapline.contract.broker import Broker
from heapline.contract.call import CALLS, HERE, Command, Context, Feed
from heapline.contract.config import BrokerConfig
from heapline.contract.errors import HeaplineError
from heapline.contract.topics import ListTopics
from heapline.wire import codec
from heapline.wire.frames import (
    Cancel,
    ClientFrames,
    Credit,
    End,
    Error,
    Hello,
    Request,
    Response,
    ServerFrames,
    Welcome,
    Windows,
)
from tests.simulation.node import Node
from tests.unit.wire.frames.connection import ZLIB

WINDOWS = Windows(calls=2, waiting=2, bodies=2)  # small enough that calls wait for them
PIECES = (1, 11, 13, 500, 8192, 1 << 16, 1 << 18)
CUT = 0.005  # probability that a piece is the last one
STALL = 0.001  # and probability that one is late by seconds
CREDITS = 3


class Side:
    """One side of a connection, and the pipe that leaves it. `receive` handles an event of the other side's frames."""

    def __init__(self, wire: Wire, frames: ClientFrames | ServerFrames, handle: Callable[[Any], None]) -> None:
        self._wire, self._handle = wire, handle
        self.frames = frames
        self.other: Side
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[bytes] = deque()
        self._at = 0.0  # when the last piece arrives

    def flush(self) -> None:
        while not self._wire.is_cut and (buffers := self.frames.take()):
            data = b"".join(buffers)
            while data:
                self._send(data[: (size := self._wire.rng.choice(PIECES))])
                data = data[size:]

    def _send(self, piece: bytes) -> None:
        rng = self._wire.rng
        late = rng.uniform(0, 10) if rng.random() < STALL and self._wire.is_faulty() else rng.expovariate(2000)
        self._at = max(self._at, self._loop.time() + late)
        self._pieces.append(piece)
        self._loop.call_at(self._at, self._arrive)

    def _arrive(self) -> None:
        wire = self._wire
        if wire.is_cut:
            return
        wire.counts["pieces"] += 1
        if wire.is_faulty() and wire.rng.random() < CUT:
            wire.cut("cuts")
            return
        for event in self.other.frames.receive(self._pieces.popleft()):
            wire.counts[type(event).__name__] += 1
            self.other._handle(event)
        self.other.flush()

    def tick(self) -> None:
        if not self._wire.is_cut:
            at = self.frames.tick(self._loop.time())
            self.flush()
            self._loop.call_at(at, self.tick)


class Wire:
    """One connection to a broker. Commands and feeds of several callers share it."""

    def __init__(self, behind: Broker, rng: random.Random, is_faulty: Callable[[], bool], counts: Counter[str]) -> None:
        self._behind, self.rng, self.is_faulty, self.counts = behind, rng, is_faulty, counts
        self._loop = asyncio.get_running_loop()
        self.is_cut = False
        server = ServerFrames(WINDOWS, waiting_commands=codec.waiting_commands(), compressions=ZLIB)
        self._client = Side(self, ClientFrames("key", compressions=ZLIB), self._on_answer)
        self._server = Side(self, server, self._on_request)
        self._client.other, self._server.other = self._server, self._client
        self._answers: dict[int, asyncio.Queue[Any]] = {}  # to the client; None if the connection ended
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of the server
        self._news = asyncio.Event()  # the client has space again, or the connection ended
        self._credit = asyncio.Event()
        self._client.tick()
        self._server.tick()

    def cut(self, why: str) -> None:
        """End the connection. The server cancels its calls; the client does not know their outcome."""
        self.is_cut = True
        self.counts[why] += 1
        for task in self._tasks.values():
            task.cancel()
        for answers in self._answers.values():
            answers.put_nowait(None)
        self._news.set()

    # -- the client's side -----------------------------------------------------------------------------------------

    async def items(self, call: Any) -> AsyncGenerator[Any, None]:
        """Send a request. Yield the items of a feed, or the result of a command."""
        frames, kind = self._client.frames, type(call)
        assert isinstance(frames, ClientFrames)
        body = codec.encode(call)
        while not self.is_cut and (frames.welcome is None or not frames.has_room(kind.facts.id, len(body))):
            self.counts["waits"] += 1
            self._news.clear()
            await self._news.wait()
        if self.is_cut:
            raise ConnectionResetError("the connection was cut before the call was sent")
        number = frames.send_request(kind.facts.id, body, compress=True)
        answers = self._answers[number] = asyncio.Queue()
        if issubclass(kind, Feed):
            frames.send_credit(number, CREDITS)
        self._client.flush()
        try:
            while not isinstance(event := await answers.get(), End):
                if event is None:
                    raise ConnectionResetError("the connection was cut")
                if isinstance(event, Error):
                    raise event.error
                yield codec.decode_result(event.body, kind)
                if isinstance(event, Response):
                    return
                if not self.is_cut:
                    frames.send_credit(number, 1)
                    self._client.flush()
        finally:
            if self._answers.pop(number, None) is not None and not self.is_cut and frames.is_open(number):
                self.counts["cancels"] += 1
                frames.send_cancel(number)
                self._client.flush()

    def _on_answer(self, event: Any) -> None:
        if not isinstance(event, Welcome) and event.request in self._answers:  # otherwise its caller is gone
            self._answers[event.request].put_nowait(event)
        self._news.set()

    # -- the server's side -----------------------------------------------------------------------------------------

    def _on_request(self, event: Any) -> None:
        match event:
            case Hello():
                self._server.frames.send_welcome()  # type: ignore[union-attr]
            case Request():
                self._tasks[event.request] = self._loop.create_task(self._serve(event), name=f"call-{event.request}")
            case Cancel(number):
                self._tasks[number].cancel()
            case Credit():
                self._credit.set()

    async def _serve(self, request: Request) -> None:
        frames, number = self._server.frames, request.request
        assert isinstance(frames, ServerFrames)
        answer: Callable[[], None] = partial(frames.send_end, number)
        try:
            call = codec.decode_call(bytes(request.body), CALLS[request.command])
            if isinstance(call, Feed):
                async for item in self._behind.stream(call):
                    while not frames.credits(number):
                        self._credit.clear()
                        await self._credit.wait()
                    frames.send_item(number, codec.encode_result(item), compress=True)
                    self._server.flush()
            else:
                body = codec.encode_result(await self._behind.do(call))
                answer = partial(frames.send_response, number, body, compress=True)
        except asyncio.CancelledError:
            answer = partial(frames.send_error, number, codec.encode_failure("CANCELLED", "cancelled"))
        except HeaplineError as error:
            answer = partial(frames.send_error, number, codec.encode_error(error))
        except OSError:  # the disk failed: the client must not treat the call as refused
            self.cut("failures")
        del self._tasks[number]
        if not self.is_cut:
            answer()
            self._server.flush()


class WireBroker(Broker):
    """A broker behind connections, the current one of which may be cut at any time."""

    def __init__(self, behind: Broker, make: Callable[[], Wire]) -> None:
        self.behind, self._make = behind, make
        self._wire: Wire | None = None

    def _connected(self) -> Wire:
        if self._wire is None or self._wire.is_cut:
            self._wire = self._make()
        return self._wire

    async def do(self, command: Command[Any], context: Context = HERE, /) -> Any:
        while True:
            try:
                async with aclosing(self._connected().items(command)) as results:
                    return await anext(results)
            except ConnectionResetError:
                if not isinstance(command, ListTopics):  # which a client calls outside its history
                    raise

    def stream(self, feed: Feed[Any], context: Context = HERE, /) -> AsyncGenerator[Any, None]:
        return self._connected().items(feed)

    async def close(self) -> None:
        if self._wire is not None and not self._wire.is_cut:
            self._wire.cut("closed")
        await self.behind.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)  # methods outside the contract


class WiredNode(Node):
    """A node that clients reach over native connections, which fail while `is_faulty`."""

    def __init__(self, seed: int, config: BrokerConfig) -> None:
        super().__init__(seed, config)
        self.counts: Counter[str] = Counter()
        self._pipes = random.Random(f"pipes {seed}")
        self._front: WireBroker | None = None

    @property
    def hl(self) -> Any:
        behind = super().hl
        if self._front is None or self._front.behind is not behind:
            make = partial(Wire, behind, self._pipes, lambda: self.is_faulty, self.counts)
            self._front = WireBroker(behind, make)
        return self._front
