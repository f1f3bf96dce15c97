"""Observers of calls: each call is counted once however it ends, even if it ends in another context."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from heapline.contract.errors import HeaplineError, LeaseLost, Unauthenticated
from heapline.contract.leases import Pop
from heapline.engine.metrics_source import TimedDisk
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.gate import Gate, Request
from heapline.server.telemetry.broker_metrics import Rows
from heapline.server.telemetry.logs import CurrentRequest, current_request
from heapline.server.telemetry.metrics import CallCounts
from heapline.server.telemetry.traces import Traces


def reported(counts: CallCounts) -> dict[str, Any]:
    rows = Rows()
    counts.add_to(rows)
    return rows.by_name


async def test_calls_are_counted_by_how_they_end() -> None:
    counts = CallCounts()
    gate = Gate(NoAuthGuard(), [counts])
    for error in (None, LeaseLost([1], "jobs"), RuntimeError("bug"), asyncio.CancelledError()):
        with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
            async with Request(gate, "grpc", "Ack", {}):
                assert reported(counts)["calls_open"]["grpc", "Ack"] == 1
                if error is not None:
                    raise error
    ended = reported(counts)["calls_total"]
    assert ended == {("grpc", "Ack", code): 1 for code in ("OK", "FAILED_PRECONDITION", "INTERNAL", "CANCELLED")}
    assert reported(counts)["calls_open"]["grpc", "Ack"] == 0
    assert sum(reported(counts)["call_duration_ms"]["grpc", "Ack"].counts) == 4


async def test_rejected_caller_is_counted() -> None:
    class Nobody(NoAuthGuard):
        async def authenticate(self, credential: str | None) -> Any:
            raise Unauthenticated("no")

    counts = CallCounts()
    with pytest.raises(HeaplineError):
        async with Request(Gate(Nobody(), [counts]), "http", "Stats", {}):
            pass
    assert reported(counts)["calls_total"] == {("http", "Stats", "UNAUTHENTICATED"): 1, ("http", "Stats", "OK"): 0}
    assert reported(counts)["calls_open"]["http", "Stats"] == 0


async def test_stream_counts_as_open_and_records_no_duration() -> None:
    counts = CallCounts(["PopStream"])
    assert reported(counts)["streams_open"]["grpc", "PopStream"] == 0
    async with Request(Gate(NoAuthGuard(), [counts]), "grpc", "PopStream", {}, is_stream=True):
        assert reported(counts)["streams_open"]["grpc", "PopStream"] == 1
    assert reported(counts)["streams_open"]["grpc", "PopStream"] == 0
    assert "call_duration_ms" not in reported(counts)


async def test_call_that_waited_is_counted_and_its_duration_is_not() -> None:
    counts = CallCounts()
    gate = Gate(NoAuthGuard(), [counts])
    for wait in (0.0, 5.0):
        async with Request(gate, "grpc", "Pop", {}) as request:
            gate.admit(request, Pop("jobs", wait=wait))
    assert reported(counts)["calls_total"]["grpc", "Pop", "OK"] == 2
    assert sum(reported(counts)["call_duration_ms"]["grpc", "Pop"].counts) == 1


async def test_call_ending_in_another_context_is_still_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    request = Request(Gate(NoAuthGuard(), [CurrentRequest(), Traces(provider)]), "http", "Pop", {})
    began = contextvars.copy_context()
    began.run(_begin, request)
    await request.__aexit__(None, None, None)  # here, where it did not begin
    assert [span.name for span in exporter.get_finished_spans()] == ["server Pop"]
    assert began.run(current_request) is None
    assert not trace.get_current_span().get_span_context().is_valid
    assert not caplog.records


def _begin(request: Request) -> None:
    for begin in request.gate.on_begin:
        begin(request)
    assert current_request() is request


def test_timed_disk_counts_each_sync_and_keeps_the_content(tmp_path: Path) -> None:
    disk = TimedDisk()
    path = str(tmp_path / "file")
    file = disk.create(path)
    file.pwritev([b"abc"], 0)
    file.fdatasync()
    file.close()
    disk.write_file_atomic(str(tmp_path / "other"), b"x")
    assert sum(disk.tally().counts) == 2
    again = disk.open(path)
    assert again.pread(10, 0) == b"abc"
    again.close()
