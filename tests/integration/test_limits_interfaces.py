"""Limits per caller on a real server: a call over a limit names the limit and changes nothing."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from heapline.client.transports.native import NativeBroker
from heapline.contract.batches import PrepareBatch, Share
from heapline.contract.errors import PayloadTooLarge, RateLimited, ResourceExhausted
from heapline.contract.message import Outgoing
from heapline.contract.messages import EnqueueBatch, NewMessages
from heapline.contract.topics import Stats
from heapline.wire.descriptors import pb
from heapline.wire.protobuf import request_of
from tests.integration.guarded_rig import GuardedRig
from tests.integration.server_rig import Requests, pop_start, until


async def open_streams(rig: GuardedRig, broker: Any, count: int) -> list[asyncio.Future[Any]]:
    before = len(rig.server.gate.credentials)
    streams = [
        asyncio.ensure_future(anext(broker.calls.stream("PopStream", Requests(pop_start(credits=1)))))
        for _ in range(count)
    ]

    async def open() -> bool:
        return len(rig.server.gate.credentials) == before + count

    await until(open)
    return streams


async def test_streams_are_limited_per_key_and_an_ended_one_frees_its_slot(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, streams_per_key=2) as rig:
        _, one = rig.key("*:produce,consume")
        _, other = rig.key("*:produce,consume")
        async with rig.as_(one) as broker, rig.as_(other) as neighbor:
            streams = await open_streams(rig, broker, 2)
            for stream in (
                broker.calls.stream("PopStream", Requests(pop_start(credits=1))),
                broker.calls.stream("EnqueueStream", Requests()),
            ):
                with pytest.raises(ResourceExhausted, match=r"open streams of key:.* limit of 2"):
                    await anext(stream)
            await open_streams(rig, neighbor, 1)  # another key's are counted separately
            assert await broker.pop("jobs") == []  # and calls are not streams
            streams[0].cancel()

            async def gone() -> bool:
                return len(rig.server.gate.credentials) == 2

            await until(gone)
            await open_streams(rig, broker, 1)


async def test_calls_in_progress_of_a_key_are_counted_on_all_interfaces(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, inflight_per_key=3) as rig:
        _, key = rig.key("*:produce,consume,admin")
        async with rig.as_(key) as broker:
            waiting = [asyncio.ensure_future(broker.pop("jobs", wait=600)) for _ in range(3)]

            async def all_wait() -> bool:
                return len(rig.server.gate.credentials) == 3

            await until(all_wait)
            with pytest.raises(ResourceExhausted, match="calls in flight"):
                await broker.enqueue("jobs", b"x")
            response = await rig.ask("GET", "/v1/heaps", key)
            assert (response.status_code, response.json()["error"]) == (429, "ResourceExhausted")
            assert response.headers["retry-after"]
            assert (await rig.ask("GET", "/v1/heaps")).status_code == 200  # the others continue
            assert (await rig.behind.stats("jobs")).ready == 0
            waiting[0].cancel()

            async def has_room() -> bool:
                return (await rig.ask("GET", "/v1/heaps", key)).status_code == 200

            await until(has_room)


async def test_refused_calls_do_not_count(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, inflight_per_key=1) as rig:
        _, key = rig.key("*:consume")
        for _ in range(5):
            assert (await rig.ask("POST", "/v1/heaps", key, json={"topic": "x"})).status_code == 403
            assert (await rig.ask("GET", "/v1/heaps", key)).status_code == 200


# -- rates -------------------------------------------------------------------------------------------------------------


async def call_native(rig: GuardedRig, key: str) -> None:
    async with NativeBroker(rig.target, credential=key) as native:
        await native.do(Stats("jobs"))


async def call_grpc(rig: GuardedRig, key: str) -> None:
    async with rig.as_(key) as broker:
        await broker.stats("jobs")


async def open_grpc_stream(rig: GuardedRig, key: str) -> None:
    async with rig.as_(key) as broker:
        await anext(broker.calls.stream("PopStream", Requests(pop_start(credits=1))))


async def call_http(rig: GuardedRig, key: str, path: str = "/v1/heaps") -> None:
    answer = await rig.ask("GET", path, key)
    if answer.status_code != 200:
        assert answer.status_code == 429
        error = RateLimited(**answer.json()["facts"])
        assert answer.headers["retry-after"] == str(error.retry_after)
        raise error


async def call_mqueue(rig: GuardedRig, key: str) -> None:
    await call_http(rig, key, "/dequeue?namespace=default&topic=jobs")


@pytest.mark.parametrize("call", [call_native, call_grpc, open_grpc_stream, call_http, call_mqueue])
async def test_rate_of_calls_is_one_over_all_interfaces(tmp_path: Path, call: Any) -> None:
    async with GuardedRig(tmp_path, calls_per_second=0.001) as rig:
        _, key = rig.key("*:produce,consume,admin")
        _, other = rig.key("*:produce,consume,admin")
        await call_http(rig, key)
        with pytest.raises(RateLimited, match="calls per second of key:") as limited:
            await call(rig, key)
        assert limited.value.retry_after > 900
        await call_http(rig, other)


async def enqueue_batch(rig: GuardedRig, key: str) -> None:
    async with rig.as_(key) as broker:
        await broker.enqueue_batch("jobs", [Outgoing(b"x")] * 3)


async def enqueue_in_stream(rig: GuardedRig, key: str) -> None:
    request = request_of(EnqueueBatch).pack(EnqueueBatch("jobs", NewMessages([b"x"])))
    async with rig.as_(key) as broker:
        await anext(broker.calls.stream("EnqueueStream", Requests(request)))


async def enqueue_mqueue(rig: GuardedRig, key: str) -> None:
    item = {"namespace": "default", "topic": "jobs", "payload": "eA=="}
    answer = await rig.ask("POST", "/enqueue", key, json=[item])
    if answer.status_code == 429:
        raise RateLimited(**answer.json()["facts"])
    assert answer.status_code < 300, answer.text


@pytest.mark.parametrize("enqueue", [enqueue_batch, enqueue_in_stream, enqueue_mqueue])
async def test_rate_of_messages_counts_batches_and_streams_of_a_key(tmp_path: Path, enqueue: Any) -> None:
    async with GuardedRig(tmp_path, messages_per_second=0.001) as rig:
        _, key = rig.key("*:produce,consume,admin")
        await enqueue(rig, rig.key("*:produce,consume,admin")[1])
        await enqueue_batch(rig, key)
        before = (await rig.behind.stats("jobs")).ready
        with pytest.raises(RateLimited, match="enqueued messages per second of key:"):
            await enqueue(rig, key)
        assert (await rig.behind.stats("jobs")).ready == before
        await call_grpc(rig, key)  # a call that does not enqueue is not limited


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_consumer_gets_more_leases_only_after_acks(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, leases_per_consumer=5) as rig:
        await rig.behind.enqueue_batch("jobs", [Outgoing(b"x")] * 30)
        async with rig.as_(rig.admin_key) as broker:
            first = await broker.pop("jobs", 3)
            assert len(await broker.pop("jobs", 100)) == 2
            with pytest.raises(ResourceExhausted, match=r"leases of consumer 'key:.*' on topic 'jobs': the limit of 5"):
                await broker.pop("jobs")
            with pytest.raises(ResourceExhausted):
                await anext(broker.calls.stream("PopStream", Requests(pop_start(credits=1))))
            assert await rig.leased() == 5
            assert len(await broker.pop("jobs", 100, holder="w1")) == 5  # another consumer
            await broker.ack(first[0])
            await broker.nack(first[1], backoff=100)
            assert len(await broker.pop("jobs", 100)) == 2


async def test_expired_leases_do_not_count_and_leases_survive_a_restart(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, leases_per_consumer=5) as rig:
        await rig.behind.enqueue_batch("jobs", [Outgoing(b"x")] * 30)
        assert len(await rig.as_admin(lambda b: b.pop("jobs", 5, visibility=60))) == 5
        await rig.restart()
        with pytest.raises(ResourceExhausted):
            await rig.as_admin(lambda b: b.pop("jobs"))
        rig.clock.advance(61)
        await rig.behind.stats("jobs")
        assert len(await rig.as_admin(lambda b: b.pop("jobs", 100))) == 5


async def test_concurrent_waiting_pops_do_not_exceed_the_limit_together(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, leases_per_consumer=5) as rig, rig.as_(rig.admin_key) as broker:
        waiting = [asyncio.ensure_future(broker.pop("jobs", 4, wait=600)) for _ in range(4)]

        async def all_wait() -> bool:
            return len(rig.server.gate.credentials) == 4

        await until(all_wait)
        await rig.behind.enqueue_batch("jobs", [Outgoing(b"x")] * 16)
        response = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
        got = [len(t) for t in response if isinstance(t, list)]
        assert sum(got) == 5
        assert all(isinstance(t, list | ResourceExhausted) for t in response)

        async def settled() -> bool:
            return await rig.leased() == sum(got)

        await until(settled)


async def test_repeated_pop_is_answered_at_the_limit(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, leases_per_consumer=5) as rig, rig.as_(rig.admin_key) as broker:
        await rig.behind.enqueue_batch("jobs", [Outgoing(b"x")] * 30)
        first = await broker.pop("jobs", 5, request_id="r1")
        again = await broker.pop("jobs", 5, request_id="r1")
        assert [m.id for m in again] == [m.id for m in first]
        with pytest.raises(ResourceExhausted):
            await broker.pop("jobs", 5, request_id="r2")


# -- payloads ----------------------------------------------------------------------------------------------------------


SMALL, LARGE = b"x" * 60, b"x" * 101
BOTH = NewMessages([SMALL, LARGE])
TOO_LARGE: list[tuple[str, Any]] = [
    ("Enqueue", pb.EnqueueRequest(topic="jobs", payload=LARGE)),
    ("EnqueueBatch", request_of(EnqueueBatch).pack(EnqueueBatch("jobs", BOTH))),
    ("EnqueueBatch", request_of(EnqueueBatch).pack(EnqueueBatch("jobs", BOTH, atomic=False))),
    ("EnqueueBatch", request_of(EnqueueBatch).pack(EnqueueBatch("jobs", BOTH), as_columns=False)),
    ("PrepareBatch", request_of(PrepareBatch).pack(PrepareBatch("b", "p", [Share("jobs", BOTH)]))),
]


@pytest.mark.parametrize(("call", "request_"), TOO_LARGE)
async def test_payload_over_the_server_s_limit_is_refused(tmp_path: Path, call: str, request_: Any) -> None:
    async with GuardedRig(tmp_path, payload_bytes_max=100) as rig, rig.as_(rig.admin_key) as broker:
        with pytest.raises(PayloadTooLarge) as caught:
            await broker.calls(call, request_)
        assert (caught.value.size, caught.value.limit) == (101, 100)
        assert (await rig.behind.stats("jobs")).ready == 0
        await broker.enqueue_batch("jobs", [Outgoing(SMALL)] * 5)  # more than 100 bytes together


async def test_payload_over_the_limit_ends_an_enqueue_stream(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, payload_bytes_max=100) as rig, rig.as_(rig.admin_key) as broker:
        with pytest.raises(PayloadTooLarge):
            await anext(broker.calls.stream("EnqueueStream", Requests(TOO_LARGE[1][1])))


# -- over MQueue's API -------------------------------------------------------------------------------------------------


async def test_mqueue_s_api_keeps_the_same_limits(tmp_path: Path) -> None:
    async with GuardedRig(tmp_path, payload_bytes_max=100, leases_per_consumer=2) as rig:
        item = {"namespace": "default", "topic": "jobs", "priority": 1}
        response = await rig.ask("POST", "/enqueue", json=[item | {"payload": base64.b64encode(LARGE).decode()}])
        assert response.status_code == 413
        assert (await rig.behind.stats("jobs")).ready == 0
        some = await rig.ask("POST", "/enqueue", json=[item | {"payload": base64.b64encode(SMALL).decode()}] * 5)
        assert some.status_code == 200
        asked = {"namespace": "default", "topic": "jobs", "limit": 5}
        assert len((await rig.ask("GET", "/dequeue", params=asked)).json()) == 2
        assert (await rig.ask("GET", "/dequeue", params=asked)).status_code == 429
        assert await rig.leased() == 2
