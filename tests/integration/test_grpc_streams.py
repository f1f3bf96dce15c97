"""PopStream and EnqueueStream over a real socket: credits, slow and disconnected clients, order, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from heapline.contract.columns import unpack
from heapline.contract.errors import BadRequest, TopicNotFound, Unauthenticated, UnavailableError
from heapline.contract.leases import Pop
from heapline.contract.message import LeaseRef, Outgoing
from heapline.contract.messages import EnqueueBatch, NewMessages
from heapline.server.auth.principals import LOCAL
from heapline.server.gate import Request
from heapline.server.protocols.message_streams import PopStream
from heapline.wire.descriptors import pb
from heapline.wire.protobuf import request_of, response_of
from tests.integration.server_rig import Keys, Requests, Rig, pop_start, until


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        yield rig


async def fill(rig: Rig, count: int, size: int = 1) -> None:
    for _ in range(0, count, 10):
        await rig.behind.enqueue_batch("jobs", [Outgoing(b"x" * size)] * 10)


def leased(response: Any) -> Any:
    return response_of(Pop).unpack(response).messages


def size(response: Any) -> int:
    return len(leased(response))


async def take(stream: Any, count: int) -> list[Any]:
    """Read responses until they contain this many messages."""
    got: list[Any] = []
    async with asyncio.timeout(20):
        while sum(map(size, got)) < count:
            got.append(await anext(stream))
    return got


async def test_stream_sends_at_most_its_credits(rig: Rig) -> None:
    await fill(rig, 100)
    requests = Requests(pop_start(credits=10, max_messages=4))
    stream = rig.wire.calls.stream("PopStream", requests)
    assert [size(r) for r in await take(stream, 10)] == [4, 4, 2]
    assert await rig.leased() == 10
    requests.credits(5)
    await take(stream, 5)
    assert await rig.leased() == 15
    await stream.aclose()


async def test_waiting_stream_delivers_new_messages(rig: Rig) -> None:
    requests = Requests(pop_start(credits=2))
    stream = rig.wire.calls.stream("PopStream", requests)
    waiting = asyncio.ensure_future(anext(stream))
    await rig.broker.enqueue("jobs", b"late", key="k", headers={"a": "b"})
    (response,) = [await asyncio.wait_for(waiting, 10)]
    found = leased(response)
    assert (found.payloads, found.keys, found.headers) == ([b"late"], ["k"], [{"a": "b"}])
    await stream.aclose()


async def test_stalled_consumer_holds_a_few_batches_and_others_get_the_rest(rig: Rig) -> None:
    await fill(rig, 400, size=60_000)
    stalled = rig.wire.calls.open("PopStream", aiter(Requests(pop_start(credits=100_000, max_messages=10))))
    last = -1

    async def settled() -> bool:
        nonlocal last
        await asyncio.sleep(0.2)
        now = await rig.leased()
        same, last = now == last and now > 0, now
        return same

    await until(settled)
    assert last <= 200, "messages that a client does not read must stay in the heap"
    rest = await rig.broker.pop("jobs", 50)
    assert rest, "a stalled consumer does not delay others"
    stalled.cancel()


async def test_cut_stream_keeps_leases_of_sent_messages_until_they_end(rig: Rig) -> None:
    await fill(rig, 20)
    requests = Requests(pop_start(credits=5, visibility=30.0))
    stream = rig.wire.calls.stream("PopStream", requests)
    await take(stream, 5)
    await stream.aclose()
    assert await rig.leased() == 5
    await rig.advance(31)
    assert await rig.leased() == 0


async def test_waiting_stream_that_was_cut_leases_nothing(rig: Rig) -> None:
    stream = rig.wire.calls.stream("PopStream", Requests(pop_start(credits=5)))
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait({waiting})
    await rig.broker.enqueue("jobs", b"x")
    (message,) = await rig.broker.pop("jobs", wait=5)
    assert message.payload == b"x"


async def test_leases_for_a_closed_stream_are_returned(rig: Rig) -> None:
    await fill(rig, 10)
    request = Request(rig.server.gate, "grpc", "PopStream", {}, is_stream=True)
    request.caller = LOCAL
    stream = PopStream(rig.server.dispatcher, request, lambda: True).run(aiter(Requests(pop_start(credits=5))))
    assert [r async for r in stream] == []

    async def all_back() -> bool:
        stats = await rig.behind.stats("jobs")
        return (stats.ready, stats.leased) == (10, 0)

    await until(all_back)
    assert (await rig.behind.stats("jobs")).leased_total == 5, "they were leased meanwhile"


async def test_client_that_ends_its_side_ends_the_stream(rig: Rig) -> None:
    requests = Requests(pop_start(credits=5))
    stream = rig.wire.calls.stream("PopStream", requests)
    waiting = asyncio.ensure_future(anext(stream, "ended"))
    await asyncio.sleep(0.02)
    requests.end()
    assert await asyncio.wait_for(waiting, 10) == "ended"


@pytest.mark.parametrize(
    "first", [pb.PopStreamRequest(credits=1), pop_start(credits=-1), pop_start(credits=1 << 40)]
)  # fmt: skip
async def test_stream_with_an_invalid_first_message_is_refused(rig: Rig, first: Any) -> None:
    with pytest.raises(BadRequest):
        await anext(rig.wire.calls.stream("PopStream", Requests(first)))


async def test_stream_of_an_unknown_topic_raises_not_found(rig: Rig) -> None:
    with pytest.raises(TopicNotFound):
        await anext(rig.wire.calls.stream("PopStream", Requests(pop_start("nowhere", credits=1))))


async def test_revoked_key_ends_its_open_stream(tmp_path: Path) -> None:
    keys = Keys(good="*:produce,consume,admin")
    async with Rig(tmp_path, keys) as rig:
        rig.wire.calls.metadata = (("authorization", "good"),)
        await rig.broker.create_topic("jobs", **rig.small)
        requests = Requests(pop_start(credits=1))
        stream = rig.wire.calls.stream("PopStream", requests)
        await rig.broker.enqueue("jobs", b"x")
        await take(stream, 1)
        keys.revoked.add("good")
        await rig.behind.enqueue("jobs", b"y")
        requests.credits(1)
        with pytest.raises(Unauthenticated):
            await asyncio.wait_for(anext(stream), 10)
        assert await rig.leased() == 1


async def test_revoked_key_ends_its_enqueue_stream(tmp_path: Path) -> None:
    keys = Keys(good="*:produce,consume,admin")
    async with Rig(tmp_path, keys) as rig:
        rig.wire.calls.metadata = (("authorization", "good"),)
        await rig.broker.create_topic("jobs", **rig.small)
        requests = Requests(batch(b"a"))
        stream = rig.wire.calls.stream("EnqueueStream", requests)
        await anext(stream)
        keys.revoked.add("good")
        requests.say(batch(b"b"))
        with pytest.raises(Unauthenticated):
            await asyncio.wait_for(anext(stream), 10)
        assert (await rig.behind.stats("jobs")).ready == 1


async def test_open_streams_end_when_the_server_stops(rig: Rig) -> None:
    stream = rig.wire.calls.stream("PopStream", Requests(pop_start(credits=1)))
    waiting = asyncio.ensure_future(anext(stream))
    popping = asyncio.ensure_future(rig.broker.pop("jobs", wait=60))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(rig.server.stop(), 10)
    with pytest.raises(UnavailableError):
        await waiting
    with pytest.raises(UnavailableError):
        await popping


# -- EnqueueStream -----------------------------------------------------------------------------------------------------


def batch(*payloads: bytes, topic: str = "jobs") -> Any:
    return request_of(EnqueueBatch).pack(EnqueueBatch(topic, NewMessages(list(payloads))))


def ids_in(answer: Any) -> list[int]:
    return unpack(response_of(EnqueueBatch).unpack(answer).ids)


async def test_enqueue_stream_answers_every_batch_in_order(rig: Rig) -> None:
    requests = Requests(*[batch(b"%d" % i, b"%d" % i) for i in range(50)])
    requests.end()
    answers = [ids_in(a) async for a in rig.wire.calls.stream("EnqueueStream", requests)]
    assert list(map(len, answers)) == [2] * 50
    for i, ids in enumerate(answers):
        for id in ids:
            assert (await rig.behind.get("jobs", id)).payload == b"%d" % i


async def test_enqueue_stream_answers_earlier_batches_before_the_error_of_one(rig: Rig) -> None:
    requests = Requests(batch(b"a"), batch(b"b", topic="nowhere"))
    stream = rig.wire.calls.stream("EnqueueStream", requests)
    assert len(ids_in(await anext(stream))) == 1
    with pytest.raises(TopicNotFound):
        await anext(stream)
    assert (await rig.broker.stats("jobs")).ready == 1


async def test_lease_of_a_stream_is_acked_by_an_ordinary_call(rig: Rig) -> None:
    await fill(rig, 10)
    stream = rig.wire.calls.stream("PopStream", Requests(pop_start(credits=10)))
    for response in await take(stream, 10):
        found = leased(response)
        pairs = zip(unpack(found.ids), unpack(found.tokens), strict=True)
        await rig.broker.ack([LeaseRef("jobs", int(id), int(token)) for id, token in pairs])
    stats = await rig.broker.stats("jobs")
    assert (stats.ready, stats.leased, stats.acked_total) == (0, 0, 10)
    await stream.aclose()
