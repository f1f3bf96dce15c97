"""The machine's clock is set while a real server runs: by an hour, by a day, forward and back.

Durations (leases, delays, backoff) are not affected; times of day (deliver_at, the life of a token)
follow the clock; ids and lease tokens never repeat, even if the server is restarted with an older date.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from heapline.contract.errors import Unauthenticated
from heapline.contract.message import Message, Outgoing, from_ms
from heapline.server.auth.guard import DirectoryGuard, read_admin_key
from heapline.server.auth.secret import Secret
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_process import Process
from tests.integration.shifted_clock_server import ShiftedClock

pytestmark = pytest.mark.slow
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
EMAIL, PASSWORD = "eve@example.org", Secret("correct horse battery")


class Shifted:
    """A server, its clock, and a client with the admin key."""

    def __init__(self, place: Path) -> None:
        self.data, offset = place / "data", place / "offset"
        offset.write_text("0", encoding="ascii")
        self.clock = ShiftedClock(offset)
        self.server = Process(
            self.data, "--offset", str(offset), module="tests.integration.shifted_clock_server", log=place / "log"
        )
        self.ids: set[int] = set()
        self.tokens: set[tuple[int, int]] = set()

    async def __aenter__(self) -> Shifted:
        await self.server.__aenter__()
        self.client = await RawGrpc(self.server.grpc_target, credential=read_admin_key(self.data).reveal()).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.server.__aexit__()

    def jump(self, seconds: float) -> None:
        """Set the clock to this offset from the true time."""
        self.clock.shift(round(seconds * 1000))

    def wall(self) -> datetime:
        return from_ms(self.clock.wall_ms())

    async def put(self, payload: bytes, topic: str = "jobs", **options: object) -> int:
        answer = await self.client.enqueue(topic, payload, **options)  # type: ignore[arg-type]
        assert answer.id not in self.ids, "an id was used twice"
        assert answer.id > max(self.ids, default=0), "ids went back"
        self.ids.add(answer.id)
        return answer.id

    async def pop(self, wait: float = 0.0, topic: str = "jobs", **options: object) -> list[Message]:
        messages = await self.client.pop(topic, 10, wait=wait, **options)  # type: ignore[arg-type]
        for m in messages:
            assert (m.id, m.token) not in self.tokens, "a lease token was used twice"
            self.tokens.add((m.id, m.token))
        return messages

    async def take(self) -> set[bytes]:
        """Return the payloads of ready messages, acked."""
        messages = await self.pop(wait=5)
        await self.client.ack(messages)
        return {m.payload for m in messages}


@pytest.fixture
async def shifted(tmp_path: Path) -> AsyncIterator[Shifted]:
    async with Shifted(tmp_path) as shifted:
        await shifted.client.create_topic("jobs", segment_bytes=1 << 20, backoff={"base": 0.0}, tick=0.01)
        yield shifted


async def test_durations_ignore_clock_changes_and_times_of_day_follow(shifted: Shifted) -> None:
    for jump in (HOUR, -HOUR, DAY, -DAY, 0.0):
        await check_spans(shifted, jump)
        shifted.jump(0.0)
        await check_moments(shifted, jump)
        shifted.jump(0.0)


async def check_spans(shifted: Shifted, jump: float) -> None:
    client = shifted.client
    await shifted.put(b"leased")
    (held,) = await shifted.pop(visibility=30 * MINUTE)
    await shifted.put(b"nacked")
    (failed,) = await shifted.pop()
    await client.nack(failed, backoff=30 * MINUTE)
    await shifted.put(b"delayed", delay=30 * MINUTE)
    await shifted.put(b"short lease")
    await shifted.pop(visibility=0.3)
    await shifted.put(b"short delay", delay=0.3)
    shifted.jump(jump)
    await client.stats("jobs")  # it has read the clock
    soon: list[Message] = []
    async with asyncio.timeout(20):
        while len(soon) < 2:
            soon += await shifted.pop(wait=5)
    assert {m.payload for m in soon} == {b"short lease", b"short delay"}, "short delays have ended, long ones have not"
    await client.ack(soon)
    stats = await client.stats("jobs")
    assert (stats.ready, stats.delayed, stats.leased) == (0, 2, 1)
    await client.extend(held, 40 * MINUTE)
    await client.ack(held)
    await client.purge("jobs")


async def check_moments(shifted: Shifted, jump: float) -> None:
    """One message due in half an hour, and one due so soon that setting the clock back puts it far away."""
    later, near = shifted.wall() + timedelta(minutes=30), shifted.wall() + timedelta(seconds=0.4)
    await shifted.put(b"later", deliver_at=later)
    await shifted.put(b"near", deliver_at=near)
    shifted.jump(jump)
    expected = {b"later", b"near"} if jump > 0 else {b"near"} if jump == 0 else set()
    found: set[bytes] = set()
    async with asyncio.timeout(20):
        while found < expected:
            found.update(await shifted.take())
    assert found == expected
    if not expected:
        assert await shifted.pop(wait=1.5) == [], "its time has not come yet"
        shifted.jump(HOUR)
        async with asyncio.timeout(20):
            while len(found) < 2:
                found.update(await shifted.take())
    elif jump == 0:
        assert (await shifted.client.stats("jobs")).delayed == 1
    await shifted.client.purge("jobs")


async def test_ids_continue_when_the_server_starts_with_an_older_date(tmp_path: Path) -> None:
    shifted = Shifted(tmp_path)
    for number, jump in enumerate((DAY, -DAY, HOUR)):
        shifted.jump(jump)
        async with shifted:
            if number == 0:
                await shifted.client.create_topic("jobs", segment_bytes=1 << 20)
            await shifted.put(b"%d" % number)
            shifted.jump(jump - HOUR)
            await shifted.put(b"%d" % number)
            batch = [Outgoing(b"x")] * 50
            ids = {result.id for result in await shifted.client.enqueue_batch("jobs", batch)}
            assert not ids & shifted.ids
            shifted.ids |= ids
            assert await shifted.pop(visibility=0.001)
    assert len(shifted.ids) == 3 * 52


async def test_token_expires_by_the_wall_clock(tmp_path: Path) -> None:
    shifted = Shifted(tmp_path)
    shifted.data.mkdir()
    guard = DirectoryGuard(shifted.data, clock=shifted.clock)
    guard.users.add(EMAIL, PASSWORD, ["*:produce,consume"])
    token = await guard.login(EMAIL, PASSWORD)
    await guard.close()
    async with shifted, RawGrpc(shifted.server.grpc_target, credential=f"Bearer {token.reveal()}") as eve:
        await shifted.client.create_topic("jobs", segment_bytes=1 << 20)
        await eve.enqueue("jobs", b"hers")
        for jump in (HOUR, -HOUR, DAY, -DAY):
            shifted.jump(jump)
            with pytest.raises(Unauthenticated):
                await eve.pop("jobs")
            shifted.jump(0.0)
            assert (await eve.stats("jobs")).ready == 1, "the token is valid again when the clock is right again"
