"""Pages of the stream: their rows, the order of the rows, and the columns of each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from heapline.contract.message import Outgoing
from heapline.engine.groups.pages import Page, read_page
from tests.unit.engine.rig import Rig, opened, settle


def page(rig: Rig, start: int = 0, **limits: Any) -> Page:
    runner = rig.runner()
    return read_page(
        runner.loaded.journal.reader(), runner.loaded.topic.layout, runner.loaded.journal.load, 0, start, **limits
    )


def payloads(page: Page) -> list[bytes]:
    return list(page.payloads)


async def pass_time(rig: Rig, ms: int) -> None:
    rig.clock.advance(ms)
    rig.runner().turns.plan()
    await settle()


async def test_page_contains_immediate_messages_in_order() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"a", priority=7)
        await rig.hl.enqueue("jobs", b"later", delay=60)
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"b"), Outgoing(b"later", delay=60.0), Outgoing(b"c" * 300)])
        got = page(rig)
        assert payloads(got) == [b"a", b"b", b"c" * 300]
        assert got.rows.offsets.tolist() == [0, 2, 4]
        assert got.priorities.tolist() == [7, 0, 0]
        assert (got.start, got.end) == (0, rig.runner().loaded.topic.partitions[0].state.offset)
        assert got.keys is got.headers is got.fairness_keys is None


async def test_fired_row_stays_at_its_offset_after_a_worker_acked_it() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"second", delay=2)
        await rig.hl.enqueue("jobs", b"first", delay=1, key="k", headers={"h": "v"})
        await rig.hl.enqueue("jobs", b"now")
        await pass_time(rig, 1500)
        await pass_time(rig, 1500)
        await rig.hl.ack(await rig.hl.pop("jobs", 10))
        got = page(rig)
        assert payloads(got) == [b"now", b"first", b"second"]
        assert got.keys == [None, "k", None]
        assert got.headers == [None, {"h": "v"}, None]
        assert np.all(np.diff(got.rows.offsets) > 0)


async def test_retry_by_a_worker_adds_no_second_row() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"a")
        for _ in range(2):
            await rig.hl.nack(await rig.hl.pop("jobs", 1), backoff=1)
            await pass_time(rig, 2000)
        assert payloads(page(rig)) == [b"a"]


async def test_cancelled_and_purged_before_firing_have_no_row() -> None:
    async with opened() as rig:
        first = await rig.hl.enqueue("jobs", b"cancelled", delay=1)
        await rig.hl.cancel("jobs", first.message_id)
        await rig.hl.enqueue("jobs", b"purged", delay=1)
        await rig.hl.purge("jobs")
        await pass_time(rig, 2000)
        got = page(rig)
        assert payloads(got) == []
        assert got.end == rig.runner().loaded.topic.partitions[0].state.offset, (
            "a reader advances past rows that are not in the stream"
        )


async def test_rescheduled_message_is_in_the_stream_with_its_new_priority() -> None:
    async with opened() as rig:
        known = await rig.hl.enqueue("jobs", b"late", delay=60, priority=1)
        await rig.hl.enqueue("jobs", b"now")
        await rig.hl.reschedule("jobs", known.message_id, delay=0, priority=9)
        await pass_time(rig, 10)
        got = page(rig)
        assert sorted(payloads(got)) == [b"late", b"now"]
        assert payloads(got)[-1] == b"late"


async def test_committed_batch_is_in_the_stream_at_its_commit() -> None:
    async with opened() as rig:
        await rig.hl.prepare_batch("b1", "p1", [Outgoing(b"one"), Outgoing(b"two", delay=60.0)], topic="jobs")
        await rig.hl.enqueue("jobs", b"between")
        await rig.hl.prepare_batch("b1", "p2", [Outgoing(b"three", key="k")], topic="jobs")
        await rig.hl.commit_batch("b1", ["p1", "p2"])
        got = page(rig)
        assert payloads(got) == [b"between", b"one", b"three"]
        assert got.keys == [None, None, "k"]


async def test_pages_follow_one_another_and_end_at_units() -> None:
    async with opened() as rig:
        for number in range(20):
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % number)] * 5)
        found, at, place = [], 0, None
        while True:
            got = page(rig, at, rows_max=7, place=place)
            if got.end == at:
                break
            assert got.start == at
            assert len(got) == 10, "two units: the second passes the limit"
            found += payloads(got)
            at, place = got.end, got.place
        assert found == [b"%d" % number for number in range(20) for _ in range(5)]


async def test_page_from_the_middle_of_a_unit_covers_the_whole_unit() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i) for i in range(10)])
        got = page(rig, 4)
        assert got.start <= 4
        assert payloads(got)[4 - got.start :] == [b"%d" % i for i in range(4, 10)]


async def test_corrupt_record_is_named_and_its_neighbors_are_served() -> None:
    async with opened() as rig:
        for i in range(3):
            await rig.hl.enqueue("jobs", b"fired %d" % i, delay=1)
        await pass_time(rig, 2000)
        runner = rig.runner()
        whole = page(rig)
        position = int(whole.rows.positions[1])
        load = runner.loaded.journal.load

        def damaged(positions: Any) -> Any:
            records = load(positions)
            at = positions.tolist().index(position)
            records.rows["id"][at] += 1
            return records

        got = read_page(runner.loaded.journal.reader(), runner.loaded.topic.layout, damaged, 0, 0)
        assert list(got.bad) == [1]
        assert got.rows.ids.tolist() == whole.rows.ids.tolist()
        assert payloads(got)[0] == b"fired 0"
        assert payloads(got)[2] == b"fired 2"


@pytest.mark.parametrize("count", [1, 1000])
async def test_batches_share_the_columns_of_their_page(count: int) -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * count)
        got = page(rig)
        batch = got.batch(None, "jobs", 7, slice(0, count), np.ones(count, dtype=np.int64))
        assert len(batch) == count
        assert batch.offsets.base is not None or batch.offsets is got.rows.offsets
        assert [m.payload for m in batch.messages()] == [b"x"] * count
