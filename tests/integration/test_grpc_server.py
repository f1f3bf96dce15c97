"""The gRPC server: malformed requests, limits, deadlines, rights, stopping, and error messages."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import heapline
from heapline.contract.errors import (
    BadRequest,
    DeadlineExceeded,
    HeaplineError,
    LeaseLost,
    PayloadTooLarge,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    UnavailableError,
)
from heapline.contract.leases import Ack
from heapline.contract.message import Outgoing
from heapline.contract.messages import EnqueueBatch
from heapline.server.auth.guard import DirectoryGuard
from heapline.server.gate import Gate
from heapline.server.protocols.http_server import HttpServer
from heapline.server.server import make_guard
from heapline.server.settings import ServerSettings, read_settings
from heapline.wire import error_codes
from heapline.wire.descriptors import METHODS, SERVICE, pb
from heapline.wire.protobuf import response_of
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Keys, Rig, until
from tests.integration.test_sdk_processes import free_port

ROOT = Path(heapline.__file__).parents[2]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        yield rig


async def lines(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


# -- garbage and limits ------------------------------------------------------------------------------------------------


async def test_garbage_on_either_port_changes_nothing(rig: Rig) -> None:
    chance = random.Random(1)
    for port in (rig.server.grpc_port, rig.server.http_port):
        for _ in range(10):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(chance.randbytes(chance.randrange(1, 9000)))
            writer.close()
    await rig.broker.enqueue("jobs", b"x")
    assert (await rig.broker.stats("jobs")).ready == 1


@pytest.mark.parametrize("method", [m for m in METHODS.values() if not m.streams_in], ids=lambda m: m.name)
async def test_malformed_request_is_rejected_without_internals(rig: Rig, method: Any) -> None:
    chance = random.Random(method.name)
    reported: list[tuple[str, str]] = []
    async with grpc.aio.insecure_channel(rig.grpc_target) as channel:
        call = channel.unary_stream(method.path) if method.streams_out else channel.unary_unary(method.path)
        for size in (1, 7, 40, 300):
            try:
                answer = call(b"\xff" + chance.randbytes(size - 1))
                await (answer.read() if method.streams_out else answer)
            except grpc.aio.AioRpcError as error:
                reported.append((error.code().name, f"{error.details()} {error.trailing_metadata()}"))
    assert [code for code, _ in reported] == ["INVALID_ARGUMENT"] * 4
    assert not [text for _, text in reported if ".py" in text or "Wire format" in text]
    assert (await rig.broker.stats("jobs")).ready == 0


async def test_too_large_payload_raises_the_same_error_as_embedded(rig: Rig) -> None:
    await rig.broker.create_topic("tiny", **{**rig.small, "max_payload_bytes": 10})
    for send in (
        rig.broker.enqueue("tiny", b"x" * 11),
        rig.broker.enqueue_batch("tiny", [Outgoing(b""), Outgoing(b"x" * 11)]),
    ):
        with pytest.raises(PayloadTooLarge) as caught:
            await send
        assert caught.value.facts() == {"size": 11, "limit": 10, "topic": "tiny"}
    assert (await rig.broker.stats("tiny")).ready == 0


async def test_request_over_the_server_s_limit_is_refused(tmp_path: Path) -> None:
    async with Rig(tmp_path, request_bytes_max=1 << 20) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        with pytest.raises(ResourceExhausted):
            await rig.broker.enqueue_batch("jobs", [Outgoing(b"x" * 60_000)] * 20)
        assert (await rig.broker.stats("jobs")).ready == 0


# -- metadata and errors ------------------------------------------------------------------------------------------


async def test_unexpected_error_returns_internal_without_details(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("the password is swordfish")

    monkeypatch.setattr(rig.behind, "do", broken)
    async with grpc.aio.insecure_channel(rig.grpc_target) as channel:
        method = METHODS["Stats"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method.path)(pb.StatsRequest(topic="jobs").SerializeToString())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == error_codes.INTERNAL_TEXT
    assert "swordfish" not in repr(caught.value)


async def test_items_serve_clients_that_write_no_columns(rig: Rig) -> None:
    calls = rig.wire.calls
    items = [pb.Outgoing(payload=b"a", priority=2, key="k"), pb.Outgoing(payload=b"b", priority=-1)]
    answer = await calls("EnqueueBatch", pb.EnqueueBatchRequest(topic="jobs", messages=pb.NewMessages(items=items)))
    assert len(response_of(EnqueueBatch).unpack(answer).ids) == 16
    popped = await calls("Pop", pb.PopRequest(topic="jobs", max_messages=10))
    found = popped.messages.items
    assert [(m.payload, m.priority, m.key, m.attempts) for m in found] == [(b"b", -1, "", 1), (b"a", 2, "k", 1)]
    keys = [pb.LeaseKey(id=m.id, token=m.token) for m in found]
    settled = await calls("Ack", pb.AckRequest(topic="jobs", leases=pb.LeaseKeys(items=keys)))
    assert response_of(Ack).unpack(settled).lost == []
    keys = [pb.LeaseKey(id=m.id, token=m.token + 9) for m in found]
    settled = await calls("Ack", pb.AckRequest(topic="jobs", leases=pb.LeaseKeys(items=keys)))
    assert response_of(Ack).unpack(settled).lost == [m.id for m in found]


async def test_only_a_dead_letter_is_found_by_id_in_the_dlq(rig: Rig) -> None:
    ids = [(await rig.broker.enqueue("jobs", b"x")).message_id for _ in range(2)]
    (message,) = await rig.broker.pop("jobs")
    await message.bury("poison")
    dead = await rig.wire.calls("DlqPeek", pb.DlqPeekRequest(topic="jobs", message_id=message.message_id))
    assert (dead.state, dead.reason, dead.payload) == ("dead", "poison", b"x")
    (alive,) = set(ids) - {message.message_id}
    with pytest.raises(heapline.MessageNotFound):
        await rig.wire.calls("DlqPeek", pb.DlqPeekRequest(topic="jobs", message_id=alive))


async def test_all_of_many_lost_leases_are_reported(rig: Rig) -> None:
    refs = [heapline.LeaseRef("jobs", i, 1) for i in range(1, 5001)]
    with pytest.raises(LeaseLost) as caught:
        await rig.broker.ack(refs)
    assert sorted(caught.value.lost) == list(range(1, 5001))


# -- deadlines ---------------------------------------------------------------------------------------------------------


async def test_pop_ends_at_its_deadline_and_leases_nothing(rig: Rig) -> None:
    async with RawGrpc(rig.grpc_target, timeout=0.2) as hasty:
        with pytest.raises(DeadlineExceeded):
            await hasty.pop("jobs", wait=60)
        await rig.broker.enqueue("jobs", b"x")
        (message,) = await rig.broker.pop("jobs", wait=5)
        assert message.attempts == 1


async def test_deadline_of_a_call_reaches_the_broker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    do, contexts = rig.behind.do, []

    def recorded(command: Any, context: Any) -> Any:
        contexts.append(context)
        return do(command, context)

    monkeypatch.setattr(rig.behind, "do", recorded)
    now = asyncio.get_running_loop().time()
    async with RawGrpc(rig.grpc_target, timeout=30) as hasty:
        await hasty.stats("jobs")
    await rig.wire.stats("jobs")
    assert now + 25 < contexts[0].deadline < now + 35
    assert contexts[1].deadline is None


# -- authentication and rights -----------------------------------------------------------------------------------------


async def test_caller_without_or_beyond_its_key_is_refused(tmp_path: Path) -> None:
    keys = Keys(admin="*:produce,consume,admin", reader="orders*:consume")
    async with Rig(tmp_path, keys) as rig:
        with pytest.raises(Unauthenticated):
            await rig.broker.list_topics()
        async with RawGrpc(rig.grpc_target, credential="admin") as admin:
            for name in ("orders", "secrets"):
                await admin.create_topic(name, **rig.small)
        async with RawGrpc(rig.grpc_target, credential="reader") as reader:
            assert [info.name for info in await reader.list_topics()] == ["orders"]
            assert await reader.pop("orders") == []
            for call in (
                reader.pop("secrets"), reader.enqueue("orders", b"x"), reader.delete_topic("orders"),
                reader.enqueue_batch("orders", [Outgoing(b"x")]), reader.stats("secrets"),
                reader.prepare_batch("b", "p", {"orders": [Outgoing(b"x")]}), reader.commit_batch("b", ["p"]),
            ):  # fmt: skip
                with pytest.raises(PermissionDenied) as caught:
                    await call
                assert caught.value.subject == "reader"
            with pytest.raises(PermissionDenied):
                await anext(reader.read_log("secrets"))


def test_server_without_a_guard_does_not_start() -> None:
    with pytest.raises(ValueError, match="guard"):
        Gate(None)  # type: ignore[arg-type]


def test_server_requires_keys_of_its_directory_by_default(tmp_path: Path) -> None:
    guard = make_guard(ServerSettings(data=tmp_path / "data"))
    assert isinstance(guard, DirectoryGuard)
    asyncio.run(guard.close())
    assert (tmp_path / "data" / "admin.key").stat().st_mode & 0o777 == 0o600


def test_auth_can_be_disabled_on_loopback_only() -> None:
    assert read_settings(insecure_everybody=True).host == "127.0.0.1"
    with pytest.raises(BadRequest, match="loopback"):
        read_settings(insecure_everybody=True, host="0.0.0.0")


def test_flags_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "heapline.yaml"
    file.write_text("grpc_port: 1\nhttp_port: 2\nstop_grace: 3\nbroker:\n  cache_bytes: 4\n")
    monkeypatch.setenv("HEAPLINE_HTTP_PORT", "20")
    settings = read_settings(file, grpc_port=100)
    assert (settings.grpc_port, settings.http_port, settings.stop_grace) == (100, 20, 3)
    assert settings.broker_config().cache_bytes == 4
    for wrong in ("no_such: 1", "grpc_port: many", "broker: {no_such: 1}", "- 1", "a: [", "broker: 3"):
        file.write_text(wrong)
        with pytest.raises(BadRequest):
            read_settings(file)


# -- health and stopping -----------------------------------------------------------------------------------------------


async def test_health_and_reflection_answer(rig: Rig) -> None:
    async with grpc.aio.insecure_channel(rig.grpc_target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)]
        async for reported in stub.ServerReflectionInfo(iter(asked)):
            assert b"LeasedMessages" in reported.file_descriptor_response.file_descriptor_proto[0]


async def test_client_generated_as_the_docs_say_works_beside_the_package(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = re.search(r"^python (-m grpc_tools\.protoc .*)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert shown is not None
    command = [part.replace("_out=.", f"_out={tmp_path}") for part in shown[1].split()]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("heapline_grpc.heapline_pb2")
    stubs = importlib.import_module("heapline_grpc.heapline_pb2_grpc")
    async with grpc.aio.insecure_channel(rig.grpc_target) as channel:
        stub = stubs.HeaplineStub(channel)
        await stub.Enqueue(made.EnqueueRequest(topic="jobs", payload=b"x", priority=3))
        leased = await stub.Pop(made.PopRequest(topic="jobs", max_messages=1))
        assert [(item.payload, item.priority) for item in leased.messages.items] == [(b"x", 3)]
    assert await rig.leased() == 1


async def test_probes_answer_only_when_all_ports_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/readyz is on the HTTP port, so that port opens last."""
    start, opened = HttpServer.start, list[asyncio.StreamWriter]()

    async def start_last(self: HttpServer) -> int:
        for port in (rig.server.port, rig.server.grpc_port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
        return await start(self)

    monkeypatch.setattr(HttpServer, "start", start_last)
    rig = Rig(tmp_path)
    async with rig:
        for writer in opened:
            writer.close()
    assert len(opened) == 2


async def test_new_connection_is_not_delayed_by_earlier_failed_ones(tmp_path: Path) -> None:
    """gRPC shares the backoff after a failed connection between channels, unless each has its own."""
    port = free_port()
    async with RawGrpc(f"127.0.0.1:{port}") as early:
        with pytest.raises(UnavailableError, match="Connection refused"):
            await early.stats("jobs")
        async with Rig(tmp_path, grpc_port=port) as rig:
            await rig.broker.create_topic("jobs")


async def test_probes_answer_and_refuse_everything_else(rig: Rig) -> None:
    port = rig.server.http_port
    assert b" 200 " in await lines(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 200 " in await lines(port, b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 404 " in await lines(port, b"GET /etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 405 " in await lines(port, b"POST /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    rig.server.gate.stopping.set()
    assert b" 503 " in await lines(port, b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 200 " in await lines(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")


async def test_stopping_server_rejects_new_calls_and_finishes_running_ones(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, asked = asyncio.Event(), asyncio.Event()
    do = rig.behind.do

    async def slow(command: Any, *more: Any) -> Any:
        if isinstance(command, EnqueueBatch):
            asked.set()
            await go_on.wait()
        return await do(command, *more)

    monkeypatch.setattr(rig.behind, "do", slow)
    under_way = asyncio.ensure_future(rig.broker.enqueue_batch("jobs", [Outgoing(b"x")]))
    await asked.wait()
    stopping = asyncio.ensure_future(rig.server.stop())
    await until(lambda: _is_refused(rig))
    go_on.set()
    (result,) = await under_way
    await asyncio.wait_for(stopping, 10)
    assert (await rig.behind.get("jobs", result.id)).payload == b"x"


async def _is_refused(rig: Rig) -> bool:
    try:
        await asyncio.wait_for(rig.broker.list_topics(), 2)
    except UnavailableError:
        return True
    except HeaplineError as error:
        raise AssertionError(f"refused with {error!r}") from None
    return False


def test_environment_of_tests_sets_no_server() -> None:
    assert [name for name in os.environ if name.startswith("HEAPLINE_")] == []
