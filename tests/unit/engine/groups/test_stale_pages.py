"""Pages in memory that disagree with the log: the log decides where a group continues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.contract.errors import TopicReloading
from heapline.contract.message import Outgoing
from heapline.engine.groups.member_calls import FetchCall
from heapline.engine.groups.page_reader import PageStore
from heapline.engine.groups.pages import Page
from heapline.testing import MemoryBroker
from tests.unit.engine.groups.group_calls import fetch, fill, payloads
from tests.unit.engine.rig import Rig, opened, settle
from tests.unit.engine.test_maintenance import churn, reclaim


def page_store(rig: Rig) -> PageStore:
    return rig.runner().streams._reading._pages


async def with_stale_page(rig: Rig) -> None:
    """Ten rows, a group at the first, and a page in memory that says the log begins at the seventh."""
    await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
    await rig.hl.create_group("jobs", "g")
    await rig.reopen()  # none of its records is in memory now
    await rig.hl.group_fetch("jobs", "other", "m", session="s", max_messages=0)
    await rig.hl.group_fetch("jobs", "other", "m", session="s", max_messages=1, wait=5.0)
    page = page_store(rig).find(0, 0)
    assert page is not None
    page_store(rig).forget(0, 0)
    page_store(rig).add(Page(**{**page._asdict(), "first": 6}))


async def test_stale_page_does_not_advance_a_group_past_rows_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as rig:
        await with_stale_page(rig)
        (before,) = await rig.hl.group_offsets("jobs", "g")
        got = [await fetch(rig.hl, "a", wait=5.0), await fetch(rig.hl, "a")]
        assert [p for fetched in got for p in payloads(fetched)] == [b"%d" % i for i in range(10)]
        (place,) = await rig.hl.group_offsets("jobs", "g")
        assert (place.committed, place.lag, place.outstanding) == (before.committed, before.lag, 10)
        assert "reclaimed unread" not in caplog.text


async def test_group_reset_during_a_log_read_keeps_its_new_offset() -> None:
    async with opened() as rig:
        await with_stale_page(rig)
        await fetch(rig.hl, "a", max_messages=0)
        rig.io.hold = {"goes_on_at"}
        waiting = asyncio.ensure_future(fetch(rig.hl, "a", wait=30.0))
        await settle()
        assert rig.io.held
        await rig.hl.reset_offsets("jobs", "g", to="latest")
        rig.io.release()
        await settle()
        await rig.hl.enqueue("jobs", b"new")
        assert payloads(await waiting) == [b"new"]


async def test_failed_log_read_is_raised_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as rig:
        await with_stale_page(rig)

        def broken(*_: Any) -> int:
            raise OSError("it clicks")

        with monkeypatch.context() as patched:
            patched.setattr("heapline.engine.groups.page_reader.goes_on_at", broken)
            with pytest.raises(TopicReloading):
                await fetch(rig.hl, "a", wait=30.0)
        assert "it clicks" in caplog.text
        assert len(payloads(await fetch(rig.hl, "a", wait=5.0))) == 10


async def test_fetch_served_by_another_page_is_not_served_again() -> None:
    """While its answer waits for the disk it would take more rows, which no member would get until they time out."""
    async with opened() as rig:
        await fill(rig, 10)
        await fetch(rig.hl, max_messages=0)
        streams = rig.runner().streams
        call = FetchCall(rig.runner().future(), "g", "a", "s", 5, 1 << 20, False)
        streams._reading._again(call)  # of a second partition, when that of the first was already served
        assert streams.inbox == []


async def test_group_below_the_logs_start_continues_there_with_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example if segments were deleted by hand: the reclaimer moves groups before it deletes one."""
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", unused_after=3600.0)
        await churn(rig)
        rig.clock.advance(3601)
        monkeypatch.setattr("heapline.engine.maintenance.decide_move_on", lambda *_: [])
        await reclaim(rig)
        start, _ = (await rig.hl.offsets("jobs"))[0]
        assert (await rig.hl.group_offsets("jobs", "g"))[0].committed < start
        await rig.reopen()
        got = await fetch(rig.hl, "a", wait=5.0)
        assert (await rig.hl.metrics()).topics[0].totals["moved_on"] == 1
        await rig.reopen()
        (place,) = await rig.hl.group_offsets("jobs", "g")
        assert place.committed >= start
        assert len(payloads(got)) == place.lag > 0
        assert caplog.text.count("reclaimed unread") == 1


async def test_page_read_for_one_group_loses_no_rows_of_a_slower_one() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=256 << 10)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
        await hl.create_group("jobs", "behind")
        await hl.group_fetch("jobs", "ahead", "m", session="s", max_messages=5)
        await hl.group_ack("jobs", "ahead", "m", {0: range(5)}, session="s")
    async with MemoryBroker(disk=hl.disk) as again:  # none of its records is in memory now
        for group, first in (("ahead", 5), ("behind", 0)):
            fetched = await again.group_fetch("jobs", group, "m", session="s", wait=5.0)
            assert [o for batch in fetched.batches for o in batch.offsets.tolist()] == list(range(first, 10))
