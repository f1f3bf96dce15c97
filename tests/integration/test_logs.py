"""The log of a server: one JSON object per line, with the ids of its call, and never a payload."""

from __future__ import annotations

import contextvars
import io
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from heapline.contract.errors import HeaplineError
from heapline.contract.message import LeaseRef, Outgoing
from heapline.server.telemetry.logs import configure
from heapline.wire.descriptors import METHODS, pb
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_process import Process
from tests.integration.server_rig import Rig

PAYLOAD = b"sentinel-payload-7d1f"
HEADER = "sentinel-header-41c8"
WRONG_KEY = "hl_00112233aabbccdd_sentinelkey" + "x" * 32


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure("json", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def call(rig: Rig, method: str, request: Any, *metadata: tuple[str, str]) -> Any:
    async with grpc.aio.insecure_channel(rig.grpc_target) as channel:
        m = METHODS[method]
        stub = channel.unary_unary(
            m.path, request_serializer=m.request.SerializeToString, response_deserializer=m.response.FromString
        )
        under_way = stub(request, metadata=metadata)
        with suppress(grpc.aio.AioRpcError):
            await under_way
        return under_way


async def test_failure_is_logged_with_the_callers_correlation_id(
    tmp_path: Path, written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(tmp_path) as rig:

        async def fail(*_: Any) -> None:
            raise RuntimeError("a bug, near Bearer abc.def and " + WRONG_KEY)

        monkeypatch.setattr(rig.behind, "do", fail)
        done = await call(rig, "ListHeaps", pb.ListHeapsRequest(), ("x-correlation-id", "order-77"))
        assert dict(await done.trailing_metadata())["x-correlation-id"] == "order-77"
        assert "bug" not in (await done.details())
        async with httpx.AsyncClient() as client:
            reported = await client.get(
                f"http://127.0.0.1:{rig.server.http_port}/v1/heaps", headers={"x-correlation-id": "order-78"}
            )
        assert (reported.status_code, reported.headers["x-correlation-id"]) == (500, "order-78")
    failures = [line for line in lines(written.getvalue()) if line["level"] == "error"]
    assert [line["correlation_id"] for line in failures] == ["order-77", "order-78"]
    assert [line["event"] for line in failures] == ["call failed", "request failed"]
    for line in failures:
        assert "RuntimeError" in line["exception"]
        assert "sentinelkey" not in line["exception"]
        assert "abc.def" not in line["exception"]
        assert {"time", "logger", "facts"} <= set(line)


async def test_correlation_id_is_returned_by_accepted_and_rejected_calls(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        good = await call(rig, "ListHeaps", pb.ListHeapsRequest(), ("x-correlation-id", "a-1"))
        assert dict(await good.trailing_metadata())["x-correlation-id"] == "a-1"
        refused = await call(rig, "Stats", pb.StatsRequest(topic="nowhere"), ("x-correlation-id", "a-2"))
        assert dict(await refused.trailing_metadata())["x-correlation-id"] == "a-2"
        unnamed = await call(rig, "Stats", pb.StatsRequest(topic="nowhere"))
        assert len(dict(await unnamed.trailing_metadata())["x-correlation-id"]) > 8
        unfit = await call(rig, "Stats", pb.StatsRequest(topic="nowhere"), ("x-correlation-id", "{forged: line}"))
        assert "forged" not in dict(await unfit.trailing_metadata())["x-correlation-id"]


async def test_background_log_lines_carry_no_correlation_id(
    tmp_path: Path, written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[contextvars.Context] = []
    server, engine = logging.getLogger("heapline.server"), logging.getLogger("heapline.engine")
    async with Rig(tmp_path) as rig:

        async def create(*_: Any) -> None:
            server.warning("of the call itself")
            engine.warning("of the engine meanwhile")
            contexts.append(contextvars.copy_context())  # like a task that it starts

        monkeypatch.setattr(rig.behind, "do", create)
        await call(rig, "MakeHeap", pb.MakeHeapRequest(topic="jobs"), ("x-correlation-id", "maker"))
        contexts[0].run(server.warning, "of a task that the call abandoned")
    reported = {line["event"]: line.get("correlation_id") for line in lines(written.getvalue())}
    assert reported["of the call itself"] == "maker"
    assert reported["of the engine meanwhile"] is None
    assert reported["of a task that the call abandoned"] is None


def test_lines_of_other_libraries_are_json_too_and_cannot_forge_lines(written: io.StringIO) -> None:
    logging.getLogger("uvicorn.error").warning('Invalid "request"\n{"level": "info"} %s', {1: 2})
    logging.getLogger("grpc._cython").error("hl_0011223344556677_" + "a" * 43)
    first, second = lines(written.getvalue())
    assert (first["logger"], first["level"]) == ("uvicorn.error", "warning")
    assert "\n" in first["event"]
    assert second["event"] == "hl_0011223344556677_[…]"


@pytest.mark.slow
async def test_server_output_contains_no_payload_or_secret(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with Process(data) as server:
        admin_key = (data / "admin.key").read_text().strip()
        async with RawGrpc(server.grpc_target, credential=WRONG_KEY) as stranger:
            for attempt in (stranger.list_topics(), stranger.enqueue("jobs", PAYLOAD)):
                with pytest.raises(HeaplineError):
                    await attempt
        async with RawGrpc(server.grpc_target, credential=f"Bearer {admin_key}") as broker:
            await broker.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=1000, max_retries_default=1)
            await use_everything(broker)
        server.process.terminate()
        out, _ = await server.process.communicate()
        err = server.logged()
    assert server.process.returncode == 0
    reported = lines(err.decode())
    assert [line["event"] for line in reported if line["logger"] == "heapline.server"][-2:] == ["stopping", "stopped"]
    audits = b"".join(path.read_bytes() for path in data.glob("audit*"))
    everything = out + err + audits
    forbidden = [PAYLOAD, HEADER.encode(), WRONG_KEY.encode(), b"sentinelkey", admin_key.encode()]
    forbidden += [
        admin_key.split("_", 2)[2].encode(),
        b'"token',
    ]  # leases' tokens are small numbers, so they are searched by name
    assert [secret for secret in forbidden if secret in everything] == []


async def use_everything(broker: RawGrpc) -> None:
    """Make valid and invalid calls, each containing something that must not be logged."""
    message = Outgoing(PAYLOAD, headers={"h": HEADER}, idempotency_key="once")
    await broker.enqueue_batch("jobs", [message, Outgoing(PAYLOAD), Outgoing(PAYLOAD, delay=3600)])
    too_much = Outgoing(PAYLOAD * 100)
    other = Outgoing(PAYLOAD + b"2", idempotency_key="once")
    for messages in ([too_much], [other], [Outgoing(PAYLOAD, headers={"h": HEADER * 10_000})]):
        with pytest.raises(HeaplineError):
            await broker.enqueue_batch("jobs", messages)
    popped = await broker.pop("jobs", 2, holder="worker")
    await popped[0].nack(backoff=0, reason="tried")
    await popped[1].bury()
    with pytest.raises(HeaplineError):
        await popped[1].ack()
    with pytest.raises(HeaplineError):
        await broker.extend([LeaseRef("jobs", popped[0].id, popped[0].token)], 10)
    [again] = await broker.pop("jobs")
    with suppress(HeaplineError):
        await broker.cancel("jobs", again.id)
    await again.release()
    await broker.peek("jobs")
    await broker.dlq_list("jobs")
    await broker.dlq_replay("jobs")
    with pytest.raises(HeaplineError):
        await broker.get("jobs", 12345)
    async for _ in broker.read_log("jobs"):
        pass
    garbage = broker.channel.unary_unary(METHODS["Enqueue"].path)
    with pytest.raises(grpc.aio.AioRpcError):
        await garbage(b"\xff" + PAYLOAD, metadata=broker.calls.metadata)
    await broker.purge("jobs")
