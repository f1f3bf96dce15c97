"""The client's connection: windows, deadlines, cancellation, and how calls end when it breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.contract.errors import Closed, DeadlineExceeded, UnavailableError
from heapline.contract.leases import Pop
from heapline.contract.log import RawUnits, ReadUnits
from heapline.contract.messages import Enqueue
from heapline.contract.topics import PauseTopic
from heapline.wire import codec
from heapline.wire.connection import ClientConnection
from heapline.wire.frames import Cancel, Credit, Request, ServerFrames, Windows
from tests.unit.wire.fake_transport import ConnectedClient, FakeTransport

COMMAND = PauseTopic("jobs")
STOPPING = codec.encode_error(UnavailableError("stopping"))


def start(client: ConnectedClient, command: Any = COMMAND, **options: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(client.connection.call(command, **options))


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_cancelled_caller_does_not_take_the_turn_of_the_next_one() -> None:
    client = ConnectedClient(Windows(calls=1))
    first, second, third = (start(client) for _ in range(3))
    await turns()
    (request,) = client.events()
    client.server.send_response(request.request)
    client.answer()
    second.cancel()  # just when the window has space for it
    await turns()
    numbers = [event.request for event in client.events() if isinstance(event, Request)]
    for number in numbers:
        client.server.send_response(number)
    client.answer()
    await turns()
    for event in client.events():
        client.server.send_response(event.request)
    client.answer()
    await asyncio.wait_for(asyncio.gather(first, third), 5)


async def test_call_that_waits_for_the_window_of_pops_does_not_block_other_calls() -> None:
    client = ConnectedClient(Windows(calls=1, waiting=1))
    calls = [start(client, Pop("jobs", wait=30.0)), start(client), start(client, Pop("jobs", wait=30.0)), start(client)]
    await turns()
    pop, command = client.events()
    client.server.send_response(command.request)
    client.answer()
    await turns()
    (second,) = client.events()
    assert second.command == PauseTopic.facts.id
    client.server.send_response(second.request)
    client.answer()
    await asyncio.wait_for(asyncio.gather(calls[1], calls[3]), 5)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert pop.command == Pop.facts.id


async def test_abandoned_large_request_frees_space_for_the_next_call() -> None:
    client = ConnectedClient(Windows(calls=1))
    client.connection.pause_writing()
    large = start(client, Enqueue("jobs", b"x" * (1 << 20)))
    await turns()
    small = start(client)
    await turns()
    large.cancel()
    await turns()
    client.connection.resume_writing()
    (request,) = client.events()
    assert request.command == PauseTopic.facts.id
    client.server.send_response(request.request)
    client.answer()
    await asyncio.wait_for(small, 5)


async def test_deadline_ends_a_call_that_waits_for_the_window_and_it_is_never_sent() -> None:
    client = ConnectedClient(Windows(calls=1))
    first = start(client)
    second = start(client, until=asyncio.get_running_loop().time() + 0.01)
    await turns()
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(second, 5)
    (request,) = client.events()
    client.server.send_response(request.request)
    client.answer()
    await first
    assert client.events() == []


async def test_deadline_cancels_a_call_and_its_late_answer_is_dropped() -> None:
    client = ConnectedClient()
    late = start(client, until=asyncio.get_running_loop().time() + 0.01)
    await turns()
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(late, 5)
    request, cancel = client.events()
    assert isinstance(cancel, Cancel)
    client.server.send_response(request.request)
    client.answer()
    assert client.connection.is_usable


async def test_goaway_fails_calls_that_were_not_sent_and_no_others() -> None:
    client = ConnectedClient(Windows(calls=1))
    first, second = start(client), start(client)
    await turns()
    (request,) = client.events()
    client.server.send_goaway("stopping")
    client.answer()
    with pytest.raises(UnavailableError) as caught:
        await asyncio.wait_for(second, 5)
    assert not caught.value.reached
    assert not client.connection.is_usable
    client.server.send_response(request.request)
    client.answer()
    await asyncio.wait_for(first, 5)


async def test_broken_connection_fails_calls_and_knows_which_were_never_sent() -> None:
    client = ConnectedClient(Windows(calls=1))
    first, second = start(client), start(client)
    await turns()
    client.connection.connection_lost(ConnectionResetError("reset"))
    errors = await asyncio.gather(first, second, return_exceptions=True)
    assert [error.reached for error in errors if isinstance(error, UnavailableError)] == [True, False]


async def test_call_after_a_violation_of_the_server_is_unavailable() -> None:
    client = ConnectedClient()
    in_flight = start(client)
    await turns()
    client.connection.data_received(b"\xff" * 12)
    with pytest.raises(UnavailableError, match="over the limit"):
        await client.connection.call(COMMAND)
    assert not client.connection.is_usable
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(in_flight, 5)


async def test_answers_that_arrive_after_close_are_ignored() -> None:
    client = ConnectedClient()
    call = start(client)
    await turns()
    (request,) = client.events()
    closing = asyncio.ensure_future(client.connection.close())
    await asyncio.sleep(0)
    client.server.send_response(request.request)
    client.answer()  # does not raise
    with pytest.raises(Closed):
        await call
    await closing


async def test_refusal_by_a_stopping_server_reached_no_call() -> None:
    connection, server = ClientConnection("key"), ServerFrames()
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    server.receive(transport.taken())
    server.send_error(0, STOPPING)
    for buffer in server.take():
        connection.data_received(bytes(buffer))
    with pytest.raises(UnavailableError) as caught:
        await connection._welcomed
    assert not caught.value.reached


async def test_credentials_are_renewed_one_at_a_time_even_if_a_caller_is_cancelled() -> None:
    client = ConnectedClient()
    given_up = asyncio.ensure_future(client.connection.renew("second"))
    await turns()
    given_up.cancel()
    renewing = asyncio.ensure_future(client.connection.renew("third"))
    await turns()
    (auth,) = client.events()  # two at the same time would be a violation
    client.server.send_response(auth.request)
    client.answer()
    await turns()
    (auth,) = client.events()
    assert auth.credential == "third"
    client.server.send_response(auth.request)
    client.answer()
    await asyncio.wait_for(renewing, 5)


async def test_feed_whose_connection_fails_raises_after_the_items_that_arrived() -> None:
    client = ConnectedClient()
    items = client.connection.feed(ReadUnits("jobs", 1, 9))
    first = asyncio.ensure_future(anext(items))  # type: ignore[arg-type]
    await turns()
    request, _ = client.events()
    for _ in range(2):
        client.server.send_item(request.request, codec.encode_result(RawUnits([])))
    client.answer()
    client.connection.data_received(b"\xff" * 12)
    assert await first == RawUnits([])
    assert await anext(items) == RawUnits([])
    with pytest.raises(UnavailableError):
        await anext(items)


async def test_feed_gives_a_credit_for_each_item_that_is_consumed() -> None:
    client = ConnectedClient()
    items = client.connection.feed(ReadUnits("jobs", 1, 9))
    first = asyncio.ensure_future(anext(items))  # type: ignore[arg-type]
    await turns()
    request, credit = client.events()
    assert credit.items == 4
    for _ in range(4):
        client.server.send_item(request.request, codec.encode_result(RawUnits([])))
    client.answer()
    await first
    assert [event for event in client.events() if isinstance(event, Credit)] == [Credit(request.request, 1)]
    await items.aclose()  # type: ignore[attr-defined]
    assert client.events() == [Cancel(request.request)]
