"""Creating a client from arguments, from the environment and with a local key; and rejected arguments."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.client.connect import connect_from_env, is_loopback
from heapline.client.sdk import ConnectedBroker
from heapline.contract.errors import BadRequest, Closed, DeadlineExceeded

NAMES = ("HEAPLINE_URL", "HEAPLINE_API_KEY_FILE", "HEAPLINE_CA_FILE", "HEAPLINE_DATA")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def settings(client: ConnectedBroker) -> tuple[Any, Any]:
    return client._endpoints, client._credential


def test_client_is_made_without_connecting_and_without_a_loop() -> None:
    assert settings(heapline.connect("queue:7400", api_key="hl_key")) == (("queue:7400",), "hl_key")
    assert settings(heapline.connect("queue:7400", api_key="hl_key\n"))[1] == "hl_key"  # read from a file
    assert settings(heapline.connect()) == (("localhost:7400",), None)
    assert settings(heapline.connect(endpoints=["a:1", "b:1"])) == (("a:1", "b:1"), None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": "a:1", "endpoints": ["b:1"]}, r"give target or endpoints=\[…\], not both"),
        ({"endpoints": []}, "endpoints is empty; name at least one server as host:port"),
        ({"endpoints": "a:1"}, "endpoints must be a list of servers, got 'a:1'; pass a single server"),
        ({"endpoints": [5]}, "a server must be host:port, got 5"),
        ({"target": "ftp://a:1"}, "is not a server; write host:port"),
        ({"endpoints": ["a:1", "ftp://b"]}, "is not a server; write host:port"),
        ({"target": ""}, "does not name a server"),
        ({"api_key": ""}, "api_key must be the text that `heapline keys create` printed"),
        ({"api_key": "two\nlines"}, "api_key must be the text"),
        ({"api_key": 5}, "api_key must be the text"),
        ({"deadline": 0}, "deadline"),
        ({"target": "heapline://a:1", "tls": heapline.ClientTls(ca="x")}, "does not use TLS, but TLS files are given"),
    ],
)
@pytest.mark.parametrize("make", [heapline.connect, heapline.connect_sync])
def test_bad_arguments_are_rejected_immediately(make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        make(**options)


def test_error_about_a_key_does_not_show_it() -> None:
    with pytest.raises(BadRequest) as caught:
        heapline.connect(api_key="secret\nkey")
    assert "secret" not in str(caught.value)


# -- the environment ---------------------------------------------------------------------------------------------------


def test_environment_names_servers_and_the_file_of_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hl_from_file\n")
    monkeypatch.setenv("HEAPLINE_URL", "queue-1:7400, queue-2:7400")
    monkeypatch.setenv("HEAPLINE_API_KEY_FILE", str(tmp_path / "key"))
    assert settings(connect_from_env()) == (("queue-1:7400", "queue-2:7400"), "hl_from_file")


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hl_from_file\n")
    monkeypatch.setenv("HEAPLINE_URL", "queue-1:7400")
    monkeypatch.setenv("HEAPLINE_API_KEY_FILE", "none")
    found = connect_from_env(url="queue-2:7400", key_file=tmp_path / "key")
    assert settings(found) == (("queue-2:7400",), "hl_from_file")
    with pytest.raises(BadRequest, match="the key file cannot be read: No such file"):
        connect_from_env(key_file=tmp_path / "no key")


def test_key_of_a_local_server_is_found_automatically(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settings(connect_from_env()) == (("localhost:7400",), None), "there is none"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "admin.key").write_text("hl_admin\n")
    assert settings(connect_from_env())[1] == "hl_admin"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "admin.key").write_text("hl_other\n")
    monkeypatch.setenv("HEAPLINE_DATA", str(tmp_path / "elsewhere"))
    assert settings(connect_from_env())[1] == "hl_other"


@pytest.mark.parametrize("foreign", ["s3cret-of-another-program\n", "-----BEGIN PRIVATE KEY-----\nabc\n", ""])
def test_admin_key_of_another_program_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, foreign: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "admin.key").write_text(foreign)
    assert settings(heapline.connect())[1] is None
    assert settings(connect_from_env())[1] is None
    monkeypatch.setenv("HEAPLINE_DATA", str(tmp_path / "data"))
    with pytest.raises(BadRequest, match="the file must contain one API key and nothing else"):
        heapline.connect()  # the environment names it


async def test_new_key_of_a_server_on_this_machine_is_found_at_the_next_connection(tmp_path: Path) -> None:
    """For example after a server was started on a new directory while workers keep running."""
    file = tmp_path / "data" / "admin.key"
    file.parent.mkdir()
    file.write_text("hl_first\n")
    hl, named = heapline.connect(), heapline.connect(api_key="hl_mine")
    file.write_text("hl_second\n")

    async def key_of_the_next(client: ConnectedBroker) -> str | None:
        await client._connect("localhost:7400").close()
        return client._credential

    assert (await key_of_the_next(hl), await key_of_the_next(named)) == ("hl_second", "hl_mine")
    file.unlink()
    assert await key_of_the_next(hl) == "hl_second", "the last known key"


@pytest.mark.parametrize("url", ["queue.internal:7400", "localhost:7400,queue.internal:7400", "10.0.0.1"])
def test_local_key_is_never_sent_to_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "admin.key").write_text("hl_admin\n")
    monkeypatch.setenv("HEAPLINE_URL", url)
    assert settings(connect_from_env())[1] is None
    assert settings(heapline.connect(endpoints=url.split(",")))[1] is None


@pytest.mark.parametrize("target", [None, "localhost", "127.0.0.1:9999", "heapline://[::1]:7400"])
def test_connect_finds_the_key_of_a_server_on_this_machine(target: str | None, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "admin.key").write_text("hl_admin\n")
    assert settings(heapline.connect(target))[1] == "hl_admin"
    assert settings(heapline.connect(target, api_key="hl_mine"))[1] == "hl_mine"
    assert settings(heapline.connect_sync(target)._client)[1] == "hl_admin"


def test_key_file_of_the_environment_is_for_the_server_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("hl_from_file\n")
    monkeypatch.setenv("HEAPLINE_API_KEY_FILE", str(tmp_path / "key"))
    assert settings(heapline.connect("queue.internal"))[1] is None
    assert settings(heapline.connect("localhost"))[1] is None


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("localhost", True), ("localhost:1", True), ("127.0.0.1:7400", True), ("127.9.9.9", True), ("[::1]:7400", True),
        ("heapline://localhost", True), ("heapline+tls://127.0.0.1:1", True), ("localhost.evil.org:7400", False),
        ("127.0.0.1.evil.org", False), ("0.0.0.0:7400", False), ("10.0.0.1", False),
    ],
)  # fmt: skip
def test_loopback_is_known_by_its_address(target: str, local: bool) -> None:
    assert is_loopback(target) is local


def test_bad_environment_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEAPLINE_API_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(BadRequest, match="HEAPLINE_API_KEY_FILE cannot be read: No such file"):
        connect_from_env()
    for content in ("", "two\nkeys", "k\x00", "k" * 5000):
        (tmp_path / "none").write_text(content)
        with pytest.raises(BadRequest, match="the file must contain one API key and nothing else"):
            connect_from_env()
    monkeypatch.delenv("HEAPLINE_API_KEY_FILE")
    monkeypatch.setenv("HEAPLINE_URL", " , ")
    with pytest.raises(BadRequest, match="HEAPLINE_URL does not name a server; write host:port"):
        connect_from_env()


def test_authorities_to_trust_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAPLINE_URL", "heapline+tls://queue:7400")
    monkeypatch.setenv("HEAPLINE_CA_FILE", "ca.crt")
    assert connect_from_env()._tls == heapline.ClientTls(ca="ca.crt")


def test_client_needs_neither_grpc_nor_protobuf_nor_the_engine() -> None:
    program = (
        "import sys, heapline; heapline.connect(); heapline.consume, heapline.ClientTls; "
        "assert not {'grpc', 'google.protobuf', 'heapline.engine', 'httpx'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(heapline.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", program], check=False, env=environment).returncode == 0


# -- servers and event loops -------------------------------------------------------------------------------------------


# -- servers and event loops -------------------------------------------------------------------------------------------
async def test_unreachable_server_is_reported_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    # No retry begins shortly before the deadline: one not refused in time would rightly be reported as in doubt.
    monkeypatch.setattr("heapline.client.wrappers.retrying.pauses", lambda: itertools.repeat(60.0))
    says = "s: could not connect to 127.0.0.1:1, so nothing changed; check that `heapline serve` is running there"
    async with heapline.connect("127.0.0.1:1", deadline=30) as hl:
        calls = [
            hl.list_topics(),
            hl.enqueue("jobs", b"x"),
            hl.enqueue_batch("jobs", [heapline.Outgoing(b"x")]),
            hl.within(20).stats("jobs"),
            hl.within(20).enqueue("jobs", b"x"),
        ]
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(type(error) is DeadlineExceeded for error in errors)
    texts = [str(error).partition(" (last error: ") for error in errors]
    assert all(reason.startswith("cannot connect to 127.0.0.1:1: ") for _, _, reason in texts)
    assert [text for text, _, _ in texts] == [
        f"{name} failed after {seconds} {says}"
        for name, seconds in (
            ("ListHeaps", 30), ("Enqueue", 30), ("EnqueueBatch", 30), ("Stats", 20), ("Enqueue", 20),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "answered", "says"),
    [
        ("", b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a native port of Heapline: the peer speaks HTTP or gRPC"),
        ("", b"\x15\x03\x03\x00\x02\x02\x46", "is not a native port of Heapline: the peer speaks TLS"),
        ("", b"SSH-2.0-OpenSSH_9.7\r\n", "is not a native port of Heapline: a frame of"),
        ("heapline+tls://", b"HTTP/1.1 400 Bad Request\r\n\r\n", "native port of Heapline: the peer does not use TLS"),
        ("https://", b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not answer with HTTPS; give the port of"),
        ("http://", b"\x00\x00\x1e\x04\x00\x00\x00\x00\x00\r\n\r\n", "does not answer with HTTP; give the port of"),
    ],
)
async def test_port_of_another_protocol_is_refused_at_once(scheme: str, answered: bytes, says: str) -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(1)
        writer.write(answered)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        target = f"{scheme}127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with heapline.connect(target, deadline=600.0) as hl:
            with pytest.raises(BadRequest, match=says):
                await hl.list_topics()
    assert connections == 1, "it was not tried again"


async def test_http_server_that_cannot_be_reached_was_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.client.wrappers.retrying.pauses", lambda: itertools.repeat(60.0))
    async with heapline.connect("http://127.0.0.1:1", deadline=30) as hl:
        with pytest.raises(DeadlineExceeded, match=r"could not connect to http://127\.0\.0\.1:1, so nothing changed"):
            await hl.enqueue("jobs", b"x")


async def test_bad_deadline_of_a_call_is_refused() -> None:
    with pytest.raises(BadRequest, match="seconds"):
        heapline.connect().within(0)


async def test_client_belongs_to_one_open_loop() -> None:
    hl = heapline.connect("127.0.0.1:1", deadline=0.1)
    with pytest.raises(DeadlineExceeded):
        await hl.list_topics()

    async def other() -> None:
        with pytest.raises(BadRequest, match="belongs to another event loop, which is still open; connect once per"):
            await hl.list_topics()

    await asyncio.to_thread(lambda: asyncio.run(other()))
    await hl.close()


def test_client_works_in_a_new_loop_after_its_loop_was_closed() -> None:
    hl = heapline.connect("127.0.0.1:1", deadline=0.1)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            asyncio.run(hl.list_topics())  # type: ignore[arg-type]


async def test_closed_client_raises_closed_and_can_be_closed_twice() -> None:
    hl = heapline.connect("127.0.0.1:1", deadline=0.1)
    with pytest.raises(DeadlineExceeded):
        await hl.list_topics()
    await hl.close()
    await hl.close()
    for call in (hl.list_topics, lambda: hl.enqueue("jobs", b"x"), lambda: anext(hl.consume("jobs"))):
        with pytest.raises(Closed):
            await call()


async def test_calls_that_wait_when_a_client_closes_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.client.sdk.CLOSE_SECONDS", 0.05)
    hl = heapline.connect("127.0.0.1:1", deadline=60)
    waiting = [asyncio.ensure_future(hl.enqueue("jobs", b"%d" % i)) for i in range(3)]
    await asyncio.sleep(0.01)
    waiting.append(asyncio.ensure_future(hl.enqueue("jobs", b"late")))
    await asyncio.sleep(0.01)
    await hl.close()
    assert all(isinstance(r, Closed) for r in await asyncio.gather(*waiting, return_exceptions=True))
