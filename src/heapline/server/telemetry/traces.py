"""Traces of calls: a span for the server's part and, below it, one for the broker's part until it was durable.

`Traces` observes requests. It continues the caller's W3C context (`traceparent`), whichever interface was used, and
makes it current during the request, so that the broker's spans and the log's lines find it. A stream may last for days
and a span is only exported when it ends. So a stream has no span of its own: each of its commands has a span directly
below the caller's.

`TracedBroker` is a broker that adds spans to another. It exists only if traces are exported. The span of the request
around it receives the same attributes (contract/span_attributes.py).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from heapline.contract.broker import Broker
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.errors import HeaplineError
from heapline.contract.span_attributes import request_attributes, result_attributes
from heapline.server.gate import Observer, Request
from heapline.server.telemetry.metrics import code_of

R = TypeVar("R")
_PROPAGATOR = TraceContextTextMapPropagator()


def make_provider(endpoint: str, sample: float) -> TracerProvider:
    """Return a provider that sends spans to a collector over HTTP, in batches, from its own thread.

    `sample` is the share of calls to trace among those whose caller has not decided.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample)),
        resource=Resource.create({"service.name": "heapline"}),
        shutdown_on_exit=False,
    )
    address = endpoint.rstrip("/")
    address = address if address.endswith("/v1/traces") else f"{address}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
    return provider


class Traces(Observer):
    """Opens a span per request."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("heapline.server")

    def begin(self, request: Request) -> None:
        context, span = _PROPAGATOR.extract(request.headers), None
        if not request.is_stream:
            attributes = {"heapline.interface": request.interface, "correlation_id": request.correlation_id}
            span = self._tracer.start_span(f"server {request.rpc}", context, SpanKind.SERVER, attributes)
            context = trace.set_span_in_context(span, context)
        request.notes[Traces] = span, context, contexts.attach(context)

    def admitted(self, request: Request) -> None:
        span = request.notes[Traces][0]
        if span is not None and request.topic:  # only now: the words of an unauthenticated client are not exported
            span.set_attribute("topic", request.topic)

    def end(self, request: Request, error: BaseException | None) -> None:
        span, context, token = request.notes[Traces]
        if contexts.get_current() is context:  # not if an abandoned request is ended in another context
            contexts.detach(token)
        if span is not None:
            _set_outcome(span, error)
            span.end()


def _set_outcome(span: trace.Span, error: BaseException | None) -> None:
    """Set the code and the class of an error, but not its text, which may quote the request."""
    if error is not None:
        span.set_attribute("code", code_of(error))
        span.set_status(Status(StatusCode.ERROR, type(error).__name__ if isinstance(error, HeaplineError) else None))


class TracedBroker(Broker):
    """Passes every call on to another broker, inside a span."""

    def __init__(self, broker: Broker, provider: TracerProvider) -> None:
        self._broker = broker
        self._tracer = provider.get_tracer("heapline.engine")

    async def do(self, command: Command[R], context: Context = HERE, /) -> R:
        facts, request_span = type(command).facts, trace.get_current_span()
        if facts.waits:
            began = time.time_ns()
            result = await self._broker.do(command, context)
            if "message_id" in result_attributes(result):  # afterwards, because an idle stream pops again and again
                span = self._tracer.start_span(f"engine {facts.rpc}", start_time=began)
                _describe((span, request_span), command, result)
                span.end()
            return result
        # OpenTelemetry must not record the exception itself: its text may quote a payload.
        with self._tracer.start_as_current_span(
            f"engine {facts.rpc}", record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                result = await self._broker.do(command, context)
            except BaseException as error:
                _describe((span, request_span), command, None)
                _set_outcome(span, error)
                raise
            if span.is_recording():
                _describe((span, request_span), command, result)
            return result

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        return self._broker.stream(feed, context)

    async def close(self) -> None:
        await self._broker.close()


def _describe(spans: tuple[trace.Span, trace.Span], command: Any, result: Any) -> None:
    attributes = request_attributes(command) | result_attributes(result)
    lost = getattr(result, "lost", None)
    if lost is not None:
        attributes["lost"] = len(lost)
    for span in spans:
        span.set_attributes(attributes)
