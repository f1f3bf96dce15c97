"""Counts calls: an observer of the front, so that every face is covered. A few dictionary look-ups a call."""

from __future__ import annotations

import asyncio
from time import perf_counter

import grpc

from heapline.engine.latency import Latency
from heapline.errors import HeaplineError
from heapline.server.front import Visit
from heapline.server.observing.readings import Rows
from heapline.wire import codes

STREAMS = frozenset({"EnqueueStream", "PopStream", "ReadLog", "Session"})


class CallCounts:
    """An `Observer`. Series are bounded by the calls that there are: faces, calls and codes are fixed names."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], int] = {}
        self._ended: dict[tuple[str, str, str], int] = {}
        self._durations: dict[tuple[str, str], Latency] = {}

    def begin(self, visit: Visit) -> None:
        place = visit.face, visit.call
        self._open[place] = self._open.get(place, 0) + 1

    def admitted(self, visit: Visit) -> None:
        pass

    def end(self, visit: Visit, error: BaseException | None) -> None:
        place = visit.face, visit.call
        self._open[place] -= 1
        ended = (*place, "OK" if error is None else code_of(error))
        self._ended[ended] = self._ended.get(ended, 0) + 1
        if visit.call not in STREAMS:
            duration = self._durations.get(place)
            if duration is None:
                duration = self._durations[place] = Latency()
            duration.add(perf_counter() - visit.started)

    def add_to(self, rows: Rows) -> None:
        for call in STREAMS:
            rows.add("streams_open", ("grpc", call), 0)  # there before the first one: alerts need something to look at
        for place, count in self._open.items():
            rows.add("calls_open", place, count)
            if place[1] in STREAMS:
                rows.add("streams_open", place, count)
        for labels, count in self._ended.items():
            rows.add("calls_total", labels, count)
        for place, duration in self._durations.items():
            rows.add("call_duration_ms", place, duration.tally())


def code_of(error: BaseException) -> str:
    """gRPC's name for how a call ended, whichever face it came by."""
    if isinstance(error, HeaplineError):
        return codes.codes_of(type(error)).grpc
    if isinstance(error, asyncio.CancelledError | GeneratorExit | grpc.aio.AbortError | asyncio.InvalidStateError):
        return "CANCELLED"
    return "INTERNAL"
