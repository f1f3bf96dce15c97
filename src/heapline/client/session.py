"""Many calls over one stream: what is asked in one turn of the loop travels together, and so do the answers.

The stream is opened by the first call and again by the first one after it broke. When it breaks, every call that waits
fails as if its own connection had: whether it was carried out is not known. Nothing is retried here.

A call that is given up (cancelled, or out of time) is ended at the server too. Its answer may be on the way by then:
`late` gets it, so that leases which nobody will use can go back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from heapline.client.ending import Ending
from heapline.errors import Closed, DeadlineExceeded, HeaplineError
from heapline.wire import codes
from heapline.wire.schema import pb

REQUEST_BYTES = 1 << 20  # about as many bytes of calls go into one message; a larger one goes alone
SLICE_CALLS, SLICE_BYTES = 8, 384 << 10
Late = Callable[[str, bytes, bytes], None]  # a method, its request, and its answer that nobody waits for


class Session:
    def __init__(self, open_stream: Callable[[], Any], late: Late) -> None:
        self._open_stream, self._late = open_stream, late
        self._line: _Line | None = None
        self._closed = False

    async def call(
        self, method: str, request: bytes, seconds: float | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        if self._closed:
            raise Closed
        if self._line is None or self._line.broken is not None:
            self._line = _Line(self._open_stream(), self._late)
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                return await self._line.call(method, request, headers)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"{method} was not answered within {seconds:g} s: it may have been done") from None

    async def close(self) -> None:
        self._closed = True
        if self._line is not None:
            await self._line.close()


class _Line:
    """One stream while it lasts."""

    def __init__(self, stream: Any, late: Late) -> None:
        self._stream, self._late = stream, late
        self._ending = Ending(stream)
        self._number = 0
        # Calls that were not answered yet, also those given up since: the server answers every call once.
        self._waiting: dict[int, tuple[str, bytes, asyncio.Future[bytes]]] = {}
        self._queue: deque[Any] = deque()
        self._wanted = asyncio.Event()
        self.broken: HeaplineError | None = None
        self._work = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())]

    async def call(self, method: str, request: bytes, headers: dict[str, str] | None) -> bytes:
        self._number = number = self._number + 1
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = method, request, future
        self._send(pb.SessionCall(number=number, method=method, request=request, headers=headers))
        try:
            return await future
        except asyncio.CancelledError:
            if number in self._waiting:
                self._send(pb.SessionCall(number=number, cancel=True))
            elif not future.cancelled() and future.exception() is None:
                # Answered in the very turn in which nobody wanted it any more.
                self._late(method, request, future.result())
            raise

    def _send(self, call: Any) -> None:
        self._queue.append(call)
        self._wanted.set()

    async def _write(self) -> None:
        try:
            while self.broken is None:
                await self._wanted.wait()
                self._wanted.clear()
                while self._queue and self.broken is None:
                    await self._stream.write(pb.SessionRequest(calls=self._take()))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the reader learns why

    def _take(self) -> list[Any]:
        calls, size = [], 0
        while self._queue and size < REQUEST_BYTES:
            calls.append(self._queue.popleft())
            size += len(calls[-1].request)
        return calls

    async def _read(self) -> None:
        error: HeaplineError = Closed()
        try:
            while (response := await self._stream.read()) is not grpc.aio.EOF:
                await self._hand_out(response.answers)
            error = codes.of_code("UNAVAILABLE", "the server ended the session: call again")
        except grpc.aio.AioRpcError as problem:
            error = await self._ending.error(problem)
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the channel was closed
        finally:
            self._break(error)

    async def _hand_out(self, answers: Any) -> None:
        """In slices, with a turn of the loop after each: what the first of them ask next is on its way while the last
        are still being unpacked. Otherwise client and server would work in turns, and never at the same time."""
        count = size = 0
        for answer in answers:
            count, size = count + 1, size + self._answer(answer)
            if count >= SLICE_CALLS or size >= SLICE_BYTES:
                await asyncio.sleep(0)
                count = size = 0

    def _answer(self, answer: Any) -> int:
        """Tell whoever waits; how many bytes the call moved."""
        method, request, future = self._waiting.pop(answer.number)
        if future.cancelled():
            if not answer.code:
                self._late(method, request, answer.response)
        elif answer.code:
            future.set_exception(codes.from_metadata(answer.error, answer.code, answer.text))
        else:
            future.set_result(answer.response)
        return len(request) + len(answer.response)

    def _break(self, error: HeaplineError) -> None:
        self.broken = error
        self._wanted.set()
        for _, _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    async def close(self) -> None:
        self._stream.cancel()
        for task in self._work:
            task.cancel()
        await asyncio.wait(self._work)
        if self.broken is None:
            self._break(Closed())  # the reader was ended before it had begun, and told nobody
        # Whoever keeps an error of ours keeps its frames, and those would keep the connection.
        self._stream, self._work = None, []
