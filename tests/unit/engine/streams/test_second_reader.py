"""What a second reader of consumer groups tried to break: ends in the middle, leaks, large events, unlucky frames."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.contract.config import GroupConfig
from heapline.contract.errors import BadRequest, Closed, HeaplineError, ResourceExhausted, TopicReloading
from heapline.contract.message import Outgoing
from heapline.contract.stream import Fetched
from heapline.core.events import GroupCreated
from heapline.core.now import Now
from heapline.engine import EmbeddedBroker
from heapline.engine.groups import admin
from heapline.engine.groups.member_calls import FetchCall
from heapline.engine.groups.page_reader import PageStore
from heapline.engine.groups.pages import Page
from heapline.engine.metrics_source import measure
from heapline.testing import MemoryBroker
from tests.unit.engine.rig import Rig, opened, settle
from tests.unit.engine.test_upkeep import churn, reclaim

MANY = 40_000


async def fetch(hl: EmbeddedBroker, member: str = "a", **more: Any) -> Fetched:
    return await hl.group_fetch("jobs", "g", member, **{"session": "s", **more})


def payloads(fetched: Fetched) -> list[bytes]:
    return [bytes(payload) for batch in fetched.batches for payload in batch.payloads]


def offsets(fetched: Fetched) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for batch in fetched.batches:
        found.setdefault(batch.partition, []).extend(batch.offsets.tolist())
    return found


async def lag(rig: Rig) -> int:
    return sum(offset.lag for offset in await rig.hl.group_offsets("jobs", "g"))


async def fill(rig: Rig, count: int, payload: bytes = b"x") -> None:
    for start in range(0, count, 5000):
        await rig.hl.enqueue_batch("jobs", [Outgoing(payload)] * min(5000, count - start))


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [0.0, 30.0])
async def test_a_fetch_whose_page_is_being_read_hears_when_the_broker_closes(wait: float) -> None:
    async with opened() as rig:
        await fill(rig, 2000)
        await fetch(rig.hl, max_messages=0)
        await rig.reopen()
        rig.io.hold = {"read"}
        waiting = asyncio.ensure_future(fetch(rig.hl, wait=wait))
        await settle()
        assert rig.io.held
        assert not waiting.done()
        closing = asyncio.ensure_future(rig.hl.close())
        await settle()
        rig.io.release()
        await closing
        await settle()
        assert waiting.done()
        assert isinstance(waiting.exception(), Closed)
        await rig.open()


async def test_a_member_that_left_is_not_brought_back_by_its_fetch_whose_page_was_being_read() -> None:
    async with opened() as rig:
        await fill(rig, 2000)
        await fetch(rig.hl, max_messages=0)
        await rig.reopen()
        rig.io.hold = {"read"}
        waiting = asyncio.ensure_future(fetch(rig.hl, wait=30.0))
        await settle()
        assert rig.io.held
        assert not waiting.done()
        await rig.hl.group_leave("jobs", "g", "a", session="s")
        rig.io.release()
        assert (await waiting).batches == []
        assert (await rig.hl.get_group("jobs", "g")).members == {}


async def test_rows_that_a_member_was_to_get_when_it_left_are_not_given_to_it_too() -> None:
    async with opened() as rig:
        await fetch(rig.hl)
        await rig.hl.enqueue("jobs", b"x")
        await fetch(rig.hl)
        rig.io.hold = {"commit"}
        enqueued = asyncio.ensure_future(rig.hl.enqueue("jobs", b"y"))
        await settle()
        waiting = asyncio.ensure_future(fetch(rig.hl))
        await settle()
        left = asyncio.ensure_future(rig.hl.group_leave("jobs", "g", "a", session="s"))
        other = asyncio.ensure_future(fetch(rig.hl, "b", session="t"))
        await settle()
        rig.io.release()
        await asyncio.gather(enqueued, left)
        assert payloads(await waiting) == []
        assert payloads(await other) == [b"x", b"y"]


# -- memory ------------------------------------------------------------------------------------------------------------


async def test_units_are_forgotten_once_durable_though_nobody_fetches() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", observer=True)
        for _ in range(50):
            await rig.hl.enqueue("jobs", b"x")
        tail = rig.runner().loaded.topic.tails[0]
        assert tail is not None
        assert len(tail._ends) < 5


async def test_sessions_of_those_who_are_no_members_are_not_remembered() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        await rig.hl.create_group("jobs", "g")
        await rig.hl.create_group("jobs", "o", observer=True)
        for i in range(20):
            with pytest.raises(HeaplineError):
                await rig.hl.group_ack("jobs", "g", f"m{i}", {0: [0]}, session="s")
            await rig.hl.group_leave("jobs", "g", f"m{i}", session="s")
            with pytest.raises(BadRequest):
                await rig.hl.group_fetch("jobs", "o", f"m{i}", session="s")
        assert not rig.runner().streams.sessions._current


async def test_a_member_that_is_gone_leaves_nothing_behind() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        for i in range(5):
            await fetch(rig.hl, f"m{i}")
            await rig.hl.group_leave("jobs", "g", f"m{i}", session="s")
        assert not rig.runner().loaded.topic.groups.by_name["g"]._turns
        assert not rig.runner().streams._answering._told


async def test_there_are_at_most_so_many_members_as_one_event_can_name() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g")
        runner = rig.runner()

        def join(now: Any) -> None:
            group = runner.loaded.topic.groups.by_name["g"]
            group.members.leases = dict.fromkeys((f"{i:0256}" for i in range(5000)), now.steady + 10**6)

        await runner.call(join)
        with pytest.raises(ResourceExhausted):
            await fetch(rig.hl, "x")
        assert runner.counters.reloads == 0


# -- large -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [0, 3])
async def test_very_many_rows_are_nacked_at_once_in_a_topic_of_small_segments(retries: int) -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", max_retries=retries)
        await fill(rig, MANY, b"")
        got: dict[int, list[int]] = {0: []}
        while len(got[0]) < MANY:
            got[0] += offsets(await fetch(rig.hl, max_messages=MANY, max_bytes=1 << 30))[0]
        some = got[0][1:100:2] + got[0][101:]
        await rig.hl.group_nack("jobs", "g", "a", {0: some}, session="s")
        assert rig.runner().counters.reloads == 0
        (offset,) = await rig.hl.group_offsets("jobs", "g")
        assert (offset.retrying, offset.dead) == ((0, len(some)) if retries == 0 else (len(some), 0))


async def test_very_many_single_rows_are_given_up_at_once_in_a_topic_of_small_segments() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", max_retries=0)
        await fill(rig, MANY, b"")
        got: dict[int, list[int]] = {0: []}
        while len(got[0]) < MANY:
            got[0] += offsets(await fetch(rig.hl, max_messages=MANY, max_bytes=1 << 30))[0]
        await rig.hl.group_nack("jobs", "g", "a", {0: got[0][1::2]}, session="s")
        assert rig.runner().counters.reloads == 0


@pytest.mark.parametrize("retries", [0, 3])
async def test_very_many_rows_time_out_at_once_in_a_topic_of_small_segments(retries: int) -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", max_retries=retries)
        await fill(rig, MANY, b"")
        got: dict[int, list[int]] = {0: []}
        while len(got[0]) < MANY:
            got[0] += offsets(await fetch(rig.hl, max_messages=MANY, max_bytes=1 << 30))[0]
        await rig.hl.group_ack("jobs", "g", "a", {0: got[0][1::2]}, session="s")
        rig.clock.advance(31)
        await rig.hl.group_offsets("jobs", "g")
        await settle()
        await rig.hl.group_offsets("jobs", "g")
        assert rig.runner().counters.reloads == 0
        (offset,) = await rig.hl.group_offsets("jobs", "g")
        assert (offset.retrying, offset.dead) == ((0, MANY // 2) if retries == 0 else (MANY // 2, 0))


# -- what is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["commit", "interval", "os"])
async def test_lag_is_right_from_any_place_also_when_little_is_synced(policy: str) -> None:
    async with opened(topic={"fsync": policy, "fsync_interval": 60.0}) as rig:
        await fill(rig, 10)
        info = await rig.hl.create_group("jobs", "g", start={0: 5})
        assert info.lag == 5


@pytest.mark.parametrize("policy", ["commit", "interval", "os"])
async def test_a_group_from_the_earliest_on_gets_all_rows_also_when_little_is_synced(policy: str) -> None:
    async with opened(topic={"fsync": policy, "fsync_interval": 60.0}) as rig:
        await fill(rig, 3000)
        got = 0
        async with asyncio.timeout(20):
            while got < 3000:
                fetched = await fetch(rig.hl)
                got += len(payloads(fetched))
                assert fetched.batches
            await fill(rig, 3000)
            while got < 6000:
                got += len(payloads(await fetch(rig.hl)))


async def test_a_fetch_gets_no_more_than_it_asks_for_of_what_an_earlier_one_left() -> None:
    async with opened() as rig:
        await fetch(rig.hl)
        rig.io.hold = {"commit"}
        enqueued = asyncio.ensure_future(rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(5)]))
        await settle()
        waiting = asyncio.ensure_future(fetch(rig.hl))
        await settle()
        waiting.cancel()
        await settle()
        rig.io.release()
        await enqueued
        assert payloads(await fetch(rig.hl, max_messages=2)) == [b"0", b"1"]
        assert payloads(await fetch(rig.hl, max_messages=2)) == [b"2", b"3"]
        assert payloads(await fetch(rig.hl)) == [b"4"]


# -- fairness ----------------------------------------------------------------------------------------------------------


async def test_a_partition_whose_page_is_on_disk_is_not_passed_over_while_another_has_rows() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        for _ in range(4):
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"x" * 100, key=str(i)) for i in range(2000)])
        await fetch(rig.hl, max_messages=0)
        await rig.reopen()
        await fetch(rig.hl, max_messages=1)
        await fetch(rig.hl, max_messages=1)
        rig.runner().streams._reading._pages.drop_below(1, 1 << 62)  # as when memory is short
        seen = [batch.partition for _ in range(8) for batch in (await fetch(rig.hl, max_messages=10)).batches]
        assert set(seen) == {0, 1}


# -- replay ------------------------------------------------------------------------------------------------------------


async def test_a_group_deleted_and_made_anew_at_once_is_the_new_one_after_a_restart() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        runner = rig.runner()
        await rig.hl.create_group("jobs", "g", max_retries=3)
        await fetch(rig.hl, "old")

        def anew(now: Now) -> None:  # two calls of one turn
            admin.delete(runner, "g", now)
            admin._create(runner, "g", "latest", [(0, 0, 0), (1, 0, 0)], GroupConfig(max_retries=7), now)

        await runner.call(anew)
        after = Rig(rig.disk.crash())
        await after.open()
        info = await after.hl.get_group("jobs", "g")
        assert (info.config.max_retries, info.members) == (7, {})
        await after.hl.close()


async def test_a_deletion_begins_at_partition_0_whatever_order_the_group_was_read_back_in() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        runner = rig.runner()
        await rig.hl.create_group("jobs", "g")
        group = runner.loaded.topic.groups.by_name["g"]
        group.partitions = dict(reversed(group.partitions.items()))
        assert [number for number, _ in runner.loaded.topic.groups.decide_delete("g", 0)] == [0, 1]


async def test_new_partitions_are_spread_over_members_though_a_crash_came_before_that_was_recorded() -> None:
    async with opened() as rig:
        await fetch(rig.hl)
        runner = rig.runner()
        runner.on_grown = None  # as if the journal ended right there
        await rig.hl.update_topic("jobs", partitions=3)
        await rig.reopen()
        await fetch(rig.hl)
        assert (await rig.hl.get_group("jobs", "g")).members == {"a": [0, 1, 2]}


async def test_a_group_is_made_in_one_unit() -> None:
    async with opened(topic={"partitions": 64}) as rig:
        await fill(rig, 3)
        runner = rig.runner()
        units: set[int] = set()
        emit = runner.loaded.topic.emit

        def spy(journal: Any, partition: Any, event: Any, now: Any) -> None:
            emit(journal, partition, event, now)
            if isinstance(event, GroupCreated):
                units.add(journal.open_unit_number)

        runner.loaded.topic.emit = spy  # type: ignore[method-assign]
        for number in range(40):  # wherever in its segment it happens
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"x" * 900)] * 20)
            units.clear()
            await rig.hl.create_group("jobs", f"g{number}")
            assert len(units) == 1


# -- handing over ------------------------------------------------------------------------------------------------------


async def test_a_member_whose_fetch_came_in_time_is_not_taken_for_dead_after_a_long_stall() -> None:
    async with opened() as rig:
        first = await fetch(rig.hl)
        rig.clock.advance(31)
        again = await fetch(rig.hl)
        assert again.generation == first.generation


# -- records that lie elsewhere ----------------------------------------------------------------------------------------


async def test_a_row_whose_record_was_written_again_is_delivered_though_its_segment_is_gone() -> None:
    async with opened(topic={"retention_hard_bytes": 4 << 20}, rewrite_below=1.0) as rig:
        await rig.hl.create_group("jobs", "g")
        await rig.hl.enqueue("jobs", b"late", delay=10.0)
        for _ in range(16):
            await fill(rig, 250, b"x" * 1000)
            await rig.hl.ack(await rig.hl.pop("jobs", 250))
        rig.clock.advance(11)
        for _ in range(4):
            await fill(rig, 250, b"x" * 1000)
            await rig.hl.ack([m for m in await rig.hl.pop("jobs", 251) if m.payload != b"late"])
        for _ in range(6):
            await fill(rig, 1)
            await rig.hl.snapshot("jobs")
            await rig.runner().upkeep.reclaim()
        assert rig.runner().upkeep.segments_reclaimed_total > 0
        assert rig.runner().upkeep.records_moved_total > 0
        await rig.reopen()
        seen: list[bytes] = []
        while (got := await fetch(rig.hl)).batches:
            seen += payloads(got)
            if b"late" in payloads(got):
                await rig.hl.group_nack("jobs", "g", "a", offsets(got), session="s")
            else:
                await rig.hl.group_ack("jobs", "g", "a", offsets(got), session="s")
        assert b"late" in seen
        rig.clock.advance(60)
        assert b"late" in payloads(await fetch(rig.hl))  # once more, found by what was recorded
        (place,) = await rig.hl.group_offsets("jobs", "g")
        assert place.dead == 0


# -- while segments go -------------------------------------------------------------------------------------------------


async def worked_off(rig: Rig) -> None:
    """Several segments that nobody needs, and two snapshots behind them."""
    for _ in range(12):
        await fill(rig, 250, b"x" * 1000)
        await rig.hl.ack(await rig.hl.pop("jobs", 250))
    rig.clock.advance(60)
    for _ in range(2):
        await fill(rig, 1)
        await rig.hl.snapshot("jobs")


async def test_a_group_made_or_reset_while_a_segment_is_being_deleted_begins_behind_it() -> None:
    async with opened(rewrite_below=0) as rig:
        await rig.hl.create_group("jobs", "r", unused_after=0.0)
        await worked_off(rig)
        rig.io.hold = {"_delete"}
        reclaiming = asyncio.ensure_future(rig.runner().upkeep.reclaim())
        await settle(200)
        assert rig.io.held
        info = await rig.hl.create_group("jobs", "g")
        (place,) = await rig.hl.reset_offsets("jobs", "r", to="earliest")
        rig.io.step()
        rig.io.hold = set()
        await reclaiming
        first = rig.runner().loaded.topic.following.floors[0]
        assert info.offsets[0].committed == place.committed > 0
        assert info.lag == place.lag
        assert first >= info.offsets[0].committed


@pytest.mark.parametrize("policy", ["interval", "os"])
async def test_what_a_segment_is_deleted_for_is_synced_before_it_is(policy: str) -> None:
    async with opened(topic={"fsync": policy, "fsync_interval": 60.0}, rewrite_below=0) as rig:
        await rig.hl.create_group("jobs", "g", unused_after=0.0)
        await worked_off(rig)
        rig.io.hold = {"_delete"}
        reclaiming = asyncio.ensure_future(rig.runner().upkeep.reclaim())
        await settle(200)
        assert rig.io.held
        journal = rig.runner().loaded.journal
        assert journal.durable_unit == journal.written_unit
        after = Rig(rig.disk.crash())  # the unlink itself may come through
        await after.open()
        (place,) = await after.hl.group_offsets("jobs", "g")
        assert place.committed >= rig.runner().loaded.topic.following.floors[0] > 0
        await after.hl.close()
        rig.io.step()
        rig.io.hold = set()
        await reclaiming


async def test_rows_that_timed_out_while_the_disk_stood_still_are_given_to_one_member_only() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", ack_timeout=5.0, member_lease=60.0)
        await fetch(rig.hl)
        rig.io.hold = {"commit"}
        enqueued = asyncio.ensure_future(rig.hl.enqueue("jobs", b"x"))
        waiting = asyncio.ensure_future(fetch(rig.hl))
        await settle()
        rig.clock.advance(6)
        beat = asyncio.ensure_future(fetch(rig.hl, "b", max_messages=0))
        await settle()
        assert not waiting.done()
        rig.io.release()
        await asyncio.gather(enqueued, beat)
        assert payloads(await waiting) == []  # its time was over before it came
        rig.clock.advance(60)
        got = [payloads(await fetch(rig.hl, member)) for member in "ab"]
        assert sorted(map(len, got)) == [0, 1]


def page_store(rig: Rig) -> PageStore:
    return rig.runner().streams._reading._pages


async def with_stale_page(rig: Rig) -> None:
    """Ten rows, a group at the first, and a page in memory by which the log begins at the seventh."""
    await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
    await rig.hl.create_group("jobs", "g")
    await rig.reopen()  # nothing of it is in memory now
    await rig.hl.group_fetch("jobs", "other", "m", session="s", max_messages=0)
    await rig.hl.group_fetch("jobs", "other", "m", session="s", max_messages=1, wait=5.0)
    page = page_store(rig).find(0, 0)
    assert page is not None
    page_store(rig).forget(0, 0)
    page_store(rig).add(Page(**{**page._asdict(), "first": 6}))


async def test_no_page_moves_a_group_on_that_the_log_has_rows_for(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as rig:
        await with_stale_page(rig)
        (before,) = await rig.hl.group_offsets("jobs", "g")
        got = [await fetch(rig.hl, "a", wait=5.0), await fetch(rig.hl, "a")]
        assert [p for fetched in got for p in payloads(fetched)] == [b"%d" % i for i in range(10)]
        (place,) = await rig.hl.group_offsets("jobs", "g")
        assert (place.committed, place.lag, place.outstanding) == (before.committed, before.lag, 10)
        assert "reclaimed unread" not in caplog.text


async def test_group_that_was_put_elsewhere_while_the_log_was_asked_stays_there() -> None:
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


async def test_disk_that_does_not_read_while_the_log_is_asked_is_told_and_logged(
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


async def test_fetch_that_was_served_by_another_page_is_not_served_once_more() -> None:
    """While its answer waits for the disk it would take more rows, which nobody gets until their time is over."""
    async with opened() as rig:
        await fill(rig, 10)
        await fetch(rig.hl, max_messages=0)
        streams = rig.runner().streams
        call = FetchCall(rig.runner().future(), "g", "a", "s", 5, 1 << 20, False)
        streams._reading._again(call)  # of a second partition, when that of the first had it served
        assert streams.inbox == []


async def test_group_below_the_logs_start_goes_on_there_and_that_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Segments that were taken out of a directory by hand, say: the reclaimer moves groups on before one goes."""
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
        assert (await measure(rig.hl)).topics[0].totals["moved_on"] == 1
        await rig.reopen()
        (place,) = await rig.hl.group_offsets("jobs", "g")
        assert place.committed >= start
        assert len(payloads(got)) == place.lag > 0
        assert caplog.text.count("reclaimed unread") == 1


async def test_a_page_that_was_read_for_a_group_further_on_loses_nothing_of_one_behind_it() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=256 << 10)
        await hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
        await hl.create_group("jobs", "behind")
        await hl.group_fetch("jobs", "ahead", "m", session="s", max_messages=5)
        await hl.group_ack("jobs", "ahead", "m", {0: range(5)}, session="s")
    async with MemoryBroker(disk=hl.disk) as again:  # nothing of it is in memory now
        for group, first in (("ahead", 5), ("behind", 0)):
            fetched = await again.group_fetch("jobs", group, "m", session="s", wait=5.0)
            assert [o for batch in fetched.batches for o in batch.offsets.tolist()] == list(range(first, 10))
