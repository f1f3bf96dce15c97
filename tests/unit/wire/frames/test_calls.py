"""Requests and their answers: numbers, windows, credits, cancellation, AUTH, GOAWAY."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from heapline.contract.errors import BadRequest, ResourceExhausted, UnavailableError
from heapline.wire import codec
from heapline.wire.frames import (
    Auth,
    Cancel,
    ClientFrames,
    Credit,
    End,
    Error,
    GoAway,
    Headers,
    Item,
    ProtocolError,
    Request,
    Response,
    ServerFrames,
    Windows,
)
from heapline.wire.frames.format import CREDITS_MAX, REQUEST_MAX, Kind
from tests.unit.wire.frames.connection import ENQUEUE, POP, connected, drain, frame, frames_in

HEADERS = Headers(2.5, "00-trace", "a=b", "corr", "token", "alice")


def to_server(client: ClientFrames, server: ServerFrames) -> list[Any]:
    return server.receive(drain(client))


def to_client(server: ServerFrames, client: ClientFrames) -> list[Any]:
    return client.receive(drain(server))


# -- answers ---------------------------------------------------------------------------------------------------------


def test_requests_of_one_turn_travel_together_and_are_answered_in_any_order() -> None:
    client, server = connected()
    first, second = client.send_request(ENQUEUE, b"a", HEADERS), client.send_request(POP, b"")
    assert client.in_progress == 1
    assert client.waiting == 1
    (data,) = client.take()
    assert server.receive(bytes(data)) == [Request(first, ENQUEUE, HEADERS, b"a"), Request(second, POP, None, b"")]
    server.send_response(second, b"two")
    server.send_error(first, codec.encode_error(BadRequest("no")))
    response, error = to_client(server, client)
    assert response == Response(second, b"two")
    assert type(error.error) is BadRequest
    assert (client.in_progress, client.waiting, server.in_progress, server.waiting) == (0, 0, 0, 0)


def test_error_of_an_unknown_class_or_garbage_becomes_the_class_of_its_code() -> None:
    described = {"error": "FromTheFuture", "code": "RESOURCE_EXHAUSTED", "text": "slow down"}
    error = Error(1, msgspec.msgpack.encode(described)).error
    assert (type(error), str(error)) == (ResourceExhausted, "slow down")
    for body in (b"", b"\xc1", b"\x90", msgspec.msgpack.encode({"error": ["x"], "facts": 5})):
        assert str(Error(1, body).error)


@pytest.mark.parametrize("send", ["send_response", "send_error", "send_end"])
def test_second_answer_raises_in_the_caller(send: str) -> None:
    client, server = connected()
    number = client.send_request(ENQUEUE, b"")
    to_server(client, server)
    server.send_response(number)
    with pytest.raises(RuntimeError, match="is not open"):
        getattr(server, send)(number, *([b""] if send == "send_error" else []))


@pytest.mark.parametrize("kind", [Kind.RESPONSE, Kind.ERROR, Kind.END, Kind.ITEM])
def test_answer_to_an_unknown_request_is_a_violation(kind: Kind) -> None:
    client, _ = connected()
    with pytest.raises(ProtocolError, match="which is not in progress"):
        client.receive(frame(kind, 5, command=1))


def test_response_after_items_is_a_violation() -> None:
    client, _ = connected()
    number = client.send_request(ENQUEUE, b"")
    client.send_credit(number, 2)
    client.receive(frame(Kind.ITEM, number, command=1))
    with pytest.raises(ProtocolError, match="which received items"):
        client.receive(frame(Kind.RESPONSE, number))


def test_events_before_a_violation_are_kept_in_the_error() -> None:
    client, _ = connected()
    number = client.send_request(ENQUEUE, b"")
    with pytest.raises(ProtocolError) as raised:
        client.receive(frame(Kind.RESPONSE, number, b"result") + frame(77))
    assert raised.value.events == [Response(number, b"result")]
    with pytest.raises(ProtocolError) as again:
        client.receive(b"")
    assert again.value.events == []


def test_nothing_is_accepted_after_a_violation_and_goaway_is_offered_last() -> None:
    _, server = connected()
    server.receive(frame(Kind.REQUEST, 1) + frame(Kind.REQUEST, 2))
    server.send_response(1, b"before")
    server.send_response(2, bytes(1 << 20))
    with pytest.raises(ProtocolError):
        server.receive(frame(Kind.REQUEST, 3) + frame(Kind.REQUEST, 3))
    sent = frames_in(drain(server))
    assert [kind for kind, *_ in sent] == [Kind.RESPONSE, Kind.GOAWAY]
    assert "request 3 is in progress" in msgspec.msgpack.decode(sent[1][4])["text"]
    for use in (
        lambda: server.receive(frame(Kind.PING)),
        lambda: server.send_response(3),
        lambda: server.send_error(3, b""),
        lambda: server.send_goaway("bye"),
        lambda: server.tick(0.0),
    ):
        with pytest.raises(ProtocolError, match="request 3 is in progress"):
            use()
    assert drain(server) == b""
    assert server.incomplete == 0


# -- request numbers ---------------------------------------------------------------------------------------------------


def test_request_numbers_start_again_at_one_and_skip_open_ones() -> None:
    client, _ = connected()
    assert client.send_request(ENQUEUE, b"") == 1
    client._next = REQUEST_MAX - 1
    assert [client.send_request(ENQUEUE, b"") for _ in range(3)] == [REQUEST_MAX, 2, 3]


@pytest.mark.parametrize("number", [0, 4])
def test_number_zero_or_in_progress_is_a_violation(number: int) -> None:
    _, server = connected()
    server.receive(frame(Kind.REQUEST, 4))
    with pytest.raises(ProtocolError, match="number each request differently, from 1"):
        server.receive(frame(Kind.REQUEST, number))


def test_number_can_be_used_again_after_its_answer() -> None:
    _, server = connected()
    for _ in range(3):
        assert len(server.receive(frame(Kind.REQUEST, 4))) == 1
        server.send_response(4)


# -- windows -----------------------------------------------------------------------------------------------------------


def test_call_over_the_window_is_refused_and_is_not_an_event() -> None:
    client, server = connected(Windows(calls=2))
    assert client.has_room(ENQUEUE)
    numbers = [client.send_request(ENQUEUE, b"") for _ in range(3)]
    assert not client.has_room(ENQUEUE)
    assert [event.request for event in to_server(client, server)] == numbers[:2]
    (refused,) = to_client(server, client)
    assert (refused.request, type(refused.error), refused.error.limit) == (numbers[2], ResourceExhausted, 2)
    server.send_response(numbers[0])
    to_client(server, client)
    assert client.has_room(ENQUEUE)


def test_waiting_calls_have_a_separate_window() -> None:
    client, server = connected(Windows(calls=1, waiting=2))
    numbers = [client.send_request(command, b"") for command in (POP, POP, POP, ENQUEUE)]
    assert not client.has_room(POP)
    assert [event.request for event in to_server(client, server)] == [numbers[0], numbers[1], numbers[3]]
    assert (server.waiting, server.in_progress) == (2, 1)
    (refused,) = to_client(server, client)
    assert (refused.request, "waiting calls" in str(refused.error)) == (numbers[2], True)


def test_bytes_of_calls_in_progress_have_a_window() -> None:
    client, server = connected(Windows(calls_bytes=1 << 20))
    numbers = [client.send_request(ENQUEUE, bytes(600 << 10)) for _ in range(2)]
    assert not client.has_room(ENQUEUE, 1)
    (accepted,) = to_server(client, server)
    (refused,) = to_client(server, client)
    assert {accepted.request, refused.request} == set(numbers)
    assert "bytes of calls in progress" in str(refused.error)
    server.send_response(accepted.request)
    to_client(server, client)
    assert client.has_room(ENQUEUE, 1 << 30), "a call that is alone is always accepted"
    client.send_request(ENQUEUE, bytes(10))
    client.send_request(ENQUEUE, bytes((1 << 20) - 10))
    assert len(to_server(client, server)) == 2, "answered calls do not count"


def test_refused_calls_do_not_keep_cancel_and_credit_from_arriving() -> None:
    client, server = connected(Windows(calls=1))
    number = client.send_request(ENQUEUE, b"")
    for _ in range(50):
        client.send_request(ENQUEUE, b"")
    client.send_credit(number, 3)
    client.send_cancel(number)
    assert [type(event) for event in to_server(client, server)] == [Request, Credit, Cancel]


def test_body_over_the_servers_limit_is_rejected_in_the_client() -> None:
    client, _ = connected(Windows(body_bytes=1 << 20))
    with pytest.raises(BadRequest, match="over the server's limit of 1048576"):
        client.send_request(ENQUEUE, bytes((1 << 20) + 1))
    assert client.in_progress == 0


def test_answer_over_the_clients_limit_is_rejected_in_the_server_and_leaves_the_request_open() -> None:
    client, server = connected(client_windows=Windows(body_bytes=1 << 20))
    number = client.send_request(ENQUEUE, b"")
    to_server(client, server)
    with pytest.raises(ResourceExhausted) as raised:
        server.send_response(number, bytes((1 << 20) + 1))
    server.send_error(number, codec.encode_error(raised.value))
    assert type(to_client(server, client)[0].error) is ResourceExhausted


def test_headers_over_their_limit_are_rejected_in_the_client() -> None:
    client, _ = connected()
    with pytest.raises(BadRequest, match="headers of a request have"):
        client.send_request(ENQUEUE, b"", Headers(tracestate="x" * 9000))
    assert client.in_progress == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "cut off"),
        (b"\x05", "cut off"),
        (b"\x05\x00\x80", "longer than their frame"),
        (b"\x01\x20" + bytes(0x2001), "over the limit of 8192"),
        (b"\x01\x00\xc1", "not valid"),
        (b"\x03\x00\x81\xa0", "longer than their frame"),
        (b"\x0a\x00\x81\xa7timeout\xc3", "not valid"),
        (b"\x04\x1f\x81\xa1x" + b"\x91" * 7936 + b"\xc0", "not valid"),
    ],
)
def test_headers_that_are_not_valid_are_a_violation(body: bytes, words: str) -> None:
    _, server = connected()
    with pytest.raises(ProtocolError, match=words):
        server.receive(frame(Kind.REQUEST, 1, body, flags=1))


@pytest.mark.parametrize("kind", [Kind.CANCEL, Kind.CREDIT, Kind.PING, Kind.AUTH, Kind.GOAWAY])
def test_flags_where_none_are_allowed_are_a_violation(kind: Kind) -> None:
    _, server = connected()
    with pytest.raises(ProtocolError, match="cannot have any"):
        server.receive(frame(kind, 1, flags=2))
    _, server = connected()
    with pytest.raises(ProtocolError, match="unknown flags 0x8"):
        server.receive(frame(Kind.REQUEST, 1, flags=8))


def test_headers_of_an_answer_are_a_violation() -> None:
    client, _ = connected()
    number = client.send_request(ENQUEUE, b"")
    with pytest.raises(ProtocolError, match="RESPONSE has headers; only REQUEST can"):
        client.receive(frame(Kind.RESPONSE, number, b"\x01\x00\x80", flags=1))


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.WELCOME, Kind.RESPONSE, Kind.ERROR, Kind.ITEM, Kind.END])
def test_frames_of_a_server_are_violations_when_a_client_sends_them(kind: Kind) -> None:
    _, server = connected()
    with pytest.raises(ProtocolError, match=f"{kind.name} is not expected here"):
        server.receive(frame(kind, 1))


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.REQUEST, Kind.CREDIT, Kind.CANCEL, Kind.AUTH])
def test_frames_of_a_client_are_violations_when_a_server_sends_them(kind: Kind) -> None:
    client, _ = connected()
    with pytest.raises(ProtocolError, match=f"{kind.name} is not expected here"):
        client.receive(frame(kind, 1))


# -- feeds -----------------------------------------------------------------------------------------------------------


def test_feed_sends_items_within_credits_and_ends() -> None:
    client, server = connected()
    number = client.send_request(POP, b"")
    client.send_credit(number, 2)
    client.send_credit(number, 3)
    assert to_server(client, server)[1:] == [Credit(number, 2), Credit(number, 3)]
    assert server.credits(number) == client.credits(number) == 5
    server.send_item(number, b"one")
    server.send_item(number, b"four", credits=4)
    with pytest.raises(RuntimeError, match="fewer than 1 credits"):
        server.send_item(number, b"too many")
    server.send_end(number)
    assert to_client(server, client) == [Item(number, b"one", 1), Item(number, b"four", 4), End(number)]
    assert server.credits(number) == client.credits(number) == client.waiting == 0


@pytest.mark.parametrize(("send", "bodies"), [("send_end", []), ("send_error", [b""])])
def test_number_of_an_ended_feed_can_be_used_again_without_its_credits(send: str, bodies: list[bytes]) -> None:
    client, server = connected()
    number = client.send_request(POP, b"")
    client.send_credit(number, 9)
    to_server(client, server)
    server.send_item(number, b"one")
    getattr(server, send)(number, *bodies)
    to_client(server, client)
    assert server.credits(number) == client.credits(number) == 0
    client._next = 0
    assert client.send_request(ENQUEUE, b"") == number
    to_server(client, server)
    server.send_response(number, b"")
    assert to_client(server, client) == [Response(number, b"")]


def test_feed_can_end_with_an_error_or_without_items() -> None:
    client, server = connected()
    failing, empty = client.send_request(POP, b""), client.send_request(POP, b"")
    client.send_credit(failing, 1)
    to_server(client, server)
    server.send_item(failing, b"one")
    server.send_error(failing, codec.encode_error(BadRequest("over")))
    server.send_end(empty)
    assert [type(event) for event in to_client(server, client)] == [Item, Error, End]


@pytest.mark.parametrize("used", [0, 3])
def test_item_without_enough_credits_is_a_violation(used: int) -> None:
    client, _ = connected()
    number = client.send_request(POP, b"")
    client.send_credit(number, 2)
    with pytest.raises(ProtocolError, match="too few credits"):
        client.receive(frame(Kind.ITEM, number, command=used))


def test_credits_for_a_feed_that_has_ended_are_ignored() -> None:
    client, server = connected()
    number = client.send_request(POP, b"")
    to_server(client, server)
    server.send_end(number)
    client.send_credit(number, 5)  # crosses END
    assert to_server(client, server) == []
    to_client(server, client)
    client.send_credit(number, 5)
    assert drain(client) == b""


@pytest.mark.parametrize("items", [0, -1, CREDITS_MAX + 1])
def test_number_of_credits_is_bounded_on_both_sides(items: int) -> None:
    client, server = connected()
    number = client.send_request(POP, b"")
    to_server(client, server)
    with pytest.raises(RuntimeError):
        client.send_credit(number, items)
    with pytest.raises(ProtocolError, match="CREDIT is not valid"):
        server.receive(frame(Kind.CREDIT, number, msgspec.msgpack.encode({"items": items})))


def test_body_of_credit_that_is_nested_too_deeply_is_a_violation() -> None:
    _, server = connected()
    with pytest.raises(ProtocolError, match="CREDIT is not valid"):
        server.receive(frame(Kind.CREDIT, 1, b"\x81\xa1x" + b"\x91" * 200_000 + b"\xc0"))


def test_credits_that_add_up_to_too_many_are_a_violation() -> None:
    _, server = connected()
    credit = frame(Kind.CREDIT, 1, msgspec.msgpack.encode({"items": CREDITS_MAX}))
    server.receive(frame(Kind.REQUEST, 1) + credit)
    with pytest.raises(ProtocolError, match="more than 2147483648 credits"):
        server.receive(credit)


# -- cancellation ------------------------------------------------------------------------------------------------------


def test_cancelled_request_is_still_answered() -> None:
    client, server = connected()
    number = client.send_request(POP, b"")
    assert client.send_cancel(number) is True
    assert to_server(client, server) == [Request(number, POP, None, b""), Cancel(number)]
    assert client.waiting == 1
    server.send_error(number, codec.encode_failure("CANCELLED", "cancelled"))
    assert to_client(server, client)[0].error.args == ("cancelled",)
    assert client.waiting == 0


def test_cancel_that_crosses_the_answer_is_ignored() -> None:
    client, server = connected()
    number = client.send_request(POP, b"")
    to_server(client, server)
    server.send_response(number, b"leases")
    client.send_cancel(number)
    assert to_server(client, server) == []
    assert to_client(server, client) == [Response(number, b"leases")], "the client must return these leases"
    assert client.send_cancel(number) is False
    assert drain(client) == b""


# -- the connection ----------------------------------------------------------------------------------------------------


def test_auth_renews_the_credential_even_when_the_window_is_full() -> None:
    client, server = connected(Windows(calls=1))
    client.send_request(ENQUEUE, b"")
    number = client.send_auth("new token")
    assert to_server(client, server)[1] == Auth(number, "new token")
    server.send_response(number)
    assert to_client(server, client) == [Response(number, b"")]
    again = client.send_auth("bad token")
    to_server(client, server)
    server.send_error(again, codec.encode_error(BadRequest("no")))
    assert to_client(server, client)[0].request == again


def test_second_auth_before_the_answer_is_a_violation() -> None:
    client, server = connected()
    client.send_auth("a")
    client.send_auth("b")
    with pytest.raises(ProtocolError, match="another AUTH"):
        to_server(client, server)


def test_goaway_lets_calls_in_progress_end_and_refuses_new_ones() -> None:
    client, server = connected()
    number = client.send_request(ENQUEUE, b"")
    to_server(client, server)
    server.send_goaway("the server is stopping")
    server.send_response(number, b"done")
    goaway = GoAway("UNAVAILABLE", "the server is stopping")
    assert to_client(server, client) == [goaway, Response(number, b"done")]
    assert client.goaway == goaway
    for send in (lambda: client.send_request(ENQUEUE, b""), lambda: client.send_auth("k")):
        with pytest.raises(UnavailableError, match="stopping") as raised:
            send()
        assert raised.value.reached is False
    client.send_goaway("leaving")
    assert to_server(client, server) == [GoAway("UNAVAILABLE", "leaving")]


def test_ping_is_answered_with_its_number_and_is_not_an_event() -> None:
    client, server = connected()
    assert server.receive(frame(Kind.PING, 42)) == []
    assert frames_in(drain(server)) == [(Kind.PONG, 0, 0, 42, b"")]
    assert client.receive(frame(Kind.PING, 7) + frame(Kind.PONG, 1)) == []
    assert frames_in(drain(client)) == [(Kind.PONG, 0, 0, 7, b"")]


def test_ping_follows_15_seconds_of_silence_and_death_15_more() -> None:
    client, server = connected()
    now = server.tick(100.0)
    assert now <= 105.0
    assert server.tick(114.9) == 115.0
    assert drain(server) == b""
    server.tick(115.0)
    assert frames_in(drain(server)) == [(Kind.PING, 0, 0, 0, b"")]
    server.tick(129.9)
    assert drain(server) == b""
    with pytest.raises(ProtocolError, match="not answered PING"):
        server.tick(130.0)
    assert client.failure is None


def test_any_received_byte_ends_the_silence() -> None:
    client, server = connected()
    server.tick(100.0)
    server.tick(115.0)
    client.receive(drain(server))
    server.receive(drain(client)[:1])
    assert server.tick(130.0) == 135.0
    server.tick(144.9)
    assert drain(server) == b""
    server.tick(145.0)
    assert drain(server) != b""


def test_late_tick_sends_ping_before_it_closes() -> None:
    _, server = connected()
    server.tick(0.0)
    server.tick(1000.0)
    assert frames_in(drain(server))[0][0] == Kind.PING
    server.receive(frame(Kind.PONG))
    server.tick(2000.0)
    assert server.failure is None
