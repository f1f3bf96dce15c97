"""A conversation cut anywhere gives the same events, and every request gets exactly one answer.

Frames are limited to 64 bytes here, so that short conversations have bodies in pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from heapline.wire import codec
from heapline.wire.frames import (
    Cancel,
    ClientFrames,
    Credit,
    End,
    Error,
    Headers,
    Item,
    ProtocolError,
    Request,
    Response,
    ServerFrames,
    Windows,
    buffers,
)
from heapline.wire.frames.format import Kind
from tests.unit.wire.frames.connection import ENQUEUE, POP, ZLIB, connected, drain, frame

LENGTH_MAX = 64
HEADERS = st.none() | st.builds(
    Headers, timeout=st.none() | st.floats(0, 9), correlation_id=st.none() | st.text(max_size=5)
)
BODIES = st.integers(0, 400).flatmap(lambda size: st.sampled_from([bytes(size), b"\x93" * size]))
COMMANDS = st.sampled_from([ENQUEUE, POP])


@pytest.fixture(autouse=True, scope="module")
def short_frames() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "LENGTH_MAX", LENGTH_MAX)
        yield


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[start:end] for start, end in pairwise(places)]


def received(side: ClientFrames | ServerFrames, chunks: list[bytes]) -> tuple[list[Any], str | None, bytes]:
    """Return all events with plain bodies, the violation, and what the side sends."""
    events: list[Any] = []
    violation = None
    for chunk in chunks:
        try:
            events += side.receive(chunk)
        except ProtocolError as error:
            events += error.events
            violation = str(error)
            break
    plain = [(type(e), *(bytes(v) if isinstance(v, memoryview) else v for v in _values(e))) for e in events]
    return plain, violation, drain(side)


def _values(event: Any) -> list[Any]:
    return [getattr(event, name) for name in event.__struct_fields__]


ACTIONS = st.one_of(
    st.tuples(st.just("request"), COMMANDS, BODIES, HEADERS, st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("credit"), st.integers(0, 30), st.integers(1, 5)),
    st.tuples(st.just("auth")),
    st.tuples(st.just("ping"), st.integers(0, 9)),
    st.tuples(st.just("goaway")),
    st.tuples(st.just("send"), st.integers(1, 500)),
    st.tuples(st.just("bytes"), st.binary(max_size=20)),
)


def client_bytes(actions: list[Any]) -> bytes:
    """Return the bytes of a client that takes these actions, some of which are violations."""
    client, _ = connected(compressions=ZLIB)
    data = b""
    for name, *values in actions:
        match name, values:
            case "request", [command, body, headers, compress]:
                client.send_request(command, body, headers, compress=compress)
            case "cancel", [number]:
                client.send_cancel(number)
            case "credit", [number, items]:
                client.send_credit(number, items)
            case "auth", []:
                client.send_auth("token")
            case "ping", [number]:
                data += frame(Kind.PING, number)
            case "goaway", []:
                client.send_goaway("bye")
            case "send", [size]:
                data += b"".join(client.take(size))
            case "bytes", [garbage]:
                data += drain(client) + garbage
    return data + drain(client)


@given(st.lists(ACTIONS, max_size=12), st.lists(st.integers(0, 1 << 20), max_size=12), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_server_sees_the_same_events_however_the_bytes_are_cut(
    actions: list[Any], places: list[int], calls: int
) -> None:
    data = client_bytes(actions)
    results = [
        received(connected(Windows(calls=calls, bodies=3), compressions=ZLIB)[1], chunks)
        for chunks in ([data], cut(data, places), [data[i : i + 1] for i in range(len(data))])
    ]
    assert results[0] == results[1] == results[2]


ANSWERS = st.one_of(
    st.tuples(st.just("response"), st.integers(1, 6), BODIES, st.booleans()),
    st.tuples(st.just("error"), st.integers(1, 6), BODIES),
    st.tuples(st.just("item"), st.integers(1, 6), BODIES, st.integers(1, 3), st.booleans()),
    st.tuples(st.just("end"), st.integers(1, 6)),
    st.tuples(st.just("send"), st.integers(1, 500)),
    st.tuples(st.just("goaway")),
    st.tuples(st.just("bytes"), st.binary(max_size=20)),
)


def client_with_requests() -> tuple[ClientFrames, ServerFrames]:
    client, server = connected(compressions=ZLIB)
    for number in range(1, 7):
        client.send_request(POP, b"")
        client.send_credit(number, 3)
    server.receive(drain(client))
    return client, server


def server_bytes(answers: list[Any]) -> bytes:
    _, server = client_with_requests()
    data = b""
    for name, *values in answers:
        match name, values:
            case "send", [size]:
                data += b"".join(server.take(size))
            case "goaway", []:
                server.send_goaway("bye")
            case "bytes", [garbage]:
                data += drain(server) + garbage
            case _, [number, *_] if not server.is_open(number):
                continue
            case "response", [number, body, compress]:
                server.send_response(number, body, compress=compress)
            case "error", [number, body]:
                server.send_error(number, body)
            case "item", [number, body, credits, compress] if server.credits(number) >= credits:
                server.send_item(number, body, credits=credits, compress=compress)
            case "end", [number]:
                server.send_end(number)
    return data + drain(server)


@given(st.lists(ANSWERS, max_size=12), st.lists(st.integers(0, 1 << 20), max_size=12))
@settings(max_examples=300, deadline=None)
def test_client_sees_the_same_events_however_the_bytes_are_cut(answers: list[Any], places: list[int]) -> None:
    data = server_bytes(answers)
    results = [
        received(client_with_requests()[0], chunks)
        for chunks in ([data], cut(data, places), [data[i : i + 1] for i in range(len(data))])
    ]
    assert results[0] == results[1] == results[2]


class Connection(RuleBasedStateMachine):
    """Both sides over a network that delivers bytes in any portions."""

    @initialize(calls=st.integers(1, 6), waiting=st.integers(1, 3), bodies=st.integers(1, 3))
    def connect(self, calls: int, waiting: int, bodies: int) -> None:
        windows = Windows(calls=calls, waiting=waiting, bodies=bodies)
        self.client, self.server = connected(windows, Windows(bodies=bodies), compressions=ZLIB)
        self.windows = windows
        self.up, self.down = b"", b""  # bytes on their way
        self.sent: dict[int, bytes] = {}
        self.unsent: set[int] = set()  # cancelled before it was sent
        self.running: dict[int, int] = {}  # at the server, with items sent
        self.items: dict[int, list[bytes]] = {}
        self.answers: Counter[int] = Counter()

    @rule(command=COMMANDS, body=BODIES, headers=HEADERS, compress=st.booleans())
    def request(self, command: int, body: bytes, headers: Headers | None, compress: bool) -> None:
        self.sent[self.client.send_request(command, body, headers, compress=compress)] = body

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.sent)))
        is_open = self.client.is_open(number)
        if not self.client.send_cancel(number) and is_open:
            self.unsent.add(number)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), items=st.integers(1, 3))
    def give_credits(self, data: st.DataObject, items: int) -> None:
        self.client.send_credit(data.draw(st.sampled_from(sorted(self.sent))), items)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), body=BODIES, compress=st.booleans())
    def answer(self, data: st.DataObject, body: bytes, compress: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        if self.running[number]:
            self.server.send_end(number)
        else:
            self.server.send_response(number, body, compress=compress)
        del self.running[number]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.server.send_error(number, codec.encode_failure("INTERNAL", "failed"))
        del self.running[number]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), body=BODIES)
    def send_item(self, data: st.DataObject, body: bytes) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        if self.server.credits(number):
            self.server.send_item(number, body)
            self.running[number] += 1
            self.items.setdefault(number, []).append(body)

    @rule(size=st.integers(1, 300), portion=st.integers(1, 300))
    def deliver_up(self, size: int, portion: int) -> None:
        self.up += b"".join(self.client.take(size))
        chunk, self.up = self.up[:portion], self.up[portion:]
        for event in self.server.receive(chunk):
            match event:
                case Request(number, _, _, body):
                    assert number not in self.running
                    assert bytes(body) == self.sent[number]
                    self.running[number] = 0
                case Cancel(number) | Credit(number):
                    assert number in self.running
                case _:
                    raise AssertionError(event)

    @rule(size=st.integers(1, 300), portion=st.integers(1, 300))
    def deliver_down(self, size: int, portion: int) -> None:
        self.down += b"".join(self.server.take(size))
        chunk, self.down = self.down[:portion], self.down[portion:]
        for event in self.client.receive(chunk):
            match event:
                case Item(number, body):
                    assert bytes(body) == self.items[number].pop(0)
                case Response(number) | Error(number) | End(number):
                    assert not self.items.get(number), "items arrive before the answer"
                    self.answers[number] += 1
                case _:
                    raise AssertionError(event)

    @invariant()
    def windows_hold(self) -> None:
        if hasattr(self, "server"):
            assert self.server.in_progress <= self.windows.calls
            assert self.server.waiting <= self.windows.waiting
            assert self.server.in_progress + self.server.waiting == len(self.running)

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        for _ in range(100_000):
            if not (self.up or self.down or self.client.buffered or self.server.buffered or self.running):
                break
            for number in list(self.running):
                self.server.send_error(number, b"")
            self.running.clear()
            self.deliver_up(10_000, 10_000)
            self.deliver_down(10_000, 10_000)
        assert self.client.in_progress == self.client.waiting == self.server.incomplete == self.client.incomplete == 0
        assert set(self.answers) == set(self.sent) - self.unsent
        assert set(self.answers.values()) <= {1}


TestConnection = Connection.TestCase
TestConnection.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
