"""The status with which a gRPC call ended, as one of Heapline's errors.

A write just after a stream has ended makes gRPC replace the server's status with an internal error of its own. So the
status of a stream is kept when it first arrives.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from heapline.contract.errors import HeaplineError, UnavailableError
from heapline.wire import error_codes

BROKEN_WRITE = "Internal error from Core"
NOT_CONNECTED = ("failed to connect", "errors resolving")  # how gRPC's text starts if a call was never sent
CHECKS, CHECK_SECONDS = 100, 0.01  # for the status of a stream that broke


class StreamStatus:
    """Keeps the status of one stream."""

    def __init__(self, call: Any) -> None:
        self._status: Any = None
        call.add_done_callback(self._keep)

    def _keep(self, call: Any) -> None:
        code, trailing, details = (_result(f()) for f in (call.code, call.trailing_metadata, call.details))
        if details != BROKEN_WRITE:
            self._status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)

    async def error(self, error: Any) -> HeaplineError:
        """Return the error that ended the stream."""
        if error.details() != BROKEN_WRITE:
            return heapline_error(error)
        for _ in range(CHECKS):
            if self._status is not None:
                return heapline_error(self._status)
            await asyncio.sleep(CHECK_SECONDS)
        return UnavailableError("the stream broke during a write; connect again and retry")


def _result(coroutine: Any) -> Any:
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("gRPC has no status for a call that has ended")


def heapline_error(error: Any) -> HeaplineError:
    """Return the error that the server raised. If it sent no details, return the error class of the status code."""
    code, text = error.code().name, error.details() or ""
    for name, value in error.trailing_metadata() or ():
        if name == error_codes.METADATA:
            return error_codes.from_metadata(value, code, text)
    found = error_codes.of_code(code, text)
    if isinstance(found, UnavailableError) and text.startswith(NOT_CONNECTED):
        found.reached = False
    return found
