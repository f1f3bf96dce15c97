"""Enqueues that a node's write-ahead log acknowledges: durable before Postgres has them, and stored there once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline import Outgoing
from heapline.clock import SystemClock
from heapline.contract.errors import BadRequest, DirectoryLocked, JournalCorrupt
from heapline.core.ids import unix_ms_of
from tests.integration import sql_rig
from tests.integration.sql_rig import crash, fresh_topic, no_flush, open_node, rig_schema, stored, take_all
from tests.postgres import shared_url
from tests.simulation.fake_disk import FakeDisk
from tests.unit.engine.rig import until

FOREVER = 1 << 62
asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import flusher as flushing  # noqa: E402 - needs asyncpg
from heapline.sql import wal as logs  # noqa: E402 - needs asyncpg


@pytest.fixture
async def admin() -> AsyncIterator[Any]:
    connection = await asyncpg.connect(shared_url(), server_settings={"search_path": rig_schema()})
    yield connection
    await connection.close()


@pytest.fixture
async def topic() -> str:
    return fresh_topic()


@contextlib.asynccontextmanager
async def node(path: Path, **config: Any) -> AsyncIterator[Any]:
    broker = await open_node(wal=str(path / "wal"), **config)
    try:
        yield broker
    finally:
        await broker.close()


def buffer_of(broker: Any) -> Any:
    return broker.node.buffers[0]


async def test_database_that_lost_a_flush_gets_it_again(tmp_path: Path, admin: Any, topic: str) -> None:
    async with node(tmp_path, poll_interval=0.05) as hl:
        await hl.create_topic(topic, k=10)
        flusher = buffer_of(hl).flusher
        await hl.enqueue(topic, b"kept")
        await until(lambda: flusher.depth == 0)
        mark = flusher.mark
        await hl.enqueue_batch(topic, [Outgoing(b"rolled back"), Outgoing(b"rolled back too", delay=0.2)])
        await until(lambda: flusher.depth == 0)
        async with admin.transaction():  # what a failover to an older state does
            await admin.execute("DELETE FROM ready WHERE payload = 'rolled back'")
            await admin.execute("DELETE FROM delayed WHERE payload = 'rolled back too'")
            await admin.execute("DELETE FROM flushed WHERE wal = $1 AND upto > $2", buffer_of(hl).flusher._wal.id, mark)
            await admin.execute("INSERT INTO counts SELECT 0, * FROM miscounted")
        while await stored(admin, topic) < 3:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)
        assert sorted(await take_all(hl, topic)) == [b"kept", b"rolled back", b"rolled back too"]


async def test_calls_wait_for_what_a_database_that_lost_it_gets_again(tmp_path: Path, admin: Any, topic: str) -> None:
    async with node(tmp_path, poll_interval=0.05) as hl:
        await hl.create_topic(topic, k=10)
        flusher = buffer_of(hl).flusher
        sent = await hl.enqueue(topic, b"x")
        await hl.enqueue(topic, b"y")
        await until(lambda: flusher.depth == 0)
        async with no_flush(hl, admin):
            await admin.execute("DELETE FROM ready USING topics AS t WHERE topic = t.id AND t.name = $1", topic)
            await admin.execute("DELETE FROM flushed WHERE wal = $1", flusher._wal.id)
            await admin.execute("INSERT INTO counts SELECT 0, * FROM miscounted")
            await until(lambda: flusher.depth > 0)
            getting = asyncio.create_task(hl.get(topic, sent.id))
            await asyncio.wait([getting], timeout=0.2)
        assert (await getting).payload == b"x"
        assert sorted(await take_all(hl, topic)) == [b"x", b"y"]


async def test_log_is_deleted_some_time_after_its_flush(
    tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "SEGMENT_BYTES", 1 << 20)
    async with node(tmp_path, wal_keep=0) as hl:
        await hl.create_topic(topic, k=10)
        for n in range(40):
            await hl.enqueue(topic, b"%d" % n + b" " * 100_000)
        await hl.stats(topic)
        directory, flusher = tmp_path / "wal" / "shard-0", buffer_of(hl).flusher
        assert len(list(directory.glob("*.seg"))) >= 4
        flusher._keep = 3600.0
        await flusher.reclaim()
        assert len(list(directory.glob("*.seg"))) >= 4
        flusher._keep = 0.0
        await flusher.reclaim()
        assert len(list(directory.glob("*.seg"))) <= 2
        await hl.enqueue(topic, b"after")
    async with node(tmp_path) as hl:
        assert len(await take_all(hl, topic)) == 41


@pytest.mark.parametrize("knows", [0, 1])  # the last unit that the older state of the database has
async def test_database_older_than_the_log_gets_the_rest_of_the_log(
    tmp_path: Path, admin: Any, topic: str, monkeypatch: pytest.MonkeyPatch, knows: int
) -> None:
    monkeypatch.setattr(logs, "SEGMENT_BYTES", 1 << 20)
    async with node(tmp_path, wal_keep=0) as hl:
        await hl.create_topic(topic, k=10)
        for n in range(40):
            await hl.enqueue(topic, b"%d" % n + b" " * 100_000)
        await hl.stats(topic)
        await buffer_of(hl).flusher.reclaim()
        id = buffer_of(hl).flusher._wal.id
    await admin.execute("DELETE FROM ready USING topics AS t WHERE topic = t.id AND t.name = $1", topic)
    await admin.execute("DELETE FROM flushed WHERE wal = $1", id)
    if knows:
        await admin.execute("INSERT INTO flushed (wal, upto, at) VALUES ($1, $2, 0)", id, knows)
    await admin.execute("INSERT INTO counts SELECT 0, * FROM miscounted")
    async with node(tmp_path) as hl:
        left = sorted(int(p) for p in await take_all(hl, topic))
        assert left == list(range(left[0], 40))
        assert 0 < left[0] < 39


async def test_messages_read_from_the_log_are_flushed_in_slices(
    tmp_path: Path, admin: Any, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MEMORY_BYTES_MAX", 4096)
    monkeypatch.setattr(logs, "SLICE_BYTES", 8192)
    async with node(tmp_path) as hl:
        await hl.create_topic(topic, k=10)
        async with no_flush(hl, admin):
            for n in range(60):
                await hl.enqueue(topic, b"%d" % n + b" " * 1000)
        assert sorted(int(p) for p in await take_all(hl, topic)) == list(range(60))


async def test_node_without_its_id_does_not_mint(tmp_path: Path, admin: Any, topic: str) -> None:
    async with node(tmp_path) as hl:
        await hl.create_topic(topic, k=10)
        first = await hl.enqueue(topic, b"x")
        # The lease has just ended: within the grace period its number is not free yet.
        just_ended = "UPDATE nodes SET until = clock_ms() - 1 WHERE owner = $1"
        await admin.execute(just_ended, hl.node.shards[0].node.owner)
        buffer_of(hl).forget()
        second = await hl.enqueue(topic, b"y")
        assert (second.id >> 12) & 1023 != (first.id >> 12) & 1023, "it has leased another number"
        assert len(await take_all(hl, topic)) == 2


class FarClock(SystemClock):
    """The clock of a machine that is some hours off, and was started some hours later."""

    def __init__(self, hours: int) -> None:
        self._ms = hours * 3_600_000

    def wall_ms(self) -> int:
        return super().wall_ms() + self._ms

    def boot_ms(self) -> int:
        return super().boot_ms() + self._ms


async def test_clocks_of_nodes_do_not_matter(tmp_path: Path, admin: Any, topic: str) -> None:
    """The database's clock decides when messages become ready and leases end, and it is the time in message ids."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = [sql_rig.node(wal=str(tmp_path / str(hours))) for hours in (-24, 24)]
        for hl, hours in zip(nodes, (-24, 24), strict=True):
            hl.node.clock = FarClock(hours)
            await stack.enter_async_context(hl)
        behind, ahead = nodes
        await ahead.create_topic(topic, k=10, backoff=heapline.Backoff(base=0))
        ids = []
        for hl in nodes:
            ids.append((await hl.enqueue(topic, b"now")).id)
            await hl.enqueue(topic, b"in an hour", delay=3600)
            assert (await hl.stats(topic)).delayed == len(ids)
            assert buffer_of(hl).flusher.mark > 0, "its log was not used"
        now = await admin.fetchval("SELECT clock_ms()")
        assert all(abs(unix_ms_of(id) - now) < 600_000 for id in ids)
        assert {m.id for m in await behind.pop(topic, 10, visibility=600)} == set(ids)
        await ahead.node.tick()
        assert await ahead.pop(topic, 10) == [], "a lease or a delay ended early"
        await admin.execute("UPDATE lease SET until = clock_ms() - 1 WHERE id = ANY($1)", ids)
        await behind.node.tick()
        assert {m.id for m in await behind.pop(topic, 10)} == set(ids)


async def test_directory_belongs_to_one_process_and_one_deployment(tmp_path: Path, topic: str) -> None:
    async with node(tmp_path):
        with pytest.raises(DirectoryLocked):
            await open_node(wal=str(tmp_path / "wal"))
    name = tmp_path / "wal" / "wal.json"
    text = name.read_text()
    name.write_text(text.replace('"deployment":"', '"deployment":"other-'))
    with pytest.raises(BadRequest, match="is the write-ahead log of deployment other-"):
        await open_node(wal=str(tmp_path / "wal"))
    name.write_text(text)
    async with node(tmp_path):
        pass


async def test_old_copy_of_the_directory_is_refused(tmp_path: Path, topic: str) -> None:
    async with node(tmp_path) as hl:
        await hl.create_topic(topic, k=10)
        await hl.enqueue(topic, b"x")
    shutil.copytree(tmp_path / "wal", tmp_path / "copy")
    async with node(tmp_path) as hl:
        await hl.enqueue(topic, b"y")
    with pytest.raises(JournalCorrupt, match="a copy of its directory has been opened since"):
        await open_node(wal=str(tmp_path / "copy"))


async def test_copy_beside_its_original_loses_no_message_silently(tmp_path: Path, topic: str) -> None:
    """As after a machine was cloned while it ran: both processes append units with the same numbers."""
    async with node(tmp_path) as original:
        await original.create_topic(topic, k=10)
        await original.enqueue(topic, b"before")
        assert await take_all(original, topic) == [b"before"]  # flushed
        shutil.copytree(tmp_path / "wal", tmp_path / "copy")
        copy = await open_node(wal=str(tmp_path / "copy"))
        for payload in (b"1", b"2", b"3"):
            await copy.enqueue(topic, payload)
        assert await take_all(copy, topic) == [b"1", b"2", b"3"]
        await copy.close()
        await until(lambda: not buffer_of(original).flusher._wal.is_usable)
        await original.enqueue(topic, b"to the database")
        assert buffer_of(original).flusher._wal.durable == 1
        assert await take_all(original, topic) == [b"to the database"]
    with pytest.raises(JournalCorrupt, match="a copy of its directory has been opened since"):
        await open_node(wal=str(tmp_path / "wal"))


async def test_node_serves_what_is_in_the_database_if_its_log_was_copied(
    tmp_path: Path, admin: Any, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Acknowledged messages stay in its directory, and neither pops nor its end wait for them."""
    async with node(tmp_path, drain_seconds=None) as hl:
        await hl.create_topic(topic, k=10)
        async with no_flush(hl, admin):
            sent = await hl.enqueue(topic, b"in the log")
            wal = buffer_of(hl).flusher._wal.id
            await admin.execute("UPDATE wal_owners SET owner = 1 WHERE wal = $1", wal)
        await until(lambda: not buffer_of(hl).flusher._wal.is_usable)
        await hl.enqueue(topic, b"in the database")
        assert [m.payload for m in await hl.pop(topic, 10)] == [b"in the database"]
        with pytest.raises(JournalCorrupt, match="a copy of its directory has been opened since"):
            await hl.get(topic, sent.id)
    assert "messages not flushed before the end" in caplog.text


async def test_log_of_a_database_that_forgot_its_owner_is_flushed(tmp_path: Path, admin: Any, topic: str) -> None:
    """It failed over to a state from before this process had opened the log."""
    async with node(tmp_path) as hl:
        await hl.create_topic(topic, k=10)
        wal = buffer_of(hl).flusher._wal.id
        earlier = await admin.fetchval("SELECT owner FROM wal_owners WHERE wal = $1", wal)
    async with node(tmp_path) as hl:
        await admin.execute("UPDATE wal_owners SET owner = $1 WHERE wal = $2", earlier, wal)
        await hl.enqueue(topic, b"x")
        assert await take_all(hl, topic) == [b"x"]
        assert await admin.fetchval("SELECT owner FROM wal_owners WHERE wal = $1", wal) != earlier


async def test_damaged_log_is_refused_by_name(tmp_path: Path, admin: Any, topic: str) -> None:
    first = await open_node(wal=str(tmp_path / "wal"))
    await first.create_topic(topic, k=10)
    async with no_flush(first, admin):
        for n in range(3):
            await first.enqueue(topic, b"%d" % n + b"y" * 600)
        await crash(first)
    (segment,) = (tmp_path / "wal" / "shard-0").glob("*1.seg")
    good = segment.read_bytes()
    at = good.index(b"1yyy")
    segment.write_bytes(good[:at] + b"?" + good[at + 1 :])
    with pytest.raises(JournalCorrupt, match=r"0000000001\.seg"):
        await open_node(wal=str(tmp_path / "wal"))
    segment.write_bytes(good)
    async with node(tmp_path) as hl:
        assert len(await take_all(hl, topic)) == 3


async def test_enqueues_go_to_postgres_while_the_log_cannot_be_written(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FakeDisk()
    hl = await open_node(disk, wal="/wal")
    try:
        await hl.create_topic(topic, k=10)
        await hl.enqueue(topic, b"0")
        disk.inject("fdatasync", errno.EIO)
        with pytest.raises(heapline.UnavailableError, match="outcome is unknown"):
            await hl.enqueue(topic, b"unknown")
        assert not buffer_of(hl).flusher._wal.is_usable
        await hl.enqueue(topic, b"1")
        monkeypatch.setattr(flushing, "REOPEN_MS", 0)
        buffer_of(hl).flusher._reopen_at = 0
        await until(lambda: buffer_of(hl).flusher._wal.is_usable)
        before = buffer_of(hl).flusher._wal.durable
        await hl.enqueue(topic, b"2")
        assert buffer_of(hl).flusher._wal.durable == before + 1
        assert set(await take_all(hl, topic)) - {b"unknown"} == {b"0", b"1", b"2"}
    finally:
        await hl.close()


async def test_topic_is_served_while_its_log_cannot_be_written(topic: str) -> None:
    """The message whose write failed has an unknown outcome: no call waits for it."""
    disk = FakeDisk()
    hl = await open_node(disk, wal="/wal", poll_interval=0.05)
    try:
        await hl.create_topic(topic, k=10)
        buffer_of(hl).flusher._reopen_at = FOREVER  # the disk stays broken
        disk.inject("fdatasync", errno.EIO)
        with pytest.raises(heapline.UnavailableError, match="outcome is unknown"):
            await hl.enqueue(topic, b"unknown")
        await hl.enqueue(topic, b"to the database")
        async with asyncio.timeout(20):
            assert [m.payload for m in await hl.pop(topic, 10)] == [b"to the database"]
            assert (await hl.stats(topic)).leased == 1
    finally:
        await hl.close()


async def test_call_waits_for_acknowledged_messages_before_one_whose_write_failed(admin: Any, topic: str) -> None:
    disk = FakeDisk()
    hl = await open_node(disk, wal="/wal", poll_interval=0.05)
    try:
        await hl.create_topic(topic, k=10)
        buffer_of(hl).flusher._reopen_at = FOREVER  # the disk stays broken
        async with no_flush(hl, admin):
            sent = await hl.enqueue(topic, b"acknowledged")
            disk.inject("fdatasync", errno.EIO)
            with pytest.raises(heapline.UnavailableError, match="outcome is unknown"):
                await hl.enqueue(topic, b"unknown")
            found = asyncio.create_task(hl.get(topic, sent.id))
            await asyncio.sleep(0.2)
        async with asyncio.timeout(20):
            assert (await found).payload == b"acknowledged"
    finally:
        await hl.close()


async def test_enqueue_fails_when_its_shard_is_down_longer_than_settings_are_cached(
    tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path) as hl:
        await hl.create_topic(topic, k=10)
        await hl.enqueue(topic, b"before")
        await hl.stats(topic)

        async def down(*args: Any) -> Any:
            raise heapline.UnavailableError("shard 0 is unavailable")

        with monkeypatch.context() as patch:
            patch.setattr(hl.node.shards[0], "read_topic", down)
            await hl.enqueue(topic, b"remembered")
            buffer_of(hl).forget()
            with pytest.raises(heapline.UnavailableError):
                await hl.enqueue(topic, b"refused")
        assert sorted(await take_all(hl, topic)) == [b"before", b"remembered"]
