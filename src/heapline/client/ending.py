"""How a stream ended, as gRPC heard it first: a write that comes a moment too late puts an internal error of gRPC's own
in the place of what the server said."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from heapline.errors import HeaplineError, UnavailableError
from heapline.wire import codes

BROKEN_WRITE = "Internal error from Core"
NOT_CONNECTED = ("failed to connect", "errors resolving")  # so begins what gRPC says of a call that never left
LOOKS, LOOK_SECONDS = 100, 0.01  # for the status of a call that broke


class Ending:
    def __init__(self, call: Any) -> None:
        self._heard: Any = None
        call.add_done_callback(self._hear)

    def _hear(self, call: Any) -> None:
        code, trailing, details = (_at_once(f()) for f in (call.code, call.trailing_metadata, call.details))
        if details != BROKEN_WRITE:
            self._heard = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)

    async def error(self, error: Any) -> HeaplineError:
        if error.details() != BROKEN_WRITE:
            return heapline_error(error)
        for _ in range(LOOKS):
            if self._heard is not None:
                return heapline_error(self._heard)
            await asyncio.sleep(LOOK_SECONDS)
        return UnavailableError("the stream broke while something was being sent: connect again and retry")


def _at_once(coroutine: Any) -> Any:
    """What a coroutine returns that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("a call that has ended keeps its status to itself")


def heapline_error(error: Any) -> HeaplineError:
    """The exception that the server raised; without details, what the code says."""
    code, text = error.code().name, error.details() or ""
    for name, value in error.trailing_metadata() or ():
        if name == codes.METADATA:
            return codes.from_metadata(value, code, text)
    told = codes.of_code(code, text)
    if isinstance(told, UnavailableError) and text.startswith(NOT_CONNECTED):
        told.reached = False
    return told
