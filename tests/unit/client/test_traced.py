"""Spans of the client: around each call, with names and numbers; their context is sent with the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from heapline.client.wrappers.traced import Traced
from heapline.contract.call import HERE, Context
from heapline.contract.columns import pack
from heapline.contract.errors import LeaseLost
from heapline.contract.ids import to_ulid
from heapline.contract.leases import Ack, Extend, Extended, Leased, LeasedMessages, LeaseKeys, Nack, Pop, Settled
from heapline.contract.log import ReadLog
from heapline.contract.message import Enqueued
from heapline.contract.messages import Enqueue, EnqueueBatch, EnqueuedBatch, NewMessages
from heapline.contract.topics import Stats

ID = (123456789 << 22) | (5 << 12) | 3  # of partition 5
IDS = pack([ID, ID + 1])
LEASES = LeaseKeys(IDS, pack([1, 2]))
FIRST = {"message_id": to_ulid(ID, 7), "partition": 5}
NAMED = {"message_id": str(ID), "partition": 5}  # a command has no id suffix


class Inner:
    """Answers each call with the next answer, and records the contexts."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.contexts: list[Context] = []

    async def do(self, command: Any, context: Context) -> Any:
        self.contexts.append(context)
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def stream(self, feed: Any, context: Context) -> AsyncIterator[Any]:
        self.contexts.append(context)
        yield 1


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def leased() -> Leased:
    return Leased("jobs", LeasedMessages(IDS, IDS, [b"a", b"b"], IDS, memoryview(b"\1\1"), IDS, IDS), 7)


@pytest.mark.parametrize(
    ("command", "answer", "attributes"),
    [
        (
            Enqueue("jobs", b"x", producer_id="p", epoch=1, seq=0),
            Enqueued(ID, id_suffix=7),
            {"producer_id": "p", "messages": 1, **FIRST},
        ),
        (EnqueueBatch("jobs", NewMessages([b"x", b"y"])), EnqueuedBatch(IDS, id_suffix=7), {"messages": 2, **FIRST}),
        (EnqueueBatch("jobs", NewMessages([b"x"])), EnqueuedBatch(pack([0])), {"messages": 1}),
        (Pop("jobs", 5), leased(), {"messages": 2, **FIRST}),
        (Pop("jobs", 5), Leased("jobs"), {}),
        (Ack("jobs", LEASES), Settled(), {"messages": 2, **NAMED}),
        (Nack("jobs", LEASES), Settled(), {"messages": 2, **NAMED}),
        (Extend("jobs", LEASES, 5.0), Extended(IDS), {"messages": 2, **NAMED}),
        (Stats("jobs"), None, {}),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_span_has_topic_partition_first_id_count_and_producer(
    spans: InMemorySpanExporter, command: Any, answer: Any, attributes: dict[str, Any]
) -> None:
    assert await Traced(Inner(answer)).do(command) is answer
    (span,) = spans.get_finished_spans()
    assert span.name == f"client {type(command).facts.rpc}"
    assert dict(span.attributes or {}) == {"topic": "jobs", **attributes}


async def test_context_of_the_span_goes_with_the_request(spans: InMemorySpanExporter) -> None:
    inner = Inner(None)
    await Traced(inner).do(Stats("jobs"), Context(deadline=5.0))
    (span,) = spans.get_finished_spans()
    assert span.context is not None
    expected = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{int(span.context.trace_flags):02x}"
    assert inner.contexts == [Context(deadline=5.0, trace=expected)]


async def test_error_ends_the_span_without_its_text(spans: InMemorySpanExporter) -> None:
    with pytest.raises(LeaseLost):
        await Traced(Inner(LeaseLost([1], "secret"))).do(Stats("jobs"))
    (span,) = spans.get_finished_spans()
    assert (span.status.is_ok, span.status.description) == (False, "LeaseLost")


async def test_feed_carries_the_callers_context_and_has_no_span(spans: InMemorySpanExporter) -> None:
    inner = Inner()
    with trace.get_tracer_provider().get_tracer("test").start_as_current_span("outer") as outer:
        assert [item async for item in Traced(inner).stream(ReadLog("jobs"))] == [1]
    found = outer.get_span_context()
    assert inner.contexts[0].trace == f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"
    assert [span.name for span in spans.get_finished_spans()] == ["outer"]


async def test_program_that_does_not_trace_sends_no_context() -> None:
    inner = Inner(None)
    await Traced(inner).do(Stats("jobs"))
    assert [item async for item in Traced(inner).stream(ReadLog("jobs"))] == [1]
    assert inner.contexts == [HERE, HERE]
