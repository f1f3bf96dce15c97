"""Count requests on every interface. Costs a few dictionary lookups per request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import perf_counter

import grpc

from heapline.contract.errors import HeaplineError
from heapline.core.latency import Latency
from heapline.server.gate import Observer, Request
from heapline.server.telemetry.broker_metrics import Rows
from heapline.wire import error_codes


class _Counts:
    """The requests of one call on one interface."""

    __slots__ = ("duration", "ended", "open")

    def __init__(self) -> None:
        self.open = 0
        self.ended: dict[str, int] = {"OK": 0}  # by code
        self.duration: Latency | None = None  # of those that neither wait nor stream


class CallCounts(Observer):
    """The number of series is bounded: interfaces, calls and codes have fixed names."""

    def __init__(self, streams: Iterable[str] = ()) -> None:
        self._counts: dict[tuple[str, str], _Counts] = {}
        self._streams = set(streams)  # shown with 0 before the first one opens, because alerts need a series

    def begin(self, request: Request) -> None:
        name = request.interface, request.rpc
        counts = self._counts.get(name)
        if counts is None:
            counts = self._counts[name] = _Counts()
        counts.open += 1
        if request.is_stream:
            self._streams.add(request.rpc)
        request.notes[CallCounts] = counts

    def end(self, request: Request, error: BaseException | None) -> None:
        counts: _Counts = request.notes[CallCounts]
        counts.open -= 1
        if error is None:
            counts.ended["OK"] += 1
        else:
            code = code_of(error)
            counts.ended[code] = counts.ended.get(code, 0) + 1
        if not request.is_stream and not request.waits:  # how long those take depends on others
            if counts.duration is None:
                counts.duration = Latency()
            counts.duration.add(perf_counter() - request.started)

    def add_to(self, rows: Rows) -> None:
        for rpc in self._streams:
            rows.add("streams_open", ("grpc", rpc), 0)
        for (interface, rpc), counts in self._counts.items():
            rows.add("calls_open", (interface, rpc), counts.open)
            if rpc in self._streams:
                rows.add("streams_open", (interface, rpc), counts.open)
            if counts.duration is not None:
                rows.add("call_duration_ms", (interface, rpc), counts.duration.tally())
            for code, count in counts.ended.items():
                rows.add("calls_total", (interface, rpc, code), count)


def code_of(error: BaseException) -> str:
    """Return gRPC's name for how a call ended, whichever interface it used."""
    if isinstance(error, HeaplineError):
        return error_codes.codes_of(type(error)).grpc
    if isinstance(error, asyncio.CancelledError | GeneratorExit | grpc.aio.AbortError | asyncio.InvalidStateError):
        return "CANCELLED"
    return "INTERNAL"
