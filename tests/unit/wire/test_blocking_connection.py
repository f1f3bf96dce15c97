"""The blocking connection against a scripted server: sockets and TLS, calls, feeds, cancellation, failures."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heapline.clock import SystemClock
from heapline.contract.call import Count
from heapline.contract.columns import pack
from heapline.contract.config import TopicConfig
from heapline.contract.dead_letters import DeleteDeadLetters
from heapline.contract.errors import (
    BadRequest,
    Closed,
    DeadlineExceeded,
    HeaplineError,
    RequestError,
    ResourceExhausted,
    TopicNotFound,
    Unauthenticated,
    UnavailableError,
)
from heapline.contract.leases import Leased, LeasedMessages, Pop, Release, Settled
from heapline.contract.log import RawUnits, ReadRecords, ReadUnits, RecordsRead
from heapline.contract.message import TopicInfo
from heapline.contract.topics import GetTopic, PauseTopic, Purge
from heapline.server.auth.dev_certs import make_dev_certs
from heapline.wire import blocking_connection as blocking
from heapline.wire import codec
from heapline.wire.blocking_connection import connect
from heapline.wire.frames import Auth, Cancel, Credit, Headers, Request, ServerFrames, Windows, compression, peer
from heapline.wire.frames.format import Kind
from tests.unit.wire.frames.connection import frame
from tests.unit.wire.frames.fake_server import FakeServer

CANCELLED = codec.encode_failure("CANCELLED", "the caller cancelled this request")


def purge(frames: ServerFrames, number: int, command: Purge) -> None:
    frames.send_response(number, codec.encode_result(Count(len(command.topic))))


def pause(frames: ServerFrames, number: int, command: PauseTopic) -> None:
    frames.send_response(number, codec.encode_result(None))


def never(frames: ServerFrames, number: int, command: Any) -> None:
    pass


SCRIPT: dict[type, Any] = {Purge: purge, PauseTopic: pause, Pop: never, ReadUnits: never}


def send_items(frames: ServerFrames, number: int) -> None:
    while frames.credits(number):
        frames.send_item(number, codec.encode(RawUnits([])))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(SCRIPT, on_cancel=lambda frames, number: frames.send_error(number, CANCELLED)) as server:
        yield server


def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the condition did not become true")


# -- connecting --------------------------------------------------------------------------------------------------------


def test_call_returns_the_result_and_raises_the_servers_error(server: FakeServer) -> None:
    with connect(server.address, "good") as connection:
        assert connection.call(Purge("jobs")) == Count(4)
        assert connection.call(PauseTopic("jobs")) is None
        with pytest.raises(TopicNotFound, match="topic 'jobs' does not exist") as raised:
            connection.call(GetTopic("jobs"))
        assert raised.value.topic == "jobs"
        assert connection.call(Purge("mail/x")) == Count(6)


def test_unix_socket(tmp_path: Path) -> None:
    with (
        FakeServer(SCRIPT, path=tmp_path / "s") as server,
        connect(str(tmp_path / "s"), "good") as connection,
    ):
        assert connection.call(Purge("jobs")) == Count(4)
    assert server.seen(Request)


def test_tls_with_a_large_request(tmp_path: Path) -> None:
    make_dev_certs(tmp_path, SystemClock().wall_ms())
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    client_tls = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    with FakeServer({DeleteDeadLetters: purge}, tls=server_tls) as server:
        with connect(server.address, "good", tls=client_tls, server_name="localhost") as connection:
            command = DeleteDeadLetters("jobs", ids=list(range(1, 1 << 18)))
            assert connection.call(command) == Count(4)
        with pytest.raises(UnavailableError, match="cannot connect"):
            connect(server.address, "good", tls=client_tls, server_name="elsewhere")


def test_unknown_credential_raises_the_servers_error(server: FakeServer) -> None:
    with pytest.raises(Unauthenticated, match="unknown key 'bad'"):
        connect(server.address, "bad")


def test_credential_can_be_renewed(server: FakeServer) -> None:
    with connect(server.address, "good") as connection:
        connection.renew("better")
        with pytest.raises(Unauthenticated, match="unknown key 'worse'"):
            connection.renew("worse")
        assert connection.call(Purge("jobs")) == Count(4)
    assert [event.credential for event in server.seen(Auth)] == ["better", "worse"]


def test_address_without_a_server_is_unavailable_and_was_not_reached(tmp_path: Path) -> None:
    for address in (("127.0.0.1", 1), str(tmp_path / "absent")):
        with pytest.raises(UnavailableError, match="cannot connect to") as raised:
            connect(address)
        assert raised.value.reached is False


def test_peer_that_is_not_a_native_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BadRequest, match="is not a native port of Heapline: the peer speaks HTTP or gRPC"):
            connect(listener.getsockname())
        thread.join()


def test_silent_peer_does_not_block_the_handshake_forever() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(UnavailableError, match="no answer; check the address"),
    ):
        connect(listener.getsockname(), timeout=0.05)


# -- calls -----------------------------------------------------------------------------------------------------------


def test_timeout_travels_with_the_call_and_cancels_it(server: FakeServer) -> None:
    with connect(server.address, "good") as connection:
        with pytest.raises(DeadlineExceeded):
            connection.call(Pop("jobs", wait=60), Headers(correlation_id="x"), timeout=0.05)
        assert connection.call(Purge("jobs")) == Count(4), "the connection can still be used"
        until(lambda: server.seen(Cancel))
        until(lambda: connection.call(Purge("jobs")) and not connection._slots)
    request = server.seen(Request)[0]
    assert request.headers == Headers(0.05, correlation_id="x")


def test_begun_calls_are_in_progress_together_and_end_in_any_order() -> None:
    waiting: list[int] = []

    def last_first(frames: ServerFrames, number: int, command: Purge) -> None:
        waiting.append(number)
        if len(waiting) == 3:
            for each in reversed(waiting):
                frames.send_response(each, codec.encode_result(Count(each)))

    with FakeServer({Purge: last_first}) as server, connect(server.address, "good") as connection:
        started = [connection.begin(Purge("jobs")) for _ in range(3)]
        assert [each.result() for each in started] == [Count(1), Count(2), Count(3)]
        assert started[0].result() == Count(1)


def test_begin_waits_for_space_in_the_servers_windows() -> None:
    with FakeServer(SCRIPT, windows=Windows(calls=1)) as server, connect(server.address, "good") as connection:
        started = [connection.begin(Purge("jobs")) for _ in range(20)]
        assert [each.result() for each in started] == [Count(4)] * 20


def test_cancelled_call_is_dropped_when_its_answer_arrives(server: FakeServer) -> None:
    with connect(server.address, "good") as connection:
        started = connection.begin(Pop("jobs", wait=60))
        started.cancel()
        started.cancel()
        until(lambda: connection.call(Purge("jobs")) and not connection._slots)
    assert len(server.seen(Cancel)) == 1


def test_leases_that_arrive_after_the_deadline_are_released() -> None:
    popped: list[int] = []
    released: list[Release] = []

    def answer_late(frames: ServerFrames, number: int) -> None:
        messages = LeasedMessages(pack([7]), pack([70]), [b"m"], pack([0]), pack([1], "B"), pack([0]), pack([0]))
        frames.send_response(number, codec.encode_result(Leased("jobs", messages)))

    def release(frames: ServerFrames, number: int, command: Release) -> None:
        released.append(command)
        frames.send_response(number, codec.encode_result(Settled()))

    script = {**SCRIPT, Pop: lambda frames, number, command: popped.append(number), Release: release}
    with FakeServer(script, on_cancel=answer_late) as server, connect(server.address, "good") as connection:
        with pytest.raises(DeadlineExceeded):
            connection.call(Pop("jobs", wait=60), timeout=0.05)
        until(lambda: connection.call(Purge("jobs")) and released)
    assert (released[0].topic, bytes(released[0].leases.tokens)) == ("jobs", bytes(pack([70])))


def one_lease(frames: ServerFrames, number: int) -> None:
    messages = LeasedMessages(pack([7]), pack([70]), [b"m"], pack([0]), pack([1], "B"), pack([0]), pack([0]))
    frames.send_response(number, codec.encode_result(Leased("jobs", messages)))


def test_late_leases_are_released_when_the_servers_window_has_space() -> None:
    pops: list[int] = []
    pauses: list[int] = []
    released: list[Release] = []

    def pop(frames: ServerFrames, number: int, command: Pop) -> None:
        pops.append(number)
        if len(pops) == 3:
            for each in pops:
                one_lease(frames, each)  # while the window for calls is full
            frames.send_response(pauses.pop(), codec.encode_result(None))

    def release(frames: ServerFrames, number: int, command: Release) -> None:
        released.append(command)
        frames.send_response(number, codec.encode_result(Settled()))

    script = {Pop: pop, PauseTopic: lambda frames, number, command: pauses.append(number), Release: release}
    with FakeServer(script, windows=Windows(calls=1)) as server, connect(server.address, "good") as connection:
        for started in [connection.begin(Pop("jobs", wait=60)) for _ in range(2)]:
            started.cancel()
        pausing = connection.begin(PauseTopic("jobs"))
        assert connection.call(Pop("jobs")).messages is not None
        until(lambda: connection._step(0.0) or len(released) == 2)
        assert pausing.result() is None


def test_late_leases_are_released_again_if_the_server_was_too_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "RETURN_SECONDS", 0.01)
    releases: list[Release] = []

    def release(frames: ServerFrames, number: int, command: Release) -> None:
        releases.append(command)
        if len(releases) < 3:
            frames.send_error(number, codec.encode_error(ResourceExhausted("calls in progress", 1)))
        else:
            frames.send_error(number, codec.encode_error(TopicNotFound("jobs")))

    script = {**SCRIPT, Release: release}
    with FakeServer(script, on_cancel=one_lease) as server, connect(server.address, "good") as connection:
        connection.begin(Pop("jobs", wait=60)).cancel()
        until(lambda: connection._step(0.0) or (len(releases) == 3 and not connection._slots))
        assert not connection._returns, "a permanent error ends it"


def test_requests_of_a_compressed_topic_are_compressed_once_its_setting_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compression.installed():
        pytest.skip("no module for zstd is installed")
    sent: list[int] = []
    compress = compression.Zstd.compress
    monkeypatch.setattr(compression.Zstd, "compress", lambda self, data: sent.append(len(data)) or compress(self, data))
    asked: list[str] = []

    def get_topic(frames: ServerFrames, number: int, command: GetTopic) -> None:
        asked.append(command.topic)
        config = TopicConfig(compression="zstd" if command.topic == "jobs" else "none")
        frames.send_response(number, codec.encode_result(TopicInfo(name=command.topic, incarnation=1, config=config)))

    script = {DeleteDeadLetters: purge, GetTopic: get_topic}
    with FakeServer(script) as server, connect(server.address, "good") as connection:
        for topic, count in (("plain", 0), ("jobs", 2)):
            command = DeleteDeadLetters(topic, ids=list(range(1, 5000)))
            connection.call(command)
            assert sent == [], "until the setting is known"
            until(lambda topic=topic: connection._step(0.0) or (topic in asked and not connection._slots))
            connection.call(command)
            connection.call(command)
            assert len(sent) == count
        connection.call(DeleteDeadLetters("jobs", ids=[1]))
        assert len(sent) == 2, "a small body is not"
    assert asked == ["plain", "jobs"], "the answer is used for a minute"


def test_large_requests_and_large_answers_do_not_block_each_other() -> None:
    def read(frames: ServerFrames, number: int, command: ReadRecords) -> None:
        result = RecordsRead(b"", b"", bytes(command.positions), memoryview(b""))
        frames.send_response(number, codec.encode_result(result))

    with FakeServer({ReadRecords: read}) as server, connect(server.address, "good") as connection:
        positions = [memoryview(bytes([n]) * (4 << 20)) for n in range(5)]
        started = [connection.begin(ReadRecords("jobs", 1, each)) for each in positions]
        assert [each.result().payloads for each in started] == positions


def test_call_that_was_cancelled_before_it_was_sent_has_no_answer() -> None:
    released = threading.Event()
    script = {Pop: lambda *_: released.wait(30), ReadRecords: never}
    with (
        FakeServer(script, windows=Windows(bodies=1)) as busy,
        connect(busy.address, "good") as connection,
    ):
        connection.begin(Pop("jobs"))  # the server reads nothing more
        large = [connection.begin(ReadRecords("jobs", 1, memoryview(bytes(16 << 20)))) for _ in range(2)]
        large[1].cancel()
        assert len(connection._slots) == 2
        with pytest.raises(UnavailableError, match="this call was cancelled"):
            large[1].result()
        released.set()


def test_threads_share_a_connection(server: FakeServer) -> None:
    results: list[Any] = []
    with connect(server.address, "good") as connection:
        threads = [
            threading.Thread(target=lambda: results.extend(connection.call(Purge("jobs")) for _ in range(50)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [Count(4)] * 200


# -- feeds -----------------------------------------------------------------------------------------------------------


def test_feed_yields_items_within_credits_while_calls_are_made() -> None:
    sent = 0

    def on_credit(frames: ServerFrames, number: int) -> None:
        nonlocal sent
        while frames.credits(number) and sent < 25:
            frames.send_item(number, codec.encode(RawUnits([])))
            sent += 1
        if sent == 25:
            frames.send_end(number)
            sent += 1

    with FakeServer(SCRIPT, on_credit=on_credit) as server, connect(server.address, "good") as connection:
        count = 0
        for item in connection.feed(ReadUnits("jobs", 0, 5), credits=4):
            assert item == RawUnits([])
            assert connection.call(Purge("jobs")) == Count(4)
            count += 1
        assert count == 25
        assert not connection._slots
    credits = [event.items for event in server.seen(Credit)]
    assert credits[0] == 4
    assert sum(credits) <= 29


def test_feed_that_fails_raises_after_its_items() -> None:
    def on_credit(frames: ServerFrames, number: int) -> None:
        frames.send_item(number, codec.encode(RawUnits([])))
        frames.send_error(number, codec.encode_error(ResourceExhausted("readers", 1)))

    with FakeServer(SCRIPT, on_credit=on_credit) as server, connect(server.address, "good") as connection:
        feed = connection.feed(ReadUnits("jobs", 0, 5))
        assert next(feed) == RawUnits([])
        with pytest.raises(ResourceExhausted):
            next(feed)


def test_feed_that_is_not_read_to_its_end_is_cancelled() -> None:
    with (
        FakeServer(
            SCRIPT, on_credit=send_items, on_cancel=lambda frames, number: frames.send_error(number, CANCELLED)
        ) as server,
        connect(server.address, "good") as connection,
    ):
        for _ in connection.feed(ReadUnits("jobs", 0, 5)):
            break
        gc.collect()
        until(lambda: server.seen(Cancel))
        until(lambda: connection.call(Purge("jobs")) and not connection._slots)


def test_item_that_does_not_arrive_in_time_ends_the_feed(server: FakeServer) -> None:
    with connect(server.address, "good") as connection:
        with pytest.raises(DeadlineExceeded):
            next(connection.feed(ReadUnits("jobs", 0, 5), timeout=0.05))
        until(lambda: server.seen(Cancel))


# -- failures --------------------------------------------------------------------------------------------------------


def test_broken_connection_fails_calls_in_progress_and_later_ones(server: FakeServer) -> None:
    with connect(server.address, "good") as connection:
        started = connection.begin(Pop("jobs", wait=60))
        until(lambda: server.seen(Request))
        server.connections[0].shutdown(socket.SHUT_RDWR)
        for use in (started.result, lambda: connection.call(Purge("jobs"))):
            with pytest.raises(UnavailableError, match=r"closed the connection|was lost"):
                use()


def answer_twice(frames: ServerFrames, number: int, command: Purge) -> None:
    frames.send_response(number, codec.encode_result(Count(1)))
    frames._open[number] = 0
    frames.send_response(number, codec.encode_result(Count(2)))


def test_violation_by_the_server_breaks_the_connection() -> None:
    with FakeServer({Purge: answer_twice}) as server, connect(server.address, "good") as connection:
        assert connection.call(Purge("jobs")) == Count(1), "the answer before the violation counts"
        with pytest.raises(UnavailableError, match="violated the protocol"):
            connection.call(Purge("jobs"))


def test_answer_before_a_violation_counts_even_if_the_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    write = blocking.BlockingConnection._write

    def write_until_the_violation(connection: Any) -> None:
        write(connection) if connection._frames.failure is None else connection._break(UnavailableError("reset"))

    monkeypatch.setattr(blocking.BlockingConnection, "_write", write_until_the_violation)
    with FakeServer({Purge: answer_twice}) as server, connect(server.address, "good") as connection:
        assert connection.call(Purge("jobs")) == Count(1)


def test_answer_that_cannot_be_decoded_fails_its_own_call_only() -> None:
    def garbage(frames: ServerFrames, number: int, command: Any = None) -> None:
        frames.send_response(number, b"\xc1")

    def garbage_item(frames: ServerFrames, number: int) -> None:
        frames.send_item(number, b"\xc1")
        frames.send_end(number)

    script = {**SCRIPT, PauseTopic: pause, Purge: garbage}
    with (
        FakeServer(script, on_cancel=garbage, on_credit=garbage_item) as server,
        connect(server.address, "good") as connection,
    ):
        with pytest.raises(UnavailableError, match="the server's answer to Purge cannot be decoded"):
            connection.call(Purge("jobs"))
        with pytest.raises(UnavailableError, match="the server's answer to ReadUnits cannot be decoded"):
            next(connection.feed(ReadUnits("jobs", 0, 5)))
        with pytest.raises(DeadlineExceeded):
            connection.call(Pop("jobs", wait=60), timeout=0.05)
        until(lambda: connection.call(PauseTopic("jobs")) is None and not connection._slots)


def serve_once(answer: bytes, *, resets: bool = False) -> Any:
    """Start a server that sends these bytes to one client and closes the connection. Return its address and thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            sock.recv(4096)
            sock.sendall(answer)
            if resets:
                sock.recv(1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    thread = threading.Thread(target=serve)
    thread.start()
    return listener.getsockname(), thread


def test_goaway_instead_of_welcome_is_the_error() -> None:
    address, thread = serve_once(frame(Kind.GOAWAY, body=b"\x82\xa4code\xb0INVALID_ARGUMENT\xa4text\xa3old"))
    with pytest.raises(RequestError, match=r"^old$"):
        connect(address)
    thread.join()


def test_reset_connection_is_unavailable() -> None:
    address, thread = serve_once(frame(Kind.WELCOME, body=b"\x81\xa7version\x01"), resets=True)
    with connect(address) as connection, pytest.raises(UnavailableError, match="the connection was lost"):
        connection.call(Purge("jobs"))
    thread.join()


def test_connection_to_a_silent_server_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "SILENCE_SECONDS", 0.05)
    released = threading.Event()
    with (
        FakeServer({Pop: lambda *_: released.wait(30)}) as server,
        connect(server.address, "good") as connection,
    ):
        with pytest.raises(UnavailableError, match="has not answered PING"):
            connection.call(Pop("jobs"))
        released.set()


def test_goaway_ends_with_its_reason() -> None:
    def leave(frames: ServerFrames, number: int, command: Purge) -> None:
        frames.send_goaway("the server is stopping")
        frames.send_response(number, codec.encode_result(Count(1)))

    with FakeServer({Purge: leave}) as server, connect(server.address, "good") as connection:
        assert connection.call(Purge("jobs")) == Count(1)
        with pytest.raises(UnavailableError, match="the server is stopping") as raised:
            connection.call(Purge("jobs"))
        assert raised.value.reached is False


def test_closed_connection_raises_closed_and_close_wakes_a_waiting_thread(server: FakeServer) -> None:
    errors: list[HeaplineError] = []
    connection = connect(server.address, "good")

    def wait() -> None:
        try:
            connection.call(Pop("jobs", wait=60))
        except HeaplineError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: server.seen(Request))
    connection.close()
    thread.join(10)
    assert len(errors) == 1
    connection.close()
    with pytest.raises((Closed, UnavailableError), match=r"closed|lost"):
        connection.call(Purge("jobs"))


def test_idle_connection_answers_ping(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "TICK_SECONDS", 0.01)
    pongs = threading.Event()
    monkeypatch.setattr(ServerFrames, "_on_pong", lambda *_: pongs.set())

    def ping(frames: ServerFrames, number: int, command: Purge) -> None:
        purge(frames, number, command)
        frames.tick(0.0)
        frames._heard = False
        frames.tick(20.0)

    with FakeServer({Purge: ping}) as pinging, connect(pinging.address, "good") as connection:
        connection.call(Purge("jobs"))
        assert pongs.wait(10)


def test_forgotten_connection_does_not_keep_its_thread(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "TICK_SECONDS", 0.01)
    connection = connect(server.address, "good")
    sock, alive = connection._sock, weakref.ref(connection)
    before = threading.active_count()
    connection._selector.close()
    del connection
    gc.collect()
    until(lambda: alive() is None and threading.active_count() < before)
    sock.close()
