"""MQueue's API: an ack or nack without token acts on the lease that the caller's own subject holds, else 409."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.worlds import Memory
from tests.integration.mqueue_rig import ALICE, BOB, PLACE, WHERE, Client, MQueueRig, item
from tests.integration.test_server_kill import Process

CALLS = ["ack", "nack"]


def act(client: Client, call: str, id: Any, **more: Any) -> Any:
    return getattr(client, call)(id, **more)


async def refused(answer: httpx.Response, id: int) -> None:
    assert answer.status_code == 409, answer.text
    reported = answer.json()
    assert (reported["error"], reported["facts"]) == ("LeaseLost", {"lost": [id], "topic": WHERE})


@pytest.mark.parametrize("call", CALLS)
async def test_another_user_s_lease_cannot_be_ended_not_even_with_its_token(tmp_path: Path, call: str) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        (id,) = await alice.put(b"x")
        (held,) = await alice.take()
        await refused(await act(bob, call, id), id)
        await refused(await act(bob, call, id, lease_token=held["lease_token"]), id)
        assert await rig.counts() == (0, 0, 1, 0)
        assert (await act(alice, call, id)).status_code == 200
        assert (await rig.counts())[2] == 0


@pytest.mark.parametrize("call", CALLS)
async def test_lease_that_has_ended_cannot_be_ended_again(tmp_path: Path, call: str) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        (id,) = await alice.put(b"x")
        (held,) = await alice.take()
        await rig.pass_time(31)
        await refused(await act(alice, call, id), id)  # it waits for its retry
        await refused(await act(alice, call, id, lease_token=held["lease_token"]), id)
        await rig.pass_time(60)
        (again,) = await bob.take()
        assert (again["id"], again["attempts"]) == (id, 2)
        await refused(await act(alice, call, id), id)  # now it belongs to another caller
        assert await rig.counts() == (0, 0, 1, 0)
        assert (await bob.ack(id)).status_code == 200
        assert await rig.counts() == (0, 0, 0, 0)


@pytest.mark.parametrize("call", CALLS)
async def test_message_without_a_lease_cannot_be_settled(tmp_path: Path, call: str) -> None:
    async with MQueueRig(tmp_path) as rig:
        bob = await rig.login(BOB)
        (id,) = await bob.put(b"x")
        await refused(await act(bob, call, id), id)
        for stranger in (0, 1, (1 << 63) - 1, id + 1, id + (1023 << 12)):
            await refused(await act(bob, call, stranger), stranger)
            await refused(await act(bob, call, stranger, lease_token="0"), stranger)
        await bob.take()
        other = await rig.http.post(f"/{call}", json={"id": id, **PLACE, "topic": "another"}, headers=bob.headers)
        assert other.status_code == 409
        assert await rig.counts() == (0, 0, 1, 0)


async def test_lease_granted_by_another_interface_is_not_the_callers(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        ids = await alice.put(b"1", b"2")
        for holder in (None, "a worker"):
            assert len(await rig.behind.pop(WHERE, holder=holder)) == 1
        for id in ids:
            await refused(await alice.ack(id), id)
        assert await rig.counts() == (0, 0, 2, 0)


@pytest.mark.parametrize("memory", ["snapshot", "journal"])
async def test_restart_keeps_lease_holders_and_acks(tmp_path: Path, memory: Memory) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        a1, a2, b1, b2 = await alice.put(b"a1", b"a2", b"b1", b"b2")
        held = await alice.take(2)
        assert [m["id"] for m in held] == [a1, a2]
        assert [m["id"] for m in await bob.take(2)] == [b1, b2]
        assert (await alice.ack(a1)).status_code == 200
        await rig.restart(memory)
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        await refused(await bob.ack(a2), a2)
        await refused(await alice.nack(b1), b1)
        await refused(await alice.ack(a1), a1)
        assert (await alice.ack(a1, lease_token=held[0]["lease_token"])).status_code == 200  # a repeat
        assert await rig.counts() == (0, 0, 3, 0)
        assert (await alice.ack(a2)).status_code == 200
        assert (await bob.ack(b1)).status_code == 200
        assert (await bob.nack(b2, error="no")).status_code == 200
        assert await rig.counts() == (0, 1, 0, 0)


async def test_api_key_s_leases_are_its_own(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        keys = [rig.directory_guard.keys.create(name, ["*:produce,consume"])[1] for name in ("one", "two")]
        one, two = (rig.anybody(key.reveal()) for key in keys)
        (id,) = await one.put(b"x")
        await one.take()
        await refused(await two.ack(id), id)
        assert (await one.ack(id)).status_code == 200


async def test_repeated_ack_succeeds_with_its_token_and_is_409_without(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        (id,) = await alice.put(b"x")
        (held,) = await alice.take()
        for _ in range(3):
            assert (await alice.ack(id, lease_token=held["lease_token"])).status_code == 200
        await refused(await alice.ack(id), id)
        await refused(await alice.nack(id, lease_token=held["lease_token"]), id)
        assert await rig.counts() == (0, 0, 0, 0)


async def test_repeated_dequeue_returns_the_same_messages_to_its_caller_only(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        ids = await alice.put(b"1", b"2", b"3", b"4")
        first = (await alice.dequeue(limit=2, request_id="r")).json()
        assert [m["id"] for m in first] == ids[:2]
        assert (await alice.dequeue(limit=2, request_id="r")).json() == first
        assert [m["id"] for m in (await bob.dequeue(limit=1, request_id="r")).json()] == ids[2:3]
        assert (await alice.ack(ids[0])).status_code == 200
        assert (await alice.dequeue(limit=2, request_id="r")).json() == first[1:]
        assert (await alice.dequeue(request_id="")).status_code == 400
        assert (await alice.dequeue(request_id="x" * 257)).status_code == 400
        assert await rig.counts() == (1, 0, 2, 0)


async def test_token_distinguishes_workers_that_share_a_subject(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        slow, quick = await rig.login(ALICE), await rig.login(ALICE)
        (id,) = await slow.put(b"x")
        (old,) = await slow.take()
        await rig.pass_time(100)
        await rig.pass_time(100)
        (new,) = await quick.take()
        assert old["lease_token"] != new["lease_token"]
        await refused(await slow.ack(id, lease_token=old["lease_token"]), id)
        await refused(await slow.nack(id, lease_token=old["lease_token"]), id)
        assert await rig.counts() == (0, 0, 1, 0)
        assert (await quick.ack(id, lease_token=new["lease_token"])).status_code == 200
        assert await rig.counts() == (0, 0, 0, 0)


async def test_recreated_topic_has_no_leases_of_the_old_one(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        (old,) = await alice.put(b"old")
        (held,) = await alice.take()
        await rig.behind.delete_topic(WHERE)
        await refused(await alice.ack(old), old)  # even while the topic does not exist
        (new,) = await alice.put(b"new")
        assert new != old
        (again,) = await alice.take()
        await refused(await alice.ack(old), old)
        await refused(await alice.ack(old, lease_token=held["lease_token"]), old)
        await refused(await alice.ack(old, lease_token=again["lease_token"]), old)
        assert await rig.counts() == (0, 0, 1, 0)
        assert (await alice.ack(new)).status_code == 200


async def test_topic_that_grows_keeps_its_leases_and_finds_those_of_new_partitions(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        before = await alice.put(*[b"x"] * 4)
        assert len(await alice.take(4)) == 4
        await rig.behind.update_topic(WHERE, partitions=8)
        after = (await alice.enqueue(*(item(idempotency_key=f"k{i}") for i in range(40)))).json()
        assert len(await alice.take(40)) == 40
        assert len({id >> 12 & 1023 for id in after}) > 1
        await rig.restart("journal")
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        for id in before + after:
            assert (await bob.ack(id)).status_code == 409
            assert (await alice.ack(id)).status_code == 200
        assert await rig.counts() == (0, 0, 0, 0)


async def test_exactly_one_of_concurrent_settlements_without_token_counts(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        ids = await alice.put(*[b"x"] * 5)
        await alice.take()
        for id in ids:
            mine = [alice.nack(id), alice.nack(id), alice.nack(id), alice.nack(id)]
            answers = await asyncio.gather(*mine, bob.ack(id), bob.nack(id))
            assert Counter(a.status_code for a in answers) == {200: 1, 409: 5}
            assert all(a.status_code == 409 for a in answers[4:])
        assert await rig.counts() == (0, 5, 0, 0)


@pytest.mark.slow
async def test_killed_server_keeps_lease_holders(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with KillableServer(data) as server:
        admin = (data / "admin.key").read_text().strip()
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            ids = await Client(http, admin).put(b"1", b"2")
            assert [m["id"] for m in await Client(http, admin).take()] == ids
            assert (await Client(http, admin).ack(ids[0])).status_code == 200
        server.process.kill()
        await server.process.wait()
    async with KillableServer(data) as server, httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        await refused(await Client(http, admin).ack(ids[0]), ids[0])
        assert (await Client(http, None).ack(ids[1])).status_code == 401
        assert (await Client(http, admin).ack(ids[1])).status_code == 200
        assert await Client(http, admin).take() == []


class KillableServer(Process):
    async def __aenter__(self) -> KillableServer:
        await super().__aenter__()
        self.url = f"http://127.0.0.1:{self.http_port}"
        return self
