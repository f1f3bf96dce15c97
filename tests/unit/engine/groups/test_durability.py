"""Groups with slow or failed writes, corrupt records, and a log whose start has moved."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import heapline
from heapline.contract.message import Outgoing
from heapline.contract.stream import Fetched
from heapline.engine import EmbeddedBroker
from heapline.journal.journal import Journal
from heapline.journal.records import BadRecord
from tests.unit.engine.rig import Rig, opened, settle, until

SEGMENT = ".seg"


async def fetch(hl: EmbeddedBroker, **more: Any) -> Fetched:
    return await hl.group_fetch("jobs", "g", "a", **{"session": "s", **more})


def payloads(fetched: Fetched) -> list[bytes]:
    return [bytes(payload) for batch in fetched.batches for payload in batch.payloads]


async def lag(rig: Rig) -> int:
    return sum(offset.lag for offset in await rig.hl.group_offsets("jobs", "g"))


async def test_row_is_delivered_only_when_it_is_durable() -> None:
    async with opened() as rig:
        await fetch(rig.hl)
        waiting = asyncio.ensure_future(fetch(rig.hl, wait=30.0))
        rig.io.hold = {"commit"}
        enqueued = asyncio.ensure_future(rig.hl.enqueue("jobs", b"x"))
        await settle()
        assert not waiting.done()
        assert not enqueued.done()
        rig.io.release()
        assert payloads(await waiting) == [b"x"]


async def test_ack_is_answered_when_it_is_durable() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        got = await fetch(rig.hl)
        rig.io.hold = {"commit"}
        acked = asyncio.ensure_future(
            rig.hl.group_ack("jobs", "g", "a", {0: got.batches[0].offsets.tolist()}, session="s")
        )
        await settle()
        assert not acked.done()
        rig.io.release()
        await acked


async def test_failed_write_reverts_acks_and_a_waiting_fetch_continues() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        got = await fetch(rig.hl)
        waiting = asyncio.ensure_future(fetch(rig.hl, wait=30.0))
        await settle()
        rig.disk.inject("fdatasync", path=SEGMENT)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.group_ack("jobs", "g", "a", {0: got.batches[0].offsets.tolist()}, session="s")
        await until(lambda: rig.runner().is_serving)
        # The unit may be durable or not; if not, the row is delivered again.
        await rig.hl.enqueue("jobs", b"y")
        found = payloads(await waiting)
        if b"y" not in found:
            found += payloads(await fetch(rig.hl, wait=30.0))
        assert b"y" in found


async def test_group_calls_during_a_reload_raise_topic_reloading_then_closed() -> None:
    async with opened() as rig:
        await fetch(rig.hl)
        rig.io.hold = {"load"}
        rig.disk.inject("fdatasync", path=SEGMENT)
        with pytest.raises(heapline.TopicReloading):
            await rig.hl.enqueue("jobs", b"x")
        await settle()
        for call in (fetch(rig.hl), rig.hl.group_ack("jobs", "g", "a", {0: [1]}, session="s")):
            with pytest.raises(heapline.UnavailableError):
                await call
        rig.io.release()
        await until(lambda: rig.runner().is_serving)
        waiting = asyncio.ensure_future(fetch(rig.hl, wait=30.0))
        await settle()
        while waiting.done():  # the first fetch after the reload reports the partitions
            waiting = asyncio.ensure_future(fetch(rig.hl, wait=30.0))
            await settle()
        await rig.hl.close()
        with pytest.raises(heapline.contract.errors.Closed):
            await waiting


async def test_power_cut_loses_no_row_and_no_ack() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g")
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
        got = await fetch(rig.hl)
        offsets = got.batches[0].offsets.tolist()
        await rig.hl.group_ack("jobs", "g", "a", {0: [offsets[i] for i in (0, 1, 5)]}, session="s")
        after = Rig(rig.disk.crash())
    hl = await after.open()
    assert payloads(await fetch(hl)) == [b"%d" % i for i in range(10) if i not in (0, 1, 5)]
    assert await lag(after) == 7
    await hl.close()


async def test_backlog_is_read_from_disk_in_pages_and_its_end_from_memory() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g")
        for start in range(0, 5000, 1000):
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(start, start + 1000)])
        await rig.hl.enqueue("jobs", b"5000")
        got: list[bytes] = []
        while len(got) < 5001:
            fetched = await fetch(rig.hl, max_messages=700)
            assert fetched.batches
            got += payloads(fetched)
        assert got == [b"%d" % i for i in range(5001)]
        assert rig.io.ran["read"] >= 1


async def test_corrupt_row_becomes_a_dead_letter_and_the_group_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g")
        for i in range(3):
            await rig.hl.enqueue("jobs", b"%d" % i, delay=1)
        rig.clock.advance(2)
        await rig.hl.enqueue("jobs", b"after")
        await until(lambda: rig.runner().loaded.topic.ready == 4)
        await rig.reopen()
        load = Journal.load

        def damaged(journal: Journal, positions: Any) -> Any:
            records = load(journal, positions)
            for at in np.flatnonzero(records.rows["id"] == bad).tolist():
                records.bad[at] = BadRecord(bad, "somewhere", 0, "its payload does not check")
            return records

        bad = int(rig.runner().loaded.topic.partitions[0].eligible(4).ids[1])
        monkeypatch.setattr(Journal, "load", damaged)
        got = payloads(await fetch(rig.hl))
        assert len(got) == 3
        (letter,) = await rig.hl.group_dead_list("jobs", "g")
        assert (letter.reason, letter.payload, letter.id) == ("record corrupt", None, bad)
        assert await lag(rig) == 3
        assert (await rig.hl.stats("jobs")).log.corrupt_records_total == 1


async def test_group_that_holds_nothing_continues_at_the_logs_start() -> None:
    async with opened(rewrite_below=0) as rig:
        await rig.hl.create_group("jobs", "g", unused_after=0.0)
        for _ in range(12):
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"x" * 1000)] * 250)
            await rig.hl.ack(await rig.hl.pop("jobs", 250))
        rig.clock.advance(60)
        for _ in range(3):
            await rig.hl.enqueue("jobs", b"x" * 1000)
            await rig.hl.snapshot("jobs")
            await rig.runner().maintenance.reclaim()
        assert rig.runner().maintenance.segments_reclaimed_total > 0
        await rig.reopen()
        first = (await rig.hl.offsets("jobs"))[0][0]
        assert first > 0
        got = 0
        while fetched := (await fetch(rig.hl)).batches:
            assert all(int(batch.offsets[0]) >= first for batch in fetched)
            got += sum(map(len, fetched))
            for batch in fetched:
                await rig.hl.group_ack("jobs", "g", "a", {0: batch.offsets.tolist()}, session="s")
        assert got > 3
        assert await lag(rig) == 0
