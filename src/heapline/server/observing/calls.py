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

STREAMS = frozenset({"EnqueueStream", "PopStream", "ReadLog", "ReadUnits", "PinState", "Replay", "Session"})


class _Counts:
    """Of one call on one face."""

    __slots__ = ("duration", "ended", "open")

    def __init__(self) -> None:
        self.open = 0
        self.ended: dict[str, int] = {"OK": 0}  # by code
        self.duration: Latency | None = None  # None: a stream's length is no measure of anything


class CallCounts:
    """An `Observer`. Series are bounded by the calls that there are: faces, calls and codes are fixed names."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], _Counts] = {}

    def begin(self, visit: Visit) -> None:
        place = visit.face, visit.call
        counts = self._places.get(place)
        if counts is None:
            counts = self._places[place] = _Counts()
            counts.duration = None if visit.call in STREAMS else Latency()
        counts.open += 1
        visit.notes[CallCounts] = counts

    def admitted(self, visit: Visit) -> None:
        pass

    def end(self, visit: Visit, error: BaseException | None) -> None:
        counts: _Counts = visit.notes[CallCounts]
        counts.open -= 1
        if error is None:
            counts.ended["OK"] += 1
        else:
            code = code_of(error)
            counts.ended[code] = counts.ended.get(code, 0) + 1
        if counts.duration is not None:
            counts.duration.add(perf_counter() - visit.started)

    def add_to(self, rows: Rows) -> None:
        for call in STREAMS:
            rows.add("streams_open", ("grpc", call), 0)  # there before the first one: alerts need something to look at
        for (face, call), counts in self._places.items():
            rows.add("calls_open", (face, call), counts.open)
            if counts.duration is None:
                rows.add("streams_open", (face, call), counts.open)
            else:
                rows.add("call_duration_ms", (face, call), counts.duration.tally())
            for code, count in counts.ended.items():
                rows.add("calls_total", (face, call, code), count)


def code_of(error: BaseException) -> str:
    """gRPC's name for how a call ended, whichever face it came by."""
    if isinstance(error, HeaplineError):
        return codes.codes_of(type(error)).grpc
    if isinstance(error, asyncio.CancelledError | GeneratorExit | grpc.aio.AbortError | asyncio.InvalidStateError):
        return "CANCELLED"
    return "INTERNAL"
