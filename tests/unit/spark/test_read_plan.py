"""Ranges of offsets are stable while the engine works, and have Kafka's meaning."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest, TopicNotFound
from heapline.contract.message import Outgoing
from heapline.spark.directory import DirectorySource
from heapline.spark.topic_log import DataLost, share_out
from tests.unit.engine.rig import PATH, Rig, opened
from tests.unit.engine.test_maintenance import churn, reclaim
from tests.unit.spark.log_rig import planned, read_work, release, rows, source_of, table

NUMBERS = itertools.count()


def offsets(**parts: int) -> str:
    return json.dumps({"jobs": {name[1:]: offset for name, offset in parts.items()}})


async def busy(rig: Rig, rounds: int) -> None:
    for _ in range(rounds):
        name = f"b{next(NUMBERS)}"
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % j * 2000, j, key=f"k{j}") for j in range(40)])
        await rig.hl.ack(await rig.hl.pop("jobs", 20, max_bytes=1 << 30))
        await rig.hl.prepare_batch(name, "p", [Outgoing(b"prepared", key=f"k{j}") for j in range(9)], topic="jobs")
        await rig.hl.commit_batch(name, ["p"])


@pytest.mark.parametrize("view", ["messages", "events"])
async def test_range_is_stable_while_the_engine_works_and_restarts(view: str) -> None:
    async with opened(topic={"partitions": 3}) as rig:
        await busy(rig, 30)
        await reclaim(rig)
        work, asked = planned(rig, view=view)  # its lease holds the journal from here on
        before = read_held(rig, work, asked)
        assert before.num_rows > 500
        await busy(rig, 20)
        await rig.hl.ack(await rig.hl.pop("jobs", 10_000, max_bytes=1 << 30))
        await reclaim(rig)
        assert read_held(rig, work, asked).equals(before)
        await rig.reopen()
        await busy(rig, 5)
        await reclaim(rig)
        assert read_held(rig, work, asked).equals(before)
        release(rig)
        starts = (await rig.hl.offsets("jobs")).items()
        await reclaim(rig)
        assert (await rig.hl.offsets("jobs")).items() != starts  # only the lease had kept them
        with pytest.raises(DataLost, match="reclaimed"):
            read_held(rig, work, asked)


def read_held(rig: Rig, work: Any, asked: Any) -> Any:
    """Read without ending the lease of the plan."""
    leases = {path: rig.disk.read_file(path) for path in rig.files(".lease")}
    found = read_work(rig, work, asked)
    for path, lease in leases.items():
        rig.disk.write_file_atomic(path, lease)
    return found


async def test_task_reads_its_units_while_the_engine_works() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await busy(rig, 10)
        (work, *_), asked = planned(rig)
        leases = {path: rig.disk.read_file(path) for path in rig.files(".lease")}
        whole = read_work(rig, [work], asked)
        log = source_of(rig).open(work.topic)
        seen = 0
        release(rig)  # so that nothing but the reading itself holds the journal
        for unit in log.units(work.start, work.end, hold_from=0.0):
            seen += sum(frame.row_count for frame in unit.frames)
            if unit.number % 10 == 0:
                await rig.hl.ack(await rig.hl.pop("jobs", 10_000, max_bytes=1 << 30))
                await reclaim(rig)
        assert seen == sum(end for _, end in work.ranges.values())
        assert whole.num_rows == 490
        assert leases
        assert not rig.files(".lease")


async def test_rows_below_the_log_start_are_data_loss() -> None:
    async with opened() as rig:
        await churn(rig)
        await reclaim(rig)
        start, end = (await rig.hl.offsets("jobs"))[0]
        assert start > 0
        with pytest.raises(
            DataLost, match=rf"rows 3 to {start - 1} of partition 0 .* were reclaimed.*failOnDataLoss=false"
        ):
            rows(rig, startingOffsets=offsets(p0=3))
        with pytest.raises(DataLost, match=f"rows {end} to {end + 6}"):
            rows(rig, endingOffsets=offsets(p0=end + 7))
        kept = rows(rig, startingOffsets=offsets(p0=3), failOnDataLoss="false")
        assert kept == rows(rig)
        assert rows(rig, endingOffsets=offsets(p0=end + 7), failOnDataLoss="false") == kept


async def test_starting_offsets_follow_kafka() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await busy(rig, 2)
        ends = {p: end for p, (_, end) in (await rig.hl.offsets("jobs")).items()}
        whole = rows(rig, view="events")
        assert rows(rig, view="events", startingOffsets=offsets(p0=-2, p1=-2), endingOffsets="latest") == whole
        assert rows(rig, view="events", endingOffsets=offsets(p0=-1, p1=-1)) == whole
        some = rows(rig, view="events", startingOffsets=offsets(p0=5, p1=ends[1]), endingOffsets=offsets(p0=9, p1=-1))
        assert [(r["partition"], r["offset"]) for r in some] == [(0, o) for o in range(5, 9)]
        work, asked = planned_without_subscribe(rig, view="events", assign='{"jobs": [1]}')
        assert read_work(rig, work, asked).to_pylist() == [r for r in whole if r["partition"] == 1]
        work, asked = planned_without_subscribe(rig, view="events", subscribePattern=".*")
        assert {piece.topic.topic for piece in work} == {"jobs"}  # and nothing of the broker's own
        assert read_work(rig, work, asked).num_rows == len(whole)
        assert planned_without_subscribe(rig, subscribePattern="o")[0] == []  # the whole name must match


def planned_without_subscribe(rig: Rig, **options: str) -> Any:
    from heapline.spark.options import parse_options
    from heapline.spark.read_plan import plan_batch

    asked = parse_options({"path": PATH, **options}, streaming=False)
    return plan_batch(DirectorySource(PATH, disk=rig.disk), asked), asked


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"startingOffsets": '{"jobs": {"0": 1}}'}, r"must name exactly the partitions.*missing: jobs-1"),
        ({"startingOffsets": '{"jobs": {"0": 1, "1": 1, "2": 1}}'}, r"not read: jobs-2"),
        ({"endingOffsetsByTimestamp": '{"jobs": {"0": 1}}'}, r"missing: jobs-1"),
        ({"startingOffsets": '{"jobs": {"0": 9, "1": 0}}', "endingOffsets": '{"jobs": {"0": 3, "1": -1}}'},
         r"partition 0 .* start offset 9 is after end offset 3"),
        ({"startingTimestamp": "99999999999999"}, r"nothing was written .* at or after 99999999999999"),
    ],
)  # fmt: skip
async def test_offsets_of_other_partitions_are_rejected(asked: dict[str, str], message: str) -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await busy(rig, 1)
        with pytest.raises(BadRequest, match=message):
            rows(rig, **asked)


async def test_unknown_topic_or_partition_is_rejected() -> None:
    async with opened() as rig:
        with pytest.raises(TopicNotFound, match="orders"):
            planned_without_subscribe(rig, subscribe="jobs,orders")
        with pytest.raises(BadRequest, match="does not have partition 3; its partitions are 0 to 0"):
            planned_without_subscribe(rig, assign='{"jobs": [3]}')
        assert rows(rig, subscribe="default/jobs") == []


async def test_times_resolve_to_the_first_row_at_or_after_them() -> None:
    async with opened(topic={"partitions": 3}) as rig:
        for i in range(40):
            keys = range(6) if i % 10 == 0 else range(2)
            await rig.hl.enqueue_batch("jobs", [Outgoing(bytes(30_000), key=f"k{j}") for j in keys])
            rig.clock.advance(1)
        whole = rows(rig, view="events", columns="partition,offset,timestamp")
        times = sorted({int(r["timestamp"].timestamp() * 1000) for r in whole})
        for time in [times[0] - 5, *times[::3], times[11] + 1]:
            after = rows(
                rig, view="events", columns="partition,offset,timestamp", startingTimestamp=str(time),
                startingOffsetsByTimestampStrategy="latest",
            )  # fmt: skip
            before = rows(rig, view="events", columns="partition,offset,timestamp", endingTimestamp=str(time))
            assert [r for r in whole if r["timestamp"].timestamp() * 1000 >= time] == after
            assert [r for r in whole if r["timestamp"].timestamp() * 1000 < time] == before


async def test_partition_without_rows_in_the_journal_keeps_its_end() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x", key=f"k{j}", priority=-500) for j in range(20)])
        await rig.hl.ack(await rig.hl.pop("jobs", 20))
        ends = {p: end for p, (_, end) in (await rig.hl.offsets("jobs")).items()}
        for _ in range(8):
            await rig.hl.enqueue_batch("jobs", [Outgoing(bytes(50_000), key="k0")] * 10)
            await rig.hl.ack(await rig.hl.pop("jobs", 10, max_bytes=1 << 30))
        for _ in range(2):
            await rig.hl.enqueue("jobs", b"mark", key="k0")
            await rig.hl.snapshot("jobs")
        await rig.runner().maintenance.reclaim()
        now = await rig.hl.offsets("jobs")
        silent = next(p for p, (start, end) in now.items() if start == end)
        assert now[silent] == (ends[silent], ends[silent])
        log = source_of(rig).open(source_of(rig).topics()[0])
        log.refresh()
        assert {p: (log.starts()[p], end) for p, end in log.ends().items()} == now


async def test_refreshed_log_equals_a_newly_opened_one() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await rig.hl.enqueue("jobs", b"first")
        ref = source_of(rig).topics()[0]
        watched = source_of(rig).open(ref)
        assert watched.refresh() is True
        for i in range(12):
            assert watched.refresh() is False
            await busy(rig, 3)
            if i % 4 == 3:
                await rig.hl.ack(await rig.hl.pop("jobs", 10_000, max_bytes=1 << 30))
                await reclaim(rig)
            assert watched.refresh() is True
            fresh = source_of(rig).open(ref)
            fresh.refresh()
            found = {p: (fresh.starts()[p], end) for p, end in fresh.ends().items()}
            assert found == await rig.hl.offsets("jobs")
            assert (watched.starts(), watched.ends()) == (fresh.starts(), fresh.ends())
            assert watched.last_unit() == fresh.last_unit()
        assert rig.runner().maintenance.segments_reclaimed_total


async def test_recreated_topic_is_another_topic() -> None:
    async with opened() as rig:
        await busy(rig, 1)
        watched = source_of(rig).open(source_of(rig).topics()[0])
        work, asked = planned(rig)
        await rig.hl.delete_topic("jobs")
        await rig.topic()
        await rig.hl.enqueue("jobs", b"new")
        with pytest.raises(Exception, match=r"was deleted|does not exist|no such|missing"):
            watched.refresh()
        with pytest.raises(Exception, match=r"reclaimed|does not exist|no such|missing"):
            read_work(rig, work, asked)
        assert [r["value"] for r in rows(rig)] == [b"new"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 120))
def test_batch_limit_is_shared_by_waiting_rows(pairs: list[tuple[int, int]], limit: int) -> None:
    starts, ends = [min(p) for p in pairs], [max(p) for p in pairs]
    found = share_out(limit, starts, ends)
    waiting = [end - start for start, end in zip(starts, ends, strict=True)]
    given_ = [f - start for f, start in zip(found, starts, strict=True)]
    assert sum(given_) == min(limit, sum(waiting))
    assert all(0 <= g <= w for g, w in zip(given_, waiting, strict=True))
    if sum(waiting) > limit:
        assert all(abs(g - limit * w / sum(waiting)) < 1 for g, w in zip(given_, waiting, strict=True))


@settings(max_examples=5)
@given(st.integers(1, 12))
async def test_read_is_split_into_min_partitions(pieces: int) -> None:
    async with opened(topic={"partitions": 2}) as rig:
        for _ in range(40):
            await rig.hl.enqueue_batch("jobs", [Outgoing(bytes(30_000), key=f"k{j}") for j in range(4)])
        work, asked = planned(rig, minPartitions=str(pieces), maxPartitionBytes=str(1 << 30))
        assert len(work) == pieces
        counts = [sum(b.num_rows for b in read_piece(rig, w, asked)) for w in work]
        assert sum(counts) == 160
        assert min(counts) >= 160 // pieces // 3
        assert table(rig).num_rows == 160


def read_piece(rig: Rig, work: Any, asked: Any) -> Any:
    from heapline.spark.read_plan import read

    return list(read(source_of(rig), work, asked))


async def test_plan_holds_only_what_it_reads() -> None:
    async with opened() as rig:
        planned(rig)
        assert not rig.files(".lease")
        await churn(rig)
        with pytest.raises(BadRequest):
            planned(rig, startingOffsets=offsets(p0=5), endingOffsets=offsets(p0=2))
        assert not rig.files(".lease")
        end = (await rig.hl.offsets("jobs"))[0][1]
        planned(rig, startingOffsets=offsets(p0=end - 1))
        (lease,) = rig.files(".lease")
        assert json.loads(rig.disk.read_file(lease))["segment"] > 1
