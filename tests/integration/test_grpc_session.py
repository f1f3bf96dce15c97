"""Session over a real socket: many calls on one stream, how they end, and leases that nobody received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from heapline.client.transports import session as client_session
from heapline.client.transports.grpc import GrpcBroker
from heapline.contract.errors import (
    BadRequest,
    DeadlineExceeded,
    PermissionDenied,
    ResourceExhausted,
    TopicNotFound,
    Unauthenticated,
    UnavailableError,
)
from heapline.contract.leases import Pop
from heapline.contract.replays import Replay
from heapline.contract.topics import Purge, Snapshot, Stats
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.gate import Request
from heapline.server.protocols import session as server_session
from heapline.server.server import Server
from heapline.server.settings import ServerSettings
from heapline.wire import codec
from heapline.wire.descriptors import pb
from tests.integration.server_rig import Keys, Requests, Rig, until


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        yield rig


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[GrpcBroker]:
    async with GrpcBroker(rig.target, session=True) as client:
        yield client


def asked(number: int, command: Any, **more: Any) -> Any:
    call = pb.SessionCall(number=number, command=type(command).facts.id, body=codec.encode(command), **more)
    return pb.SessionRequest(calls=[call])


@asynccontextmanager
async def stuck_session(rig: Rig, requests: Requests) -> AsyncIterator[tuple[Any, Any]]:
    """A session whose first answer gRPC has taken, and no other: everything after it stays in the session."""
    dispatcher = rig.server.dispatcher
    async with Request(dispatcher.gate, "grpc", "Session", {}, is_stream=True) as request:
        session = server_session.Session(dispatcher, request)
        running = session.run(aiter(requests))
        await anext(running)
        yield session, running


async def answers(stream: Any, count: int) -> list[Any]:
    got: list[Any] = []
    async with asyncio.timeout(20):
        while len(got) < count:
            got += (await anext(stream)).answers
    return got


# -- calls -------------------------------------------------------------------------------------------------------------


async def test_waiting_call_does_not_delay_others(rig: Rig, client: GrpcBroker) -> None:
    waiting = asyncio.ensure_future(client.pop("jobs", wait=30))
    await client.stats("jobs")
    assert not waiting.done()
    await client.enqueue("jobs", b"x")
    (message,) = await asyncio.wait_for(waiting, 20)
    assert message.payload == b"x"


async def test_calls_of_one_turn_travel_together(rig: Rig, client: GrpcBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    take = client_session._Line._next_calls
    monkeypatch.setattr(client_session._Line, "_next_calls", lambda line: (sent.append(0), take(line))[1])
    await asyncio.gather(*(client.enqueue("jobs", b"x") for _ in range(200)))
    assert len(sent) < 20
    assert (await rig.behind.stats("jobs")).ready == 200


async def test_errors_are_those_of_unary_calls(rig: Rig, client: GrpcBroker) -> None:
    for broker in (client, rig.wire):
        with pytest.raises(TopicNotFound) as caught:
            await broker.stats("nowhere")
        assert caught.value.topic == "nowhere"


async def test_destructive_call_is_confirmed_over_the_session(rig: Rig, client: GrpcBroker) -> None:
    await client.enqueue("jobs", b"x")
    unconfirmed = Requests(asked(1, Purge("jobs")))
    (answer,) = await answers(rig.wire.calls.stream("Session", unconfirmed), 1)
    assert (answer.code, (await rig.behind.stats("jobs")).ready) == ("FAILED_PRECONDITION", 1)
    assert await client.purge("jobs") == 1


async def test_invalid_call_is_rejected_alone(rig: Rig) -> None:
    wrong = pb.SessionCall(number=2, command=Stats.facts.id, body=codec.encode({"topic": "jobs", "more": 1}))
    requests = Requests(
        pb.SessionRequest(calls=[pb.SessionCall(number=1, command=0xFFFF), wrong]),
        pb.SessionRequest(calls=[pb.SessionCall(number=3, command=Stats.facts.id, body=b"\xff\xff")]),
        asked(4, Replay("jobs")),
        asked(5, Stats("jobs")),
    )
    got = {a.number: a for a in await answers(rig.wire.calls.stream("Session", requests), 5)}
    assert {got[n].code for n in range(1, 5)} == {"INVALID_ARGUMENT"}
    assert got[5].code == ""
    assert codec.decode_result(got[5].body, Stats).ready == 0


async def test_repeated_number_of_a_call_in_progress_ends_the_session(rig: Rig) -> None:
    requests = Requests(asked(1, Pop("jobs", wait=30.0)), asked(1, Pop("jobs", wait=30.0)))
    with pytest.raises(BadRequest):
        await answers(rig.wire.calls.stream("Session", requests), 1)


async def test_every_call_is_answered_even_if_cancelled_before_it_started(rig: Rig) -> None:
    pop = asked(1, Pop("jobs", wait=30.0)).calls[0]
    calls = pb.SessionRequest(calls=[pop, pb.SessionCall(number=1, cancel=True)])
    got = await answers(rig.wire.calls.stream("Session", Requests(calls, asked(2, Stats("jobs")))), 2)
    assert {a.number: a.code for a in got} == {1: "CANCELLED", 2: ""}


async def test_call_too_large_for_the_server_fails_with_its_own_error(tmp_path: Path) -> None:
    async with Rig(tmp_path, request_bytes_max=1 << 20) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        async with GrpcBroker(rig.target, session=True) as client:
            waiting = asyncio.ensure_future(client.pop("jobs", wait=30))
            await client.stats("jobs")
            with pytest.raises(ResourceExhausted, match="larger than max"):
                await client.enqueue("jobs", b"x" * (2 << 20))
            with pytest.raises(UnavailableError) as caught:
                await asyncio.wait_for(waiting, 20)
            assert type(caught.value) is UnavailableError


async def test_calls_that_fit_alone_are_not_too_large_together(tmp_path: Path) -> None:
    async with Rig(tmp_path, request_bytes_max=1 << 20) as rig:
        await rig.behind.create_topic("jobs", max_payload_bytes=3 << 20)
        async with GrpcBroker(rig.target, session=True) as client:
            sizes = [100_000, 1_000_000, 100_000, 900_000, 40_000] + [1000] * 2000
            await asyncio.gather(*(client.enqueue("jobs", b"x" * size) for size in sizes))
            assert (await rig.behind.stats("jobs")).ready == len(sizes)


# -- leases that nobody receives ---------------------------------------------------------------------------------------


async def test_cancelled_pop_leases_nothing_later(rig: Rig, client: GrpcBroker) -> None:
    waiting = asyncio.ensure_future(client.pop("jobs", wait=30))
    await client.stats("jobs")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.stats("jobs")  # by now the server has the cancellation
    await client.enqueue("jobs", b"x")

    async def is_ready() -> bool:
        stats = await rig.behind.stats("jobs")
        return (stats.ready, stats.leased) == (1, 0)

    await until(is_ready)


async def test_call_out_of_time_raises_deadline_exceeded_and_is_cancelled(rig: Rig) -> None:
    async with GrpcBroker(rig.target, session=True, timeout=0.2) as hasty:
        with pytest.raises(DeadlineExceeded):
            await hasty.pop("jobs", wait=30)
        await hasty.enqueue("jobs", b"x")
    assert (await rig.behind.stats("jobs")).leased_total == 0


async def test_leases_that_arrive_after_cancellation_are_returned(
    rig: Rig, client: GrpcBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.enqueue("jobs", b"x")
    hand_out = client_session._Line._hand_out
    for is_cancelled_first in (False, True):
        popping = asyncio.ensure_future(client.pop("jobs", wait=30))

        async def hand_out_and_cancel(
            line: Any, answers: Any, popping: Any = popping, is_cancelled_first: bool = is_cancelled_first
        ) -> None:
            if is_cancelled_first:
                popping.cancel()
            await hand_out(line, answers)  # does not wait, because there are few answers
            popping.cancel()

        with monkeypatch.context() as patched:
            patched.setattr(client_session._Line, "_hand_out", hand_out_and_cancel)
            with pytest.raises(asyncio.CancelledError):
                await popping

        async def is_back() -> bool:
            stats = await rig.behind.stats("jobs")
            return (stats.ready, stats.leased) == (1, 0) and stats.leased_total > 0

        await until(is_back)


async def test_leases_not_handed_to_grpc_are_returned_when_the_stream_breaks(rig: Rig) -> None:
    await rig.broker.enqueue("jobs", b"x")
    requests = Requests(asked(1, Stats("jobs")))
    async with stuck_session(rig, requests) as (session, running):
        requests.say(asked(2, Pop("jobs", wait=30.0)))

        async def is_answered() -> bool:
            return bool(session._answers)

        await until(is_answered)
        assert await rig.leased() == 1
        await running.aclose()

        async def is_back() -> bool:
            stats = await rig.behind.stats("jobs")
            return (stats.ready, stats.leased) == (1, 0)

        await until(is_back)


async def test_leases_of_a_pop_with_request_id_stay_with_its_repeat(rig: Rig) -> None:
    await rig.broker.enqueue("jobs", b"x")
    requests = Requests(asked(1, Stats("jobs")))
    async with stuck_session(rig, requests) as (session, running):
        requests.say(asked(2, Pop("jobs", request_id="r")))

        async def is_answered() -> bool:
            return bool(session._answers)

        await until(is_answered)
        (message,) = await rig.broker.pop("jobs", request_id="r")  # the caller repeats it over another connection
        await running.aclose()
        await rig.behind.stats("jobs")
        assert await rig.leased() == 1
        await rig.broker.ack(message)


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_session_with_too_many_calls_in_progress_is_not_read_further(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_session, "CALLS_MAX", 2)
    one_more = asyncio.Semaphore(0)

    async def snapshot(command: Any, request: Any) -> None:
        await one_more.acquire()

    monkeypatch.setitem(rig.server.dispatcher._own, Snapshot, snapshot)  # type: ignore[arg-type]
    stream = rig.wire.calls.stream(
        "Session", Requests(*(asked(n, Snapshot("jobs")) for n in (1, 2)), asked(3, Stats("jobs")))
    )
    first = asyncio.ensure_future(answers(stream, 1))
    await asyncio.sleep(0.05)
    assert not first.done(), "the third call waits outside"
    one_more.release()
    assert {a.number for a in await first + await answers(stream, 1)} in ({1, 3}, {2, 3})
    await stream.aclose()


async def test_waiting_pops_block_neither_enqueues_nor_their_own_cancellation(
    rig: Rig, client: GrpcBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_session, "CALLS_MAX", 2)
    waiting = [asyncio.ensure_future(client.pop("jobs", wait=30)) for _ in range(10)]
    await asyncio.wait_for(client.enqueue("jobs", b"x"), 20)
    done, _ = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert [m.payload for pop in done for m in pop.result()] == [b"x"]
    for pop in waiting:
        pop.cancel()
    await asyncio.wait_for(client.enqueue("jobs", b"y"), 20)

    async def is_ready() -> bool:
        return (await rig.behind.stats("jobs")).ready == 1

    await until(is_ready)


async def test_client_that_does_not_read_its_answers_is_not_read_further(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_session, "CALLS_MAX", 5)
    requests = Requests(*(asked(n, Stats("jobs")) for n in range(100)))
    async with stuck_session(rig, requests) as (session, running):
        for _ in range(50):
            await rig.behind.stats("jobs")
            assert len(set(session._calls) | {answer.number for answer, _ in session._answers}) <= 5

        async def is_full() -> bool:
            return len(session._answers) == 5

        await until(is_full)
        requests.end()
        rest = {a.number async for response in running for a in response.answers}
        assert max(rest) == 99, "it continues when the client reads"


# -- who may call ------------------------------------------------------------------------------------------------------


async def test_revoked_key_is_rejected_at_the_next_call(tmp_path: Path) -> None:
    keys = Keys(good="*:produce,consume,admin")
    async with Rig(tmp_path, keys) as rig, GrpcBroker(rig.target, credential="good", session=True) as broker:
        await broker.create_topic("jobs", **rig.small)
        keys.revoked.add("good")
        with pytest.raises(Unauthenticated):
            await broker.enqueue("jobs", b"x")


async def test_rights_are_checked_for_every_call(tmp_path: Path) -> None:
    keys = Keys(admin="*:produce,consume,admin", reader="jobs:consume")
    async with Rig(tmp_path, keys) as rig, GrpcBroker(rig.target, credential="reader", session=True) as reader:
        await rig.behind.create_topic("jobs", **rig.small)
        assert await reader.pop("jobs") == []
        for call in (reader.enqueue("jobs", b"x"), reader.pop("other"), reader.purge("jobs"), reader.do(Stats("x/y"))):
            with pytest.raises(PermissionDenied):
                await call
        assert (await rig.behind.stats("jobs")).ready == 0


async def test_call_cannot_replace_the_credential_of_its_stream(tmp_path: Path) -> None:
    keys = Keys(admin="*:produce,consume,admin", reader="jobs:consume")
    async with Rig(tmp_path, keys) as rig, GrpcBroker(rig.target, credential="reader", session=True) as reader:
        stream = reader._stub("Session")(metadata=reader._metadata)
        call = asked(1, Purge("jobs"), headers={"authorization": "admin", "x-api-key": "admin"})
        await stream.write(call)
        (answer,) = (await stream.read()).answers
        assert answer.code == "PERMISSION_DENIED"
        stream.cancel()


async def test_unauthenticated_client_is_rejected_whatever_it_sends(tmp_path: Path) -> None:
    keys = Keys(good="*:admin")
    async with Rig(tmp_path, keys) as rig, GrpcBroker(rig.target, credential="bad", session=True) as broker:
        for _ in range(5):
            with pytest.raises(Unauthenticated):
                await broker.enqueue_batch("jobs", [])


# -- stopping ----------------------------------------------------------------------------------------------------------


async def test_stopping_server_ends_waiting_calls_and_then_the_session(rig: Rig, client: GrpcBroker) -> None:
    waiting = asyncio.ensure_future(client.pop("jobs", wait=30))
    await client.stats("jobs")
    await asyncio.wait_for(rig.server.stop(), 10)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 10)


async def test_session_is_reopened_when_the_server_is_back(rig: Rig, client: GrpcBroker) -> None:
    await client.enqueue("jobs", b"x")
    port = rig.server.grpc_port
    await rig.server.stop()
    with pytest.raises(UnavailableError):
        await client.stats("jobs")
    rig.server = Server(rig.behind, NoAuthGuard(), ServerSettings(grpc_port=port, http_port=0))
    await rig.server.start()

    async def serves() -> bool:
        try:
            return (await client.stats("jobs")).ready == 1
        except UnavailableError:
            return False

    await until(serves)
