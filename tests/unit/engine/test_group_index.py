"""The index of a topic's groups equals its journal: live, after a crash, and from a snapshot."""

from __future__ import annotations

import asyncio

import pytest

from heapline.contract.message import Outgoing
from heapline.core.events import GroupDeleted
from tests.simulation.fake_disk import FakeDisk
from tests.unit.engine.rig import Rig, opened, settle, until
from tests.unit.engine.stream_rig import ack_below, as_lists, make_group, record, reported


async def everything(rig: Rig) -> None:
    """Enqueue in every way that adds messages to the stream, and in some that do not."""
    hl = rig.hl
    await hl.enqueue_batch("jobs", [Outgoing(b"a%d" % i) for i in range(5)])
    await hl.enqueue_batch("jobs", [Outgoing(b"d%d" % i, delay=1.0 + i % 2) for i in range(6)])
    later = (await hl.enqueue("jobs", b"later", delay=3600.0)).id
    await hl.prepare_batch("b", "p", {"jobs": [Outgoing(b"b0"), Outgoing(b"b1", delay=5.0)]})
    await hl.prepare_batch("b", "q", {"jobs": [Outgoing(b"lost")]})
    await hl.commit_batch("b", ["p"])
    await hl.ack(await hl.pop("jobs", 2))
    await hl.nack(await hl.pop("jobs", 1), backoff=1.0)
    await hl.reschedule("jobs", later, delay=0)
    rig.clock.advance(10_000)
    rig.runner().turns.plan()
    await until(lambda: rig.runner().loaded.topic.partitions[0].entries.delayed == 0)
    await settle()


async def check(rig: Rig) -> None:
    topic = rig.runner().loaded.topic
    stream = await reported(rig.runner())
    assert topic.counts[0].total == len(stream.offsets) == 14
    assert len(set(stream.ids.tolist())) == 14, "each message once"
    tail = topic.tails[0]
    assert tail is not None
    page = tail.read(tail.start, 1000, topic.partitions[0].state.offset)
    assert page is not None
    assert as_lists(page.rows) == as_lists(stream.only(stream.offsets >= tail.start))
    assert tail.durable_end(rig.runner().loaded.journal.durable_unit) == topic.partitions[0].state.offset
    assert topic.groups.by_name["g"].partitions[0].lag(topic.counts[0].total) == 14 - 3


@pytest.mark.parametrize("how", ["live", "journal", "snapshot", "between"])
async def test_group_index_equals_the_stream_in_the_journal(how: str) -> None:
    async with opened() as rig:
        await make_group(rig.runner())
        await everything(rig)
        if how in ("snapshot", "between"):
            await rig.hl.snapshot("jobs")
        await ack_below(rig.runner(), 4)
        if how == "snapshot":
            await rig.hl.snapshot("jobs")
        if how == "live":
            await check(rig)
            return
        other = Rig(rig.disk.crash())
        other.clock.advance(10_000)
        await other.open()
        try:
            await check(other)
            assert other.runner().loaded.topic.groups.by_name["g"].partitions[0].committed == 3 + 1
        finally:
            await other.hl.close()


async def test_topic_without_groups_keeps_no_tail_and_loses_it_with_the_last() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        topic = rig.runner().loaded.topic
        assert topic.tails == [None]
        await make_group(rig.runner())
        assert topic.tails[0] is not None
        await record(rig.runner(), lambda now: [(0, GroupDeleted("g", now.steady))])
        assert topic.tails == [None]
        assert not topic.groups


async def test_topic_without_streams_counts_nothing() -> None:
    async with opened(topic={"streams": False}) as rig:
        await rig.hl.enqueue("jobs", b"x")
        assert rig.runner().loaded.topic.counts[0].total == 0


async def test_group_gets_the_partitions_of_a_topic_that_grows_from_their_beginning() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await make_group(rig.runner(), "one")
        await make_group(rig.runner(), "two")
        spread: list[int] = []
        rig.runner().on_grown = lambda runner, now: spread.append(len(runner.loaded.topic.partitions))
        await rig.hl.update_topic("jobs", partitions=5)
        assert spread == [5]
        other = Rig(rig.disk.crash())
        await other.open()
        for each in (rig, other):
            for group in each.runner().loaded.topic.groups:
                assert sorted(group.partitions) == [0, 1, 2, 3, 4]
                assert [group.partitions[p].committed for p in (2, 3, 4)] == [0, 0, 0]
        await other.hl.close()


async def test_group_half_created_or_half_deleted_in_a_crash_is_repaired_at_open() -> None:
    async with opened(topic={"partitions": 3}) as rig:
        for name in ("half", "gone", "whole"):
            await make_group(rig.runner(), name)
        await record(rig.runner(), lambda now: [(2, GroupDeleted("half", now.steady))])
        await record(rig.runner(), lambda now: [(0, GroupDeleted("gone", now.steady))])
        disk: FakeDisk = rig.disk
        for _ in range(2):
            other = Rig(disk.crash())
            await other.open()
            groups = other.runner().loaded.topic.groups
            assert sorted(groups.by_name) == ["half", "whole"]
            assert all(sorted(group.partitions) == [0, 1, 2] for group in groups)
            await asyncio.sleep(0)
            await other.hl.close()
            disk = other.disk
