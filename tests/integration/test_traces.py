"""One trace from the client through the server into the engine, without payloads or secrets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import heapline
from heapline.contract.call import HERE, Context
from heapline.contract.errors import LeaseLost, TopicNotFound
from heapline.contract.message import LeaseRef, Outgoing
from heapline.contract.producer import Producer
from heapline.contract.replays import Replay
from heapline.engine import EmbeddedBroker
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.server import Server
from heapline.server.settings import ServerSettings
from tests.conformance.worlds import UnsyncedDisk
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Requests, Rig, pop_start

SENTINEL = "payload-that-must-stay-inside"


class TracedGrpc(RawGrpc):
    """A client that traces its calls as the SDK does."""

    def __init__(self, target: str, provider: TracerProvider) -> None:
        super().__init__(target)
        self._tracer = provider.get_tracer("client")

    async def do(self, command: Any, context: Context = HERE, /) -> Any:
        with self._tracer.start_as_current_span(
            f"client {type(command).facts.rpc}", record_exception=False, set_status_on_exception=False
        ) as span:
            headers: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(headers)
            self.calls.metadata = tuple(headers.items())
            try:
                return await super().do(command, context)
            except Exception as error:
                span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))
                raise


class TracedRig(Rig):
    provider: TracerProvider

    async def start(self) -> None:
        path, disk = str(self.directory), UnsyncedDisk()
        self.behind = EmbeddedBroker(path, config=self.config, disk=disk, clock=self.clock)
        await self.behind.__aenter__()
        self.server = Server(self.behind, self._guard, self._settings, traces=self.provider)
        await self.server.start()
        self.broker = await TracedGrpc(self.grpc_target, self.provider).__aenter__()  # type: ignore[assignment]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Every span that ends, of client and server: the client uses the program's own provider."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(TracedRig, "provider", provider, raising=False)
    yield exporter
    provider.shutdown()


def chain(spans: InMemorySpanExporter, call: str) -> list[ReadableSpan]:
    """Return the spans of client, server and engine of the last such call; each must be the parent of the next."""
    found = list(spans.get_finished_spans())
    client = [s for s in found if s.name == f"client {call}"][-1]
    server = next(s for s in found if s.name == f"server {call}" and s.parent and s.parent.span_id == _id(client))
    engine = [s for s in found if s.name.startswith("engine ") and s.parent and s.parent.span_id == _id(server)]
    assert {_trace(s) for s in (client, server, *engine)} == {_trace(client)}
    return [client, server, *engine]


def _id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def _trace(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


async def test_spans_of_server_and_engine_carry_topic_partition_first_id_count_and_producer(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with TracedRig(tmp_path) as rig:
        await rig.wire.create_topic("jobs", partitions=3)
        enqueued = await rig.wire.enqueue("jobs", b"x", producer=Producer("billing"))
        first = {"topic": "jobs", "messages": 1, "message_id": enqueued.message_id}
        first["partition"] = (await rig.wire.get("jobs", enqueued.id)).partition
        digits = first | {"message_id": str(enqueued.id), "lost": 0}  # settlements do not contain the topic's id suffix
        _check_attributes(chain(spans, "EnqueueBatch"), first | {"producer_id": "billing"})
        [message] = await rig.wire.pop("jobs")
        _check_attributes(chain(spans, "Pop"), first)
        await message.extend(30)
        _check_attributes(chain(spans, "Extend"), digits)
        await message.nack(backoff=0)
        _check_attributes(chain(spans, "Nack"), digits)
        [message] = await rig.wire.pop("jobs", wait=5.0)
        _check_attributes(chain(spans, "Pop"), first)
        await message.ack()
        _check_attributes(chain(spans, "Ack"), digits)


def _check_attributes(found: list[ReadableSpan], expected: dict[str, Any]) -> None:
    _, server, engine = found
    assert engine.name == server.name.replace("server", "engine")
    assert dict(engine.attributes or {}) == expected
    assert engine.start_time is not None
    assert engine.end_time is not None
    assert engine.end_time > engine.start_time
    server_alone = {"heapline.interface", "correlation_id"}
    assert {name: value for name, value in (server.attributes or {}).items() if name not in server_alone} == expected


async def test_trace_continues_from_the_sdk_over_the_native_wire_into_the_engine(
    tmp_path: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TracedRig(tmp_path) as rig, heapline.connect(rig.target) as client:
        await rig.behind.create_topic("jobs")
        await client.enqueue("jobs", b"x")
        [message] = await client.pop("jobs", wait=5.0)
        await message.ack()
        for call in ("Pop", "Ack"):
            assert len(chain(spans, call)) == 3, "client, server and engine"
        seen: list[str | None] = []
        stream = rig.behind.stream
        monkeypatch.setattr(rig.behind, "stream", lambda feed, given: seen.append(given.trace) or stream(feed, given))
        with TracedRig.provider.get_tracer("program").start_as_current_span("program") as program:
            assert [step async for step in client.stream(Replay("jobs"))]
        of_program = program.get_span_context()  # a feed has no span of its own
        assert [given[:52] for given in seen if given] == [f"00-{of_program.trace_id:032x}-{of_program.span_id:016x}"]


async def test_span_of_a_failed_call_has_its_code_without_its_text(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with TracedRig(tmp_path) as rig:
        with pytest.raises(TopicNotFound):
            await rig.wire.enqueue("nowhere", b"x")
        failed = chain(spans, "Enqueue")
        assert [s.status.status_code for s in failed] == [trace.StatusCode.ERROR] * 3
        assert [s.status.description for s in failed] == ["TopicNotFound"] * 3
        assert [s.events for s in failed] == [()] * 3
        await rig.wire.create_topic("jobs")
        with pytest.raises(LeaseLost):
            await rig.wire.ack([LeaseRef("jobs", 1, 1)])


async def test_spans_contain_no_payload_and_only_known_attributes(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with TracedRig(tmp_path) as rig:
        await rig.wire.create_topic("jobs")
        await rig.wire.enqueue_batch("jobs", [Outgoing(SENTINEL.encode(), headers={"secret": SENTINEL})])
        with pytest.raises(TopicNotFound):
            await rig.wire.enqueue("nowhere", SENTINEL.encode())
        [message] = await rig.wire.pop("jobs")
        await message.ack()
    response = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "engine Pop" in response
    assert SENTINEL not in response
    attributes = {name for span in spans.get_finished_spans() for name in span.attributes or {}}
    assert attributes <= {
        "topic", "partition", "message_id", "messages", "lost", "producer_id", "code", "correlation_id",
        "heapline.interface",
    }  # fmt: skip


async def test_stream_deliveries_are_children_of_the_opening_span(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with TracedRig(tmp_path) as rig:
        await rig.wire.create_topic("jobs")
        await rig.wire.enqueue("jobs", b"x")
        with rig.provider.get_tracer("test").start_as_current_span("worker") as worker:
            headers: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(headers)
            rig.wire.calls.metadata = tuple(headers.items())
            requests = Requests(pop_start(credits=1))
            stream = rig.wire.calls.stream("PopStream", requests)
            await anext(stream)
            requests.end()
            await stream.aclose()  # type: ignore[attr-defined]
        [popped] = [s for s in spans.get_finished_spans() if s.name == "engine Pop"]
        assert popped.parent is not None
        assert popped.parent.span_id == worker.get_span_context().span_id
        assert not [s for s in spans.get_finished_spans() if s.name == "server PopStream"]


async def test_http_call_with_a_traceparent_joins_that_trace(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with TracedRig(tmp_path) as rig, httpx.AsyncClient() as client:
        response = await client.get(
            f"http://127.0.0.1:{rig.server.http_port}/v1/heaps",
            headers={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"},
        )
        assert response.status_code == 200
        [server] = [s for s in spans.get_finished_spans() if s.name == "server ListHeaps"]
        assert f"{_trace(server):032x}" == "ab" * 16


async def test_trace_that_its_caller_does_not_sample_leaves_no_spans(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with TracedRig(tmp_path) as rig, httpx.AsyncClient() as client:
        await client.get(
            f"http://127.0.0.1:{rig.server.http_port}/v1/heaps",
            headers={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-00"},
        )
        assert not [s for s in spans.get_finished_spans() if s.name == "server ListHeaps"]


async def test_spans_are_sent_only_to_a_configured_collector(tmp_path: Path) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        settings = ServerSettings(data=tmp_path / "data", otlp_endpoint=endpoint, trace_sample=1.0)
        settings = msgspec.structs.replace(settings, port=0, grpc_port=0, http_port=0)
        async with EmbeddedBroker(str(tmp_path / "data")) as broker, Server(broker, NoAuthGuard(), settings) as server:
            async with RawGrpc(f"127.0.0.1:{server.grpc_port}") as client:
                await client.create_topic("jobs", segment_bytes=1 << 20)
                await client.enqueue("jobs", b"x")
            assert server.dispatcher.broker is not broker
        collector.shutdown()
    assert received
    assert {path for path, _ in received} == {"/v1/traces"}
    assert b"engine Enqueue" in b"".join(body for _, body in received)
    async with EmbeddedBroker(str(tmp_path / "other")) as broker:
        assert Server(broker, NoAuthGuard(), ServerSettings()).dispatcher.broker is broker
