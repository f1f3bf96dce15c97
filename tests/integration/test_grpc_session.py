"""Session over a real socket: many calls on one stream, their ends, and what becomes of leases that nobody got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from heapline.client import session as client_session
from heapline.client.wire import WireBroker
from heapline.errors import BadRequest, DeadlineExceeded, TopicNotFound, Unauthenticated, UnavailableError
from heapline.server import session as server_session
from heapline.server.app import Server
from heapline.server.auth.principal import LOCAL, Everybody
from heapline.server.front import Caller, Front, Visit
from heapline.server.grpc_service import GrpcService
from heapline.server.settings import ServerSettings
from heapline.wire.schema import pb
from tests.integration.server_rig import Keys, Requests, Rig, until


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        yield rig


def asked(number: int, method: str, request: Any = None, **more: Any) -> Any:
    data = b"" if request is None else request.SerializeToString()
    return pb.SessionRequest(calls=[pb.SessionCall(number=number, method=method, request=data, **more)])


def pop(**options: Any) -> Any:
    return pb.PopRequest(topic="jobs", max_messages=1, **options)


async def answers(stream: Any, count: int) -> list[Any]:
    got: list[Any] = []
    async with asyncio.timeout(20):
        while len(got) < count:
            got += (await anext(stream)).answers
    return got


async def test_call_that_waits_holds_up_no_other(rig: Rig) -> None:
    waiting = asyncio.ensure_future(rig.broker.pop("jobs", wait=30))
    await rig.broker.stats("jobs")
    assert not waiting.done()
    await rig.broker.enqueue("jobs", b"x")
    (message,) = await asyncio.wait_for(waiting, 20)
    assert message.payload == b"x"


async def test_calls_of_one_moment_travel_together(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    take = client_session._Line._take
    monkeypatch.setattr(client_session._Line, "_take", lambda line: (packed.append(0), take(line))[1])
    await asyncio.gather(*(rig.broker.enqueue("jobs", b"x") for _ in range(200)))
    assert len(packed) < 20
    assert (await rig.behind.stats("jobs")).ready == 200


async def test_errors_are_the_ones_of_a_call_by_itself(rig: Rig) -> None:
    async with WireBroker(rig.target, sessions=False) as unary:
        for broker in (rig.wire, unary):
            with pytest.raises(TopicNotFound) as caught:
                await broker.stats("nowhere")
            assert caught.value.topic == "nowhere"


async def test_what_is_no_unary_call_is_refused_alone(rig: Rig) -> None:
    requests = Requests(
        asked(1, "PopStream"), asked(2, "Nonsense"), asked(3, "Session"), asked(4, "__class__"),
        pb.SessionRequest(calls=[pb.SessionCall(number=5, method="Stats", request=b"\xff\xff")]),
        asked(6, "Stats", pb.Heap(topic="jobs")),
    )  # fmt: skip
    got = {a.number: a for a in await answers(rig.wire.calls.stream("Session", requests), 6)}
    assert {got[n].code for n in range(1, 6)} == {"INVALID_ARGUMENT"}
    assert got[6].code == ""
    assert pb.HeapStats.FromString(got[6].response)


async def test_number_that_is_under_way_ends_the_session(rig: Rig) -> None:
    requests = Requests(asked(1, "Pop", pop(wait=30.0)), asked(1, "Pop", pop(wait=30.0)))
    with pytest.raises(BadRequest):
        await answers(rig.wire.calls.stream("Session", requests), 1)


async def test_pop_given_up_by_the_client_takes_nothing_later(rig: Rig) -> None:
    waiting = asyncio.ensure_future(rig.broker.pop("jobs", wait=30))
    await rig.broker.stats("jobs")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await rig.broker.stats("jobs")  # by now the server has been told
    await rig.broker.enqueue("jobs", b"x")
    stats = await rig.behind.stats("jobs")
    assert (stats.ready, stats.leased, stats.leased_total) == (1, 0, 0)


async def test_call_out_of_time_says_so_and_is_ended(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        async with WireBroker(rig.target, timeout=0.2) as hasty:
            with pytest.raises(DeadlineExceeded):
                await hasty.pop("jobs", wait=30)
            await hasty.enqueue("jobs", b"x")
        assert (await rig.behind.stats("jobs")).leased_total == 0


async def test_leases_that_arrive_when_nobody_waits_any_more_go_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.broker.enqueue("jobs", b"x")
    asking: list[asyncio.Task[Any]] = []
    answer = client_session._Line._answer

    def answer_and_cancel(line: Any, told: Any) -> int:
        is_pop = line._waiting[told.number][0] == "Pop"  # what was given back before is answered too
        if is_pop and before:
            asking.pop().cancel()
        size = answer(line, told)
        if is_pop and not before:
            asking.pop().cancel()
        return size

    for before in (False, True):  # the answer is there first, or the cancellation is
        asking.append(asyncio.ensure_future(rig.broker.pop("jobs", wait=30)))
        with monkeypatch.context() as patched:
            patched.setattr(client_session._Line, "_answer", answer_and_cancel)
            with pytest.raises(asyncio.CancelledError):
                await asking[0]

        async def is_back(before: bool = before) -> bool:
            stats = await rig.behind.stats("jobs")
            return (stats.ready, stats.leased, stats.leased_total) == (1, 0, 1 + before)

        await until(is_back)


class Context:
    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


async def _is_answered(session: Any) -> bool:
    return bool(session._answers)


async def test_what_was_popped_and_not_sent_when_the_stream_breaks_goes_back(rig: Rig) -> None:
    for as_items in (False, True):
        await rig.broker.enqueue("jobs", b"x")
        front = Front(Everybody())
        service = GrpcService(rig.behind, front)
        caller = Caller(Everybody(), LOCAL, Visit(front, "grpc", "Session", None, {}, Context()))
        session = server_session.Session(front, service, caller, service._give_back)
        requests = Requests(asked(1, "Stats", pb.Heap(topic="jobs")))
        running = session.run(aiter(requests))
        assert (await anext(running)).answers[0].number == 1  # and gRPC is slow to take it
        requests.say(asked(2, "Pop", pop(wait=30.0, as_items=as_items)))
        await until(lambda session=session: _is_answered(session))
        await running.aclose()

        async def is_back() -> bool:
            stats = await rig.behind.stats("jobs")
            return (stats.ready, stats.leased) == (1, 0) and stats.leased_total > 0

        await until(is_back)
        await rig.broker.purge("jobs")


async def test_named_pop_that_was_not_sent_stays_with_the_one_who_repeated_it(rig: Rig) -> None:
    await rig.broker.enqueue("jobs", b"x")
    front = Front(Everybody())
    service = GrpcService(rig.behind, front)
    caller = Caller(Everybody(), LOCAL, Visit(front, "grpc", "Session", None, {}, Context()))
    session = server_session.Session(front, service, caller, service._give_back)
    requests = Requests(asked(1, "Stats", pb.Heap(topic="jobs")))
    running = session.run(aiter(requests))
    await anext(running)  # and gRPC is slow to take it
    requests.say(asked(2, "Pop", pop(request_id="r")))
    await until(lambda: _is_answered(session))
    (message,) = await rig.broker.pop("jobs", request_id="r")  # whose connection broke asks again on another
    await running.aclose()
    await rig.behind.stats("jobs")
    assert await rig.leased() == 1
    await rig.broker.ack(message)


@pytest.mark.parametrize("sessions", [True, False])
async def test_named_pop_given_up_and_repeated_leaves_its_leases_with_the_repeat(rig: Rig, sessions: bool) -> None:
    await rig.broker.enqueue("jobs", b"x")
    async with WireBroker(rig.target, sessions=sessions) as broker:
        given_up = asyncio.ensure_future(broker.pop("jobs", request_id="r"))
        wanted = asyncio.ensure_future(broker.pop("jobs", request_id="r"))
        await asyncio.sleep(0)
        if sessions:  # the answer is there, and nobody to take it
            answer = client_session._Line._answer
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(
                    client_session._Line, "_answer", lambda line, told: (given_up.cancel(), answer(line, told))[1]
                )
                (message,) = await wanted
        else:
            given_up.cancel()
            (message,) = await wanted
        with pytest.raises(asyncio.CancelledError):
            await given_up
    assert await rig.leased() == 1
    await rig.broker.ack(message)


async def test_every_call_is_answered_also_one_that_is_given_up_before_it_began(rig: Rig) -> None:
    calls = [
        pb.SessionCall(number=1, method="Pop", request=pop(wait=30.0).SerializeToString()),
        pb.SessionCall(number=1, cancel=True),
    ]
    requests = Requests(pb.SessionRequest(calls=calls), asked(2, "Stats", pb.Heap(topic="jobs")))
    got = await answers(rig.wire.calls.stream("Session", requests), 2)
    assert {a.number: a.code for a in got} == {1: "CANCELLED", 2: ""}


async def test_session_with_enough_under_way_is_not_read_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_session, "CALLS_MAX", 2)
    one_more = asyncio.Semaphore(0)

    async def snapshot(request: Any, caller: Any) -> Any:
        await one_more.acquire()
        return pb.Done()

    monkeypatch.setattr(rig.server._service, "Snapshot", snapshot)
    long = (asked(n, "Snapshot", pb.Heap(topic="jobs")) for n in (1, 2))
    stream = rig.wire.calls.stream("Session", Requests(*long, asked(3, "Stats", pb.Heap(topic="jobs"))))
    first = asyncio.ensure_future(answers(stream, 1))
    await asyncio.sleep(0.05)
    assert not first.done(), "the third call waits outside"
    one_more.release()
    assert {a.number for a in await first + await answers(stream, 1)} in ({1, 3}, {2, 3})
    await stream.aclose()


async def test_pops_that_wait_keep_out_neither_the_enqueue_they_wait_for_nor_their_own_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_session, "CALLS_MAX", 2)
    waiting = [asyncio.ensure_future(rig.broker.pop("jobs", wait=30)) for _ in range(10)]
    await asyncio.wait_for(rig.broker.enqueue("jobs", b"x"), 20)
    done, _ = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert [m.payload for pop in done for m in pop.result()] == [b"x"]
    for pop in waiting:
        pop.cancel()
    await asyncio.wait_for(rig.broker.enqueue("jobs", b"y"), 20)
    assert (await rig.behind.stats("jobs")).ready == 1


async def test_client_that_does_not_read_its_answers_is_not_read_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_session, "CALLS_MAX", 5)
    front = Front(Everybody())
    service = GrpcService(rig.behind, front)
    caller = Caller(Everybody(), LOCAL, Visit(front, "grpc", "Session", None, {}, Context()))
    session = server_session.Session(front, service, caller, service._give_back)
    requests = Requests(*(asked(n, "Stats", pb.Heap(topic="jobs")) for n in range(100)))
    running = session.run(aiter(requests))
    await anext(running)  # gRPC takes no more
    for _ in range(50):
        await rig.behind.stats("jobs")
        assert len(set(session._calls) | {answer.number for answer, _ in session._answers}) <= 5

    async def is_full() -> bool:
        return len(session._answers) == 5

    await until(is_full)
    rest = {n async for response in _to_end(running, requests) for n in (a.number for a in response.answers)}
    assert max(rest) == 99, "and goes on when it does"


async def _to_end(running: Any, requests: Requests) -> AsyncIterator[Any]:
    requests.end()
    async for response in running:
        yield response


async def test_key_revoked_is_refused_at_the_next_call_of_its_session(tmp_path: Path) -> None:
    keys = Keys(good="*:produce,consume,admin")
    async with Rig(tmp_path, keys) as rig, WireBroker(rig.target, credential="good") as broker:
        await broker.create_topic("jobs", **rig.small)
        keys.revoked.add("good")
        with pytest.raises(Unauthenticated):
            await broker.enqueue("jobs", b"x")


async def test_stranger_is_told_so_whatever_he_sends(tmp_path: Path) -> None:
    async with Rig(tmp_path, Keys(good="*:admin")) as rig, WireBroker(rig.target, credential="bad") as broker:
        for _ in range(5):
            with pytest.raises(Unauthenticated):
                await broker.enqueue_batch("jobs", [])


async def test_stopping_server_ends_what_waits_and_then_the_session(rig: Rig) -> None:
    waiting = asyncio.ensure_future(rig.broker.pop("jobs", wait=30))
    await rig.broker.stats("jobs")
    await asyncio.wait_for(rig.server.stop(), 10)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 10)


async def test_session_is_opened_again_when_the_server_is_back(rig: Rig) -> None:
    await rig.broker.enqueue("jobs", b"x")
    port = rig.server.grpc_port
    await rig.server.stop()
    with pytest.raises(UnavailableError):
        await rig.broker.stats("jobs")
    again = Server(rig.behind, Everybody(), ServerSettings(grpc_port=port, http_port=0))
    rig.server = again
    await again.start()

    async def serves() -> bool:
        try:
            return (await rig.broker.stats("jobs")).ready == 1
        except UnavailableError:
            return False

    await until(serves)
