"""The native interface over a real socket: many calls on one connection, how they end, and undelivered leases."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heapline.client.transports.native import NativeBroker
from heapline.contract.call import Page
from heapline.contract.errors import (
    BadRequest,
    ConfirmationNeeded,
    DeadlineExceeded,
    LeaseLost,
    PermissionDenied,
    TopicNotFound,
    Unauthenticated,
    UnavailableError,
)
from heapline.contract.leases import Pop
from heapline.contract.log import ReadUnits
from heapline.contract.messages import Enqueue
from heapline.contract.replays import Replay
from heapline.contract.topics import ListTopics, PauseTopic, Purge, Snapshot, Stats
from heapline.engine import EmbeddedBroker
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.protocols import native
from heapline.server.server import Server
from heapline.server.settings import ServerSettings
from heapline.wire import codec
from heapline.wire.connection import ClientConnection
from heapline.wire.frames import ClientFrames, End, Error, GoAway, Item, Response, Windows, peer
from tests.integration.proxy import Proxy
from tests.integration.raw_native import RawNative, code_of, refusal
from tests.integration.server_rig import Keys, Rig, until
from tests.unit.wire.fake_transport import FakeTransport
from tests.unit.wire.frames.connection import frame

MB = 1 << 20


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        yield rig
        await until(lambda: is_idle(rig))


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[RawNative]:
    async with RawNative(rig.target) as client:
        yield client


async def is_idle(rig: Rig) -> bool:
    """Whether all requests have ended and released what they counted."""
    gate = rig.server.gate
    return (gate.requests_open, gate.calls.held, gate.streams.held) == (0, {}, {})


async def all_ready(rig: Rig, count: int) -> bool:
    stats = await rig.behind.stats("jobs")
    return (stats.ready, stats.leased) == (count, 0)


def connection_of(rig: Rig) -> native.NativeConnection:
    (connection,) = rig.server._native.connections
    return connection


async def waits(rig: Rig, count: int = 1) -> None:
    async def are_waiting() -> bool:
        return len(rig.server.dispatcher._waiting) == count

    await until(are_waiting)


# -- calls -------------------------------------------------------------------------------------------------------------


async def test_waiting_call_does_not_delay_others(client: RawNative) -> None:
    pop, stats = client.send(Pop("jobs", wait=30.0), Stats("jobs"))
    await client.answers(stats)
    (enqueue,) = client.send(Enqueue("jobs", b"x"))
    popped, _ = await client.answers(pop, enqueue)
    assert codec.decode_result(popped.body, Pop).messages.payloads == [b"x"]


async def test_errors_are_those_of_the_contract(client: RawNative) -> None:
    with pytest.raises(TopicNotFound) as caught:
        await client.do(Stats("nowhere"))
    assert caught.value.topic == "nowhere"


async def test_destructive_call_needs_its_confirmation(rig: Rig, client: RawNative) -> None:
    await client.do(Enqueue("jobs", b"x"))
    with pytest.raises(ConfirmationNeeded) as needed:
        await client.do(Purge("jobs"))
    assert (await rig.behind.stats("jobs")).ready == 1
    assert (await client.do(Purge("jobs"), confirmation=needed.value.token)).count == 1


async def test_invalid_call_is_rejected_alone(client: RawNative) -> None:
    wrong = codec.encode({"topic": "jobs", "more": 1})
    numbers = [
        client.frames.send_request(0xFFFF, b"\x80"),
        client.frames.send_request(Stats.facts.id, wrong),
        client.frames.send_request(Stats.facts.id, b"\xff\xff"),
        client.frames.send_request(Stats.facts.id, codec.encode(Stats("jobs"))),
    ]
    client.flush()
    unknown, *invalid, stats = await client.answers(*numbers)
    assert isinstance(unknown.error, BadRequest)
    assert "0xffff" in str(unknown.error)
    assert {code_of(answer) for answer in invalid} == {"INVALID_ARGUMENT"}
    assert codec.decode_result(stats.body, Stats).ready == 0


async def test_client_cannot_call_for_another_principal(client: RawNative) -> None:
    with pytest.raises(BadRequest, match="on_behalf_of"):
        await client.do(Stats("jobs"), on_behalf_of="admin")


async def test_repeated_number_of_a_call_in_progress_ends_the_connection(rig: Rig, client: RawNative) -> None:
    pop = codec.encode(Pop("jobs", wait=30.0))
    client.writer.write(frame(3, 1, pop, command=Pop.facts.id) * 2)
    (goaway,) = await client.end()
    assert code_of(goaway) == "INVALID_ARGUMENT"


async def test_call_cancelled_with_its_request_is_answered(rig: Rig, client: RawNative) -> None:
    number = client.frames.send_request(Pop.facts.id, codec.encode(Pop("jobs", wait=30.0)))
    client.cancel(number)
    (answer,) = await client.answers(number)
    assert code_of(answer) == "CANCELLED"
    client.frames.send_request(Stats.facts.id, codec.encode(Stats("jobs")))


async def test_large_body_whose_client_gives_up_is_dropped(rig: Rig, client: RawNative) -> None:
    client.writer.write(frame(3, 1, b"\x81", flags=2, command=Enqueue.facts.id) + frame(9, 1))
    client.writer.write(frame(10, 7))
    data = await client.read()
    assert codec.decode(data[12:-12], dict)["code"] == "CANCELLED"
    assert connection_of(rig)._frames.incomplete == 0


async def test_timeout_of_a_request_ends_it_and_leases_nothing(rig: Rig, client: RawNative) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.do(Pop("jobs", wait=30.0), timeout=0.05)
    await client.do(Enqueue("jobs", b"x"), timeout=1e300)
    assert await all_ready(rig, 1)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("-inf")])
async def test_timeout_that_is_not_a_duration_is_rejected(client: RawNative, seconds: float) -> None:
    with pytest.raises(BadRequest, match="timeout"):
        await client.do(Pop("jobs", wait=30.0), timeout=seconds)


async def test_answer_over_the_window_of_the_client_is_an_error_and_its_leases_are_returned(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig, RawNative(rig.target, windows=Windows(body_bytes=MB)) as small:
        await rig.behind.create_topic("jobs", max_payload_bytes=2 * MB)
        await rig.behind.enqueue("jobs", b"x" * (MB + 1))
        (answer,) = await small.answers(*small.send(Pop("jobs")))
        assert code_of(answer) == "RESOURCE_EXHAUSTED"
        await until(lambda: all_ready(rig, 1))


async def test_error_over_the_window_of_the_client_is_answered(
    rig: Rig, client: RawNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(command: Any, request: Any) -> None:
        raise LeaseLost(list(range(1 << 40, (1 << 40) + 200_000)), "jobs")

    monkeypatch.setitem(rig.server.dispatcher._own, PauseTopic, lose)  # type: ignore[arg-type]
    async with RawNative(rig.target, windows=Windows(body_bytes=MB)) as small:
        (answer,) = await small.answers(*small.send(PauseTopic("jobs")))
        assert code_of(answer) == "RESOURCE_EXHAUSTED"


# -- undelivered leases ------------------------------------------------------------------------------------------------


async def test_cancelled_pop_leases_nothing_later(rig: Rig, client: RawNative) -> None:
    (pop,) = client.send(Pop("jobs", wait=30.0))
    await waits(rig)
    client.cancel(pop)
    (answer,) = await client.answers(pop)
    assert code_of(answer) == "CANCELLED"
    await client.do(Enqueue("jobs", b"x"))
    assert await all_ready(rig, 1)


async def test_pop_past_its_deadline_returns_leases_that_arrive_later(rig: Rig) -> None:
    await rig.behind.enqueue("jobs", b"x")
    async with Proxy(rig.target) as proxy, NativeBroker(proxy.target, timeout=0.5) as hasty:
        await hasty.stats("jobs")
        proxy.hold()
        with pytest.raises(DeadlineExceeded):
            await hasty.pop("jobs")
        assert await rig.leased() == 1
        proxy.flow()
        await until(lambda: all_ready(rig, 1))


async def test_leases_not_handed_to_the_transport_are_returned_when_the_connection_breaks(
    rig: Rig, client: RawNative
) -> None:
    await rig.behind.enqueue("jobs", b"x")
    connection_of(rig).pause_writing()
    client.send(Pop("jobs"))

    async def is_leased() -> bool:
        return await rig.leased() == 1

    await until(is_leased)
    await client.close()
    await until(lambda: all_ready(rig, 1))


async def test_leases_granted_while_the_transport_closes_are_returned(rig: Rig, client: RawNative) -> None:
    connection, granted = connection_of(rig), asyncio.Event()
    done = connection._done

    def done_while_closing(call: Any, answer: Any) -> None:
        connection._transport.close()  # as if the server stops; the loop reports the loss later
        done(call, answer)
        connection.flush()
        granted.set()

    connection._done = done_while_closing  # type: ignore[method-assign]
    client.send(Pop("jobs", wait=30.0))
    await waits(rig)
    await rig.behind.enqueue("jobs", b"x")
    await asyncio.wait_for(granted.wait(), 20)
    await until(lambda: all_ready(rig, 1))


async def test_leases_granted_as_the_credential_ends_are_returned(tmp_path: Path) -> None:
    keys = Keys(good="*:produce,consume,admin")
    async with Rig(tmp_path, keys) as rig, RawNative(rig.target, "good") as client:
        await rig.behind.create_topic("jobs", **rig.small)
        connection = connection_of(rig)
        done = connection._done

        def done_after_revocation(call: Any, answer: Any) -> None:
            keys.revoked.add("good")
            done(call, answer)

        connection._done = done_after_revocation  # type: ignore[method-assign]
        (pop,) = client.send(Pop("jobs", wait=30.0))
        await waits(rig)
        (call,) = connection._calls.values()
        assert not isinstance(call.answer, asyncio.Task), "a pop that waits needs no task"
        await rig.behind.enqueue("jobs", b"x")
        (answer,) = await client.answers(pop)
        assert code_of(answer) == "UNAUTHENTICATED"
        await until(lambda: all_ready(rig, 1))


async def test_leases_of_a_pop_with_request_id_stay_with_its_repeat(rig: Rig, client: RawNative) -> None:
    await rig.behind.enqueue("jobs", b"x")
    connection_of(rig).pause_writing()
    client.send(Pop("jobs", request_id="r"))

    async def is_leased() -> bool:
        return await rig.leased() == 1

    await until(is_leased)
    async with NativeBroker(rig.target) as other:
        (message,) = await other.pop("jobs", request_id="r")  # the caller repeats it over another connection
        await client.close()
        await other.stats("jobs")
        assert await rig.leased() == 1
        await other.ack(message)


async def test_delivered_leases_are_not_kept_while_other_answers_wait(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that never catches up must not make the server remember all leases it ever granted."""
    connection = native.NativeConnection(rig.server._native, rig.server.dispatcher)
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    client = ClientFrames(None)
    connection.data_received(b"".join(map(bytes, client.take())))

    async def is_welcome() -> bool:
        return bool(transport.written)

    await until(is_welcome)
    client.receive(transport.taken())
    await rig.behind.enqueue("jobs", b"x")
    client.send_request(Pop.facts.id, codec.encode(Pop("jobs")))
    connection.pause_writing()
    connection.data_received(b"".join(map(bytes, client.take())))

    async def is_answered() -> bool:
        return bool(connection._unsent)

    await until(is_answered)
    connection._is_paused = False  # space for one piece only
    monkeypatch.setattr(transport, "writelines", lambda buffers: connection.pause_writing())
    connection._frames._writer.put(6, 1, 99, b"z" * 2 * MB)
    connection.flush()
    assert connection._frames.buffered > 0
    assert connection._unsent == []
    connection.abort()
    await until(lambda: is_idle(rig))
    assert await rig.leased() == 1


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_window_refuses_calls_and_cancel_still_arrives(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.server._native.windows = Windows(calls=2, waiting=3)
    one_more = asyncio.Semaphore(0)

    async def snapshot(command: Any, request: Any) -> None:
        await one_more.acquire()

    monkeypatch.setitem(rig.server.dispatcher._own, Snapshot, snapshot)  # type: ignore[arg-type]
    async with RawNative(rig.target) as client:
        *running, over = client.send(*(Snapshot("jobs") for _ in range(3)))
        *waiting, over_too = client.send(*(Pop("jobs", wait=30.0) for _ in range(4)))
        refused = await client.answers(over, over_too)
        assert [code_of(answer) for answer in refused] == ["RESOURCE_EXHAUSTED"] * 2
        client.cancel(running[0])
        client.cancel(waiting[0])
        cancelled = await client.answers(running[0], waiting[0])
        assert [code_of(answer) for answer in cancelled] == ["CANCELLED"] * 2
        assert (await client.do(Stats("jobs"))).ready == 0
        one_more.release()
        await client.answers(running[1])


async def test_sdk_waits_for_the_window_instead_of_being_refused(rig: Rig) -> None:
    rig.server._native.windows = Windows(calls=2, waiting=2)
    async with NativeBroker(rig.target) as client:
        pops = [asyncio.ensure_future(client.pop("jobs", wait=30)) for _ in range(5)]
        await asyncio.wait_for(asyncio.gather(*(client.enqueue("jobs", b"x") for _ in range(50))), 20)
        assert [len(messages) for messages in await asyncio.wait_for(asyncio.gather(*pops), 20)] == [1] * 5


async def test_server_stops_reading_from_a_client_that_does_not_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "BACKED_UP_BYTES", 64 << 10)
    async with RawNative(rig.target) as client:
        connection = connection_of(rig)
        connection.pause_writing()

        async def is_backed_up() -> bool:
            client.send(*(Stats("jobs") for _ in range(10)))
            return not connection._is_reading and await is_idle(rig)

        await until(is_backed_up)
        buffered = connection._frames.buffered
        (last,) = client.send(Stats("jobs"))
        for _ in range(20):
            await rig.behind.stats("jobs")
        assert connection._frames.buffered == buffered
        connection.resume_writing()
        await client.answers(last)
        assert connection._is_reading


async def test_slow_client_is_not_closed_as_silent_while_it_is_not_read(
    rig: Rig, client: RawNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, now = connection_of(rig), 1000.0
    connection._frames.tick(now)
    connection._is_reading = False
    connection.pause_writing()
    for _ in range(10):
        now += peer.SILENCE_SECONDS
        connection.resume_writing()  # the client has read something
        connection._is_reading = False
        connection._frames.tick(now)
    connection.on_written()
    assert (await client.do(Stats("jobs"))).ready == 0


async def test_feed_sends_as_many_items_as_it_has_credits(rig: Rig, client: RawNative) -> None:
    for _ in range(6):
        await rig.behind.enqueue("jobs", b"x")
    (feed,) = client.send(Replay("jobs"))
    await client.do(Stats("jobs"))
    client.credit(feed, 1)
    first = await client.event()
    assert isinstance(first, Item)
    client.credit(feed, 1000)
    events = [await client.event()]
    while isinstance(events[-1], Item):
        events.append(await client.event())
    assert isinstance(events[-1], End)


async def test_feed_without_credits_ends_when_the_server_stops(rig: Rig, client: RawNative) -> None:
    await rig.behind.enqueue("jobs", b"x")
    (feed,) = client.send(Replay("jobs"))

    async def is_blocked() -> bool:
        return bool(connection_of(rig)._feeds)

    await until(is_blocked)
    rig.server.settings = msgspec.structs.replace(rig.server.settings, stop_grace=60.0)
    await asyncio.wait_for(rig.server.stop(), 20)
    events = await client.end()
    assert [type(event) for event in events] == [GoAway, Error]
    assert (events[1].request, code_of(events[1])) == (feed, "UNAVAILABLE")


async def test_feed_of_a_broken_connection_ends(rig: Rig, client: RawNative) -> None:
    await rig.behind.enqueue("jobs", b"x")
    client.send(Replay("jobs"))

    async def is_blocked() -> bool:
        return bool(connection_of(rig)._feeds)

    await until(is_blocked)
    await client.close()
    await until(lambda: is_idle(rig))


# -- authentication and rights -----------------------------------------------------------------------------------------


async def test_revoked_key_is_rejected_at_the_next_call(tmp_path: Path) -> None:
    keys = Keys(good="*:produce,consume,admin")
    async with Rig(tmp_path, keys) as rig, RawNative(rig.target, "good") as client:
        await rig.behind.create_topic("jobs", **rig.small)
        await client.do(Enqueue("jobs", b"x"))
        keys.revoked.add("good")
        with pytest.raises(Unauthenticated):
            await client.do(Enqueue("jobs", b"x"))
        assert await all_ready(rig, 1)


async def test_revoked_key_with_a_simultaneous_violation_ends_the_connection_in_order(tmp_path: Path) -> None:
    keys = Keys(good="*:produce,consume,admin")
    async with Rig(tmp_path, keys) as rig, RawNative(rig.target, "good") as client:
        keys.revoked.add("good")
        client.writer.write(frame(3, 1, codec.encode(Stats("jobs")), command=Stats.facts.id) + b"\xff" * 12)
        (goaway,) = await client.end()
        assert code_of(goaway) == "INVALID_ARGUMENT"
        assert await is_idle(rig)


async def test_rights_are_checked_for_every_call(tmp_path: Path) -> None:
    keys = Keys(admin="*:produce,consume,admin", reader="jobs:consume")
    async with Rig(tmp_path, keys) as rig, RawNative(rig.target, "reader") as reader:
        await rig.behind.create_topic("jobs", **rig.small)
        assert (await reader.do(Pop("jobs"))).messages is None
        for command in (Enqueue("jobs", b"x"), Pop("other"), Purge("jobs"), Stats("x/y"), ReadUnits("x", 0, 1)):
            with pytest.raises(PermissionDenied):
                await reader.do(command)
        assert await all_ready(rig, 0)
        assert await is_idle(rig)


async def test_auth_renews_the_credential_of_the_same_caller_only(tmp_path: Path) -> None:
    keys = Keys(first="*:admin", second="*:admin")
    async with Rig(tmp_path, keys) as rig:
        connection = await ClientConnection.open(("127.0.0.1", rig.server.port), "first")
        await connection.renew("first")
        for credential in ("second", "unknown"):
            with pytest.raises(Unauthenticated):
                await connection.renew(credential)
        (served,) = rig.server._native.connections
        assert served._caller.subject == "first"
        await connection.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 5000, frame(3, 1, b"\x80"), frame(10, 1)]
)
async def test_unauthenticated_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(native, "HELLO_SECONDS", 0.1 if not sent else 5.0)
    async with Rig(tmp_path, Keys(good="*:admin")) as rig:
        assert [code_of(event) for event in await refusal(rig.target, sent)] == ["INVALID_ARGUMENT"][: len(sent)]
        await until(lambda: no_connections(rig))


async def no_connections(rig: Rig) -> bool:
    server = rig.server._native
    return not server.connections and not server.unauthenticated


async def test_unknown_key_is_refused_whatever_follows_it(tmp_path: Path) -> None:
    async with Rig(tmp_path, Keys(good="*:admin")) as rig:
        hello = b"".join(map(bytes, ClientFrames("bad").take()))
        (error,) = await refusal(rig.target, hello)
        assert (error.request, code_of(error)) == (0, "UNAUTHENTICATED")
        enqueue = frame(3, 1, codec.encode(Enqueue("jobs", b"x")), command=Enqueue.facts.id)
        for more in (enqueue, b"\xff" * 12, hello):
            (goaway,) = await refusal(rig.target, hello + more)
            assert code_of(goaway) == "INVALID_ARGUMENT"
        await until(lambda: no_connections(rig))
        assert rig.server.gate.requests_open == 0


async def test_violation_right_after_a_valid_hello_is_refused_without_a_logged_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(tmp_path, Keys(good="*:admin")) as rig:
        hello = b"".join(map(bytes, ClientFrames("good").take()))
        (goaway,) = await refusal(rig.target, hello + b"\xff" * 12)
        assert code_of(goaway) == "INVALID_ARGUMENT"
        await until(lambda: no_connections(rig))
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_connections_of_one_address_that_are_not_authenticated_are_capped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "UNAUTHENTICATED_MAX", 3)
    async with Rig(tmp_path) as rig:
        strangers = [RawNative(rig.target) for _ in range(4)]
        for stranger in strangers:
            await stranger.connect()
        assert await strangers[3].read() == b""
        await strangers[0].close()

        async def has_room() -> bool:
            return rig.server._native.unauthenticated["127.0.0.1"] == 2

        await until(has_room)
        async with RawNative(rig.target) as client:
            assert await client.do(ListTopics()) == Page([], None)
            assert rig.server._native.unauthenticated["127.0.0.1"] == 2, "it is authenticated"
        for stranger in strangers[1:]:
            await stranger.close()
        await until(lambda: no_connections(rig))


# -- stopping ----------------------------------------------------------------------------------------------------------


async def test_stopping_server_ends_waiting_calls_and_sends_goaway(rig: Rig, client: RawNative) -> None:
    (pop,) = client.send(Pop("jobs", wait=30.0))
    await waits(rig)
    await asyncio.wait_for(rig.server.stop(), 20)
    goaway, error = await client.end()
    assert isinstance(goaway, GoAway)
    assert goaway.code == "UNAVAILABLE"
    assert (error.request, code_of(error)) == (pop, "UNAVAILABLE")


async def test_stopping_server_answers_calls_in_flight(
    rig: Rig, client: RawNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = asyncio.Event()

    async def snapshot(command: Any, request: Any) -> None:
        await finish.wait()

    monkeypatch.setitem(rig.server.dispatcher._own, Snapshot, snapshot)  # type: ignore[arg-type]
    (number,) = client.send(Snapshot("jobs"))

    async def runs() -> bool:
        return rig.server.gate.requests_open == 1

    await until(runs)
    stopping = asyncio.ensure_future(rig.server.stop())
    assert isinstance(await client.event(), GoAway)
    finish.set()
    assert await client.event() == Response(number, b"")
    await stopping


async def test_client_reconnects_to_a_restarted_server(rig: Rig) -> None:
    async with NativeBroker(rig.target) as client:
        await client.enqueue("jobs", b"x")
        port = rig.server.port
        await rig.server.stop()
        with pytest.raises(UnavailableError):
            await client.stats("jobs")
        rig.server = Server(rig.behind, NoAuthGuard(), ServerSettings(port=port, grpc_port=0, http_port=0))
        await rig.server.start()
        assert (await client.stats("jobs")).ready == 1


async def test_call_to_a_silent_server_ends_at_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with NativeBroker(f"127.0.0.1:{port}", timeout=0.05) as client:
            async with asyncio.timeout(5):
                with pytest.raises(UnavailableError) as caught:
                    await client.stats("jobs")
            assert not caught.value.reached


# -- Unix sockets ------------------------------------------------------------------------------------------------------


async def test_unix_socket_is_private_to_the_user_and_removed_when_the_server_stops(tmp_path: Path) -> None:
    path = tmp_path / "heapline.sock"
    async with Rig(tmp_path, unix_socket=path) as rig, NativeBroker(f"unix://{path}") as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await client.create_topic("jobs", **rig.small)
        await client.enqueue("jobs", b"x")
        (message,) = await client.pop("jobs")
        await client.ack(message)
    assert not path.exists()


async def test_socket_file_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "heapline.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    async with Rig(tmp_path, unix_socket=path), NativeBroker(f"unix://{path}") as client:
        assert await client.list_topics() == []


async def test_file_that_is_not_a_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    async with Rig(tmp_path) as rig:
        server = native.NativeServer(rig.server.dispatcher, "127.0.0.1", 0, request_bytes_max=MB, unix_socket=path)
        with pytest.raises(BadRequest, match="not a socket"):
            await server.start()
    assert path.read_text() == "data"


async def test_server_that_cannot_listen_closes_the_ports_it_has_opened(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServerSettings(port=0, grpc_port=0, http_port=taken.getsockname()[1], stop_grace=1.0)
        async with EmbeddedBroker(str(tmp_path / "data")) as broker:
            server = Server(broker, NoAuthGuard(), settings)
            with pytest.raises(OSError, match="in use"):
                await server.__aenter__()
        for port in (server.port, server.grpc_port):
            assert port
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
