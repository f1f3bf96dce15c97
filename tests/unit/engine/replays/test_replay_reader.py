"""Replays to a subscriber: which rows, in which order, from which start to which end, and how fast."""

from __future__ import annotations

import asyncio
import errno
import random
from datetime import timedelta
from typing import Any

import pytest

import heapline
from heapline.contract import replays
from heapline.contract.message import from_ms
from heapline.contract.replays import SaveCheckpoint
from heapline.contract.stream import ReplayFilter, StreamBatch, StreamMessage
from heapline.core.placement import place
from heapline.engine.replays import handlers, reader, scan
from heapline.journal.records import BadRecord, Records, empty_records
from heapline.journal.small_files import SmallFiles
from heapline.testing import FakeClock, HandClock, MemoryBroker
from tests.unit.engine.rig import PATH, Rig, opened, settle

SMALL: dict[str, Any] = {"segment_bytes": 1 << 20, "max_payload_bytes": 64 << 10}


async def read(hl: Any, **options: Any) -> list[StreamMessage]:
    return [row async for row in hl.replay("jobs", **options)]


async def payloads(hl: Any, **options: Any) -> list[bytes]:
    return [row.payload for row in await read(hl, **options)]


async def pass_time(hl: MemoryBroker, clock: HandClock, seconds: float) -> None:
    clock.advance(seconds)
    for _ in range(2):
        await hl.stats("jobs")


async def made(clock: HandClock, **config: Any) -> MemoryBroker:
    hl = MemoryBroker(clock)
    await hl.create_topic("jobs", **{**SMALL, **config})
    return hl


# -- order -------------------------------------------------------------------------------------------------------------


async def test_rows_are_ordered_by_unit_across_and_offset_within_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan.MergedScan.read, "__defaults__", (7, 1 << 20))
    clock, draw = HandClock(), random.Random(7)
    hl = await made(clock, partitions=4)
    for i in range(80):
        await hl.enqueue("jobs", b"%d" % i, key=str(draw.random()), delay=draw.choice([None, None, 1.0]))
        if i % 20 == 19:
            await pass_time(hl, clock, 1)
    units: dict[tuple[int, int], int] = {}
    for partition in range(4):
        async for frame in hl.read_log("jobs", partition):
            units |= {(partition, frame.offset + i): frame.unit for i in range(frame.row_count)}
    rows = await read(hl)
    assert len(rows) == 80
    order = [units[row.partition, row.offset] for row in rows]
    assert order == sorted(order)
    for partition in range(4):
        offsets = [row.offset for row in rows if row.partition == partition]
        assert offsets == sorted(set(offsets))


async def test_batches_hold_the_same_rows_as_messages() -> None:
    hl = await made(HandClock(), partitions=3)
    for i in range(40):
        await hl.enqueue("jobs", b"%d" % i, key=str(i), headers={"n": str(i)}, priority=i)
    rows = await read(hl)
    batches: list[StreamBatch] = [batch async for batch in hl.replay("jobs", batches=True)]
    again = [row for batch in batches for row in batch.messages()]
    seen = [(r.partition, r.offset, r.id, r.payload, r.key, r.headers, r.priority, r.attempts) for r in rows]
    assert seen == [(r.partition, r.offset, r.id, r.payload, r.key, r.headers, r.priority, r.attempts) for r in again]


# -- ranges ------------------------------------------------------------------------------------------------------------


async def test_offset_ranges_cut_units_at_the_requested_offsets() -> None:
    hl = await made(HandClock())
    await hl.enqueue_batch("jobs", [heapline.Outgoing(b"%d" % i) for i in range(10)])
    assert await payloads(hl, start=3, end=6) == [b"3", b"4", b"5"]
    assert await payloads(hl, start={0: 8}) == [b"8", b"9"]
    assert await payloads(hl, start=4, end={0: 4}) == []
    assert await payloads(hl, start=6, end=2) == []
    assert await payloads(hl, start="latest") == []
    assert await payloads(hl, start=100) == []


async def test_time_range_contains_the_units_written_in_it() -> None:
    clock = HandClock()
    hl = await made(clock, partitions=2)
    moments = []
    for i in range(30):
        moments.append(clock.now())
        await hl.enqueue("jobs", b"%d" % i, key=str(i))
        await pass_time(hl, clock, 5)
    tick = timedelta(milliseconds=1)
    assert await payloads(hl, start=moments[10], end=moments[13]) == [b"10", b"11", b"12"]
    assert await payloads(hl, start=moments[10] + tick, end=moments[13] + tick) == [b"11", b"12", b"13"]
    assert await payloads(hl, start=moments[0] - timedelta(days=1), end=moments[1]) == [b"0"]
    assert await payloads(hl, start=moments[28]) == [b"28", b"29"]
    assert await payloads(hl, start=clock.now() + timedelta(days=1)) == []


async def test_time_ranges_are_found_by_the_index_of_a_long_journal() -> None:
    clock = HandClock()
    hl = await made(clock)
    moments = []
    for i in range(60):  # several entries of the index, and several segments
        moments.append(clock.now())
        await hl.enqueue("jobs", b"%d" % i + b"." * 60_000)
        await pass_time(hl, clock, 1)
    runner = hl.topics.runner("jobs")
    reader = runner.loaded.journal.reader()
    assert len(reader.segments()) > 2
    for i in (0, 1, 17, 30, 59):
        at = round(moments[i].timestamp() * 1000)
        assert reader.offset_at(0, wall=at) == i


async def test_delayed_message_is_in_the_time_range_in_which_it_fired() -> None:
    clock = HandClock()
    hl = await made(clock)
    await hl.enqueue("jobs", b"late", delay=60)
    await pass_time(hl, clock, 30)
    middle = clock.now()
    assert await payloads(hl, end=middle) == []
    await pass_time(hl, clock, 31)
    assert await payloads(hl, end=middle) == []
    assert await payloads(hl, start=middle) == [b"late"]


async def test_replay_ends_at_the_log_end_seen_at_its_start() -> None:
    hl = await made(HandClock())
    await hl.enqueue("jobs", b"0")
    seen = []
    async for row in hl.replay("jobs"):
        seen.append(row.payload)
        await hl.enqueue("jobs", b"new")
    assert seen == [b"0"]


async def drain_and_reclaim(rig: Rig) -> tuple[int, int]:
    """Fill and drain the topic until its first segments are deleted. Return the log's first offset and its end."""
    for _ in range(30):
        await rig.hl.enqueue("jobs", b"." * 100_000)
        await rig.hl.ack(await rig.hl.pop("jobs", 1))
        rig.clock.advance(1)
    for _ in range(3):
        await rig.hl.enqueue("jobs", b".")  # the snapshots that reclaiming needs
        await rig.hl.snapshot("jobs")
    await rig.runner().maintenance.reclaim()
    first, end = (await rig.hl.offsets("jobs"))[0]
    assert first > 0, "the test would prove nothing"
    return first, end


async def test_start_by_time_before_the_reclaimed_part_is_rejected_unless_gaps_are_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened() as rig:
        before = from_ms(rig.clock.wall_ms())
        first, _ = await drain_and_reclaim(rig)
        with pytest.raises(heapline.BadRequest, match=rf"starts at offset {first}, .*allow_gaps"):
            await read(rig.hl, start=before)
        with pytest.raises(heapline.BadRequest, match="allow_gaps"):
            await rig.hl.start_replay("again", "jobs", start=before)
        assert not await rig.hl.list_replays()
        everything_left = [row.offset for row in await read(rig.hl, start="earliest")]
        assert [row.offset for row in await read(rig.hl, start=before, allow_gaps=True)] == everything_left
        assert [record.levelname for record in caplog.records if "reclaimed" in record.getMessage()] == ["WARNING"]
        info = await rig.hl.start_replay("again", "jobs", start=before, allow_gaps=True)
        assert info.gaps == {0: first}
        assert await read(rig.hl, start=from_ms(rig.clock.wall_ms())), "a start by time within the log is accepted"


async def test_start_by_time_is_rejected_if_rows_from_before_the_clock_was_set_back_were_reclaimed() -> None:
    """The log then starts with rows whose wall time is before the requested one."""
    async with opened() as rig:
        asked = from_ms(rig.clock.wall_ms() + 1)
        for set_back in (3600, 0):
            for _ in range(15):
                await rig.hl.enqueue("jobs", b"." * 100_000)
                await rig.hl.ack(await rig.hl.pop("jobs", 1))
                rig.clock.advance(1)
            rig.clock.jump_wall(-set_back)
        for _ in range(3):
            await rig.hl.enqueue("jobs", b".")
            await rig.hl.snapshot("jobs")
        rig.clock.advance(4000)
        await rig.hl.enqueue("jobs", b".")
        await rig.runner().maintenance.reclaim()
        begin = rig.runner().loaded.journal.reader().first_unit()
        assert begin is not None
        assert begin.number > 1, "the test would prove nothing"
        assert from_ms(begin.wall) < asked
        with pytest.raises(heapline.BadRequest, match="allow_gaps"):
            await read(rig.hl, start=asked)
        first, end = (await rig.hl.offsets("jobs"))[0]
        rows = await read(rig.hl, start=asked, allow_gaps=True)
        assert first <= rows[0].offset <= rows[-1].offset < end


async def test_reclaimed_offsets_and_checkpoints_are_skipped_if_gaps_are_allowed() -> None:
    async with opened() as rig:
        first, _ = await drain_and_reclaim(rig)
        await rig.hl.do(SaveCheckpoint("jobs", "mine", {0: 1}))
        for options in ({"start": first - 1}, {"start": {0: 0}}, {"checkpoint": "mine"}):
            rows = await read(rig.hl, allow_gaps=True, **options)
            assert rows[0].offset >= first, options
        assert (await rig.hl.start_replay("b", "jobs", start=first, allow_gaps=True)).gaps == {}


async def test_partition_whose_rows_are_all_reclaimed_counts_as_a_gap_only_before_the_log() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        before = from_ms(rig.clock.wall_ms())
        silent, other = (next(k for k in map(str, range(99)) if place([k.encode()], 2).item() == p) for p in (1, 0))
        await rig.hl.enqueue("jobs", b"once", key=silent)
        await rig.hl.ack(await rig.hl.pop("jobs", 1))
        rig.clock.advance(1)
        for _ in range(30):
            await rig.hl.enqueue("jobs", b"." * 100_000, key=other)
            await rig.hl.ack(await rig.hl.pop("jobs", 1))
        rig.clock.advance(1)
        for _ in range(3):
            await rig.hl.enqueue("jobs", b".", key=other)
            await rig.hl.snapshot("jobs")
        await rig.runner().maintenance.reclaim()
        with pytest.raises(heapline.BadRequest, match=r"partition 1 .*allow_gaps"):
            await read(rig.hl, start=before, partitions=[1])
        assert await read(rig.hl, start=before, partitions=[1], allow_gaps=True) == []
        assert await read(rig.hl, start=from_ms(rig.clock.wall_ms()), partitions=[1]) == []


async def test_reclaimed_start_is_rejected_with_the_logs_start() -> None:
    async with opened() as rig:
        first, end = await drain_and_reclaim(rig)
        with pytest.raises(heapline.BadRequest, match=f"starts at {first}"):
            await read(rig.hl, start=first - 1)
        assert next(row.offset for row in await read(rig.hl, start="earliest")) >= first
        assert await read(rig.hl, start=end) == []
        await rig.hl.do(SaveCheckpoint("jobs", "mine", {0: 1}))
        with pytest.raises(heapline.BadRequest, match="use another"):
            await read(rig.hl, checkpoint="mine")


@pytest.mark.parametrize(
    "options", [{"start": -1}, {"start": "first"}, {"start": 1.5}, {"start": {0: -1}}, {"start": {7: 0}}, {"start": {}},
                {"partitions": [3]}, {"partitions": []}, {"partitions": "0"}, {"mode": "slow"}, {"rate": 0},
                {"rate": "1"}, {"where": {"key": "a"}}, {"checkpoint": "a/b"}, {"end": "never"}], ids=str,
)  # fmt: skip
async def test_invalid_replay_request_is_rejected(options: dict[str, Any]) -> None:
    hl = await made(HandClock())
    with pytest.raises((heapline.BadRequest, heapline.BadName)):
        await read(hl, **options)


async def test_topic_without_streams_cannot_be_replayed() -> None:
    hl = await made(HandClock(), streams=False)
    with pytest.raises(heapline.BadRequest, match="streams=False"):
        await read(hl)


# -- filter and rate ---------------------------------------------------------------------------------------------------


async def test_filters_choose_by_priority_key_and_headers() -> None:
    hl = await made(HandClock())
    await hl.enqueue("jobs", b"plain", priority=1)
    await hl.enqueue("jobs", b"key", priority=2, key="k")
    await hl.enqueue("jobs", b"both", priority=3, key="k", headers={"a": "1", "b": "2"})
    await hl.enqueue("jobs", b"other", priority=4, headers={"a": "2"})
    assert await payloads(hl, where=ReplayFilter(priority_min=2, priority_max=3)) == [b"key", b"both"]
    assert await payloads(hl, where=ReplayFilter(key="k")) == [b"key", b"both"]
    assert await payloads(hl, where=ReplayFilter(headers={"a": "1", "b": "2"})) == [b"both"]
    assert await payloads(hl, where=ReplayFilter(key="k", headers={"a": "2"})) == []
    assert await payloads(hl, where=ReplayFilter()) == [b"plain", b"key", b"both", b"other"]


async def test_rate_limits_rows_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LOOK_MS", 0)  # reads the clock in every step of the loop
    clock = HandClock()
    hl = await made(clock)
    await hl.enqueue_batch("jobs", [heapline.Outgoing(b"%d" % i) for i in range(50)])
    got: list[bytes] = []

    async def read() -> None:
        async for row in hl.replay("jobs", rate=20):
            got.append(row.payload)

    task = asyncio.ensure_future(read())
    counts = []
    for _ in range(12):
        await settle()
        counts.append(len(got))
        FakeClock.advance(clock, 0.1)
    assert counts == [2 * n for n in range(1, 13)], "a burst is a tenth of the rows per second"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert got == [b"%d" % i for i in range(24)]


# -- checkpoints -------------------------------------------------------------------------------------------------------


async def test_checkpoint_continues_where_its_reader_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "SAVE_ROWS", 5)
    hl = await made(HandClock(), partitions=2)
    for i in range(30):
        await hl.enqueue("jobs", b"%d" % i, key=str(i))
    seen: list[bytes] = []
    while len(seen) < 60:
        rows = hl.replay("jobs", checkpoint="mine")
        before = len(seen)
        async for row in rows:
            seen.append(row.payload)
            if len(seen) - before == 7:
                break
        await rows.aclose()  # type: ignore[attr-defined]
        if len(seen) == before:
            break
    # The row at which a reader stops is not finished: it is delivered again.
    assert list(dict.fromkeys(seen)) == [b"%d" % i for i in range(30)]
    assert max(map(seen.count, seen)) <= 2
    await hl.enqueue("jobs", b"new")
    assert await payloads(hl, checkpoint="mine") == [b"new"]
    assert await payloads(hl, checkpoint="mine") == []


async def test_checkpoints_survive_a_restart_and_are_deleted_with_their_topic() -> None:
    clock = HandClock()
    hl = await made(clock)
    await hl.enqueue("jobs", b"0")
    assert await payloads(hl, checkpoint="mine") == [b"0"]
    await hl.enqueue("jobs", b"1")
    await hl.close()
    async with MemoryBroker(clock, disk=hl.disk) as again:
        assert await payloads(again, checkpoint="mine") == [b"1"]
        await again.delete_topic("jobs")
        await again.create_topic("jobs", **SMALL)
        await again.enqueue("jobs", b"2")
        assert await payloads(again, checkpoint="mine") == [b"2"]


async def test_corrupt_checkpoint_is_reported_and_not_treated_as_new() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"0")
        assert len(await read(rig.hl, checkpoint="mine")) == 1
        (path,) = rig.files("/mine.json")
        file = rig.disk.open(path, write=True)
        file.pwritev([b"9"], 40)
        with pytest.raises(heapline.CorruptionError, match="checksum"):
            await read(rig.hl, checkpoint="mine")


async def test_replay_continues_when_its_topic_is_reloaded() -> None:
    async with opened() as rig:
        for i in range(10):
            await rig.hl.enqueue("jobs", b"%d" % i)
        rows = rig.hl.replay("jobs", rate=1e6)
        seen = [(await anext(rows)).payload]
        await rig.hl.update_topic("jobs", fsync="os")  # takes effect when the topic is opened again
        await settle()
        seen += [row.payload async for row in rows]
        assert seen == [b"%d" % i for i in range(10)]


# -- a journal that is reclaimed ---------------------------------------------------------------------------------------


async def churn(rig: Rig, rounds: int = 6) -> None:
    """Write and ack a few segments."""
    for _ in range(rounds):
        await rig.hl.enqueue_batch("jobs", [heapline.Outgoing(b"x" * 50_000, priority=-100)] * 10)
        await rig.hl.ack(await rig.hl.pop("jobs", 10, max_bytes=1 << 30))


async def reclaim(rig: Rig) -> None:
    for _ in range(2):
        await rig.hl.enqueue("jobs", b"mark", priority=-200)
        await rig.hl.ack(await rig.hl.pop("jobs"))
        await rig.hl.snapshot("jobs")
    await rig.runner().maintenance.reclaim()


@pytest.mark.parametrize("mode", ["all", "fast"])
async def test_live_message_is_read_at_its_current_position(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"kept", delay=10, key="k", headers={"h": "v"}, priority=7)
        await rig.hl.enqueue("jobs", b"gone", delay=10, priority=-1)
        await rig.hl.enqueue("jobs", b"beside", priority=9)
        rig.clock.advance(11)
        for _ in range(2):
            await rig.hl.stats("jobs")
        await rig.hl.ack(await rig.hl.pop("jobs", 1))
        journal, looks = rig.runner().loaded.journal, list[int]()
        load = journal.load

        def moved_away(positions: Any) -> Records:
            """Records of fired rows were moved: at the position in the row nothing can be read."""
            looks.append(len(positions))
            if len(looks) > 1:
                return load(positions)
            records = empty_records(len(positions))
            records.bad = {i: BadRecord(0, "", 0, "gone") for i in range(len(positions))}
            return records

        monkeypatch.setattr(journal, "load", moved_away)
        rows = await read(rig.hl, mode=mode)
        assert looks == [2, 1], "the record of the live message was read at its current position"
        reported = {(r.payload, r.key, r.headers.get("h"), r.priority) for r in rows}
        assert reported == {(b"kept", "k", "v", 7), (b"beside", None, None, 9)}


async def test_running_replay_pins_its_part_of_the_journal_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan.MergedScan.read, "__defaults__", (1, 1))
    async with opened() as rig:
        for _ in range(3):
            await churn(rig)
        rows = rig.hl.replay("jobs")
        seen = [await anext(rows)]
        rig.clock.advance(5)
        seen += [await anext(rows) for _ in range(10)]
        await reclaim(rig)
        seen += [row async for row in rows]
        assert len(seen) == 180
        assert rig.files(".lease") == []
        await reclaim(rig)
        assert (await rig.hl.offsets("jobs"))[0][0] > 0


async def test_two_readers_of_one_checkpoint_save_one_after_the_other() -> None:
    async with opened(topic={"partitions": 2}) as rig:
        rig.io.hold.add("save")
        keeps = [asyncio.ensure_future(rig.hl.do(SaveCheckpoint("jobs", "c", {p: 5}))) for p in (0, 1)]
        gave_up = asyncio.ensure_future(rig.hl.do(SaveCheckpoint("jobs", "c", {0: 3})))
        await settle()
        gave_up.cancel()
        await settle()
        assert len(rig.io.held) == 1, "otherwise two threads write one file"
        rig.io.release()
        await asyncio.gather(*keeps)
        assert await handlers.find_checkpoint(rig.runner(), "c") == {0: 5, 1: 5}


@pytest.mark.parametrize("start", ["latest", 7])
async def test_checkpoint_reads_new_partitions_from_their_beginning(start: Any) -> None:
    async with opened(topic={"partitions": 2}) as rig:
        await read(rig.hl, start=start, checkpoint="c")
        await rig.hl.update_topic("jobs", partitions=6)
        for i in range(40):
            await rig.hl.enqueue("jobs", b"%d" % i, key=str(i))
        rows = await read(rig.hl, start=start, checkpoint="c")
        assert sorted(row.payload for row in rows) == sorted(b"%d" % i for i in range(40))


async def test_checkpoint_is_stored_by_the_topics_log() -> None:
    async with opened() as rig:
        log = rig.runner().loaded.journal
        log.checkpoints = SmallFiles(rig.disk, f"{PATH}/elsewhere")
        await rig.hl.do(SaveCheckpoint("jobs", "c", {0: 0}))
        assert log.checkpoints.names() == ["c.json"]
        assert await handlers.find_checkpoint(rig.runner(), "c") == {0: 0}


async def test_full_disk_raises_storage_full_when_a_checkpoint_is_saved() -> None:
    async with opened() as rig:
        rig.disk.inject("pwritev", errno.ENOSPC, path="replays")
        with pytest.raises(heapline.UnavailableError, match="No space left"):
            await rig.hl.do(SaveCheckpoint("jobs", "c", {0: 0}))
        rig.disk.inject("pwritev", errno.ENOSPC, path="replays")
        with pytest.raises(heapline.UnavailableError, match="No space left"):
            await rig.hl.start_replay("r", "jobs")
        assert await rig.hl.list_replays() == []
