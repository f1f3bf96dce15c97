"""Spans and metrics: an enqueue and its run are in one trace; without a provider nothing is collected."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import heapline
from heapline.client.tasks import tracing
from tests.unit.client.tasks.rig import World, in_world


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    monkeypatch.setattr(metrics, "get_meter", lambda name: provider.get_meter(name))
    monkeypatch.setattr(tracing, "_instruments", {})
    yield reader
    provider.shutdown()


def test_run_is_a_span_in_the_trace_of_its_enqueue(spans: InMemorySpanExporter) -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs", max_retries=0)
        async def note(n: int) -> None:
            world.said.append(trace.get_current_span().get_span_context().trace_id)
            if n == 2:
                raise heapline.Bury("two is too many")

        with trace.get_tracer_provider().get_tracer("test").start_as_current_span("request"):
            await note.enqueue(1)
            await note.enqueue(2)
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.done == 1 and worker.totals.buried == 1)

    in_world(scenario)
    by_name: dict[str, list[Any]] = {}
    for span in spans.get_finished_spans():
        by_name.setdefault(span.name, []).append(span)
    (request,) = by_name["request"]
    assert len(by_name["process note"]) == 2
    for span in by_name["process note"]:
        assert span.parent.span_id == request.context.span_id
        assert span.attributes["messaging.destination.name"] == "jobs"
        assert span.attributes["heapline.attempt"] == 1
    assert {span.status.description for span in by_name["process note"]} == {None, "Bury: two is too many"}


def test_runs_are_measured_by_task_and_outcome(measured: InMemoryMetricReader) -> None:
    async def scenario(world: World) -> None:
        @world.app.task(topic="jobs")
        async def note(n: int) -> None:
            if n:
                raise heapline.Retry(delay=1000)

        await note.enqueue_many([0, 0, 1])
        async with world.worker() as worker:
            await world.until(lambda: worker.totals.done == 2 and worker.totals.retried == 1)

    in_world(scenario)
    data = measured.get_metrics_data()
    assert data is not None
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("heapline.task.duration", "s")
    found = {(p.attributes["task"], p.attributes["outcome"]): p.count for p in metric.data.data_points}  # type: ignore[index, union-attr]
    assert found == {("note", "done"): 2, ("note", "retry"): 1}


def test_nothing_is_collected_and_nothing_loaded_without_a_provider() -> None:
    program = (
        "import sys, heapline; app = heapline.App('./data')\n"
        "from heapline.client.tasks import tracing\n"
        "assert not tracing.is_on() and app.hooks() == []\n"
        "assert not any(name.startswith(('opentelemetry', 'grpc', 'pydantic')) for name in sys.modules)\n"
        "import opentelemetry.trace, opentelemetry.metrics\n"
        "assert not tracing.is_on()\n"
    )
    source = str(Path(heapline.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": source}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
