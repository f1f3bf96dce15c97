"""Unauthenticated clients cost the server little, and it parses nothing that they send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import heapline
from heapline.client.target import ClientTls
from heapline.client.transports.native import NativeBroker
from heapline.clock import SystemClock
from heapline.contract.errors import Unauthenticated
from heapline.server.auth.dev_certs import make_dev_certs
from heapline.server.protocols import grpc as grpc_protocol
from heapline.server.protocols import native, pages
from heapline.server.protocols.http_server import HEAD_BYTES_MAX, BoundedProtocol
from heapline.wire.descriptors import METHODS, SERVICE
from heapline.wire.frames.format import Kind
from tests.integration.guarded_rig import EMAIL, GuardedRig
from tests.integration.server_rig import until
from tests.unit.server.auth.rig import PASSWORD

GARBAGE = b"\xff\xff\xff"
MESSAGES_10_000 = b"\x0a\x00" * 10_000  # two bytes each


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    async with GuardedRig(tmp_path) as rig:
        yield rig


class Raw:
    """One connection to the HTTP port."""

    def __init__(self, rig: GuardedRig) -> None:
        self._port = rig.server.http_port

    async def __aenter__(self) -> Raw:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def say(self, *lines: bytes) -> None:
        self.writer.write(b"\r\n".join(lines))
        await self.writer.drain()

    async def head(self, path: str, *lines: str) -> None:
        await self.say(*(line.encode() for line in (f"POST {path} HTTP/1.1", "host: x", *lines, "", "")))

    async def status(self) -> int:
        said = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)
        return int(said.split()[1])


# -- gRPC ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
async def test_unauthenticated_bytes_are_not_parsed(
    rig: GuardedRig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(grpc_protocol, "_parse", lambda method, data: parsed.append(data) or method.request())
    method = METHODS[name]
    async with grpc.aio.insecure_channel(rig.grpc_target) as channel:
        path = f"/{SERVICE}/{name}"
        call: Any
        if method.streams_in:
            call = channel.stream_stream(path)()
            await call.write(MESSAGES_10_000)
        elif method.streams_out:
            call = channel.unary_stream(path)(GARBAGE)
        else:
            call = channel.unary_unary(path)(GARBAGE)
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.UNAUTHENTICATED
    assert parsed == []


async def test_malformed_request_of_an_authenticated_caller_is_reported(rig: GuardedRig) -> None:
    async with grpc.aio.insecure_channel(rig.grpc_target) as channel:
        metadata = (("authorization", f"Bearer {rig.admin_key}"),)
        call: Any = channel.unary_unary(f"/{SERVICE}/Stats")(GARBAGE, metadata=metadata)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_unauthenticated_request_is_rejected_before_it_is_received(rig: GuardedRig) -> None:
    """The client is cut off, or receives the refusal, with most of its request unsent."""
    async with grpc.aio.insecure_channel(rig.grpc_target, options=[("grpc.max_send_message_length", -1)]) as channel:
        large = b"\0" * (70 << 20)  # over the server's limit: a server that reads it answers that it is too large
        call: Any = channel.unary_unary(f"/{SERVICE}/Enqueue")(large)
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {rig.admin_key}"),)
        for _ in range(2):  # not verified yet, and verified
            stats: Any = channel.unary_unary(f"/{SERVICE}/Stats")(b"\x0a\x04jobs", metadata=metadata)
            assert await asyncio.wait_for(stats.code(), 20) is grpc.StatusCode.OK
        call = channel.unary_unary(f"/{SERVICE}/Enqueue")(large, metadata=metadata)
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.RESOURCE_EXHAUSTED


# -- native --------------------------------------------------------------------------------------------------------


async def open_native(rig: GuardedRig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", rig.server.port)


async def test_native_connection_without_hello_is_closed(rig: GuardedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "HELLO_SECONDS", 0.1)
    reader, writer = await open_native(rig)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_unauthenticated_native_connections_are_limited_per_address(
    rig: GuardedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "UNAUTHENTICATED_MAX", 3)
    async with heapline.connect(rig.target, api_key=rig.admin_key) as known:
        await known.list_topics()  # authenticated, so it does not count
        opened = [await open_native(rig) for _ in range(3)]
        reader, refused = await open_native(rig)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        await known.list_topics()
        for _, writer in (*opened, (reader, refused)):
            writer.close()
    async with asyncio.timeout(20), heapline.connect(rig.target, api_key=rig.admin_key) as another:
        await another.list_topics()  # closed connections do not count


@pytest.fixture
async def tls_rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    make_dev_certs(tmp_path / "certs", SystemClock().wall_ms())
    files = {"tls_certificate": tmp_path / "certs" / "server.crt", "tls_key": tmp_path / "certs" / "server.key"}
    async with GuardedRig(tmp_path, **files) as rig:
        yield rig


def unauthenticated_are(rig: GuardedRig, count: int) -> Callable[[], Awaitable[bool]]:
    async def are() -> bool:
        return sum(rig.server._native.unauthenticated.values()) == count

    return are


def tls_client(rig: GuardedRig, tmp_path: Path) -> NativeBroker:
    tls = ClientTls(ca=tmp_path / "certs" / "ca.crt")
    return NativeBroker(f"heapline+tls://localhost:{rig.server.port}", credential=rig.admin_key, tls=tls)


async def test_unfinished_tls_handshakes_are_limited_per_address(
    tls_rig: GuardedRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "UNAUTHENTICATED_MAX", 3)
    async with tls_client(tls_rig, tmp_path) as known:
        await known.list_topics()  # authenticated, so it does not count
        opened = [await open_native(tls_rig) for _ in range(3)]
        await until(unauthenticated_are(tls_rig, 3))
        opened[0][1].write(b"\x16\x03\x01")  # a handshake that begins and never continues
        reader, refused = await open_native(tls_rig)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        await known.list_topics()
        for _, writer in (*opened, (reader, refused)):
            writer.close()
    await until(unauthenticated_are(tls_rig, 0))  # closed connections do not count
    async with asyncio.timeout(20), tls_client(tls_rig, tmp_path) as another:
        await another.list_topics()


async def test_tls_handshake_that_is_never_finished_is_closed(
    tls_rig: GuardedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "HELLO_SECONDS", 0.1)
    reader, writer = await open_native(tls_rig)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    await until(unauthenticated_are(tls_rig, 0))


async def test_tls_handshake_is_part_of_the_time_before_hello(
    tls_rig: GuardedRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock = socket.create_connection(("127.0.0.1", tls_rig.server.port))
    await until(unauthenticated_are(tls_rig, 1))
    monkeypatch.setattr(native, "HELLO_SECONDS", 10_000.0)  # of connections that are accepted later
    context = ssl.create_default_context(cafile=str(tmp_path / "certs" / "ca.crt"))
    _, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname="localhost")

    async def is_open() -> bool:
        return bool(tls_rig.server._native.connections)

    await until(is_open)
    (connection,) = tls_rig.server._native.connections
    assert connection._hello_timer is not None
    assert connection._hello_timer.when() < asyncio.get_running_loop().time() + 5000
    writer.close()


async def test_native_connection_that_sends_more_than_hello_is_closed(rig: GuardedRig) -> None:
    reader, writer = await open_native(rig)
    writer.write((4085).to_bytes(4, "little") + b"\x01" + bytes(7))  # a HELLO one byte over the limit
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer[4] == Kind.GOAWAY
    assert b"over the limit of 4084" in answer
    writer.close()


async def test_unix_socket_opens_for_the_server_s_user_only(tmp_path: Path) -> None:
    path = tmp_path / "heapline.sock"
    async with GuardedRig(tmp_path, unix_socket=path) as rig:
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        async with heapline.connect(f"unix://{path}", api_key=rig.admin_key) as hl:
            await hl.list_topics()
        async with heapline.connect(f"unix://{path}", api_key="hl_wrong_key") as hl:
            with pytest.raises(Unauthenticated):
                await hl.list_topics()
    assert not path.exists()


# -- HTTP ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/enqueue", "/ack", "/nack", "/v1/enqueue", "/v1/keys", "/v1/heaps/jobs:pause"])
async def test_unauthenticated_request_is_rejected_before_its_body_is_read(rig: GuardedRig, path: str) -> None:
    async with Raw(rig) as raw:
        await raw.head(path, "content-type: application/json", "content-length: 1000000")
        assert await raw.status() == 401


async def test_login_rejects_a_large_body(rig: GuardedRig) -> None:
    async with Raw(rig) as raw:
        await raw.head("/v1/auth/login", "content-type: application/json", "content-length: 60000000")
        await raw.say(b'{"email": "' + b"x" * pages.LOGIN_BYTES_MAX)
        assert await raw.status() == 413


async def test_login_rejects_a_slow_body(rig: GuardedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LOGIN_SECONDS_MAX", 0.05)
    async with Raw(rig) as raw:
        await raw.head("/v1/auth/login", "content-type: application/json", "content-length: 100")
        await raw.say(b'{"email"')
        assert await raw.status() == 408
        await raw.reader.read()
        assert raw.reader.at_eof()


async def test_longest_password_still_logs_in(rig: GuardedRig) -> None:
    await rig.token()
    for password, status in ((PASSWORD, 200), ("\N{GRINNING FACE}" * 1024, 401)):
        body = json.dumps({"email": EMAIL, "password": password})  # escaped: twelve bytes per character
        response = await rig.http.post("/v1/auth/login", content=body, headers={"content-type": "application/json"})
        assert response.status_code == status


@pytest.mark.parametrize("second", ["transfer-encoding: chunked", "content-length: 6"])
async def test_request_with_two_lengths_is_refused(rig: GuardedRig, second: str) -> None:
    async with Raw(rig) as raw:
        await raw.head("/v1/enqueue", f"authorization: Bearer {rig.admin_key}", "content-length: 5", second)
        await raw.say(b"0", b"", b"GET /healthz HTTP/1.1", b"host: x", b"", b"")
        assert await raw.status() == 400
        await raw.reader.read()
        assert raw.reader.at_eof()


async def test_trailers_are_not_read_as_headers(rig: GuardedRig) -> None:
    """A proxy that removes or sets a header does not look there."""
    async with Raw(rig) as raw:
        await raw.say(
            b"POST /v1/heaps/jobs:snapshot HTTP/1.1", b"host: x", b"transfer-encoding: chunked", b"",
            b"0", f"authorization: Bearer {rig.admin_key}".encode(), b"", b"",
        )  # fmt: skip
        assert await raw.status() == 401


@pytest.mark.parametrize("part", [b"x: y\r\n" * 1000, b"y" * 6000])  # many fields; one without an end
async def test_bytes_after_a_body_are_bounded(rig: GuardedRig, part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    received = 0
    receive = BoundedProtocol.data_received

    def counted(self: BoundedProtocol, data: bytes) -> None:
        nonlocal received
        received += len(data)
        receive(self, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", counted)
    async with Raw(rig) as raw:
        await raw.head("/v1/enqueue", "transfer-encoding: chunked")
        await raw.say(b"0", b"x-first: ")
        with contextlib.suppress(ConnectionError):
            while received < 100 * HEAD_BYTES_MAX:
                await raw.say(part)
                await asyncio.sleep(0)
    assert received < 10 * HEAD_BYTES_MAX


async def test_chunked_body_is_not_counted_as_headers(rig: GuardedRig) -> None:
    await rig.behind.create_topic("large")
    payload = "x" * (4 * HEAD_BYTES_MAX)
    body = json.dumps({"topic": "large", "payload_text": payload}).encode()
    async with Raw(rig) as raw:
        await raw.head("/v1/enqueue", f"authorization: Bearer {rig.admin_key}", "transfer-encoding: chunked")
        for at in range(0, len(body), 1000):
            chunk = body[at : at + 1000]
            await raw.say(b"%x" % len(chunk), chunk, b"")
        await raw.say(b"0", b"", b"")
        assert await raw.status() == 200
