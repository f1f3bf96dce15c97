"""The topic setting `compression`: what is compressed, between which sides, and what a server refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.client.transports.native import NativeBroker
from heapline.contract.leases import Pop
from heapline.contract.messages import Enqueue
from heapline.contract.replays import Replay
from heapline.wire import blocking_connection, codec, compressed_topics
from heapline.wire.frames import GoAway, compression
from heapline.wire.frames.compression import Zstd, installed
from tests.conformance.worlds import picture
from tests.integration.proxy import Proxy
from tests.integration.raw_grpc import GrpcBroker
from tests.integration.raw_native import RawNative
from tests.integration.server_rig import Rig, until
from tests.unit.wire.frames.connection import frame

zstd: Any = pytest.importorskip("backports.zstd" if not installed(("compression.zstd",)) else "compression.zstd")
TEXT = b"the same text again and again, " * 1000
ZSTD = {"compression": "zstd"}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.behind.create_topic("jobs", **rig.small, **ZSTD)
        await rig.behind.create_topic("plain", **rig.small)
        yield rig


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of bodies that either side has compressed."""
    sizes: list[int] = []
    compress = Zstd.compress

    def spy(self: Zstd, data: Any) -> bytes:
        sizes.append(len(data))
        return compress(self, data)

    monkeypatch.setattr(Zstd, "compress", spy)
    return sizes


async def learned(*sides: compressed_topics.CompressedTopics, topic: str = "jobs") -> None:
    """Wait until the sides know the setting of the topic."""

    async def do_know() -> bool:
        return all(topic in side._settings._known for side in sides)

    await until(do_know)


async def lifecycle(hl: Any, topic: str) -> None:
    await hl.enqueue(topic, TEXT)
    (message,) = await hl.pop(topic)
    assert message.payload == TEXT
    await message.ack()


async def test_large_requests_and_answers_of_a_compressed_topic_are_compressed(rig: Rig, compressed: list[int]) -> None:
    async with NativeBroker(rig.target) as hl:
        for topic in ("jobs", "plain"):
            await lifecycle(hl, topic)
            await learned(hl._compressed, rig.server.dispatcher.compressed, topic=topic)
        assert compressed == [], "until a side knows the setting"
        await lifecycle(hl, "plain")
        assert compressed == []
        await lifecycle(hl, "jobs")
        assert len(compressed) == 2, "the enqueue and the answer of the pop"
        assert all(size > len(TEXT) for size in compressed)
        await hl.enqueue("jobs", b"x" * 4000)
        assert len(compressed) == 2, "a small body is not"


async def test_compressed_topic_works_through_the_sdk_and_sends_fewer_bytes(rig: Rig) -> None:
    async with Proxy(rig.target) as proxy, heapline.connect(proxy.target) as hl:
        for topic in ("jobs", "plain"):
            await lifecycle(hl, topic)
            await learned(rig.server.dispatcher.compressed, topic=topic)
        sizes = {}
        for topic in ("jobs", "plain"):
            before = proxy.answered
            await lifecycle(hl, topic)
            sizes[topic] = proxy.answered - before
    assert sizes["plain"] > len(TEXT) > 10 * sizes["jobs"]


async def test_client_without_zstd_is_served_without_compression(
    rig: Rig, compressed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "installed", dict)
    async with NativeBroker(rig.target) as hl:
        for _ in range(3):
            await lifecycle(hl, "jobs")
    assert compressed == []


async def test_changed_setting_is_used_after_a_minute(
    rig: Rig, compressed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with NativeBroker(rig.target) as hl:
        sides = (hl._compressed, rig.server.dispatcher.compressed)
        await lifecycle(hl, "plain")
        await learned(*sides, topic="plain")
        await hl.update_topic("plain", **ZSTD)
        await lifecycle(hl, "plain")
        assert compressed == []
        for side in sides:
            side._settings._known["plain"] = (False, 0.0)  # it was read long ago

        async def is_compressed() -> bool:
            await lifecycle(hl, "plain")
            return len(compressed) >= 2

        await until(is_compressed)


async def test_items_of_a_feed_are_compressed_for_both_kinds_of_connections(rig: Rig, compressed: list[int]) -> None:
    for _ in range(3):
        await rig.behind.enqueue("jobs", TEXT)
    await rig.server.dispatcher.compressed.ask("jobs")
    async with NativeBroker(rig.target) as hl:
        rows = [row.payload async for row in hl.replay("jobs")]  # type: ignore[union-attr]
    assert rows == [TEXT] * 3
    assert compressed
    count, first = len(compressed), Replay("jobs")

    def read() -> int:
        with blocking_connection.connect(("127.0.0.1", rig.server.port)) as connection:
            return sum(len(step.payloads) for step in connection.feed(first) if hasattr(step, "payloads"))

    import asyncio

    await asyncio.to_thread(read)
    assert len(compressed) > count


async def test_grpc_compresses_answers_of_the_topic_with_gzip(rig: Rig) -> None:
    sizes = {}
    for topic in ("jobs", "plain"):
        await rig.behind.enqueue(topic, TEXT)
        await rig.server.dispatcher.compressed.ask(topic)
        async with Proxy(rig.grpc_target) as proxy, GrpcBroker(proxy.target) as hl:
            (message,) = await hl.pop(topic)
            assert message.payload == TEXT
            sizes[topic] = proxy.answered
    assert sizes["plain"] > len(TEXT) > 10 * sizes["jobs"]


def bombs() -> dict[str, bytes]:
    size = 1 << 30
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.content_size_flag: 0})
    chunk = bytes(1 << 20)
    parts = [compressor.compress(chunk) for _ in range(64)]
    unnamed = b"".join(parts) + compressor.flush()
    # A header that names a window of 1 GiB and no content: decoders allocate the window first.
    window = b"\x28\xb5\x2f\xfd\x00" + bytes([(30 - 10) << 3]) + b"\x01\x00\x00"
    return {
        f"{size} bytes when decompressed; the limit is": zstd.compress(bytes(size), 1),
        "bytes when decompressed": unnamed,
        "not a zstd frame": window,
    }


async def test_server_refuses_bombs_by_name_and_nothing_changes(rig: Rig) -> None:
    before = await picture(rig.behind)
    for text, bomb in bombs().items():
        assert len(bomb) < 256 << 10
        async with RawNative(rig.target) as client:
            client.writer.write(frame(3, 1, bomb, flags=4, command=Enqueue.facts.id))
            event = await client.event()
            assert isinstance(event, GoAway)
            assert "cannot decompress a body" in event.text
            assert text in event.text
    assert await picture(rig.behind) == before
    async with RawNative(rig.target) as client:
        await client.do(Enqueue("jobs", b"x"))


async def test_compressed_request_is_accepted_whatever_the_topics_setting(rig: Rig) -> None:
    async with RawNative(rig.target) as client:
        body = codec.encode(Enqueue("plain", TEXT))
        number = client.frames.send_request(Enqueue.facts.id, body, compress=True)
        client.flush()
        await client.answers(number)
        leased = await client.do(Pop("plain"))
        assert leased.messages.payloads == [TEXT]
