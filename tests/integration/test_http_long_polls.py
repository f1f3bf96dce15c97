"""Pops that wait over HTTP while clients disconnect and servers stop; and logins."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from heapline.server.auth.guard import DirectoryGuard
from heapline.server.auth.secret import Secret
from heapline.server.protocols import http, http_server
from tests.integration.http_rig import HttpRig
from tests.integration.server_rig import Keys, until
from tests.unit.server.auth.rig import PASSWORD, CountingHasher

WAITING = {"topic": "jobs", "wait": 3600}


async def waiting(rig: HttpRig, count: int = 1) -> bool:
    """Whether this many pops wait in the broker."""
    return sum(not call.future.done() for call in rig.behind.topics.runner("jobs").turns.pops) >= count


async def begin_to_wait(rig: HttpRig) -> asyncio.Task[Any]:
    task = asyncio.create_task(rig.post("pop", WAITING))
    await until(lambda: waiting(rig))
    return task


async def test_waiting_pop_is_answered_when_a_message_arrives(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.heap()
        pop = await begin_to_wait(rig)
        await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"})
        assert len((await pop).json()["messages"]) == 1


async def test_pop_of_a_disconnected_client_leases_nothing(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.heap()
        pop = await begin_to_wait(rig)
        pop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pop

        async def over() -> bool:
            return not await waiting(rig)

        await until(over)
        await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"})
        stats = await rig.behind.stats("jobs")
        assert (stats.ready, stats.leased) == (1, 0)


@pytest.mark.parametrize("is_named", [False, True])
async def test_leases_for_a_disconnected_client_are_returned(
    tmp_path: Path, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the pop has a request_id: a caller that repeats it has the same leases."""
    async with HttpRig(tmp_path) as rig:
        await rig.heap()

        async def disconnect_first(exchange: Any, task: Any) -> bool:
            await task  # leased when the client's disconnection is noticed
            return False

        monkeypatch.setattr(http, "while_connected", disconnect_first)
        await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"})
        await rig.post("pop", {"topic": "jobs", "request_id": "r"} if is_named else {"topic": "jobs"})

        async def settled() -> bool:
            stats = await rig.behind.stats("jobs")
            return (stats.leased_total, stats.leased) == (1, 1 if is_named else 0)

        await until(settled)


async def test_revoked_key_ends_a_waiting_pop(tmp_path: Path) -> None:
    guard = Keys(boss="*:produce,consume,admin", worker="*:consume")
    async with HttpRig(tmp_path, guard) as rig:
        rig.http.headers["authorization"] = "boss"
        await rig.heap()
        rig.http.headers["authorization"] = "worker"
        pop = await begin_to_wait(rig)
        guard.revoked.add("worker")
        rig.server.gate.credentials.check()
        assert (await pop).status_code == 401


async def test_stopping_server_ends_waiting_pops_and_rejects_new_calls(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.heap()
        pop = await begin_to_wait(rig)
        rig.server.gate.stopping.set()
        rig.server.dispatcher.stop_waiting()
        ended = await pop
        refused = await rig.post("enqueue", {"topic": "jobs", "payload_text": "x"})
        for answer in (ended, refused):
            assert (answer.status_code, answer.json()["error"]) == (503, "UnavailableError")
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"
        assert (await rig.http.get("/healthz")).status_code == 200
        assert (await rig.http.get("/readyz")).status_code == 503


async def test_stop_closes_idle_connections_and_finishes_running_calls(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.heap()
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.http_port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"ok\n")
        one = {"topic": "jobs", "payload_text": "x"}
        under_way = [asyncio.create_task(rig.post("enqueue", one)) for _ in range(20)]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(rig.server.stop(), 20)
        assert await asyncio.wait_for(reader.read(), 20) == b""  # closed by the server
        writer.close()
        outcomes = await asyncio.gather(*under_way, return_exceptions=True)
        done = sum(getattr(o, "status_code", 0) == 200 for o in outcomes)
        assert (await rig.behind.stats("jobs")).ready == done


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", [b"x: " + b"y" * (1 << 20), b"".join(b"x%d: y\r\n" % i for i in range(20_000))])
async def test_head_of_a_request_is_bounded(tmp_path: Path, rest: bytes) -> None:
    async with HttpRig(tmp_path) as rig:
        said = await rig.raw(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + rest)
        assert said == b"" or said.startswith(b"HTTP/1.1 431 ")  # or closed while it was still sending
        assert (await rig.http.get("/healthz")).status_code == 200


async def test_large_body_does_not_count_as_head(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.heap(max_payload_bytes=500_000)
        for _ in range(2):  # on one connection
            big = await rig.post("enqueue", {"topic": "jobs", "payload_text": "x" * 400_000})
            assert big.status_code == 200


async def test_connection_with_an_incomplete_head_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS_MAX", 0.01)
    async with HttpRig(tmp_path) as rig:
        assert await rig.raw(b"GET /healthz HTTP/1.1\r\nhost: x\r\n") == b""


async def test_slow_answer_is_not_cut_by_the_limit_for_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS_MAX", 0.5)
    async with HttpRig(tmp_path) as rig:
        await rig.heap()
        answer = await rig.post("pop", {"topic": "jobs", "wait": 0.8})
        assert answer.json() == {"topic": "jobs", "messages": []}


async def test_answers_do_not_wait_for_the_clients_acknowledgement(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        await rig.http.get("/healthz")
        (connection,) = rig.server._http._server.server_state.connections
        socket_ = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert socket_.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_truncated_body_is_not_logged_as_a_server_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with HttpRig(tmp_path) as rig:
        head = b"POST /v1/enqueue HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        _, writer = await asyncio.open_connection("127.0.0.1", rig.server.http_port)
        writer.write(head)
        await writer.drain()
        writer.close()
        for _ in range(3):
            assert (await rig.http.get("/healthz")).status_code == 200
    assert "request failed" not in caplog.text


# -- logging in --------------------------------------------------------------------------------------------------------


async def test_login_returns_a_token_and_the_same_answer_to_all_failures(tmp_path: Path) -> None:
    (tmp_path / "auth").mkdir()
    guard = DirectoryGuard(tmp_path / "auth", hasher=CountingHasher())
    guard.users.add("ann@example.org", Secret(PASSWORD), ["*:produce,consume,admin"])
    guard.users.add("bob@example.org", Secret(PASSWORD), ["*:produce,consume,admin"])
    guard.users.change("bob@example.org", disabled=True)
    async with HttpRig(tmp_path, guard) as rig:
        response = await rig.post("auth/login", {"email": "ann@example.org", "password": PASSWORD})
        rig.http.headers["authorization"] = f"Bearer {response.json()['token']}"
        await rig.heap()
        failures = {
            (await rig.post("auth/login", {"email": email, "password": password})).text
            for email, password in (
                ("ann@example.org", "x"), ("eve@example.org", PASSWORD), ("bob@example.org", PASSWORD), ("nobody", ""),
            )
        }  # fmt: skip
        assert len(failures) == 1
        assert "Unauthenticated" in failures.pop()
    await guard.close()


async def test_login_on_a_server_without_users_is_refused(tmp_path: Path) -> None:
    async with HttpRig(tmp_path) as rig:
        answer = await rig.post("auth/login", {"email": "a@b.c", "password": "x"})
        assert (answer.status_code, "no users" in answer.json()["text"]) == (400, True)
