"""Maintenance: snapshots lose nothing, dead segments are deleted, and long-lived messages do not pin them."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.message import Outgoing, from_ms
from heapline.engine.maintenance import EXPIRY_SLICE
from heapline.journal.reclaim import ReaderLease, end_lease, write_lease
from tests.unit.engine import held_io
from tests.unit.engine.rig import Rig, opened, settle, until

BULK = b"x" * 50_000


async def churn(rig: Rig, messages: int = 60) -> None:
    """Write and ack enough messages for several segments of 1 MiB."""
    for _ in range(messages // 10):
        await rig.hl.enqueue_batch("jobs", [Outgoing(BULK, priority=-100)] * 10)
        await rig.hl.ack(await rig.hl.pop("jobs", 10, max_bytes=1 << 30))


async def reclaim(rig: Rig) -> None:
    """Write two snapshots, the older of which passes everything written so far, then reclaim segments."""
    for _ in range(2):
        await rig.hl.enqueue("jobs", b"mark", priority=-1)
        await rig.hl.ack(await rig.hl.pop("jobs"))
        await rig.hl.snapshot("jobs")
    await rig.runner().maintenance.reclaim()


# -- snapshots ---------------------------------------------------------------------------------------------------------


async def test_snapshot_is_complete_and_calls_continue_meanwhile() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i) for i in range(5000)])
        rig.io.hold = {"_write"}
        snapshot = asyncio.create_task(rig.hl.snapshot("jobs"))
        await settle()
        await rig.hl.ack(await rig.hl.pop("jobs", 10))
        await rig.hl.enqueue("jobs", b"meanwhile", priority=-1)
        assert not snapshot.done()
        rig.io.release()
        await snapshot
        disk = rig.disk.crash()
        other = Rig(disk)
        hl = await other.open()
        assert other.runner().loaded.snapshot_unit > 0
        found = [m.payload for m in await hl.pop("jobs", 10_000)]
        assert found == [b"meanwhile", *(b"%d" % i for i in range(10, 5000))]
        await hl.close()


async def test_snapshot_of_an_unchanged_topic_writes_nothing() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        await rig.hl.snapshot("jobs")
        before = rig.disk.contents()
        await rig.hl.snapshot("jobs")
        assert rig.disk.contents() == before


async def test_snapshot_is_written_after_the_configured_bytes() -> None:
    async with opened(reclaim_interval=0.005, snapshot_bytes=100_000) as rig:
        await rig.hl.enqueue("jobs", b"small")
        await asyncio.sleep(0.03)
        assert rig.runner().maintenance.snapshots_total == 0
        await rig.hl.enqueue("jobs", b"x" * 150_000)
        await until(lambda: rig.runner().maintenance.snapshots_total == 1)


async def test_snapshot_is_written_after_the_configured_interval() -> None:
    async with opened(reclaim_interval=0.005, snapshot_interval=600.0) as rig:
        await rig.hl.enqueue("jobs", b"x")
        await asyncio.sleep(0.03)
        assert rig.runner().maintenance.snapshots_total == 0
        rig.clock.advance(601)
        await until(lambda: rig.runner().maintenance.snapshots_total == 1)


async def test_two_snapshots_are_kept_and_a_damaged_one_is_not_used() -> None:
    async with opened() as rig:
        for i in range(4):
            await rig.hl.enqueue("jobs", b"%d" % i, priority=i)
            await rig.hl.snapshot("jobs")
        units = rig.runner().loaded.journal.snapshots.units()
        assert len(units) == 2
        for path in rig.files(""):
            if f"{units[-1]:010d}" in path or f"/{units[-1]}." in path or path.endswith(f"{units[-1]}.snap"):
                rig.disk.damage(path, 0)
                break
        other = Rig(rig.disk.crash())
        hl = await other.open()
        assert [m.payload for m in await hl.pop("jobs", 9)] == [b"0", b"1", b"2", b"3"]
        await hl.close()


async def test_failed_snapshot_is_harmless_and_retried() -> None:
    async with opened(reclaim_interval=0.005, snapshot_bytes=1) as rig:
        rig.disk.inject("create", path="snapshots", times=2)
        await rig.hl.enqueue("jobs", b"x")
        await until(lambda: rig.runner().maintenance.snapshots_total == 1)
        assert (await rig.hl.stats("jobs")).log.reloads_total == 0


# -- dead letters ------------------------------------------------------------------------------------------------------


async def bury(rig: Rig, *payloads: bytes) -> None:
    """Enqueue messages, each of which becomes a dead letter a second after the one before."""
    for payload in payloads:
        await rig.hl.enqueue("jobs", payload)
        (message,) = await rig.hl.pop("jobs")
        await message.bury("boom")
        rig.clock.advance(1)


async def dead(rig: Rig) -> list[bytes]:
    return [info.payload for info in await rig.hl.dlq_list("jobs")]


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        ({"dlq_retention": 2.5}, [b"c", b"d"]),
        ({"dlq_max_letters": 3}, [b"b", b"c", b"d"]),
        ({"dlq_max_bytes": 300}, [b"c", b"d"]),  # each takes at most 128
        ({"dlq_retention": 0.0}, [b"a", b"b", b"c", b"d"]),
    ],
    ids=str,
)
async def test_dead_letters_past_a_limit_are_deleted_oldest_first(limit: dict[str, Any], kept: list[bytes]) -> None:
    async with opened(topic={"partitions": 3}) as rig:
        await bury(rig, b"a", b"b", b"c", b"d")
        await rig.hl.update_topic("jobs", **limit)
        await rig.runner().maintenance.expire_dead_letters()
        assert await dead(rig) == kept
        stats = await rig.hl.stats("jobs")
        assert (stats.dead, stats.dead_total, stats.dead_expired_total) == (len(kept), 4, 4 - len(kept))
    other = Rig(rig.disk.crash())
    await other.open()
    assert await dead(other) == kept
    await other.hl.close()


async def test_dead_letter_expires_after_thirty_days_and_its_end_says_why() -> None:
    async with opened() as rig:
        await bury(rig, b"old")
        (info,) = await rig.hl.dlq_list("jobs")
        rig.clock.advance(30 * 86400 - 2)
        await rig.runner().maintenance.expire_dead_letters()
        assert await dead(rig) == [b"old"]
        rig.clock.advance(2)
        await rig.runner().maintenance.expire_dead_letters()
        gone = await rig.hl.get("jobs", info.id)
        assert (gone.state, gone.reason) == ("deleted", "expired as a dead letter")


async def test_background_maintenance_expires_dead_letters_in_slices() -> None:
    async with opened(reclaim_interval=0.005) as rig:
        count = 2 * EXPIRY_SLICE + 7
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * count)
        for message in await rig.hl.pop("jobs", count):
            await message.bury("boom")
        await rig.hl.update_topic("jobs", dlq_max_letters=5)
        await until(lambda: rig.runner().counters.dead_expired == count - 5)
        assert (await rig.hl.stats("jobs")).dead == 5


# -- reclaim -----------------------------------------------------------------------------------------------------------


async def test_dead_segments_are_deleted_and_the_log_then_starts_later() -> None:
    async with opened() as rig:
        await churn(rig)
        before = len(rig.files(".seg"))
        assert before >= 4
        await reclaim(rig)
        assert len(rig.files(".seg")) <= 2
        assert rig.runner().maintenance.segments_reclaimed_total >= before - 2
        start, end = (await rig.hl.offsets("jobs"))[0]
        assert 0 < start <= end
        stats = await rig.hl.stats("jobs")
        assert stats.log.journal_segments == len(rig.files(".seg"))
        frames = [frame async for frame in rig.hl.read_log("jobs", start=start)]
        assert (frames[0].offset, frames[-1].offset + frames[-1].row_count) == (start, end)
        await rig.hl.enqueue("jobs", b"still here")
        hl = await rig.reopen()
        assert [m.payload for m in await hl.pop("jobs", 5)] == [b"still here"]


async def test_nothing_is_deleted_before_two_snapshots_have_passed_it() -> None:
    async with opened() as rig:
        await churn(rig)
        before = rig.files(".seg")
        await rig.runner().maintenance.reclaim()
        await rig.hl.snapshot("jobs")
        await rig.runner().maintenance.reclaim()
        assert rig.files(".seg") == before


async def test_retention_keeps_dead_segments_for_its_duration() -> None:
    async with opened() as rig:
        await rig.hl.update_topic("jobs", retention=3600.0)
        await churn(rig)
        before = rig.files(".seg")
        await reclaim(rig)
        assert rig.files(".seg") == before
        rig.clock.advance(3601)
        await reclaim(rig)
        assert len(rig.files(".seg")) <= 2


async def test_reader_of_the_directory_holds_its_segments() -> None:
    async with opened() as rig:
        await churn(rig)
        before = rig.files(".seg")
        folder = rig.runner().loader.directory
        write_lease(rig.disk, folder, ReaderLease("spark", 1, 1, rig.clock.wall_ms() + 60_000))
        await reclaim(rig)
        assert rig.files(".seg") == before
        end_lease(rig.disk, folder, "spark")
        await reclaim(rig)
        assert len(rig.files(".seg")) <= 2


async def test_segments_are_reclaimed_without_a_call() -> None:
    async with opened(reclaim_interval=0.005, snapshot_bytes=200_000) as rig:
        for _ in range(5):
            await churn(rig, 30)
        await until(lambda: rig.runner().maintenance.segments_reclaimed_total >= 3)


# -- rewriting ---------------------------------------------------------------------------------------------------------


async def long_lived(rig: Rig) -> dict[str, Any]:
    """Create one message of every kind that may stay for years, all in the first segment."""
    hl = rig.hl
    year = 366 * 86400.0
    next_year = from_ms(rig.clock.wall_ms()) + timedelta(days=366)
    out = {
        "delayed": await hl.enqueue("jobs", b"delayed", priority=5, delay=year, key="k", headers={"a": "b"}),
        "moment": await hl.enqueue("jobs", b"moment", priority=4, deliver_at=next_year),
        "retried": await hl.enqueue("jobs", b"retried", priority=-9, max_retries=3),
        "leased": await hl.enqueue("jobs", b"leased", priority=-8, headers={"l": "l"}),
        "dead": await hl.enqueue("jobs", b"dead", priority=-7, key="dead"),
        "touched": await hl.enqueue("jobs", b"touched", priority=-6),
        "ready": await hl.enqueue("jobs", b"ready", priority=3, ttl=2 * year, idempotency_key="once"),
    }  # fmt: skip
    await hl.update_topic("jobs", lease_max=year)
    messages = await hl.pop("jobs", 3, visibility=year / 2, holder="w")
    await messages[0].nack(backoff=year, reason="try next year")
    await messages[2].bury("kaputt")
    await hl.reschedule("jobs", out["touched"].id, priority=77, delay=year)
    return {name: r.id for name, r in out.items()} | {"held": messages[1]}


@pytest.mark.parametrize("partitions", [1, 3])
async def test_live_messages_are_rewritten_so_their_segment_can_be_deleted(partitions: int) -> None:
    async with opened() as rig:
        await rig.hl.delete_topic("jobs")
        await rig.topic("jobs", partitions=partitions)
        kept = await long_lived(rig)
        held = kept.pop("held")
        before = {name: await rig.hl.get("jobs", id) for name, id in kept.items()}
        first = rig.files(".seg")[0]
        for _ in range(3):
            await churn(rig)
            await reclaim(rig)
        assert first not in rig.files(".seg")
        assert rig.runner().maintenance.records_moved_total >= 7
        assert (await rig.hl.stats("jobs")).log.reloads_total == 0

        for again in (False, True):
            hl = await rig.reopen() if again else rig.hl
            assert {name: await hl.get("jobs", id) for name, id in kept.items()} == before
        await hl.ack(heapline.LeaseRef("jobs", held.id, held.token))
        (m,) = await hl.pop("jobs", 9)
        assert (m.payload, m.attempts) == (b"ready", 1)
        assert (await hl.enqueue("jobs", b"ready", idempotency_key="once")).duplicate
        await m.ack()
        assert await hl.dlq_replay("jobs") == 1
        rig.clock.advance(367 * 86400)
        messages = await hl.pop("jobs", 9)
        found = [(m.payload, m.priority, m.attempts, m.key, m.headers) for m in messages]
        assert found == [
            (b"retried", -9, 2, None, {}), (b"dead", -7, 1, "dead", {}), (b"moment", 4, 1, None, {}),
            (b"delayed", 5, 1, "k", {"a": "b"}), (b"touched", 77, 1, None, {}),
        ]  # fmt: skip


async def test_moved_messages_are_found_from_the_journal_alone() -> None:
    async with opened() as rig:
        kept = await long_lived(rig)
        kept.pop("held")
        await churn(rig)
        await rig.hl.snapshot("jobs")
        await reclaim(rig)
        assert rig.runner().maintenance.records_moved_total
        before = {name: await rig.hl.get("jobs", id) for name, id in kept.items()}
        other = Rig(rig.disk.crash())  # the tail after the snapshots contains the moves
        hl = await other.open()
        assert {name: await hl.get("jobs", id) for name, id in kept.items()} == before
        await hl.close()


async def test_full_first_segment_before_many_dead_ones_is_moved_in_slices() -> None:
    async with opened() as rig:
        count = 0
        while len(rig.files(".seg")) < 2:
            await rig.hl.enqueue_batch("jobs", [Outgoing(b"y", delay=1e7)] * 500)
            count += 500
        for _ in range(3):
            await churn(rig, 200)
            await reclaim(rig)
        stats = await rig.hl.stats("jobs")
        assert (stats.delayed, stats.log.reloads_total) == (count, 0)
        assert rig.runner().maintenance.records_moved_total > count / 2
        hl = await rig.reopen()
        rig.clock.advance(1e7 + 1)
        while (await hl.stats("jobs")).delayed:  # fires in slices
            assert rig.runner().is_serving
        assert (await hl.stats("jobs")).ready == count
        assert (await hl.pop("jobs"))[0].payload == b"y"


async def test_messages_can_be_settled_and_changed_while_they_are_moved() -> None:
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"%d" % i, priority=i) for i in range(40)])
        messages = await rig.hl.pop("jobs", 40, visibility=3600)
        await churn(rig)
        await reclaim(rig)
        rig.io.hold = {"load"}
        moving = asyncio.create_task(reclaim(rig))
        await settle()
        await rig.hl.ack(messages[:10])
        await rig.hl.nack(messages[10:20], backoff=0)
        rig.io.release()
        await moving
        stats = await rig.hl.stats("jobs")
        assert (stats.leased, stats.ready) == (20, 10)
        again = await rig.hl.pop("jobs", 10)
        assert [(m.payload, m.attempts) for m in again] == [(b"%d" % i, 2) for i in range(10, 20)]
        await rig.hl.ack(again + messages[20:])
        assert (await rig.hl.stats("jobs")).leased == 0


async def test_rewriting_can_be_turned_off() -> None:
    async with opened(rewrite_below=0.0) as rig:
        await rig.hl.enqueue("jobs", b"x", delay=1e6)
        await churn(rig)
        await reclaim(rig)
        await reclaim(rig)
        assert rig.runner().maintenance.records_moved_total == 0


async def one_old_message(rig: Rig) -> int:
    """A ready message in an otherwise dead first segment; none of it is in memory."""
    r = await rig.hl.enqueue("jobs", b"old" * 500, priority=50)
    await churn(rig)
    for _ in range(2):
        await rig.hl.enqueue("jobs", b"mark", priority=-1)
        await rig.hl.ack(await rig.hl.pop("jobs"))
        await rig.hl.snapshot("jobs")
    rig.runner().loaded.journal.cache.clear()
    return r.id


async def moved_away(rig: Rig) -> None:
    """Rewrite its record elsewhere and delete its segment."""
    first = rig.files(".seg")[0]
    for _ in range(3):
        await rig.runner().maintenance.reclaim()
    assert first not in rig.files(".seg")


@pytest.mark.parametrize("call", ["get", "peek", "pop", "reschedule"])
async def test_record_moved_during_a_read_is_not_reported_as_corrupt(call: str) -> None:
    async with opened(cache_bytes=0) as rig:
        id = await one_old_message(rig)
        rig.io.hold = {"load"}
        hl = rig.hl
        calls: dict[str, Any] = {
            "get": hl.get("jobs", id), "peek": hl.peek("jobs"), "pop": hl.pop("jobs"),
            "reschedule": hl.reschedule("jobs", id, priority=7),
        }  # fmt: skip
        reading = asyncio.create_task(calls.pop(call))
        for other in calls.values():
            other.close()
        await settle()
        slow = rig.io.held.pop()
        rig.io.hold.clear()
        moving = asyncio.create_task(moved_away(rig))
        await settle()
        assert not moving.done(), "a segment is kept while readers use it"
        rig.io._do(*slow)
        answer = await reading
        await moving
        if call != "reschedule":
            info = answer if call == "get" else answer[0]
            assert (info.id, info.payload) == (id, b"old" * 500)
        else:
            assert (await hl.get("jobs", id)).priority == 7
        stats = await hl.stats("jobs")
        assert (stats.dead, stats.log.corrupt_records_total) == (0, 0)


async def test_log_read_below_its_start_is_rejected_except_from_0() -> None:
    async with opened() as rig:
        await churn(rig)
        await reclaim(rig)
        start, _ = (await rig.hl.offsets("jobs"))[0]
        assert start > 1
        with pytest.raises(heapline.BadRequest, match=f"starts at {start}"):
            _ = [frame async for frame in rig.hl.read_log("jobs", start=1)]
        frames = [frame async for frame in rig.hl.read_log("jobs")]
        assert frames[0].offset == start


def test_segment_is_not_deleted_before_the_acks_that_emptied_it_are_durable() -> None:
    async def scene(rig: held_io.Rig) -> None:
        hl = await rig.opened()
        for i in range(3):
            await hl.enqueue("jobs", bytes(400_000), priority=i)
        held = await hl.pop("jobs", 3)
        for _ in range(3):
            await hl.enqueue("jobs", b"later", delay=1e6)
            await hl.snapshot("jobs")
        rig.io.hold = {"commit"}
        acking = asyncio.ensure_future(hl.ack(held))
        await held_io.spin()
        reclaiming = asyncio.ensure_future(hl.topics._runners["jobs"].maintenance.reclaim())
        await held_io.spin()
        after = rig.disk.crash(random.Random(5))
        assert not acking.done()
        rig.io.let_go()
        await asyncio.gather(acking, reclaiming)
        assert hl.topics._runners["jobs"].maintenance.segments_reclaimed_total == 1
        rig.clock.advance(3600)
        again = await rig.broker(after).__aenter__()
        await asyncio.sleep(5)
        assert sorted(len(m.payload) for m in await again.pop("jobs", 3)) == [400_000] * 3

    held_io.play(scene)
