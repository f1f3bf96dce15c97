"""A credential that ends also ends its open calls on every interface, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.contract.errors import Unauthenticated
from heapline.contract.message import Outgoing
from heapline.server import credentials
from tests.integration.guarded_rig import EMAIL, GuardedRig
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Requests, pop_start, until

TOKEN_S = 15 * 60


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GuardedRig]:
    monkeypatch.setattr(credentials, "CHECK_EVERY", 0.01)
    async with GuardedRig(tmp_path) as rig:
        yield rig


class Open:
    """Start one of each kind of long call."""

    def __init__(self, rig: GuardedRig, broker: RawGrpc) -> None:
        self._lasting = rig.server.gate.credentials
        self.calls: list[asyncio.Future[Any]] = [
            _start(anext(broker.calls.stream("PopStream", Requests(pop_start(credits=1))))),
            _start(anext(broker.calls.stream("PopStream", Requests(pop_start(credits=0))))),
            _start(anext(broker.calls.stream("EnqueueStream", Requests()))),
            _start(broker.pop("jobs", wait=600)),
        ]

    async def are_open(self) -> None:
        async def open() -> bool:
            return len(self._lasting) == len(self.calls)

        await until(open)

    async def end(self) -> None:
        async with asyncio.timeout(10):
            reported = await asyncio.gather(*self.calls, return_exceptions=True)
        assert [type(t) for t in reported] == [Unauthenticated] * len(self.calls)


def _start(work: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(work)


async def test_key_revoked_over_http_ends_before_the_answer_and_others_stay(
    rig: GuardedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "CHECK_EVERY", 3600)  # only the revocation itself can end them
    key_id, key = rig.key("*:produce,consume")
    async with rig.as_(key) as worker, rig.as_(rig.admin_key) as admin:
        theirs = Open(rig, worker)
        await theirs.are_open()
        stays = _start(anext(admin.calls.stream("PopStream", Requests(pop_start(credits=1)))))
        assert (await rig.confirm("DELETE", f"/v1/keys/{key_id}")).status_code == 200
        await theirs.end()
        with pytest.raises(Unauthenticated):
            await worker.enqueue("jobs", b"too late")
        await rig.behind.enqueue("jobs", b"for the caller that stays")
        assert len((await asyncio.wait_for(stays, 10)).messages.items) == 1


async def test_key_revoked_by_the_cli_is_rejected_after_the_next_refresh(rig: GuardedRig) -> None:
    key_id, key = rig.key("*:produce,consume")
    async with rig.as_(key) as worker:
        theirs = Open(rig, worker)
        await theirs.are_open()
        rig.other_process().keys.revoke(key_id)
        rig.auth_clock.advance(1.001)
        await theirs.end()


async def test_expired_token_ends_its_streams_and_is_rejected(rig: GuardedRig) -> None:
    token = await rig.token()
    async with rig.as_(f"Bearer {token}") as person:
        await person.list_topics()
        assert (await rig.ask("GET", "/v1/heaps", token)).status_code == 200
        theirs = Open(rig, person)
        await theirs.are_open()
        rig.auth_clock.advance(TOKEN_S)
        await theirs.end()
        with pytest.raises(Unauthenticated):
            await person.list_topics()
    refused = await rig.ask("GET", "/v1/heaps", token)
    assert (refused.status_code, refused.json()["error"]) == (401, "Unauthenticated")


async def test_changing_a_user_ends_their_streams(rig: GuardedRig) -> None:
    token = await rig.token()
    async with rig.as_(token) as person:
        theirs = Open(rig, person)
        await theirs.are_open()
        rig.guard.users.change(EMAIL, disabled=True)
        await theirs.end()


async def test_ended_pop_leaves_no_lease(rig: GuardedRig) -> None:
    key_id, key = rig.key("*:consume")
    async with rig.as_(key) as worker:
        pops = [_start(worker.pop("jobs", 5, wait=600)) for _ in range(5)]
        stream = _start(anext(worker.calls.stream("PopStream", Requests(pop_start(credits=10)))))

        async def waiting() -> bool:
            return len(rig.server.gate.credentials) == 6

        await until(waiting)
        rig.guard.keys.revoke(key_id)
        rig.server.gate.credentials.check()
        await rig.behind.enqueue("jobs", b"for nobody")
        for call in (*pops, stream):
            with pytest.raises(Unauthenticated):
                await asyncio.wait_for(call, 10)
    assert await rig.leased() == 0
    assert len(rig.server.gate.credentials) == 0


async def test_stream_whose_client_does_not_read_ends(rig: GuardedRig) -> None:
    key_id, key = rig.key("*:produce,consume")
    await rig.behind.enqueue_batch("jobs", [Outgoing(b"x" * 60_000)] * 200, atomic=False)
    async with rig.as_(key) as worker:
        start = pop_start(credits=200, max_messages=10)
        stream = worker.calls.open("PopStream", aiter(Requests(start)))
        await stream.read()  # one answer, and then no more

        async def stalled() -> bool:
            leased = await rig.leased()
            await asyncio.sleep(0.1)
            return leased == await rig.leased() and len(rig.server.gate.credentials) == 1

        await until(stalled)
        rig.guard.keys.revoke(key_id)

        async def over() -> bool:
            return len(rig.server.gate.credentials) == 0

        await until(over)
        stream.cancel()


async def test_renewed_token_keeps_connection_and_waiting_calls_open(rig: GuardedRig) -> None:
    async with heapline.connect(rig.target, api_key=f"Bearer {await rig.token()}") as hl:
        await hl.list_topics()
        popping = _start(hl.pop("jobs", wait=600))

        async def is_waiting() -> bool:
            return len(rig.server.gate.credentials) == 1

        await until(is_waiting)
        rig.auth_clock.advance(TOKEN_S - 10)
        await hl.renew(f"Bearer {await rig.token()}")
        rig.auth_clock.advance(60)  # the first token has expired
        rig.server.gate.credentials.check()
        assert len(rig.server._native.connections) == 1
        await hl.enqueue("jobs", b"x")
        async with asyncio.timeout(10):
            (message,) = await popping
        await message.ack()
        rig.auth_clock.advance(TOKEN_S)
        with pytest.raises(Unauthenticated):
            await hl.list_topics()


async def test_token_of_another_caller_or_garbage_does_not_replace_the_old_one(rig: GuardedRig) -> None:
    _, other = rig.key("*:produce,consume,admin")
    async with heapline.connect(rig.target, api_key=f"Bearer {await rig.token()}") as hl:
        await hl.list_topics()
        for wrong in (other, "Bearer nonsense"):
            with pytest.raises(Unauthenticated):
                await hl.renew(wrong)
        with pytest.raises(heapline.BadRequest, match="api_key must be the text"):
            await hl.renew(" ")
        await hl.list_topics()
    async with heapline.connect(
        f"http://127.0.0.1:{rig.server.http_port}", api_key=f"Bearer {await rig.token()}"
    ) as hl:
        await hl.list_topics()
        rig.auth_clock.advance(TOKEN_S - 10)
        await hl.renew(f"Bearer {await rig.token()}")
        rig.auth_clock.advance(60)
        await hl.list_topics()
