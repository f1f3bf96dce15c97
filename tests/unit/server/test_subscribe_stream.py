"""One member's stream: credits, acks, answers and its end; a slow reader holds at most one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from heapline.contract.errors import BadRequest, MemberReplaced, PermissionDenied, Unauthenticated
from heapline.contract.groups import GroupFetch, PartitionBatch, PartitionRows, pack_offsets, unpack_offsets
from heapline.server.auth.principals import Principal, parse_scope
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Gate, Request, Stopping
from heapline.server.protocols import subscribe_stream
from heapline.server.protocols.subscribe_stream import Subscriptions
from heapline.wire.descriptors import pb
from heapline.wire.protobuf import response_of, struct_codec
from tests.unit.server.fake_groups import FakeGroups, batch
from tests.unit.server.rig import Scoped

ROWS = struct_codec(PartitionRows, pb.PartitionRows)


class Client:
    """Sends requests on a stream, and reads responses."""

    def __init__(
        self, broker: FakeGroups, credits: int = 0, streams: Any = None, scopes: str = "*:consume", **options: Any
    ) -> None:
        self.guard = Scoped()
        self.gate = Gate(self.guard)
        request = Request(self.gate, "grpc", "Subscribe", {}, is_stream=True)
        request.caller = Principal(f"key:{scopes}", (parse_scope(scopes),))
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        opened = pb.GroupFetchRequest(topic="jobs", group="g", member="m", session="s", as_columns=True, **options)
        self.say(open=opened, credits=credits)
        stream = (Subscriptions() if streams is None else streams).open(Dispatcher(broker, {}, self.gate), request)
        self.answers: AsyncIterator[Any] = stream.run(self._requests())

    def say(self, **what: Any) -> None:
        self._queue.put_nowait(pb.SubscribeRequest(**what))

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def _requests(self) -> AsyncIterator[Any]:
        while (request := await self._queue.get()) is not None:
            yield request

    async def next(self) -> Any:
        async with asyncio.timeout(5):
            return await anext(self.answers, None)

    async def rows(self) -> list[PartitionBatch]:
        """Return the rows of the next response that has some."""
        while not (answer := await self.next()).fetched.batches:
            pass
        return batches_in(answer)


def batches_in(answer: Any) -> list[PartitionBatch]:
    return response_of(GroupFetch).unpack(answer.fetched).batches


def offsets(found: PartitionBatch) -> list[int]:
    return list(memoryview(found.rows.offsets).cast("B").cast("q"))


def settle(number: int, offsets: dict[int, list[int]], **more: Any) -> Any:
    return pb.Settle(number=number, rows=[ROWS.pack(share) for share in pack_offsets(offsets)], **more)


def lost_in(settled: Any) -> dict[int, list[int]]:
    return unpack_offsets([ROWS.unpack(share) for share in settled.lost])


async def test_first_response_lists_the_members_partitions() -> None:
    client = Client(FakeGroups())
    answer = await client.next()
    fetched = answer.fetched
    assert (fetched.topic, list(fetched.partitions), fetched.generation) == ("jobs", [0, 1], 1)
    assert not fetched.batches


async def test_rows_are_sent_as_columns_and_only_for_credits() -> None:
    broker = FakeGroups(batch(0, 5, [b"a", b"", b"ccc"], keys=["k", None, None]), batch(1, 7, [b"d"]))
    client = Client(broker, credits=3)
    (first,) = await client.rows()
    assert (first.partition, offsets(first), first.rows.payloads) == (0, [5, 6, 7], [b"a", b"", b"ccc"])
    assert (first.rows.keys, first.rows.headers) == (["k", None, None], None)
    assert list(memoryview(first.rows.ids).cast("B").cast("q")) == [1005, 1006, 1007]
    waiting = asyncio.ensure_future(client.next())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    client.say(credits=1)
    (columns,) = batches_in(await waiting)
    assert offsets(columns) == [7]


async def test_later_rows_are_pushed() -> None:
    broker = FakeGroups()
    client = Client(broker, credits=10)
    await client.next()
    waiting = asyncio.ensure_future(client.rows())
    await asyncio.sleep(0.01)
    broker.put(batch(1, 0, [b"x"]))
    ((rows),) = await waiting
    assert rows.rows.payloads == [b"x"]


async def test_member_without_credits_renews_its_lease_and_learns_new_partitions() -> None:
    broker = FakeGroups(batch(0, 0, [b"x"]))
    client = Client(broker)
    await client.next()
    waiting = asyncio.ensure_future(client.next())
    await asyncio.sleep(0.01)
    assert broker.calls[-1] == ("fetch", 0, subscribe_stream.WAIT)
    broker.assign(1)
    answer = await waiting
    assert (list(answer.fetched.partitions), answer.fetched.generation) == ([1], 2)


async def test_acks_are_answered_by_number_with_their_lost_rows() -> None:
    broker = FakeGroups(batch(0, 0, [b"x"] * 4))
    client = Client(broker, credits=4)
    await client.rows()
    client.say(settle=[settle(7, {0: [0, 1]}), settle(8, {0: [2, 99]}), settle(9, {0: [3]}, nack=True, reason="no")])
    settled: dict[int, Any] = {}
    while len(settled) < 3:
        settled |= {s.number: s for s in (await client.next()).settled}
    assert not settled[7].lost
    assert not settled[9].lost
    assert lost_in(settled[8]) == {0: [99]}
    assert ("nack", {0: [3]}, "no") in broker.calls


async def test_leave_follows_earlier_settlements_and_ends_the_stream() -> None:
    broker = FakeGroups(batch(0, 0, [b"x"]))
    client = Client(broker, credits=5)
    await client.rows()
    client.say(settle=[settle(1, {0: [0]})], leave=True)
    numbers = []
    while (answer := await client.next()) is not None:
        numbers += [s.number for s in answer.settled]
    assert numbers == [1]
    assert [call[0] for call in broker.calls if call[0] != "fetch"] == ["ack", "leave"]
    assert broker.calls[-1] == ("leave",), "and the member does not rejoin afterwards"


async def test_client_that_ends_its_stream_remains_a_member() -> None:
    broker = FakeGroups()
    client = Client(broker, credits=5)
    await client.next()
    client.end()
    assert await client.next() is None
    assert not broker.left


async def test_slow_reader_holds_one_batch_and_its_acks_are_applied() -> None:
    broker = FakeGroups(*(batch(0, n, [b"x"]) for n in range(50)))
    client = Client(broker, credits=50, max_messages=1)
    await client.rows()
    client.say(settle=[settle(1, {0: [0]})])
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(broker.waiting) >= 48, "at most one batch more than it has read is outstanding"


async def test_unread_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe_stream, "SETTLES_MAX", 4)
    broker = FakeGroups(batch(0, 0, [b"x"]))
    client = Client(broker, credits=1)
    await client.rows()
    for n in range(20):
        client.say(settle=[settle(n, {0: [0]})])
    for _ in range(200):
        await asyncio.sleep(0)
    assert sum(call[0] == "ack" for call in broker.calls) <= 5
    numbers: list[int] = []
    while len(numbers) < 20:
        numbers += [s.number for s in (await client.next()).settled]
    assert numbers == list(range(20))


async def test_replaced_member_receives_an_error() -> None:
    broker = FakeGroups()
    client = Client(broker, credits=1)
    await client.next()
    broker.fail(MemberReplaced("jobs", "g", "m"))
    with pytest.raises(MemberReplaced):
        await client.next()


async def test_stopping_server_and_revoked_credential_end_the_stream() -> None:
    client = Client(FakeGroups(), credits=1)
    await client.next()
    client.gate.stopping.set()
    with pytest.raises(Stopping):
        await client.next()
    other = Client(FakeGroups(), credits=1)
    await other.next()
    other.guard.revoked.add("*:consume")
    other.say(credits=1)
    with pytest.raises(Unauthenticated):
        await other.next()


async def test_caller_without_the_consume_right_gets_nothing() -> None:
    broker = FakeGroups(batch(0, 0, [b"x"]))
    client = Client(broker, credits=1, scopes="*:produce")
    with pytest.raises(PermissionDenied):
        await client.next()
    assert broker.calls == []


@pytest.mark.parametrize(
    "what", [{"credits": -1}, {"credits": 1 << 40}, {"open": pb.GroupFetchRequest(topic="jobs")}], ids=str
)
async def test_bad_requests_end_the_stream(what: dict[str, Any]) -> None:
    client = Client(FakeGroups())
    await client.next()
    client.say(**what)
    with pytest.raises(BadRequest):
        await client.next()


async def test_new_stream_of_a_session_ends_the_former_without_losing_rows() -> None:
    broker = FakeGroups()
    streams = Subscriptions()
    former = Client(broker, credits=5, streams=streams)
    await former.next()
    waiting = asyncio.ensure_future(former.next())
    await asyncio.sleep(0.01)
    later = Client(broker, credits=5, streams=streams)
    await later.next()
    with pytest.raises(MemberReplaced):
        await waiting
    broker.put(batch(0, 0, [b"x"]))
    assert [b.rows.payloads for b in await later.rows()] == [[b"x"]]
    later.end()
    assert await later.next() is None
    assert len(streams) == 0


@pytest.mark.parametrize("later", range(6))
async def test_ack_is_answered_without_waiting_for_rows_when_credits_arrive(later: int) -> None:
    client = Client(FakeGroups(batch(0, 0, [b"a"])), credits=1)
    await client.rows()
    answer = asyncio.ensure_future(client.next())
    await steps()
    client.say(settle=[settle(1, {0: [0]})])
    for _ in range(later):
        await asyncio.sleep(0)
    client.say(credits=5)
    await steps()
    assert answer.done()
    assert [s.number for s in answer.result().settled] == [1]


async def test_bytes_of_unread_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribe_stream, "SETTLES_BYTES_MAX", 1000)
    broker = FakeGroups()
    client = Client(broker)
    await client.next()
    for number in range(10):
        client.say(settle=[settle(number, {0: list(range(100))})])
    answered: list[int] = []
    while len(answered) < 10:
        await steps()
        assert sum(call[0] == "ack" for call in broker.calls) <= len(answered) + 1
        answered += [s.number for s in (await client.next()).settled]
    assert answered == list(range(10))


async def steps() -> None:
    for _ in range(30):
        await asyncio.sleep(0)
