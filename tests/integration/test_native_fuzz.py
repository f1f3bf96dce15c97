"""Damaged, split, interleaved and cancelled frames against a live server: it stays up, and nothing changes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from heapline.contract.columns import pack
from heapline.contract.leases import Ack, LeaseKeys, Pop
from heapline.contract.log import ReadUnits
from heapline.contract.messages import Enqueue
from heapline.contract.replays import Replay
from heapline.contract.topics import DeleteTopic, PauseTopic, Purge, Stats
from heapline.server.protocols.native import NativeConnection
from heapline.wire import codec
from heapline.wire.frames import ClientFrames, Error, Response, Windows
from tests.conformance.worlds import picture
from tests.integration.raw_native import RawNative
from tests.integration.server_rig import Keys, Rig, until
from tests.unit.wire.fake_transport import FakeTransport
from tests.unit.wire.frames.connection import frame

MB = 1 << 20
ROUNDS, SOAK_ROUNDS = 150, 5000
CREDENTIALS = [None, "unknown", "other"]  # those of `other` are valid, but not for this topic
WINDOWS = Windows(calls=8, waiting=8, body_bytes=MB, calls_bytes=2 * MB, bodies=3, bodies_bytes=2 * MB)


@pytest.fixture
async def rig(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Rig]:
    """A server with a topic that must be unchanged at the end, without remains of the connections."""
    keys = Keys(good="*:produce,consume,admin", other="other:produce,consume,admin")
    async with Rig(tmp_path, keys) as rig:
        rig.server._native.windows = WINDOWS
        await rig.behind.create_topic("jobs", **rig.small)
        for number in range(5):
            await rig.behind.enqueue("jobs", b"%d" % number, priority=number)
        await rig.behind.pop("jobs", visibility=3600)
        before = await picture(rig.behind)
        yield rig
        await until(lambda: is_clean(rig))
        assert await picture(rig.behind) == before
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio" or r.levelname == "ERROR"] == []


async def is_clean(rig: Rig) -> bool:
    gate, server = rig.server.gate, rig.server._native
    counts = (gate.requests_open, gate.calls.held, gate.streams.held, len(gate.credentials))
    return counts == (0, {}, {}, 0) and not server.connections and not server.unauthenticated


def hello(credential: str | None) -> bytes:
    return b"".join(map(bytes, ClientFrames(credential).take()))


def request(number: int, command: Any) -> bytes:
    return frame(3, number, codec.encode(command), command=type(command).facts.id)


def conversation() -> list[bytes]:
    """Frames of a client, with calls that would change the topic if the server ran them."""
    purge = codec.encode(Purge("jobs"))
    return [
        request(1, Enqueue("jobs", b"x" * 40)),
        request(2, Pop("jobs", wait=30.0)),
        frame(9, 2),
        request(3, Purge("jobs")),
        frame(3, 4, purge[:3], flags=2, command=Purge.facts.id),
        request(5, Replay("jobs")),
        frame(8, 5, codec.encode({"items": 3})),
        frame(3, 4, purge[3:], command=Purge.facts.id),
        request(6, DeleteTopic("jobs")),
        frame(10, 7),
        frame(3, 8, b"\x05\x00\x81\xa1a\xa1b" + purge, flags=1, command=Purge.facts.id),
        request(9, Ack("jobs", LeaseKeys(pack([1]), pack([1])))),
        frame(3, 10, bytes(600), flags=2, command=Enqueue.facts.id),
        frame(9, 10),
        frame(13, 11, codec.encode({"credential": "unknown"})),
        request(12, PauseTopic("jobs")),
        request(13, ReadUnits("jobs", 0, 9)),
        frame(12, 0, codec.encode({"code": "UNAVAILABLE", "text": "bye"})),
    ]


def damaged(chance: Random) -> list[bytes]:
    """Return chunks: the conversation with frames omitted, repeated, exchanged and changed, cut anywhere."""
    frames = conversation()
    for _ in range(chance.randrange(4)):
        at, to = chance.randrange(len(frames)), chance.randrange(len(frames))
        frames.insert(to, frames[at] if chance.random() < 0.5 else frames.pop(at))
    data = bytearray(b"".join(frames))
    for _ in range(chance.choice([0, 0, 1, 2, 8])):
        at = chance.randrange(len(data))
        what = chance.randrange(4)
        if what == 0:
            data[at] = chance.randrange(256)
        elif what == 1:
            del data[at : at + chance.randrange(1, 20)]
        elif what == 2:
            data[at:at] = chance.randbytes(chance.randrange(1, 20))
        else:
            data[at:at] = frame(3, chance.randrange(1, 20), b"", command=chance.randrange(256))[:12]
    cuts = sorted({0, len(data), *(chance.randrange(len(data)) for _ in range(chance.randrange(8)))})
    return [bytes(data[a:b]) for a, b in itertools.pairwise(cuts)]


async def attack(rig: Rig, chance: Random) -> None:
    """Connect, send damaged frames, read some of the answers or none, and disconnect in some way."""
    client = RawNative(rig.target)
    await client.connect()
    client.writer.write(hello(chance.choice(CREDENTIALS)))
    if chance.random() < 0.8:
        await client.read()
    for chunk in damaged(chance):
        client.writer.write(chunk)
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    leave = chance.randrange(3)
    if leave == 0:
        client.writer.transport.abort()
    elif leave == 1:
        with contextlib.suppress(OSError):  # the server was faster
            client.writer.write_eof()
        while await client.read():
            pass
    await client.close()


async def attack_often(rig: Rig, rounds: int, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + rounds, 10):
        await asyncio.gather(*(attack(rig, Random(f"native {n}")) for n in range(seed, seed + 10)))
        async with RawNative(rig.target, "good") as client:
            assert (await client.do(Stats("jobs"))).ready == 4


async def test_damaged_frames_change_nothing(rig: Rig) -> None:
    await attack_often(rig, ROUNDS, 0)


@pytest.mark.soak
async def test_many_damaged_frames_change_nothing(rig: Rig) -> None:
    await attack_often(rig, SOAK_ROUNDS, ROUNDS)


async def test_frames_split_at_every_byte_are_answered_like_whole_ones(rig: Rig) -> None:
    sent = b"".join(
        (
            request(1, Stats("jobs")),
            request(2, Stats("nowhere")),
            frame(3, 3, b"\x81\xa5to", flags=2, command=Stats.facts.id),
            frame(10, 9),
            frame(3, 3, b"pic\xa4jobs", command=Stats.facts.id),
            frame(9, 4),
        )
    )
    for at in range(len(sent)):
        connection = NativeConnection(rig.server._native, rig.server.dispatcher)
        transport = FakeTransport(connection)
        connection.connection_made(transport)
        client = ClientFrames("good")
        connection.data_received(b"".join(map(bytes, client.take())))
        await written(transport)
        client.receive(transport.taken())
        for _ in range(3):
            client.send_request(Stats.facts.id, b"")  # so that the connection knows the numbers
        connection.data_received(sent[:at])
        connection.data_received(sent[at:])
        answers: dict[int, type] = {}
        while len(answers) < 3:
            await written(transport)
            answers |= {event.request: type(event) for event in client.receive(transport.taken())}
        assert answers == {1: Response, 2: Error, 3: Response}
        connection.abort()
    await asyncio.sleep(0)


async def written(transport: FakeTransport) -> None:
    async with asyncio.timeout(20):
        while not transport.written:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0)


async def test_incomplete_bodies_are_bounded_and_freed(rig: Rig) -> None:
    piece = frame(3, 0, bytes(200 << 10), flags=2, command=Enqueue.facts.id)
    async with RawNative(rig.target, "good") as client:
        (connection,) = rig.server._native.connections
        for turn in range(100):  # 20 MB, if the server accepted them
            number = 1 + turn % 3
            client.writer.write(piece[:8] + number.to_bytes(4, "little") + piece[12:])
            assert connection._frames.incomplete <= WINDOWS.bodies_bytes + (256 << 10) + 12
        (goaway,) = await client.end()
        assert goaway.code == "INVALID_ARGUMENT"
        assert connection._frames.incomplete == 0


@pytest.mark.parametrize("length", [4085, 0x30001, 0xFFFFFFFF])
async def test_frame_over_the_unauthenticated_limit_is_refused_before_it_arrives(rig: Rig, length: int) -> None:
    client = RawNative(rig.target)
    await client.connect()
    client.writer.write(length.to_bytes(4, "little") + b"\x01" + bytes(7))
    (goaway,) = await client.end()
    assert "over the limit of 4084" in goaway.text
    await client.close()


async def test_every_call_is_answered_once_however_it_is_cancelled(rig: Rig) -> None:
    chance = Random(7)
    await rig.behind.create_topic("empty", **rig.small)
    async with RawNative(rig.target, "good") as client:
        counts: dict[int, int] = {}
        for _ in range(200):
            command = chance.choice([Pop("empty", wait=30.0), Stats("jobs"), Replay("jobs"), Stats("nowhere")])
            (number,) = client.send(command)
            counts[number] = 0
            if type(command) is Replay and chance.random() < 0.5:
                client.credit(number, chance.randrange(1, 9))
            for _ in range(chance.randrange(3)):
                client.cancel(chance.choice(list(counts)))
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        for number in counts:
            client.cancel(number)
        while not all(counts.values()):
            event = await client.event()
            if type(event).__name__ in ("Response", "Error", "End"):
                counts[event.request] += 1
        await client.do(Stats("jobs"))
        assert set(counts.values()) == {1}
        assert client.frames.in_progress == client.frames.waiting == 0
