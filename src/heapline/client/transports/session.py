"""Many calls over one gRPC stream: calls made in one turn of the loop travel together, and so do their answers.

The first call opens the stream; after it breaks, the next call opens another one. If the stream breaks, every call in
flight fails as if its own connection had broken: it is not known whether it was executed. Nothing is repeated here.
gRPC also breaks the stream if a message is larger than the server accepts. That is the error of the largest call only.
A call that is cancelled or out of time is cancelled at the server too.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from heapline.client.transports.grpc_status import StreamStatus
from heapline.client.transports.transport import closed
from heapline.contract.errors import DeadlineExceeded, HeaplineError, ResourceExhausted
from heapline.wire import codec, error_codes
from heapline.wire.descriptors import pb

REQUEST_BYTES = 1 << 20  # of calls in one message, which every server accepts; a larger call goes alone
CALL_BYTES = 256  # of a call besides its body, generously
SLICE_CALLS, SLICE_BYTES = 8, 384 << 10  # answers that are handed out in one turn of the loop


class Session:
    """`timeout` is in seconds, for calls without a deadline."""

    def __init__(self, open_stream: Callable[[], Any], timeout: float | None = None) -> None:
        self._open_stream, self._timeout = open_stream, timeout
        self._line: _Line | None = None
        self._is_closed = False

    async def call(self, command: Any, headers: dict[str, str] | None, until: float | None) -> Any:
        """Run a command and return its result. `until` is its deadline, in the loop's time."""
        if self._is_closed:
            raise closed()
        if self._line is None or self._line.error is not None:
            self._line = _Line(self._open_stream())
        kind = type(command)
        if until is None and self._timeout is not None:
            until = asyncio.get_running_loop().time() + self._timeout
        deadline = asyncio.timeout_at(until)
        try:
            async with deadline:
                body = await self._line.call(kind.facts.id, codec.encode(command), headers, until)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(kind.facts.rpc) from None
        return codec.decode_result(body, kind)

    async def close(self) -> None:
        self._is_closed = True
        if self._line is not None:
            await self._line.close()


class _Line:
    """One stream, until it breaks."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._status = stream, StreamStatus(stream)
        self._number = 0
        # By number: the future and the size. Cancelled ones too: the server answers every call.
        self._in_flight: dict[int, tuple[asyncio.Future[bytes], int]] = {}
        self._queue: deque[Any] = deque()
        self._has_calls = asyncio.Event()
        self.error: HeaplineError | None = None  # why the stream broke
        self._tasks = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())]

    async def call(self, command: int, body: bytes, headers: dict[str, str] | None, until: float | None) -> bytes:
        loop = asyncio.get_running_loop()
        self._number = number = self._number + 1
        future: asyncio.Future[bytes] = loop.create_future()
        self._in_flight[number] = future, len(body)
        left = None if until is None else max(0.0, until - loop.time())
        self._queue.append(pb.SessionCall(number=number, command=command, body=body, headers=headers, timeout=left))
        self._has_calls.set()
        try:
            return await future
        except asyncio.CancelledError:
            if number in self._in_flight:
                self._queue.append(pb.SessionCall(number=number, cancel=True))
                self._has_calls.set()
            raise

    async def _write(self) -> None:
        try:
            while self.error is None:
                await self._has_calls.wait()
                self._has_calls.clear()
                while self._queue and self.error is None:
                    await self._stream.write(pb.SessionRequest(calls=self._next_calls()))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the stream has ended; _read gets the reason

    def _next_calls(self) -> list[Any]:
        calls = [self._queue.popleft()]
        size = len(calls[0].body) + CALL_BYTES
        while self._queue and (size := size + len(self._queue[0].body) + CALL_BYTES) <= REQUEST_BYTES:
            calls.append(self._queue.popleft())
        return calls

    async def _read(self) -> None:
        error: HeaplineError = closed()
        try:
            while (response := await self._stream.read()) is not grpc.aio.EOF:
                await self._hand_out(response.answers)
            error = error_codes.of_code("UNAVAILABLE", "the server ended the session; retry")
        except grpc.aio.AioRpcError as problem:
            error = await self._status.error(problem)
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the channel was closed
        finally:
            self._break(error)

    async def _hand_out(self, answers: Any) -> None:
        """Hand out answers in slices, with a turn of the loop after each.

        The callers of the first slice send their next calls while the last slice is decoded. Otherwise client and
        server would work in turns, never at the same time.
        """
        count = size = 0
        for answer in answers:
            count, size = count + 1, size + len(answer.body)
            future, _ = self._in_flight.pop(answer.number)
            if future.done():
                pass  # its caller has gone; the wrappers above return the leases of a pop
            elif not answer.code:
                future.set_result(answer.body)
            else:
                described = codec.decode(answer.body, dict) if answer.body else {}
                future.set_exception(error_codes.rebuild(described, answer.code))
            if count >= SLICE_CALLS or size >= SLICE_BYTES:
                await asyncio.sleep(0)
                count = size = 0

    def _break(self, error: HeaplineError) -> None:
        """Fail all calls in flight. The error is the stream's: it does not say that a call was not executed."""
        error.repeated = True
        self.error, refused = error, None
        self._has_calls.set()
        if type(error) is ResourceExhausted and error.limit is None and self._in_flight:  # from gRPC, not the server
            refused, _ = max(self._in_flight.values(), key=lambda call: call[1])
            self.error = error_codes.of_code("UNAVAILABLE", f"another call broke the session ({error}); retry")
        for future, _ in self._in_flight.values():
            if not future.done():
                future.set_exception(copy.copy(error if future is refused else self.error))
        self._in_flight.clear()

    async def close(self) -> None:
        self._stream.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        if self.error is None:
            self._break(closed())  # _read was cancelled before it started
        self._stream, self._tasks = None, []  # an error that a caller keeps must not keep the connection
