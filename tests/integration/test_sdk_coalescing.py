"""Single calls are joined over a real server: few requests, and each caller gets its own answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import heapline
from heapline.client.sdk import ConnectedBroker
from heapline.contract.errors import (
    BadRequest,
    IdempotencyConflict,
    LeaseLost,
    PayloadTooLarge,
    ResourceExhausted,
    Unauthenticated,
)
from heapline.contract.message import Enqueued, Outgoing
from tests.integration.server_rig import Keys, Rig


class Heard:
    """Counts the calls that a client makes."""

    def __init__(self, hl: ConnectedBroker) -> None:
        self.calls: Counter[str] = Counter()
        connect = hl._connect

        def counted(endpoint: str) -> Any:
            transport = connect(endpoint)
            request = transport._request

            async def call(command: Any, context: Any) -> Any:
                self.calls[type(command).facts.rpc] += 1
                return await request(command, context)

            transport._request = call  # type: ignore[method-assign]
            return transport

        hl._connect = counted  # type: ignore[method-assign]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        yield rig


@pytest.fixture
async def hl(rig: Rig) -> AsyncIterator[ConnectedBroker]:
    async with heapline.connect(rig.target) as hl:
        yield hl


async def test_enqueues_and_acks_of_many_coroutines_take_few_calls(hl: ConnectedBroker) -> None:
    heard = Heard(hl)

    async def one(i: int) -> int:
        return (await hl.enqueue("jobs", b"%d" % i, priority=i)).id

    ids = await asyncio.gather(*(one(i) for i in range(500)))
    messages = await hl.pop("jobs", 500)
    assert [m.id for m in messages] == ids, "each has the id of its own message"
    await asyncio.gather(*(m.ack() for m in messages))
    assert heard.calls["EnqueueBatch"] <= 3
    assert heard.calls["Ack"] <= 3
    assert heard.calls["Enqueue"] == 0


async def test_message_that_meets_no_other_is_sent_singly(hl: ConnectedBroker) -> None:
    heard = Heard(hl)
    for i in range(3):
        await hl.enqueue("jobs", b"%d" % i)
    assert (heard.calls["Enqueue"], heard.calls["EnqueueBatch"]) == (3, 0)


async def test_one_callers_messages_keep_their_order(hl: ConnectedBroker) -> None:
    await asyncio.gather(*(hl.enqueue("jobs", b"%d" % i) for i in range(2500)))
    assert [int(m.payload) for m in await hl.pop("jobs", 2500)] == list(range(2500))


async def test_bad_message_fails_only_its_own_caller(hl: ConnectedBroker) -> None:
    await hl.enqueue("jobs", b"first", idempotency_key="k")
    calls = [
        hl.enqueue("jobs", b"good"),
        hl.enqueue("jobs", b"x" * 100_000),
        hl.enqueue("jobs", b"other", idempotency_key="k"),
        hl.enqueue("jobs", b"first", idempotency_key="k"),
        hl.enqueue("jobs", b"good too", headers={"a": "b"}, delay=60),
    ]
    one, two, three, four, five = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(two, PayloadTooLarge)
    assert isinstance(three, IdempotencyConflict)
    assert isinstance(one, Enqueued)
    assert isinstance(five, Enqueued)
    assert isinstance(four, Enqueued)
    assert (one.duplicate, four.duplicate, five.duplicate) == (False, True, False)
    stats = await hl.stats("jobs")
    assert (stats.ready, stats.delayed) == (2, 1)


async def test_lost_lease_fails_only_its_own_ack(rig: Rig, hl: ConnectedBroker) -> None:
    await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(3)])
    messages = await hl.pop("jobs", 3)
    await rig.behind.release(messages[1])
    results = await asyncio.gather(*(m.ack() for m in messages), return_exceptions=True)
    assert results[0] is results[2] is None
    assert isinstance(results[1], LeaseLost)
    assert results[1].lost == [messages[1].id]


async def test_two_leases_of_one_message_are_settled_separately(rig: Rig, hl: ConnectedBroker) -> None:
    await hl.enqueue("jobs", b"x")
    (old,) = await hl.pop("jobs")
    await rig.behind.release(old)
    (new,) = await hl.pop("jobs")
    results = await asyncio.gather(old.ack(), new.ack(), old.ack(), return_exceptions=True)
    assert [type(r) for r in results] == [LeaseLost, type(None), LeaseLost]


async def test_small_batches_are_joined_and_rejected_independently(hl: ConnectedBroker) -> None:
    await hl.enqueue("jobs", b"", idempotency_key="k")
    heard = Heard(hl)
    good = [hl.enqueue_batch("jobs", [Outgoing(b"%d" % i)] * 3) for i in range(40)]
    bad = hl.enqueue_batch("jobs", [Outgoing(b"bad"), Outgoing(b"other", idempotency_key="k")])
    *results, refused = await asyncio.gather(*good, bad, return_exceptions=True)
    assert isinstance(refused, IdempotencyConflict)
    assert all(len(r) == 3 and not any(e.duplicate for e in r) for r in results)  # type: ignore[arg-type]
    assert len({e.id for r in results for e in r}) == 120  # type: ignore[union-attr]
    assert (await hl.stats("jobs")).ready == 121
    heard.calls.clear()
    await asyncio.gather(*(hl.enqueue_batch("jobs", [Outgoing(b"%d" % i)] * 3) for i in range(40)))
    assert heard.calls["EnqueueBatch"] <= 2


async def test_batches_that_exceed_the_limit_together_are_sent_one_by_one(hl: ConnectedBroker) -> None:
    await hl.update_topic("jobs", max_backlog=10)
    calls = (hl.enqueue_batch("jobs", [Outgoing(b"x")] * 4) for _ in range(5))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["ResourceExhausted"] * 3 + ["list"] * 2
    assert isinstance(next(r for r in results if not isinstance(r, list)), ResourceExhausted)
    assert (await hl.stats("jobs")).ready == 8


async def test_full_topic_name_shares_the_lane_and_the_numbers(hl: ConnectedBroker) -> None:
    await asyncio.gather(*(hl.enqueue("jobs", b"a"), hl.enqueue("default/jobs", b"b")))
    assert {m.payload for m in await hl.pop("default/jobs", 5)} == {b"a", b"b"}


async def test_cancelled_pop_leaves_nothing_leased(rig: Rig, hl: ConnectedBroker) -> None:
    await hl.enqueue("jobs", b"x")
    for steps in range(0, 30, 3):
        popping = asyncio.ensure_future(hl.pop("jobs", wait=30, visibility=3600))
        for _ in range(steps):
            await asyncio.sleep(0)
        popping.cancel()
        await asyncio.wait({popping})
        if not popping.cancelled():
            await popping.result()[0].release()
        (message,) = await hl.pop("jobs", wait=10)
        await message.release()


# -- consume -----------------------------------------------------------------------------------------------------------


async def test_revoked_key_ends_consuming_with_its_error(tmp_path: Path) -> None:
    keys = Keys(k1="*:produce,consume")
    async with Rig(tmp_path, keys) as rig, heapline.connect(rig.target, api_key="k1") as hl:
        await rig.behind.create_topic("jobs", **rig.small)
        await hl.enqueue("jobs", b"1")
        async with hl.consume("jobs") as messages:
            await (await anext(messages)).ack()
            keys.revoked.add("k1")
            with pytest.raises(Unauthenticated):
                await asyncio.wait_for(anext(messages), 30)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
async def test_consumer_leases_no_more_than_it_wants(rig: Rig, hl: ConnectedBroker, prefetch: int) -> None:
    await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i) for i in range(12)])
    async with hl.consume("jobs", prefetch=prefetch) as messages:
        for number in range(4):
            message = await anext(messages)
            assert message.payload == b"%d" % number
            for _ in range(20):  # time for more to arrive
                await hl.stats("jobs")
            assert await rig.leased() == 1 + prefetch
            await message.ack()


async def test_closing_the_client_releases_prefetched_messages(rig: Rig) -> None:
    async with heapline.connect(rig.target) as hl:
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(9)])
        messages = hl.consume("jobs", prefetch=5)
        await (await anext(messages)).ack()
    stats = await rig.behind.stats("jobs")
    assert (stats.ready, stats.leased) == (8, 0)


async def test_client_retries_while_its_server_restarts(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.start()
    port = rig.server.port
    await rig.behind.create_topic("jobs", **rig.small)
    async with heapline.connect(rig.target, deadline=60) as hl:
        messages = hl.consume("jobs")
        waiting = asyncio.ensure_future(anext(messages))
        await hl.enqueue("jobs", b"1")
        await (await waiting).ack()
        waiting = asyncio.ensure_future(anext(messages))
        await rig.stop()
        calls = asyncio.gather(*(hl.enqueue("jobs", b"%d" % i) for i in range(20)))
        await asyncio.sleep(0.3)
        rig._settings = msgspec.structs.replace(rig._settings, port=port)
        await rig.start()
        assert len({r.id for r in await calls}) == 20
        await (await asyncio.wait_for(waiting, 30)).ack()
        await messages.aclose()
        assert (await hl.stats("jobs")).ready == 19
    await rig.stop()


async def test_headers_are_copied_when_the_call_is_made(
    hl: ConnectedBroker,
) -> None:
    headers: dict[str, Any] = {"n": "1"}
    calls = [asyncio.ensure_future(hl.enqueue("jobs", b"first"))]
    await asyncio.sleep(0)
    calls.append(asyncio.ensure_future(hl.enqueue("jobs", b"second", headers=headers)))
    await asyncio.sleep(0)
    headers["n"] = 2  # no header at all: neither this call nor the next one may be affected
    calls.append(asyncio.ensure_future(hl.enqueue("jobs", b"third")))
    await asyncio.gather(*calls)
    assert [m.headers for m in await hl.pop("jobs", 3)] == [{}, {"n": "1"}, {}]


async def test_messages_of_a_batch_have_their_own_headers(hl: ConnectedBroker) -> None:
    same = {"a": "1"}
    headers = [same, same, None, {}, {"a": "2"}, {"b": "1", "a": "1"}, {"a": "1", "b": "1"}, same]
    await hl.enqueue_batch("jobs", [Outgoing(b"x", headers=h) for h in headers])
    popped = await hl.pop("jobs", len(headers))
    assert [m.headers for m in popped] == [h or {} for h in headers]
    with_some = [m for m in popped if m.headers]
    for i, message in enumerate(with_some):
        message.headers["mine"] = str(i)
    assert [m.headers["mine"] for m in with_some] == [*"012345"]
    assert same == {"a": "1"}


async def test_call_too_large_for_the_server_fails_alone_and_others_count_once(tmp_path: Path) -> None:
    async with Rig(tmp_path, request_bytes_max=1 << 20) as rig:
        await rig.behind.create_topic("jobs", max_payload_bytes=3 << 20)
        async with heapline.connect(rig.target) as hl:

            async def small(i: int) -> None:
                await asyncio.sleep(0.001 * (i % 7))  # some are in flight, and some executed, when it breaks
                await hl.enqueue_batch("jobs", [Outgoing(b"x") for _ in range(3)])

            async def large() -> None:
                await asyncio.sleep(0.003)
                with pytest.raises(BadRequest, match="over the server's limit of 1048576"):
                    await hl.enqueue_batch("jobs", [Outgoing(b"x" * (2 << 20))])

            await asyncio.gather(*(small(i) for i in range(60)), large(), *(small(i) for i in range(60)))
            assert (await rig.behind.stats("jobs")).ready == 360
