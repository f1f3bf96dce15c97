"""MQueue's API: a namespace over its rate receives Retry-After, and other namespaces are not affected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.integration.mqueue_rig import ALICE, BOB, WHERE, MQueueRig, item


def limited(answer: httpx.Response, seconds: int) -> None:
    assert answer.status_code == 429, answer.text
    assert answer.headers["retry-after"] == str(seconds)
    reported = answer.json()
    assert reported["error"] == "RateLimited"
    assert reported["facts"]["retry_after"] == seconds


async def test_rate_limited_namespace_gets_retry_after_and_others_are_served(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path, mqueue_rate=0.4, mqueue_burst=5.0) as rig:
        alice, bob = await rig.login(ALICE), await rig.login(BOB)
        (id,) = await alice.put(b"x")
        assert [m["id"] for m in await bob.take()] == [id]  # two requests at the same time, from any user
        for refused in (alice.enqueue(item()), bob.dequeue(), bob.ack(id), bob.nack(id)):
            limited(await refused, 3)  # 2.5 seconds, rounded up
        assert await rig.counts() == (0, 0, 1, 0)
        assert (await bob.enqueue({**item(), "namespace": "other"})).status_code == 200
        await rig.pass_time(2.4)
        limited(await bob.ack(id), 1)
        await rig.pass_time(0.1)
        assert (await bob.ack(id)).status_code == 200
        limited(await bob.dequeue(), 3)


async def test_request_over_two_namespaces_counts_in_both_or_in_none(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path, mqueue_rate=1.0, mqueue_burst=2.0) as rig:
        bob = await rig.login(BOB)
        other = {**item(), "namespace": "other"}
        for _ in range(2):
            assert (await bob.enqueue(item())).status_code == 200
        for _ in range(5):
            limited(await bob.enqueue(other, item()), 1)
        assert "other/process-refund" not in [info.name for info in await rig.behind.list_topics()]
        assert [(await bob.enqueue(other)).status_code for _ in range(3)] == [200, 200, 429]


async def test_namespace_can_have_its_own_rate_or_none(tmp_path: Path) -> None:
    rates = {"quick": 0.0, "slow": 0.001}
    async with MQueueRig(tmp_path, mqueue_rate=2.0, mqueue_burst=1.0, mqueue_rates=rates) as rig:
        bob = await rig.login(BOB)

        async def statuses(namespace: str) -> list[int]:
            answers = [await bob.dequeue(namespace=namespace) for _ in range(4)]
            return [answer.status_code for answer in answers]

        assert await statuses("quick") == [200] * 4
        assert await statuses("slow") == [200, 429, 429, 429]
        assert await statuses("others") == [200, 200, 429, 429]
        limited(await bob.dequeue(namespace="slow"), 1000)


async def test_rejected_requests_do_not_consume_the_rate(tmp_path: Path) -> None:
    users = {ALICE: "payments/*:produce,consume", BOB: "other/*:produce,consume"}
    async with MQueueRig(tmp_path, users, mqueue_rate=1.0, mqueue_burst=0.0) as rig:
        alice, bob, nobody = await rig.login(ALICE), await rig.login(BOB), rig.anybody()
        for _ in range(3):
            assert (await nobody.dequeue()).status_code == 401
            assert (await bob.dequeue()).status_code == 403
            assert (await bob.enqueue({**item(), "namespace": "other"}, item())).status_code == 403
            assert (await alice.enqueue({**item(), "payload": "!"})).status_code == 400
        assert (await alice.dequeue()).status_code == 200
        limited(await alice.dequeue(), 1)


async def test_concurrent_requests_are_limited_to_the_burst(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path, mqueue_rate=10.0, mqueue_burst=0.5) as rig:
        alice = await rig.login(ALICE)
        answers = await asyncio.gather(*(alice.enqueue(item(b"%d" % i)) for i in range(30)))
        assert sorted(a.status_code for a in answers) == [200] * 5 + [429] * 25
        assert await rig.counts(WHERE) == (5, 0, 0, 0)


async def test_without_a_rate_nothing_is_limited(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        alice = await rig.login(ALICE)
        answers = await asyncio.gather(*(alice.dequeue() for _ in range(50)))
        assert {a.status_code for a in answers} == {200}
