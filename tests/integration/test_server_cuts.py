"""Streams and batches with broken connections: acknowledged calls are kept, leases are released, nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from heapline.client.transports.native import NativeBroker
from heapline.contract.broker import Broker
from heapline.contract.columns import unpack
from heapline.contract.errors import TopicNotFound, UnavailableError
from heapline.contract.leases import Pop
from heapline.contract.message import Enqueued, Outgoing
from heapline.contract.messages import EnqueueBatch, pack_messages
from heapline.wire.protobuf import request_of, response_of
from tests.integration.cuttable_client import Cuttable, answered, fill
from tests.integration.proxy import Proxy
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_rig import Requests, Rig, pop_start, until

BIG = 50_000


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        yield rig


@pytest.fixture
async def world(rig: Rig) -> AsyncIterator[Cuttable]:
    async with Proxy(rig.grpc_target) as proxy, Cuttable(rig, proxy, RawGrpc(proxy.target)) as world:
        yield world


@pytest.fixture
async def native_world(rig: Rig) -> AsyncIterator[Cuttable]:
    async with Proxy(rig.target) as proxy, Cuttable(rig, proxy, NativeBroker(proxy.target)) as world:
        yield world


async def read_all(stream: Any, take: Callable[[Any], Any]) -> None:
    async with asyncio.timeout(20):
        async for response in stream:
            take(response)


# -- PopStream ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 9, 1000, 3 * BIG])
async def test_stream_cut_in_mid_frame_loses_and_duplicates_nothing(world: Cuttable, after: int) -> None:
    rig = world.rig
    await fill(rig, 6, BIG)
    world.proxy.cut_after(after)
    stream = world.client.calls.stream("PopStream", Requests(pop_start(credits=4, max_messages=2, visibility=30.0)))
    got: list[int] = []
    with pytest.raises(UnavailableError):
        await read_all(stream, lambda response: got.extend(unpack(response_of(Pop).unpack(response).messages.ids)))
    # There may be none although one was sent: a client's gRPC may report the cut before it delivers what it has.
    assert len(got) in ((0, 2) if after > BIG else (0,)), "a response arrives completely, or not at all"
    await world.settled()
    ready, leased = await world.counts()
    assert ready + leased == 6
    assert len(got) <= leased <= 4, "sent messages stay leased: they may have arrived"
    others = await rig.behind.pop("jobs", 100, visibility=60.0, max_bytes=1 << 30)
    assert len(others) >= ready, "more, if a pop in progress is released only now"
    assert not {m.id for m in others} & set(got)
    await rig.advance(31)
    await rig.advance(60)  # and their backoff
    again = await rig.behind.pop("jobs", 100, max_bytes=1 << 30, wait=5)
    assert len({m.id for m in again} | {m.id for m in others}) == 6
    await world.nothing_is_left()


async def test_waiting_stream_leases_nothing_after_a_cut(world: Cuttable) -> None:
    stream = world.client.calls.stream("PopStream", Requests(pop_start(credits=5)))
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 20)
    await world.nothing_is_left()
    await fill(world.rig, 1)
    assert await world.counts() == (1, 0)


async def test_stalled_stream_that_is_cut_releases_everything(world: Cuttable) -> None:
    rig = world.rig
    await fill(rig, 200, BIG)
    world.proxy.stall()
    stream = world.client.calls.stream("PopStream", Requests(pop_start(credits=1000, max_messages=5, visibility=30.0)))
    waiting = asyncio.ensure_future(anext(stream))

    async def has_leased() -> bool:
        return await rig.leased() > 0

    await until(has_leased)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 20)
    await world.nothing_is_left()
    await rig.advance(31)
    await rig.advance(60)

    async def all_back() -> bool:
        return await world.counts() == (200, 0)

    await until(all_back)


# -- EnqueueStream and EnqueueBatch ------------------------------------------------------------------------------------


def numbered(epoch: int, number: int, size: int = 3) -> Any:
    messages = [Outgoing(b"%d.%d" % (number, i), seq=number * size + i) for i in range(size)]
    command = EnqueueBatch("jobs", pack_messages(messages), producer_id="p", epoch=epoch, answered_below=0)
    return request_of(EnqueueBatch).pack(command)


async def test_enqueue_stream_cut_and_repeated_enqueues_every_message_once(world: Cuttable) -> None:
    epoch = await world.rig.behind.open_producer("jobs", "p")
    batches = [numbered(epoch, i) for i in range(60)]
    world.proxy.cut_after(300)
    known: list[list[int]] = []
    stream = world.client.calls.stream("EnqueueStream", Requests(*batches))
    with pytest.raises(UnavailableError):
        await read_all(stream, lambda answer: known.append(ids_of(answer)))
    assert 0 < len(known) < 60
    for number, ids in enumerate(known):
        for i, id in enumerate(ids):
            assert (await world.rig.behind.get("jobs", id)).payload == b"%d.%d" % (number, i)
    requests = Requests(*batches)
    requests.end()
    again = [ids_of(answer) async for answer in world.rig.wire.calls.stream("EnqueueStream", requests)]
    assert again[: len(known)] == known, "a repeat gets the same ids"
    assert await world.counts() == (180, 0)
    await world.nothing_is_left()


def ids_of(answer: Any) -> list[int]:
    return unpack(response_of(EnqueueBatch).unpack(answer).ids)


async def test_repeated_batch_with_a_lost_response_is_recognized(world: Cuttable) -> None:
    await repeat_batch(world)


async def test_repeated_batch_with_a_lost_response_is_recognized_on_the_native_wire(native_world: Cuttable) -> None:
    await repeat_batch(native_world)


async def repeat_batch(world: Cuttable) -> None:
    epoch = await world.rig.behind.open_producer("jobs", "p")
    batch = [Outgoing(b"%d" % i, seq=i) for i in range(10)]

    async def send(broker: Broker) -> list[Enqueued]:
        return await broker.enqueue_batch("jobs", batch, producer_id="p", epoch=epoch, answered_below=0)

    world.proxy.hold()
    sending = asyncio.ensure_future(send(world.client))
    await answered(world.proxy)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(sending, 20)
    assert await world.counts() == (10, 0)
    assert all(result.duplicate for result in await send(world.rig.wire))
    assert await world.counts() == (10, 0)
    await world.nothing_is_left()


async def test_idle_enqueue_stream_ends_when_the_server_stops(rig: Rig) -> None:
    epoch = await rig.behind.open_producer("jobs", "p")
    stream = rig.wire.calls.stream("EnqueueStream", Requests(numbered(epoch, 0)))
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.02)
    rig.server.gate.stopping.set()
    with pytest.raises(UnavailableError, match="stopping"):
        await asyncio.wait_for(waiting, 10)


async def test_later_errors_of_an_enqueue_stream_are_retrieved(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    command = EnqueueBatch("nowhere", pack_messages([Outgoing(b"x")]))
    wrong = [request_of(EnqueueBatch).pack(command) for _ in range(10)]
    with caplog.at_level(logging.WARNING), pytest.raises(TopicNotFound):
        await read_all(rig.wire.calls.stream("EnqueueStream", Requests(*wrong)), print)
    await rig.behind.stats("jobs")
    gc.collect()
    assert not caplog.records
