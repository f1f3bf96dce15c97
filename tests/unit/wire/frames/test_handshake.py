"""HELLO and WELCOME: what is agreed, which peers are refused, and what can be sent before."""

from __future__ import annotations

import doctest
from typing import Any

import msgspec
import pytest

from heapline.contract.errors import BadRequest, Unauthenticated
from heapline.wire import codec, frames
from heapline.wire.frames import ClientFrames, Error, GoAway, Hello, ProtocolError, ServerFrames, Welcome, Windows
from heapline.wire.frames.format import Kind
from tests.unit.wire.frames.connection import ZLIB, connected, drain, frame, frames_in


def hello(**fields: Any) -> bytes:
    return frame(Kind.HELLO, body=msgspec.msgpack.encode({"magic": "heapline", "versions": [1, 1], **fields}))


def refusal_of(data: bytes) -> str:
    """Return the text of the GOAWAY with which a new server answers."""
    server = ServerFrames()
    with pytest.raises(ProtocolError) as raised:
        server.receive(data)
    (kind, _, _, _, body) = frames_in(drain(server))[-1]
    text: str = msgspec.msgpack.decode(body)["text"]
    assert (kind, text) == (Kind.GOAWAY, str(raised.value))
    return text


def test_example_of_the_package_runs() -> None:
    assert doctest.testmod(frames).failed == 0
    assert doctest.testmod(frames).attempted > 5


def test_hello_and_welcome_carry_what_each_side_announces() -> None:
    client = ClientFrames("secret", client="heapline-python/9", windows=Windows(bodies=3), compressions=ZLIB)
    server = ServerFrames(Windows(calls=7), waiting_commands=frozenset({5, 4}), server="heapline/9", compressions=ZLIB)
    (greeting,) = server.receive(drain(client))
    assert isinstance(greeting, Hello)
    assert (greeting.credential, greeting.client, greeting.versions) == ("secret", "heapline-python/9", (1, 1))
    assert (greeting.features, greeting.windows.bodies) == (["zlib"], 3)
    server.send_welcome()
    (welcome,) = client.receive(drain(server))
    assert welcome == client.welcome == Welcome(1, ["zlib"], Windows(calls=7), [4, 5], "heapline/9")


def test_credential_is_not_in_the_text_of_an_event() -> None:
    client, server = ClientFrames("secret-1", compressions={}), ServerFrames(compressions={})
    (greeting,) = server.receive(drain(client))
    server.send_welcome()
    client.receive(drain(server))
    client.send_auth("secret-2")
    (renewal,) = server.receive(drain(client))
    assert (greeting.credential, renewal.credential) == ("secret-1", "secret-2")
    assert "secret" not in f"{greeting} {greeting!r} {renewal} {renewal!r} {vars(server)}"


def test_feature_of_one_side_only_is_not_used() -> None:
    client, server = ClientFrames(compressions=ZLIB), ServerFrames(compressions={})
    server.receive(drain(client))
    server.send_welcome()
    assert client.receive(drain(server))[0].features == []


def test_unknown_fields_and_features_of_a_newer_client_are_ignored() -> None:
    server = ServerFrames(compressions={})
    data = hello(versions=[1, 9], features=["teleport"], windows={"bodies": 2, "sparks": 3}, region="north")
    (greeting,) = server.receive(data)
    assert greeting.windows == Windows(bodies=2)
    server.send_welcome()
    assert msgspec.msgpack.decode(frames_in(drain(server))[0][4])["version"] == 1


@pytest.mark.parametrize("versions", [[2, 3], [0, 0], [5, 1]])
def test_client_without_a_common_version_is_refused_by_name(versions: list[int]) -> None:
    text = refusal_of(hello(versions=versions))
    assert f"versions {versions[0]} to {versions[1]}" in text


def test_refused_client_receives_the_error_and_the_server_accepts_nothing_more() -> None:
    client, server = ClientFrames("wrong", compressions={}), ServerFrames()
    server.receive(drain(client))
    server.send_error(0, codec.encode_error(Unauthenticated("unknown key")))
    (refused,) = client.receive(drain(server))
    assert isinstance(refused, Error)
    assert type(refused.error) is Unauthenticated
    assert str(refused.error) == "unknown key"
    with pytest.raises(ProtocolError):
        server.receive(hello())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: queue\r\n\r\n", "speaks HTTP or gRPC"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "speaks HTTP or gRPC"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00", "speaks TLS"),
        (b"\xff" * 12, "over the limit"),
        (frame(Kind.REQUEST, 1), "REQUEST is not expected here"),
        (frame(99), "kind 99 is not expected here"),
        (frame(Kind.HELLO, body=b"\xc1"), "the body of HELLO is not valid"),
        (frame(Kind.HELLO, body=b"\x80"), "lacks the magic word"),
        (hello(magic="heaplime"), "lacks the magic word"),
        (frame(Kind.HELLO, body=b"\x81\xa1x" + b"\x91" * 4000 + b"\xc0"), "the body of HELLO is not valid"),
        (hello(windows={"body_bytes": 5}), "the body of HELLO is not valid"),
        (hello(windows={"body_bytes": 2 << 20, "bodies_bytes": 1 << 20}), "larger bodies than incomplete bodies"),
        (hello(credential="x" * 5000), "over the limit"),
        (hello() + hello(), "HELLO is not expected here"),
        (hello() + frame(Kind.REQUEST, 1), "REQUEST is not expected here"),
        (hello() + frame(Kind.PING) * 400, "too many PINGs before WELCOME"),
        (frame(Kind.REQUEST, 1, flags=2), "more than 0 incomplete bodies"),
    ],
)
def test_anything_but_one_hello_is_refused_with_the_reason(data: bytes, words: str) -> None:
    assert words in refusal_of(data)


def test_server_holds_at_most_4_kib_before_hello() -> None:
    server = ServerFrames()
    start = frame(Kind.HELLO, body=bytes(4084))[:-1]
    for byte in start:
        server.receive(bytes([byte]))
    assert server.incomplete == len(start) < 4096
    with pytest.raises(ProtocolError, match="over the limit of 4084"):
        ServerFrames().receive(frame(Kind.HELLO, body=bytes(4085))[:12])


def test_credential_that_does_not_fit_is_rejected_in_the_client() -> None:
    with pytest.raises(BadRequest, match="HELLO has"):
        ClientFrames("x" * 5000)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "speaks HTTP or gRPC"),
        (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00", "speaks HTTP or gRPC"),
        (b"\x15\x03\x03\x00\x02\x02\x46\x00\x00\x00\x00\x00", "speaks TLS"),
        (b"\x15\x03\x03\x00\x02\x02\x46", "speaks TLS"),  # all that a peer with TLS answers
        (b"SSH-2.0-x", "a frame of [0-9]+ bytes is over the limit"),
        (frame(Kind.RESPONSE, 1), "RESPONSE is not expected here"),
        (frame(Kind.WELCOME, body=b"\x81\xa7version\x05"), "version 5 of the protocol, which was not offered"),
        (frame(Kind.WELCOME, body=b"\x82\xa7version\x01\xa8features\x91\xa1x"), "features that were not offered"),
    ],
)
def test_client_refuses_a_peer_that_is_not_a_server(data: bytes, words: str) -> None:
    client = ClientFrames(compressions={})
    with pytest.raises(ProtocolError, match=words):
        client.receive(data)


def test_client_receives_the_reason_why_the_handshake_failed() -> None:
    client, server = ClientFrames(compressions={}), ServerFrames()
    drain(client)
    with pytest.raises(ProtocolError):
        server.receive(hello(versions=[7, 7]))
    (goaway,) = client.receive(drain(server))
    assert isinstance(goaway, GoAway)
    assert goaway.code == "INVALID_ARGUMENT"
    assert "versions 7 to 7" in goaway.text


def test_request_before_welcome_raises_in_the_caller() -> None:
    with pytest.raises(RuntimeError, match="WELCOME has not arrived"):
        ClientFrames().send_request(1, b"")
    with pytest.raises(RuntimeError, match="HELLO has not arrived"):
        ServerFrames().send_welcome()


def test_second_welcome_is_a_violation() -> None:
    client, server = connected()
    with pytest.raises(RuntimeError):
        server.send_welcome()
    with pytest.raises(ProtocolError, match="WELCOME is not expected here"):
        client.receive(frame(Kind.WELCOME, body=b"\x81\xa7version\x01"))
