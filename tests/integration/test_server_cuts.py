"""Connections that break, wherever it hurts: what was answered stands, what was leased comes back, nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from heapline.client import calls
from heapline.client.wire import WireBroker
from heapline.errors import BadRequest, TopicNotFound, UnavailableError
from heapline.model import Enqueued, Outgoing
from heapline.server.auth.principal import LOCAL, Everybody
from heapline.server.grpc_service import GrpcService
from heapline.server.rpc import Caller, Front
from heapline.wire.columns import pack_outgoing, read_ints
from heapline.wire.schema import pb
from tests.integration.proxy import Proxy
from tests.integration.server_rig import Requests, Rig, pop_start, until

BIG = 50_000


class Cuttable:
    """A rig, and a client whose connection goes through a proxy."""

    def __init__(self, rig: Rig, proxy: Proxy) -> None:
        self.rig, self.proxy = rig, proxy
        self._tasks = len(asyncio.all_tasks())

    async def __aenter__(self) -> Cuttable:
        self.client = await WireBroker(self.proxy.target).__aenter__()
        await self.client.stats("jobs")  # it is connected
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def counts(self) -> tuple[int, int]:
        stats = await self.rig.behind.stats("jobs")
        return stats.ready, stats.leased

    async def nothing_is_left(self) -> None:
        """The server has forgotten its client: no task, no waiting pop, no connection."""
        await self.client.close()

        async def gone() -> bool:
            gc.collect()
            tasks, calls = len(asyncio.all_tasks()), self.rig.server.front.calls_under_way
            return tasks <= self._tasks and not calls and not self.proxy.connections

        try:
            await until(gone)
        except TimeoutError:
            pytest.fail(f"{self.proxy.connections} connections, {self._tasks} tasks became {asyncio.all_tasks()}")
        assert not self.rig.server._service._waiting
        assert not self.rig.server._service._by_wait_id


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        yield rig


@pytest.fixture
async def world(rig: Rig) -> AsyncIterator[Cuttable]:
    async with Proxy(rig.target) as proxy, Cuttable(rig, proxy) as world:
        yield world


async def fill(rig: Rig, count: int, size: int = 10) -> None:
    for start in range(0, count, 10):
        numbers = range(start, min(count, start + 10))
        await rig.behind.enqueue_batch("jobs", [Outgoing(b"%d" % i + b"." * size) for i in numbers])


async def read_all(stream: Any, take: Callable[[Any], Any]) -> None:
    async with asyncio.timeout(20):
        async for response in stream:
            take(response)


async def answered(proxy: Proxy) -> None:
    """The server has answered, and the client has not got it."""
    await asyncio.wait_for(proxy.taken.wait(), 20)


# -- PopStream ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 9, 1000, 3 * BIG])
async def test_stream_cut_in_mid_frame_loses_nothing_and_delivers_nothing_twice(world: Cuttable, after: int) -> None:
    rig = world.rig
    await fill(rig, 6, BIG)
    world.proxy.cut_after(after)
    stream = world.client.calls.stream("PopStream", Requests(pop_start(credits=4, max_messages=2, visibility=30.0)))
    got: list[int] = []
    with pytest.raises(UnavailableError):
        await read_all(stream, lambda response: got.extend(read_ints(response.columns.ids).tolist()))
    assert len(got) == (2 if after > BIG else 0), "a response came whole, or not at all"
    ready, leased = await world.counts()
    assert ready + leased == 6
    assert len(got) <= leased <= 4, "what was sent stays leased: it may have arrived"
    others = await rig.behind.pop("jobs", 100, visibility=60.0, max_bytes=1 << 30)
    assert len(others) == ready
    assert not {m.id for m in others} & set(got)
    await rig.advance(31)
    await rig.advance(60)  # and their back-off
    again = await rig.behind.pop("jobs", 100, max_bytes=1 << 30, wait=5)
    assert len({m.id for m in again} | {m.id for m in others}) == 6
    await world.nothing_is_left()


async def test_stream_cut_while_it_waits_takes_nothing_any_more(world: Cuttable) -> None:
    stream = world.client.calls.stream("PopStream", Requests(pop_start(credits=5)))
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 20)
    await world.nothing_is_left()
    await fill(world.rig, 1)
    assert await world.counts() == (1, 0)


async def test_stream_that_stalls_and_is_cut_gives_everything_back(world: Cuttable) -> None:
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
    identity = pb.Identity(producer_id="p", epoch=epoch, answered_below=0)
    return pb.EnqueueBatchRequest(topic="jobs", columns=pack_outgoing(messages), identity=identity)


async def test_enqueue_stream_cut_and_repeated_puts_every_message_in_once(world: Cuttable) -> None:
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
    assert again[: len(known)] == known, "a repeat gets the ids that were answered"
    assert await world.counts() == (180, 0)
    await world.nothing_is_left()


def ids_of(answer: Any) -> list[int]:
    return [int(r.id) for r in answer.items] if answer.items else read_ints(answer.ids).tolist()


async def test_batch_whose_answer_was_cut_is_recognised_when_it_is_repeated(world: Cuttable) -> None:
    epoch = await world.rig.behind.open_producer("jobs", "p")
    batch = [Outgoing(b"%d" % i, seq=i) for i in range(10)]

    async def send(broker: WireBroker) -> list[Enqueued]:
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


async def test_idle_enqueue_stream_hears_at_once_that_the_server_stops(rig: Rig) -> None:
    epoch = await rig.behind.open_producer("jobs", "p")
    stream = rig.wire.calls.stream("EnqueueStream", Requests(numbered(epoch, 0)))
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.02)
    rig.server.front.stopping.set()
    with pytest.raises(UnavailableError, match="stopping"):
        await asyncio.wait_for(waiting, 10)


async def test_errors_behind_the_first_of_an_enqueue_stream_are_not_left_lying(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = [pb.EnqueueBatchRequest(topic="nowhere", columns=pack_outgoing([Outgoing(b"x")])) for _ in range(10)]
    with caplog.at_level(logging.WARNING), pytest.raises(TopicNotFound):
        await read_all(rig.wire.calls.stream("EnqueueStream", Requests(*wrong)), print)
    await rig.behind.stats("jobs")
    gc.collect()
    assert not caplog.records


# -- Pop ---------------------------------------------------------------------------------------------------------------


async def test_waiting_pop_whose_connection_dies_takes_nothing_any_more(world: Cuttable) -> None:
    popping = asyncio.ensure_future(world.client.pop("jobs", wait=60))

    async def waits() -> bool:
        return bool(world.rig.server._service._waiting)

    await until(waits)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(popping, 20)
    await world.nothing_is_left()
    await fill(world.rig, 1)
    assert await world.counts() == (1, 0)


@pytest.mark.parametrize("wait", [0.0, 60.0])
async def test_pop_whose_answer_was_cut_keeps_its_leases_until_they_end(world: Cuttable, wait: float) -> None:
    """The server cannot know whether the answer has arrived."""
    await fill(world.rig, 3)
    world.proxy.hold()
    popping = asyncio.ensure_future(world.client.pop("jobs", 2, wait=wait, visibility=30.0))
    await answered(world.proxy)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(popping, 20)
    await world.nothing_is_left()
    assert await world.counts() == (1, 2)
    await world.rig.advance(31)
    assert await world.counts() == (1, 0), "they come back, after a back-off"
    await world.rig.advance(60)
    assert await world.counts() == (3, 0)


async def test_named_pop_whose_answer_was_cut_gets_the_same_leases_when_it_is_repeated(world: Cuttable) -> None:
    await fill(world.rig, 5)
    world.proxy.hold()
    popping = asyncio.ensure_future(world.client.pop("jobs", 2, wait=60.0, request_id="r1"))
    await answered(world.proxy)
    world.proxy.cut()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(popping, 20)
    first = await world.rig.wire.pop("jobs", 2, request_id="r1")
    assert [m.payload[:1] for m in first] == [b"0", b"1"]
    assert await world.counts() == (3, 2)
    await world.rig.wire.ack(first)
    assert await world.counts() == (3, 0)


async def test_iterator_of_requests_that_fails_ends_the_stream_with_its_error(world: Cuttable) -> None:
    async def requests() -> AsyncIterator[Any]:
        yield pop_start(credits=1)
        raise LookupError("nothing more to say")

    with pytest.raises(LookupError, match="nothing more"):
        await asyncio.wait_for(anext(world.client.calls.stream("PopStream", requests())), 20)
    await world.nothing_is_left()


async def test_pop_cancelled_with_its_answer_on_the_wire_gives_the_messages_back(world: Cuttable) -> None:
    await fill(world.rig, 3)
    world.proxy.hold()
    popping = asyncio.ensure_future(world.client.pop("jobs", 2, wait=60.0))
    await answered(world.proxy)
    assert await world.counts() == (1, 2)
    popping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await popping
    world.proxy.flow()

    async def all_back() -> bool:
        return await world.counts() == (3, 0)

    await until(all_back)
    await world.nothing_is_left()


async def test_pop_cancelled_while_it_waits_ends_on_the_server(world: Cuttable) -> None:
    popping = asyncio.ensure_future(world.client.pop("jobs", wait=60.0))

    async def waits() -> bool:
        return bool(world.rig.server._service._waiting)

    await until(waits)
    popping.cancel()
    await asyncio.wait({popping})

    async def ended() -> bool:
        return not world.rig.server._service._waiting

    await until(ended)
    await fill(world.rig, 1)
    assert await world.counts() == (1, 0)
    await world.nothing_is_left()


async def test_pop_is_given_up_only_by_whoever_asked_for_it(rig: Rig) -> None:
    service = rig.server._service
    popping = asyncio.ensure_future(rig.wire.calls("Pop", pb.PopRequest(topic="jobs", wait=60.0, wait_id="w")))

    async def waits() -> bool:
        return bool(service._waiting)

    await until(waits)
    give_up = pb.PopRequest(topic="jobs", wait_id="w", give_up=True)
    another = type(LOCAL)("key:another", LOCAL.scopes)
    await service.Pop(give_up, Caller(Everybody(), another, None))
    await rig.behind.stats("jobs")
    assert not popping.done()
    await rig.wire.calls("Pop", give_up)
    assert (await asyncio.wait_for(popping, 10)).columns.count == 0
    with pytest.raises(BadRequest, match="wait_id"):
        await rig.wire.calls("Pop", pb.PopRequest(topic="jobs", give_up=True))


class Leaving:
    """A broker whose caller is cancelled in the very moment between its answer and the one who waits for it."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        self.caller: asyncio.Task[Any]

    async def pop_columns(self, *arguments: Any, **options: Any) -> Any:
        answer = await self._broker.pop_columns(*arguments, **options)
        asyncio.get_running_loop().call_soon(self.caller.cancel)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


async def test_pop_cancelled_between_its_answer_and_its_handler_gives_the_messages_back(rig: Rig) -> None:
    await fill(rig, 3)
    broker = Leaving(rig.behind)
    service = GrpcService(broker, Front(Everybody()))  # type: ignore[arg-type]
    request = pb.PopRequest(topic="jobs", max_messages=2, wait=10.0)
    broker.caller = asyncio.ensure_future(service.Pop(request, Caller(Everybody(), LOCAL, None)))
    with pytest.raises(asyncio.CancelledError):
        await broker.caller

    async def all_back() -> bool:
        stats = await rig.behind.stats("jobs")
        return (stats.ready, stats.leased, stats.leased_total) == (3, 0, 2)

    await until(all_back)


# -- no cut at all: the other side is gone and says nothing ------------------------------------------------------------


async def test_client_that_vanished_without_a_word_takes_no_more_messages(tmp_path: Path) -> None:
    async with Rig(tmp_path, keepalive=0.3) as rig, Proxy(rig.target) as proxy, WireBroker(proxy.target) as client:
        await rig.broker.create_topic("jobs", **rig.small)
        stream = client.calls.stream("PopStream", Requests(pop_start(credits=5)))
        waiting = [asyncio.ensure_future(anext(stream)), asyncio.ensure_future(client.pop("jobs", wait=60.0))]

        async def under_way(count: int) -> bool:
            return rig.server.front.calls_under_way == count

        await until(lambda: under_way(2))
        proxy.vanish()
        await until(lambda: under_way(0))
        await fill(rig, 1)
        stats = await rig.behind.stats("jobs")
        assert (stats.ready, stats.leased_total) == (1, 0)
        for future in waiting:
            future.cancel()
        await asyncio.wait(waiting)


async def test_client_misses_a_server_that_vanished_without_a_word(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "KEEPALIVE_MS", 300)
    async with Proxy(rig.target) as proxy, WireBroker(proxy.target) as client:
        popping = asyncio.ensure_future(client.pop("jobs", wait=60.0))

        async def waits() -> bool:
            return bool(rig.server._service._waiting)

        await until(waits)
        proxy.vanish()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(popping, 20)
