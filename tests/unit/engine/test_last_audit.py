"""The result of a topic's last audit: kept beside the journal, replaced as a whole."""

from __future__ import annotations

import asyncio
import errno
import random
from datetime import datetime, timedelta

import msgspec
import pytest

from heapline.contract.errors import BadRequest, StorageFull, TopicNotFound
from heapline.contract.message import TopicAudit, from_ms
from heapline.engine.last_audit import FILE, VERSION
from heapline.journal.small_files import sealed
from tests.simulation.fake_disk import FakeDisk
from tests.unit.engine.rig import PATH, Rig, opened, settle

DIRECTORY = f"{PATH}/topics/default/jobs.1"


def now(rig: Rig) -> datetime:
    return from_ms(rig.clock.wall_ms())


async def audit_of(rig: Rig) -> TopicAudit | None:
    log = (await rig.hl.stats("jobs")).log
    assert log is not None
    return log.audit


async def record(rig: Rig, **found: int) -> TopicAudit:
    await rig.hl.record_audit("jobs", now(rig), messages=7, **found)
    kept = await audit_of(rig)
    assert kept is not None
    return kept


async def test_result_survives_a_restart_and_a_later_one_replaces_it() -> None:
    async with opened() as rig:
        assert await audit_of(rig) is None
        first = await record(rig, lost=2)
        assert (first.messages, first.lost, first.doubled, first.early) == (7, 2, 0, 0)
        assert first.until == first.recorded_at
        await rig.reopen()
        assert await audit_of(rig) == first
        rig.clock.advance(60)
        second = await record(rig)
        assert (second.lost, second.until - first.until) == (0, timedelta(minutes=1))
        await rig.reopen()
        assert await audit_of(rig) == second


async def test_power_cut_leaves_the_result_before_or_the_new_one_and_an_answered_one_stays() -> None:
    async with opened() as rig:
        before = await record(rig, lost=1)
        cuts: list[FakeDisk] = []

        def cut(operation: str, path: str) -> None:
            if f"/{FILE}" in path or operation == "fsync_dir":
                cuts.extend(rig.disk.crash(random.Random(seed)) for seed in range(6))

        rig.disk.on_step = cut
        after = await record(rig, early=1)
        rig.disk.on_step = lambda operation, path: None
        found = [await audit_on(disk) for disk in cuts]
        assert len(cuts) >= 6 * 5  # create, write, sync, rename, sync of the directory
        assert {each and each.lost for each in found} == {before.lost, after.lost}
        assert [await audit_on(rig.disk.crash(random.Random(seed))) for seed in range(6)] == [after] * 6


async def audit_on(disk: FakeDisk) -> TopicAudit | None:
    other = Rig(disk)
    await other.open()
    try:
        return await audit_of(other)
    finally:
        await other.hl.close()


async def test_result_cannot_be_of_the_future() -> None:
    async with opened() as rig:
        await rig.hl.record_audit("jobs", now(rig) + timedelta(days=1))
        found = await audit_of(rig)
        assert found is not None
        assert found.until == found.recorded_at == now(rig)


WHOLE = sealed(VERSION, msgspec.msgpack.encode({"until": 0, "recorded_at": 0, "messages": 1}))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 300,
        WHOLE[:-1],
        WHOLE,  # a valid checksum around fields of other types
        sealed(VERSION, b"\xc0"),
        sealed(VERSION + 1, b"\x80"),
    ],
    ids=["empty", "zeros", "torn", "types", "nil", "later-version"],
)
async def test_damaged_or_unknown_file_counts_as_not_audited_and_keeps_the_topic(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as rig:
        await record(rig)
        await rig.hl.enqueue("jobs", b"x")
        await rig.hl.close()
        rig.disk.write_file_atomic(f"{DIRECTORY}/{FILE}", content)
        await rig.open()
        assert await audit_of(rig) is None
        assert "audit result cannot be read" in caplog.text
        assert (await rig.hl.stats("jobs")).ready == 1
        found = await record(rig)
        await rig.reopen()
        assert await audit_of(rig) == found


async def test_failed_write_keeps_the_result_before() -> None:
    async with opened() as rig:
        before = await record(rig, lost=1)
        rig.disk.inject("pwritev", errno.ENOSPC, path=f"/{FILE}")
        with pytest.raises(StorageFull):
            await rig.hl.record_audit("jobs", now(rig))
        assert await audit_of(rig) == before
        await rig.hl.enqueue("jobs", b"the topic continues")
        await rig.reopen()
        assert await audit_of(rig) == before


async def test_results_end_with_their_topic() -> None:
    async with opened() as rig:
        await record(rig)
        rig.io.hold.add("write_audit")
        both = asyncio.gather(rig.hl.record_audit("jobs", now(rig)), rig.hl.delete_topic("jobs"))
        await settle()
        rig.io.release()
        await both
        assert rig.files(f"/{FILE}") == []
        with pytest.raises(TopicNotFound):
            await rig.hl.record_audit("jobs", now(rig))
        await rig.topic()
        assert await audit_of(rig) is None


async def test_list_of_promises_is_bounded() -> None:
    async with opened() as rig:
        with pytest.raises(BadRequest, match="at most 50 promises"):
            await rig.hl.record_audit("jobs", now(rig), refuted=["x"] * 51)
