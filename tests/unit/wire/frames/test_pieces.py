"""Bodies over 256 KiB travel in pieces between other frames; compressed bodies are bounded."""

from __future__ import annotations

import contextlib
import zlib
from random import Random
from typing import Any

import pytest

from heapline.wire.frames import ClientFrames, Headers, Item, ProtocolError, Request, Response, Windows
from heapline.wire.frames.compression import installed
from heapline.wire.frames.format import LENGTH_MAX, Kind
from tests.unit.wire.frames.connection import ENQUEUE, POP, ZLIB, Zlib, connected, drain, frame, frames_in

MIB = 1 << 20


def pattern(size: int, seed: int = 1) -> bytes:
    return bytes(range(seed, 251)) * (size // (251 - seed) + 1)


def body_of(size: int, seed: int = 1) -> bytes:
    return pattern(size, seed)[:size]


@pytest.mark.parametrize("size", [LENGTH_MAX - 1, LENGTH_MAX, LENGTH_MAX + 1, 3 * LENGTH_MAX, MIB + 17])
@pytest.mark.parametrize("headers", [None, Headers(1.0, "00-trace")])
def test_large_body_is_cut_and_joined(size: int, headers: Headers | None) -> None:
    client, server = connected()
    body = body_of(size)
    number = client.send_request(ENQUEUE, body, headers)
    data = drain(client)
    frames = frames_in(data)
    assert all(len(piece) <= LENGTH_MAX for *_, piece in frames)
    assert [bool(flags & 2) for _, flags, *_ in frames] == [True] * (len(frames) - 1) + [False]
    (event,) = server.receive(data)
    assert event == Request(number, ENQUEUE, headers, event.body)
    assert bytes(event.body) == body
    assert client.buffered == server.incomplete == 0
    server.send_response(number, body)
    (answer,) = client.receive(drain(server))
    assert bytes(answer.body) == body


def test_large_bodies_take_turns_and_small_frames_go_first() -> None:
    client, server = connected()
    large = [client.send_request(ENQUEUE, body_of(MIB, seed)) for seed in (1, 2, 3)]
    order, events = [], []
    small = 0
    while buffers := client.take(1):
        data = b"".join(buffers)
        order += [number for *_, number, _ in frames_in(data)]
        events += server.receive(data)
        if len(order) == 4:
            small = client.send_request(ENQUEUE, b"small")
    assert order[:3] == large
    assert order[3] == large[0]
    assert order[4] == small, "it waits for at most one piece"
    assert [event.request for event in events] == [small, *large]
    assert [bytes(event.body) for event in events[1:]] == [body_of(MIB, seed) for seed in (1, 2, 3)]


def test_take_is_bounded_and_never_cuts_a_small_frame() -> None:
    client, server = connected()
    client.send_request(ENQUEUE, bytes(MIB))
    numbers = [client.send_request(ENQUEUE, bytes(5000)) for _ in range(100)]
    requests = []
    while buffers := client.take(20_000):
        data = b"".join(buffers)
        assert len(data) <= 20_000 + 5012 + LENGTH_MAX + 12
        frames_in(data)
        requests += [event.request for event in server.receive(data)]
    assert sorted(requests) == [1, *numbers]
    assert client.buffered == 0


def test_many_small_frames_become_one_buffer() -> None:
    client, _ = connected()
    for _ in range(1000):
        client.send_request(ENQUEUE, b"0123456789")
    assert client.buffered == 22_000
    assert [len(buffer) for buffer in client.take()] == [22_000]
    assert client.take() == []


def test_pieces_are_views_of_the_body_that_was_sent() -> None:
    client, _ = connected()
    body = bytes(MIB)
    client.send_request(ENQUEUE, body)
    views = [buffer for buffer in client.take(2 * MIB) if isinstance(buffer, memoryview)]
    assert views
    assert all(view.obj is body for view in views)


def test_items_of_a_feed_keep_their_order_behind_a_large_one() -> None:
    client, server = connected()
    number = client.send_request(POP, b"")
    client.send_credit(number, 9)
    server.receive(drain(client))
    bodies = [b"first", body_of(MIB), b"second", body_of(MIB, 2), b"third"]
    for body in bodies:
        server.send_item(number, body)
    server.send_end(number)
    events = client.receive(drain(server, 1000))
    assert [bytes(event.body) for event in events[:-1] if isinstance(event, Item)] == bodies
    assert len(events) == 6
    assert server.buffered == 0


def test_credit_waits_for_its_large_request() -> None:
    client, server = connected()
    number = client.send_request(POP, bytes(MIB))
    client.send_credit(number, 3)
    server.receive(drain(client))
    assert server.credits(number) == 3


def test_sender_respects_the_peer_s_number_of_incomplete_bodies() -> None:
    client, server = connected(Windows(bodies=2))
    for _ in range(5):
        client.send_request(ENQUEUE, bytes(MIB))
    open_bodies: set[int] = set()
    while buffers := client.take(1):
        for _, flags, _, number, _ in frames_in(b"".join(buffers)):
            (open_bodies.add if flags & 2 else open_bodies.discard)(number)
            assert len(open_bodies) <= 2
        server.receive(b"".join(buffers))
    assert server.in_progress == 5


def test_sender_respects_the_peer_s_bytes_of_incomplete_bodies() -> None:
    client, server = connected(Windows(body_bytes=MIB, bodies_bytes=2 * MIB))
    for _ in range(5):
        client.send_request(ENQUEUE, bytes(MIB))
    highest = 0
    while buffers := client.take(1):
        server.receive(b"".join(buffers))
        highest = max(highest, server.incomplete)
    assert server.in_progress == 5
    assert MIB < highest <= 2 * MIB


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([(1, MIB // 4)] * 5, "the body of request 1 is over the limit of 1048576"),
        ([(n, MIB // 4) for n in (1, 2, 3) for _ in range(3)], "incomplete bodies are over the limit of 2097152"),
        ([(n, 1) for n in range(1, 7)], "more than 5 incomplete bodies"),
    ],
)
def test_pieces_over_a_window_are_a_violation(frames: list[tuple[int, int]], words: str) -> None:
    _, server = connected(Windows(body_bytes=MIB, bodies_bytes=2 * MIB, bodies=5))
    *accepted, last = (frame(Kind.REQUEST, number, bytes(size), flags=2) for number, size in frames)
    for piece in accepted:
        server.receive(piece)
    with pytest.raises(ProtocolError, match=words):
        server.receive(last)
    assert server.incomplete == 0


@pytest.mark.parametrize(
    "following",
    [
        frame(Kind.REQUEST, 1, b"x", flags=1),
        frame(Kind.REQUEST, 1, b"x", flags=4),
        frame(Kind.REQUEST, 1, b"x", command=9),
        frame(Kind.CREDIT, 1, b"\x81\xa5items\x01"),
        frame(Kind.AUTH, 1, b"\x81\xaacredential\xa1x"),
    ],
)
def test_other_frame_amid_the_pieces_of_its_request_is_a_violation(following: bytes) -> None:
    _, server = connected()
    server.receive(frame(Kind.REQUEST, 1, b"x", flags=2))
    with pytest.raises(ProtocolError, match="amid the pieces of a REQUEST"):
        server.receive(following)


def test_frame_over_256_kib_is_a_violation_before_its_body_arrives() -> None:
    _, server = connected()
    with pytest.raises(ProtocolError, match="a frame of 262145 bytes is over the limit of 262144"):
        server.receive(frame(Kind.REQUEST, 1, bytes(LENGTH_MAX + 1))[:12])


def test_tiny_piece_does_not_keep_the_chunk_in_which_it_arrived() -> None:
    _, server = connected()
    chunk = frame(Kind.REQUEST, 1, b"x", flags=2) + frame(Kind.PING) * 10_000
    server.receive(chunk)
    assert server.incomplete == 1


@pytest.mark.parametrize(("command", "kind"), [(ENQUEUE, memoryview), (POP, bytes)])
def test_large_body_is_a_view_unless_its_call_may_wait(command: int, kind: type) -> None:
    _, server = connected()
    body = body_of(20_000)
    (event,) = server.receive(frame(Kind.REQUEST, 1, body, command=command))
    assert type(event.body) is kind
    assert event.body == body


# -- cancellation ------------------------------------------------------------------------------------------------------


def test_cancel_amid_the_pieces_stops_them_and_is_answered() -> None:
    client, server = connected()
    number = client.send_request(ENQUEUE, bytes(10 * MIB))
    server.receive(b"".join(client.take(1)))
    assert server.incomplete > 0
    assert client.send_cancel(number) is True
    data = drain(client)
    assert len(data) == 12
    assert server.receive(data) == []
    assert server.incomplete == client.buffered == 0
    (answer,) = client.receive(drain(server))
    assert answer.request == number
    assert "cancelled" in str(answer.error)


def test_no_body_begins_before_the_cancel_of_an_abandoned_one() -> None:
    """The peer counts the abandoned body until then, however many small frames wait."""
    client, server = connected(Windows(bodies=2, body_bytes=MIB, bodies_bytes=2 * MIB))
    large = [client.send_request(ENQUEUE, bytes(MIB)) for _ in range(2)]
    for _ in range(5):
        server.receive(b"".join(client.take(1)))
    for _ in range(3):
        client.send_request(ENQUEUE, b"small")
    for number in large:
        assert client.send_cancel(number) is True
    others = [client.send_request(ENQUEUE, bytes(MIB)) for _ in range(2)]
    events = []
    while buffers := client.take(1):
        events += server.receive(b"".join(buffers))
    assert {event.request for event in events} >= set(others)
    assert (server.in_progress, server.incomplete) == (5, 0)


@pytest.mark.parametrize("number", [0, 1])
def test_abandoned_body_cannot_have_the_number_of_a_request_in_progress(number: int) -> None:
    _, server = connected()
    server.receive(frame(Kind.REQUEST, 1, b"x"))
    with pytest.raises(ProtocolError, match=f"request {number} is in progress"):
        server.receive(frame(Kind.REQUEST, number, b"x", flags=2) + frame(Kind.CANCEL, number))
    assert not any(kind == Kind.ERROR for kind, *_ in frames_in(drain(server)))


def test_cancel_before_the_first_piece_sends_nothing_and_no_answer_follows() -> None:
    client, _ = connected(Windows(bodies=1))
    client.send_request(ENQUEUE, bytes(MIB))
    number = client.send_request(ENQUEUE, bytes(MIB))
    client.take(1)
    assert client.send_cancel(number) is False
    assert client.in_progress == 1
    assert {request for *_, request, _ in frames_in(drain(client))} == {1}


def test_kind_256_that_marks_abandoned_requests_cannot_be_sent() -> None:
    _, server = connected()
    with pytest.raises(ProtocolError, match="kind 0 is not expected"):
        server.receive(frame(0, 1))


# -- compression -------------------------------------------------------------------------------------------------------


def test_agreed_compression_is_used_for_bodies_above_4_kib_that_become_smaller() -> None:
    client, server = connected(compressions=ZLIB)
    sizes = {client.send_request(ENQUEUE, bytes(size), compress=True): size for size in (4096, 4097, 2 * MIB)}
    sizes[client.send_request(ENQUEUE, bytes(5000))] = 5000
    data = drain(client)
    assert [flags for _, flags, *_ in frames_in(data)] == [0, 4, 4, 0]
    events = server.receive(data)
    assert {event.request: len(event.body) for event in events} == sizes
    server.send_response(2, zlib.compress(pattern(10_000)) * 200, compress=True)
    (answer,) = client.receive(drain(server))
    assert isinstance(answer, Response)


def test_items_can_be_compressed() -> None:
    client, server = connected(compressions=ZLIB)
    number = client.send_request(POP, b"")
    client.send_credit(number, 1)
    server.receive(drain(client))
    server.send_item(number, bytes(100_000), compress=True)
    data = drain(server)
    assert len(data) < 1000
    assert client.receive(data) == [Item(number, bytes(100_000), 1)]


def test_compressed_body_can_travel_in_pieces_with_headers() -> None:
    client, server = connected(compressions=ZLIB)
    body = Random(1).randbytes(600_000) + bytes(100_000)
    client.send_request(ENQUEUE, body, Headers(correlation_id="x"), compress=True)
    frames = frames_in(drain(client))
    assert [flags for _, flags, *_ in frames][:2] == [7, 2]
    (event,) = [e for k, f, c, r, b in frames for e in server.receive(frame(k, r, b, flags=f, command=c))]
    assert bytes(event.body) == body
    assert event.headers == Headers(correlation_id="x")


def test_without_agreement_nothing_is_compressed_and_a_compressed_body_is_a_violation() -> None:
    client, server = connected()
    client.send_request(ENQUEUE, bytes(100_000), compress=True)
    assert len(drain(client)) == 100_012
    with pytest.raises(ProtocolError, match="the handshake did not agree"):
        server.receive(frame(Kind.REQUEST, 9, zlib.compress(b"x"), flags=4))


def test_bomb_and_garbage_are_violations() -> None:
    windows = Windows(body_bytes=MIB)
    for body in (zlib.compress(bytes(MIB + 1)), b"garbage", zlib.compress(b"x")[:-1], zlib.compress(b"x") + b"y"):
        _, server = connected(windows, compressions=ZLIB)
        with pytest.raises(ProtocolError, match="cannot decompress a body"):
            server.receive(frame(Kind.REQUEST, 1, body, flags=4))
    _, server = connected(windows, compressions=ZLIB)
    assert len(server.receive(frame(Kind.REQUEST, 1, zlib.compress(bytes(MIB)), flags=4))[0].body) == MIB


class CountingZlib(Zlib):
    """Counts decompressed bodies, which all have a MiB."""

    def __init__(self) -> None:
        self.bodies = 0

    def unpacked_size(self, data: Any) -> int:
        return MIB

    def decompress(self, data: Any, size_max: int) -> bytes:
        self.bodies += 1
        return super().decompress(data, size_max)


def test_requests_over_a_window_are_refused_packed() -> None:
    packer, packed = CountingZlib(), zlib.compress(bytes(MIB))
    half = len(packed) // 2
    _, server = connected(Windows(calls=9, calls_bytes=3 * MIB), compressions={"zlib": packer})
    for number in range(1, 50):
        if number % 2:
            chunk = frame(Kind.REQUEST, number, packed, flags=4)
        else:
            chunk = frame(Kind.REQUEST, number, packed[:half], flags=6) + frame(Kind.REQUEST, number, packed[half:])
        assert len(server.receive(chunk)) == (number <= 3)
    assert packer.bodies == server.in_progress == 3
    refused = [body for kind, *_, body in frames_in(drain(server)) if kind == Kind.ERROR]
    assert len(refused) == 46
    assert all(b"bytes of calls in progress" in body for body in refused)


@pytest.mark.parametrize("number", [0, 1])
def test_packed_request_cannot_have_the_number_of_a_request_in_progress(number: int) -> None:
    """Even if a window is full: the refusal would be a second answer to the request in progress."""
    _, server = connected(Windows(calls=1), compressions=ZLIB)
    server.receive(frame(Kind.REQUEST, 1, b"x"))
    with pytest.raises(ProtocolError, match=f"request {number} is in progress"):
        server.receive(frame(Kind.REQUEST, number, zlib.compress(b"x"), flags=4))
    assert not any(kind == Kind.ERROR for kind, *_ in frames_in(drain(server)))


def test_answers_to_no_request_are_not_decompressed_after_the_first() -> None:
    packer, packed = CountingZlib(), zlib.compress(bytes(MIB))
    client, _ = connected(compressions={"zlib": packer})
    with pytest.raises(ProtocolError, match="request 7, which is not in progress"):
        client.receive(frame(Kind.RESPONSE, 7, packed, flags=4) * 100)
    assert packer.bodies == 1


def test_zstd_names_the_size_of_a_body_before_it_is_decompressed() -> None:
    if not (available := installed()):
        pytest.skip("this Python has no zstd")
    zstd = available["zstd"]
    packed = zstd.compress(bytes(5000))
    assert zstd.unpacked_size(packed) == 5000
    assert zstd.unpacked_size(b"garbage") is zstd.unpacked_size(b"") is None


def test_body_too_large_to_compress_on_the_loop_is_sent_plainly() -> None:
    client, _ = connected(compressions=ZLIB)
    client.send_request(ENQUEUE, bytes((4 << 20) + 1), compress=True)
    assert all(not flags & 4 for _, flags, *_ in frames_in(drain(client)))


def test_zstd_is_announced_only_if_its_module_can_be_imported() -> None:
    assert installed(("heapline_has_no_such_module",)) == {}
    assert list(installed(("heapline_has_no_such_module", "zlib"))) == ["zstd"]
    assert ClientFrames()._compressions.keys() == installed().keys()


@pytest.mark.skipif(not installed(), reason="no module for zstd is installed")
def test_damaged_zstd_is_refused_and_never_exceeds_its_limit() -> None:
    (zstd,) = installed().values()
    random, limit = Random(7), 100_000
    good = [zstd.compress(b"abcdefg" * (size // 7) + bytes(size % 7)) for size in (0, 5, 5000, limit)]
    assert [len(zstd.decompress(data, limit)) for data in good] == [0, 5, 5000, limit]
    for bad in (b"", b"garbage", good[2][:-1], good[2] + b"x", good[2] * 2):
        with pytest.raises(ValueError, match="zstd frame"):
            zstd.decompress(bad, limit)
    with pytest.raises(ValueError, match="100001 bytes when decompressed; the limit is 100000"):
        zstd.decompress(zstd.compress(bytes(limit + 1)), limit)
    for _ in range(3000):
        data = bytearray(random.choice(good))
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        with contextlib.suppress(ValueError):
            assert len(zstd.decompress(bytes(data[: random.randint(0, len(data))]), limit)) <= limit
    with pytest.raises(ValueError, match="not a zstd frame"):
        zstd.decompress(b"\x28\xb5\x2f\xfd\x00" + bytes([(30 - 10) << 3]) + b"\x01\x00\x00", limit)  # window of 1 GiB
