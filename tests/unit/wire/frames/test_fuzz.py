"""Random and mutated bytes in every state: only ProtocolError, bounded memory, and nothing after the error."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heapline.wire.frames import ClientFrames, Headers, ProtocolError, ServerFrames, Windows
from heapline.wire.frames.format import LENGTH_MAX, Kind
from tests.unit.wire.frames.connection import ENQUEUE, POP, ZLIB, connected, drain, frame, frames_in

Side = ClientFrames | ServerFrames
WINDOWS = Windows(calls=4, waiting=4, body_bytes=1 << 20, bodies=3, bodies_bytes=2 << 20)
RESPONSE_BYTES = 1 << 20  # the least that a client must accept
INCOMPLETE_MAX = WINDOWS.bodies_bytes + LENGTH_MAX + 12


def server_before_hello() -> Side:
    return ServerFrames(WINDOWS, compressions=ZLIB)


def server_before_welcome() -> Side:
    server = ServerFrames(WINDOWS, compressions=ZLIB)
    server.receive(drain(ClientFrames("key", compressions=ZLIB)))
    return server


def open_server() -> Side:
    client, server = connected(WINDOWS, compressions=ZLIB)
    client.send_request(ENQUEUE, b"one")
    client.send_credit(client.send_request(POP, b"two"), 9)
    client.send_request(ENQUEUE, bytes(600_000))
    data = drain(client)
    server.receive(data[: len(data) - 100_000])  # request 3 is incomplete
    return server


def client_before_welcome() -> Side:
    client = ClientFrames("key", windows=WINDOWS, compressions=ZLIB)
    drain(client)
    return client


def open_client() -> Side:
    client, server = connected(client_windows=WINDOWS, compressions=ZLIB)
    for number in range(1, 5):
        client.send_request(POP, b"")
        client.send_credit(number, 3)
    server.receive(drain(client))
    server.send_item(2, bytes(600_000))
    data = drain(server)
    client.receive(data[: len(data) - 100_000])
    return client


STATES: list[Callable[[], Side]] = [
    server_before_hello,
    server_before_welcome,
    open_server,
    client_before_welcome,
    open_client,
]


def attack(side: Side, chunks: list[bytes]) -> bool:
    """Feed bytes to a side. Return whether it raised ProtocolError, after which it must be silent and empty."""
    received = 0
    was_buffered = side.buffered
    for position, chunk in enumerate(chunks):
        received += len(chunk)
        try:
            side.receive(chunk)
        except ProtocolError as error:
            check_end(side, str(error), chunks[position:])
            return True
        assert side.incomplete <= INCOMPLETE_MAX
        # The shortest frame that is answered has 12 bytes, and the longest automatic answer 250.
        assert side.buffered - was_buffered <= (received // 12 + 1) * 262
    return False


def check_end(side: Side, text: str, later: list[bytes]) -> None:
    kind, _, _, _, body = frames_in(drain(side))[-1]
    assert kind == Kind.GOAWAY
    assert text
    assert msgspec.msgpack.decode(body)["text"] == text[:1000]
    for chunk in (b"", *later):
        with pytest.raises(ProtocolError):
            side.receive(chunk)
    assert drain(side) == b""
    assert side.incomplete == 0


BODIES = st.one_of(
    st.binary(max_size=64),
    st.sampled_from([b"", b"\x80", b"\xc1", b"\x81\xa5items\x05", b"\x81\xaacredential\xa1x", b"\x05\x00\x80"]),
    st.dictionaries(
        st.sampled_from(["magic", "versions", "version", "windows", "items", "text"]),
        st.integers(-(1 << 63), (1 << 64) - 1),
    ).map(msgspec.msgpack.encode),
)
FRAMES = st.builds(
    frame,
    st.integers(0, 15),
    st.integers(0, 6),
    BODIES,
    flags=st.sampled_from([0, 0, 0, 1, 2, 2, 4, 6, 7, 255]),
    command=st.sampled_from([0, 1, ENQUEUE, POP, 0xFFFF]),
)


@pytest.mark.parametrize("make", STATES)
@given(chunks=st.lists(st.binary(max_size=200), max_size=5))
@example(chunks=[b"\xff" * 12])
@example(chunks=[bytes(12)])
@settings(max_examples=200, deadline=None)
def test_random_bytes_only_raise_protocol_error(make: Callable[[], Side], chunks: list[bytes]) -> None:
    attack(make(), chunks)


@pytest.mark.parametrize("make", STATES)
@given(frames=st.lists(FRAMES, max_size=20))
@settings(max_examples=300, deadline=None)
def test_random_frames_only_raise_protocol_error(make: Callable[[], Side], frames: list[bytes]) -> None:
    attack(make(), frames)


NUMBERS = st.one_of(st.sampled_from([-1, 0, 1, 16, 1 << 20, 1 << 31, 1 << 40, (1 << 64) - 1]), st.integers(0, 1 << 21))
ODD = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=3)
)
HELLOS = st.fixed_dictionaries(
    {
        "magic": st.just("heapline"),
        "versions": st.one_of(st.just((1, 1)), st.tuples(st.integers(0, 2), st.integers(0, 3)), ODD),
    },
    optional={
        "features": st.one_of(ODD, st.lists(st.sampled_from(["zlib", "zstd", "", "zlib" * 99]), max_size=30)),
        "windows": st.one_of(ODD, st.dictionaries(st.sampled_from(Windows.__struct_fields__), NUMBERS)),
        "credential": st.one_of(ODD, st.text(max_size=900)),
        "client": st.one_of(ODD, st.text(max_size=900)),
        "later": ODD,
    },
).map(msgspec.msgpack.encode)


@given(hello=HELLOS, twice=st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_hello_is_refused_or_leaves_a_server_that_answers(hello: bytes, twice: bool) -> None:
    server = server_before_hello()
    assert isinstance(server, ServerFrames)
    pings = frame(Kind.PING, 1) * 3
    if attack(server, [frame(Kind.HELLO, 0, hello) * (1 + twice) + pings]):
        return
    server.send_welcome()
    answers = [RESPONSE_BYTES, 3 * LENGTH_MAX, 10]
    server.receive(b"".join(frame(Kind.REQUEST, number, command=ENQUEUE) for number in (1, 2, 3)))
    for number, size in enumerate(answers, 1):
        server.send_response(number, bytes(size), compress=True)
    kinds = [kind for kind, *_ in frames_in(drain(server))]
    assert kinds.count(Kind.PONG) == 3
    assert kinds.count(Kind.WELCOME) == 1
    assert kinds.count(Kind.RESPONSE) >= 3
    assert server.buffered == 0, "no window that a client may announce keeps answers from being sent"


def conversation_of_a_client() -> bytes:
    client, _ = connected(WINDOWS, compressions=ZLIB)
    for number in range(1, 7):
        client.send_request(POP, bytes(number * 50), Headers(1.5, "00-trace"), compress=True)
        client.send_credit(number, 3)
    client.send_request(ENQUEUE, bytes(300_000))
    client.send_cancel(2)
    client.send_auth("token")
    client.send_goaway("bye")
    return drain(client)


def conversation_of_a_server() -> bytes:
    _, server = connected(compressions=ZLIB)
    server.receive(b"".join(frame(Kind.REQUEST, number) for number in range(1, 7)))
    server.receive(frame(Kind.CREDIT, 2, b"\x81\xa5items\x05"))
    server.send_item(2, bytes(300), credits=2)
    server.send_item(2, bytes(300_000))
    server.send_end(2)
    server.send_response(1, bytes(10_000), compress=True)
    server.send_error(3, b"\x80")
    server.send_goaway("bye")
    return drain(server)


def mutate(random: Random, data: bytes) -> bytes:
    """Change, delete, repeat or swap a few parts, mostly in headers of frames."""
    changed = bytearray(data)
    starts, at = [], 0
    for *_, body in frames_in(data):
        starts.append(at)
        at += 12 + len(body)
    for _ in range(random.randint(1, 4)):
        start = random.choice(starts) + random.randrange(16)
        match random.randrange(4):
            case 0:
                changed[start % len(changed)] = random.randrange(256)
            case 1:
                del changed[start : start + random.choice([1, 4, 12, 100])]
            case 2:
                changed[start:start] = random.randbytes(random.choice([1, 4, 12, 100]))
            case _:
                begin = random.choice(starts)
                changed += changed[begin : begin + random.choice([12, 50, 400])]
    return bytes(changed)


@pytest.mark.parametrize(
    ("make", "conversation"),
    [
        (open_server, conversation_of_a_client),
        (lambda: connected(WINDOWS, compressions=ZLIB)[1], conversation_of_a_client),
        (open_client, conversation_of_a_server),
        (server_before_hello, lambda: drain(ClientFrames("key", compressions=ZLIB)) + conversation_of_a_client()),
        (server_before_hello, lambda: drain(ClientFrames("key", compressions=ZLIB))),
    ],
)
def test_mutated_conversations_only_raise_protocol_error(
    make: Callable[[], Side], conversation: Callable[[], bytes]
) -> None:
    data, outcomes = conversation(), set()
    for seed in range(400):
        random = Random(seed)
        mutated = mutate(random, data)
        size = random.choice([1 << 20, 65_536, 5000])
        outcomes.add(attack(make(), [mutated[i : i + size] for i in range(0, len(mutated), size)]))
    assert True in outcomes, "no mutation was a violation"


def test_incomplete_bodies_of_an_attacker_stay_within_the_window() -> None:
    server: Any = connected(WINDOWS)[1]
    numbers = cycle((1, 2, 3))
    while server.incomplete + 100_000 <= WINDOWS.bodies_bytes:
        server.receive(frame(Kind.REQUEST, next(numbers), bytes(100_000), flags=2))
    with pytest.raises(ProtocolError, match="incomplete bodies are over the limit"):
        server.receive(frame(Kind.REQUEST, next(numbers), bytes(100_000), flags=2))
    assert server.incomplete == 0


def test_empty_pieces_cost_no_memory() -> None:
    server: Any = connected(WINDOWS)[1]
    for _ in range(1000):
        server.receive(frame(Kind.REQUEST, 1, flags=2) * 100)
    assert server.incomplete == server.buffered == 0
