"""Spans and metrics of handlers through OpenTelemetry, if the program has set it up.

OpenTelemetry is not imported here: a program that has set a provider has imported it, so its absence from `sys.modules`
means that there is none. The trace of the producer travels in the message's headers (W3C trace context).
"""

from __future__ import annotations

import sys
import time
from typing import Any

from heapline.client.tasks.outcomes import Retry, reason_of
from heapline.client.tasks.task import Call, Next, Sending

_NAME = "heapline.tasks"
_instruments: dict[str, Any] = {}


def is_on() -> bool:
    """Whether this process collects traces or metrics."""
    return _traces() or _metrics()


def _traces() -> bool:
    trace = sys.modules.get("opentelemetry.trace")
    return trace is not None and _collects(trace.get_tracer_provider())


def _metrics() -> bool:
    metrics = sys.modules.get("opentelemetry.metrics")
    return metrics is not None and _collects(metrics.get_meter_provider())


def _collects(provider: Any) -> bool:
    """Whether a provider was set. Until then, OpenTelemetry has placeholders that do nothing."""
    return not type(provider).__name__.lstrip("_").startswith(("Proxy", "NoOp"))


def inject(sending: Sending) -> None:
    """Put the current trace context into the headers."""
    if _traces():
        from opentelemetry import propagate

        propagate.inject(sending.headers)


async def observe(call: Call, following: Next) -> Any:
    """Built-in middleware: a span and a duration for each run."""
    started = time.perf_counter()
    outcome = "done"
    try:
        if _traces():
            return await _in_span(call, following)
        return await following(call)
    except BaseException as error:
        outcome = "retry" if isinstance(error, Retry) else type(error).__qualname__
        raise
    finally:
        if _metrics():
            labels = {"topic": call.task.topic, "task": call.task.name, "outcome": outcome}
            _durations().record(time.perf_counter() - started, labels)


async def _in_span(call: Call, following: Next) -> Any:
    from opentelemetry import propagate, trace

    message = call.message
    attributes: dict[str, Any] = {
        "messaging.system": "heapline",
        "messaging.operation.type": "process",
        "messaging.destination.name": message.topic,
        "messaging.message.id": message.message_id,
        "heapline.task": call.task.name,
        "heapline.attempt": message.attempts,
    }
    with trace.get_tracer(_NAME).start_as_current_span(
        f"process {call.task.name}",
        propagate.extract(message.headers),
        trace.SpanKind.CONSUMER,
        attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            return await following(call)
        except BaseException as error:
            span.set_status(trace.StatusCode.ERROR, reason_of(error))
            raise


def _durations() -> Any:
    if "durations" not in _instruments:
        from opentelemetry import metrics

        _instruments["durations"] = metrics.get_meter(_NAME).create_histogram(
            "heapline.task.duration", unit="s", description="How long a handler ran, by task and outcome"
        )
    return _instruments["durations"]
