"""Traces of calls: one span for what the face did and, below it, one for what the engine did until it was durable.

`Traces` is an observer of the front. It takes up the caller's W3C context (`traceparent`), whichever face the call came
by, and makes it the current one while the call lasts, so that the engine's spans and the log's lines find it.
A stream may last for days, and a span is only told when it ends: so a stream has no span of its own, and each enqueue
and each pop in it stands below the caller's span directly.

`TracedBroker` is the broker with spans: asked until durable. It is only made when traces are wanted; otherwise there is
not even a test for it. Attributes are names and numbers: topic, partition and id of the first message, how many, the
producer's id. Never a payload, never a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from heapline.core.events import I64
from heapline.core.ids import partition_of
from heapline.engine.calls import Identity
from heapline.engine.embedded import EmbeddedBroker
from heapline.errors import HeaplineError
from heapline.model import Enqueued, LeaseRef, Message, Popped
from heapline.server.front import Visit
from heapline.server.observing.calls import STREAMS, code_of
from heapline.ulid import to_ulid

_PROPAGATOR = TraceContextTextMapPropagator()


def make_provider(endpoint: str, sample: float) -> TracerProvider:
    """Spans go to a collector over HTTP, in batches, from a thread of their own. `sample` is the share of calls that
    are traced among those whose caller has not decided it."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample)), resource=Resource.create({"service.name": "heapline"}),
        shutdown_on_exit=False,
    )  # fmt: skip
    address = endpoint.rstrip("/")
    address = address if address.endswith("/v1/traces") else f"{address}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
    return provider


class Traces:
    """An `Observer`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("heapline.server")

    def begin(self, visit: Visit) -> None:
        context, span = _PROPAGATOR.extract(visit.headers), None
        if visit.call not in STREAMS:
            attributes = {"heapline.face": visit.face, "correlation_id": visit.correlation_id}
            span = self._tracer.start_span(f"server {visit.call}", context, SpanKind.SERVER, attributes)
            context = trace.set_span_in_context(span, context)
        visit.notes[Traces] = span, context, contexts.attach(context)

    def admitted(self, visit: Visit) -> None:
        span = visit.notes[Traces][0]
        if span is not None and visit.topic:  # what a stranger calls a topic is not sent on
            span.set_attribute("topic", visit.topic)

    def end(self, visit: Visit, error: BaseException | None) -> None:
        span, context, token = visit.notes.pop(Traces)
        if contexts.get_current() is context:  # else it was ended elsewhere, by whoever swept up an abandoned answer
            contexts.detach(token)
        if span is not None:
            _tell(span, error)
            span.end()


def _tell(span: trace.Span, error: BaseException | None) -> None:
    """The class of an error and no more: its text may quote what the caller sent."""
    if error is not None:
        span.set_attribute("code", code_of(error))
        span.set_status(Status(StatusCode.ERROR, type(error).__name__ if isinstance(error, HeaplineError) else None))


class TracedBroker(EmbeddedBroker):
    """Passes everything on; see the module."""

    def __init__(self, path: str, *, provider: TracerProvider, **options: Any) -> None:
        super().__init__(path, **options)
        self.provider = provider
        self.tracer: Tracer = provider.get_tracer("heapline.engine")

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.provider.shutdown)  # sends what is left

    @contextmanager
    def _span(self, what: str, topic: str | None, producer_id: str | None = None) -> Any:
        # Nothing is recorded by OpenTelemetry itself: an exception's text may quote a payload.
        with self.tracer.start_as_current_span(
            f"engine {what}", record_exception=False, set_status_on_exception=False
        ) as span:
            if topic is not None:
                span.set_attribute("topic", topic)
            if producer_id is not None:
                span.set_attribute("producer_id", producer_id)
            try:
                yield span
            except BaseException as error:
                _tell(span, error)
                raise

    async def enqueue(self, topic: str, *args: Any, **options: Any) -> Enqueued:
        with self._span("enqueue", topic, _producer(options)) as span:
            result = await super().enqueue(topic, *args, **options)
            _about(span, [result.id])
            return result

    async def enqueue_batch(self, topic: str, *args: Any, **options: Any) -> list[Enqueued]:
        with self._span("enqueue", topic, _producer(options)) as span:
            results = await super().enqueue_batch(topic, *args, **options)
            _about(span, [result.id for result in results])
            return results

    async def enqueue_columns(self, topic: str, *args: Any) -> list[int]:
        with self._span("enqueue", topic) as span:
            ids = await super().enqueue_columns(topic, *args)
            _about(span, ids)
            return ids

    async def enqueue_numbered_columns(
        self, topic: str, payloads: list[bytes], priorities: I64, seqs: list[int], identity: Identity, atomic: bool
    ) -> list[Enqueued] | None:
        with self._span("enqueue", topic, identity.producer_id) as span:
            results = await super().enqueue_numbered_columns(topic, payloads, priorities, seqs, identity, atomic)
            _about(span, [result.id for result in results or ()])
            return results

    async def pop(self, topic: str, *args: Any, **options: Any) -> list[Message]:
        began = time.time_ns()
        messages = await super().pop(topic, *args, **options)
        self._popped(topic, began, [m.id for m in messages])
        return messages

    async def pop_columns(self, topic: str, *args: Any, **options: Any) -> tuple[str, Popped | None]:
        began = time.time_ns()
        name, popped = await super().pop_columns(topic, *args, **options)
        self._popped(topic, began, [] if popped is None else popped.ids)
        return name, popped

    def _popped(self, topic: str, began: int, ids: list[int]) -> None:
        """Told afterwards: an idle stream looks again and again, and that is no news."""
        if ids:
            span = self.tracer.start_span("engine pop", start_time=began, attributes={"topic": topic})
            _about(span, ids)
            span.end()

    async def ack(self, messages: Any) -> None:
        held: list[Message | LeaseRef] = [messages] if isinstance(messages, Message | LeaseRef) else list(messages)
        with self._span("ack", held[0].topic if held else None) as span:
            _about(span, [m.id for m in held])
            await super().ack(messages if isinstance(messages, Message) else held)

    async def ack_columns(self, topic: str, ids: list[int], tokens: list[int]) -> list[int]:
        with self._span("ack", topic) as span:
            _about(span, ids)
            lost = await super().ack_columns(topic, ids, tokens)
            span.set_attribute("lost", len(lost))
            return lost


def _producer(options: dict[str, Any]) -> str | None:
    producer = options.get("producer")
    return options.get("producer_id") or (None if producer is None else producer.producer_id)


def _about(span: trace.Span, ids: Sequence[int]) -> None:
    if span.is_recording():
        span.set_attribute("messages", len(ids))
        if ids:
            span.set_attributes({"message_id": to_ulid(ids[0]), "partition": int(partition_of(ids[0]))})
