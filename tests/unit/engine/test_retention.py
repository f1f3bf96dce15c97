"""Retention by age, by size, and for groups that have not read a row yet; and hard limits that override them."""

from __future__ import annotations

from typing import Any

import pytest

from heapline.contract.errors import BadRequest
from heapline.contract.message import Outgoing
from tests.unit.engine.rig import Rig, opened
from tests.unit.engine.stream_rig import reported
from tests.unit.engine.test_maintenance import BULK, churn, reclaim

DAY = 86400.0


async def read(rig: Rig, group: str = "g", limit: int = 100_000, nack: bytes = b"-") -> list[bytes]:
    """Read what a member gets until nothing is left; ack all rows except those whose payload begins like `nack`."""
    got: list[bytes] = []
    while len(got) < limit:
        fetched = await rig.hl.group_fetch("jobs", group, "m", session="s", max_messages=min(1000, limit - len(got)))
        for batch in fetched.batches:
            rows = batch.messages()
            got += [row.payload[:8] for row in rows]
            bad = [row.offset for row in rows if row.payload.startswith(nack)]
            good = [row.offset for row in rows if not row.payload.startswith(nack)]
            await rig.hl.group_ack("jobs", group, "m", {batch.partition: good}, session="s")
            if bad:
                await rig.hl.group_nack("jobs", group, "m", {batch.partition: bad}, session="s")
        if not fetched.batches:
            break
    await rig.hl.group_leave("jobs", group, "m", session="s")
    return got


async def lag(rig: Rig, group: str = "g") -> int:
    return (await rig.hl.get_group("jobs", group)).lag


def first_segment(rig: Rig) -> int:
    return int(rig.files(".seg")[0].rpartition("/")[2].removesuffix(".seg"))


# -- groups ------------------------------------------------------------------------------------------------------------


async def test_segments_stay_until_every_holding_group_has_passed_them() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "quick")
        await rig.hl.create_group("jobs", "slow")
        await churn(rig)
        assert len(await read(rig, "quick")) == 60
        before = rig.files(".seg")
        await reclaim(rig)
        assert rig.files(".seg") == before
        assert len(await read(rig, "slow", 30)) == 30
        await reclaim(rig)
        assert 1 < first_segment(rig) < len(before)
        assert len(await read(rig, "slow")) == 30 + 4, "no row that it had not passed was deleted"
        await reclaim(rig)
        assert len(rig.files(".seg")) <= 2


@pytest.mark.parametrize("how", ["observer", "unused"])
async def test_group_that_does_not_hold_is_moved_on_with_the_journals_start(how: str) -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", observer=how == "observer", unused_after=3600.0)
        await churn(rig)
        rig.clock.advance(3601)
        await reclaim(rig)
        assert len(rig.files(".seg")) <= 2
        (place,) = await rig.hl.group_offsets("jobs", "g")
        start, _ = (await rig.hl.offsets("jobs"))[0]
        assert place.committed >= start
        assert place.lag == len((await reported(rig.runner())).offsets)
        (topic,) = (await rig.hl.metrics()).topics
        assert topic.totals["moved_on"] == rig.runner().maintenance.reclaimer.groups_moved_on_total > 0
        await churn(rig)
        await reclaim(rig)
        assert len(rig.files(".seg")) <= 2, "being moved does not make it hold the journal again"
        if how == "unused":
            assert len(await read(rig)) == await lag(rig) + len((await reported(rig.runner())).offsets)
            assert await lag(rig) == 0


async def test_fired_and_acked_message_is_kept_for_a_slow_group() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g")
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"later-%d" % i, delay=60.0, priority=-200) for i in range(3)])
        await churn(rig)
        assert len(await read(rig)) == 60
        await reclaim(rig)  # they are live: they are moved forward, or pin their segment
        rig.clock.advance(61)
        (first, *others) = await rig.hl.pop("jobs", 3)
        await rig.hl.ack([first, *others])
        await churn(rig)
        for _ in range(2):
            await reclaim(rig)
        hl = await rig.reopen()
        assert await hl.pop("jobs") == []
        got = await read(rig)
        assert [p for p in got if p.startswith(b"later")] == [b"later-0", b"later-1", b"later-2"]
        assert await lag(rig) == 0
        await reclaim(rig)
        assert len(rig.files(".seg")) <= 2


async def test_fired_record_pins_its_segment_until_groups_pass_its_row() -> None:
    async with opened(rewrite_below=0.0) as rig:  # nothing is moved
        await rig.hl.create_group("jobs", "g")
        await rig.hl.enqueue("jobs", b"later", delay=60.0, priority=-200)
        await churn(rig)
        await read(rig)
        rig.clock.advance(61)
        await rig.hl.ack(await rig.hl.pop("jobs"))
        await reclaim(rig)
        assert first_segment(rig) == 1, "all its rows are passed, and all its messages are deleted"
        assert b"later" in await read(rig)
        await reclaim(rig)
        assert len(rig.files(".seg")) <= 2


async def test_offset_past_non_stream_rows_is_recorded_before_they_are_deleted() -> None:
    """Otherwise a crash would put the group below the journal's start and reset it, without its failures."""
    async with opened() as rig:
        hl = rig.hl
        await churn(rig, 40)
        await hl.create_group("jobs", "g", backoff={"base": 0.0, "jitter": 0.0})
        await read(rig)
        for _ in range(3):  # rows that are not in a stream
            messages = await hl.enqueue_batch("jobs", [Outgoing(BULK, delay=DAY)] * 10)
            for message in messages:
                await hl.cancel("jobs", message.id)
        for _ in range(2):
            await hl.enqueue("jobs", b"once", delay=DAY)
            await hl.snapshot("jobs")
        await hl.enqueue("jobs", b"once")
        (batch,) = (await hl.group_fetch("jobs", "g", "m", session="s")).batches
        await hl.group_nack("jobs", "g", "m", {0: batch.offsets.tolist()}, session="s")
        await hl.group_leave("jobs", "g", "m", session="s")
        await hl.ack(await hl.pop("jobs"))
        await rig.runner().maintenance.reclaim()
        assert first_segment(rig) > 2
        other = Rig(rig.disk.crash())
        hl = await other.open()
        try:
            (place,) = await hl.group_offsets("jobs", "g")
            assert place.committed >= (await hl.offsets("jobs"))[0][0]
            (batch, *_) = (await hl.group_fetch("jobs", "g", "m", session="t")).batches
            assert (batch.messages()[0].payload, batch.messages()[0].attempts) == (b"once", 2)
        finally:
            await hl.close()


@pytest.mark.parametrize("alive", [True, False])
async def test_rewritten_group_dead_letters_are_served_only_to_their_group(alive: bool) -> None:
    async with opened() as rig:
        hl = rig.hl
        await hl.create_group("jobs", "g", max_retries=0)
        ids = [(await hl.enqueue("jobs", b"bad-%d" % i, priority=0 if alive else -200)).id for i in range(3)]
        if not alive:
            await hl.ack(await hl.pop("jobs", 3))
        await churn(rig)
        await read(rig, nack=b"bad")
        assert len(await hl.group_dead_list("jobs", "g")) == 3
        for _ in range(3):
            await churn(rig)
            await read(rig)
            await reclaim(rig)
        assert first_segment(rig) > 2
        for again in (False, True):
            hl = await rig.reopen() if again else rig.hl
            letters = await hl.group_dead_list("jobs", "g")
            assert [letter.payload for letter in letters] == [b"bad-0", b"bad-1", b"bad-2"]
            found = [m.payload for m in await hl.peek("jobs", 10) if m.payload.startswith(b"bad")]
            assert len(found) == (3 if alive else 0)
        assert await hl.group_dead_replay("jobs", "g") == 3
        assert [p for p in await read(rig) if p.startswith(b"bad")] == [b"bad-0", b"bad-1", b"bad-2"]
        assert [letter.id for letter in letters] == ids


async def test_margin_keeps_rows_below_the_last_group() -> None:
    async with opened(topic={"retention_margin": 100}) as rig:
        await rig.hl.create_group("jobs", "g")
        await churn(rig, 200)
        await read(rig)
        await reclaim(rig)
        start, end = (await rig.hl.offsets("jobs"))[0]
        (place,) = await rig.hl.group_offsets("jobs", "g")
        assert 0 < start <= place.committed - 100
        assert end - place.committed < 30
        await rig.hl.update_topic("jobs", retention_margin=0)
        await reclaim(rig)
        assert len(rig.files(".seg")) <= 2


# -- age and size ------------------------------------------------------------------------------------------------------


def journal_bytes(rig: Rig) -> int:
    return (1 << 20) * len(rig.files(".seg"))


@pytest.mark.parametrize("retention", [0.0, 3600.0])
async def test_retention_by_size_keeps_history_until_the_journal_is_larger(retention: float) -> None:
    async with opened(topic={"retention_bytes": 5 << 20, "retention": retention}) as rig:
        await churn(rig, 40)
        before = rig.files(".seg")
        await reclaim(rig)
        assert rig.files(".seg") == before
        await churn(rig, 200)
        await reclaim(rig)
        assert 4 << 20 <= journal_bytes(rig) <= 6 << 20, "only the size counts, not the age"
        rig.clock.advance(3601)
        await reclaim(rig)
        assert (len(rig.files(".seg")) <= 2) == bool(retention), "or the age, if one is set"


async def test_retention_keeps_fired_rows_for_a_group_created_later() -> None:
    async with opened(topic={"retention": DAY}, rewrite_below=0.0) as rig:
        await rig.hl.enqueue("jobs", b"later", delay=2 * DAY, priority=-200)
        await churn(rig)
        rig.clock.advance(2 * DAY + 1)
        await rig.hl.ack(await rig.hl.pop("jobs"))
        await churn(rig, 20)
        await reclaim(rig)
        await rig.hl.create_group("jobs", "g")
        assert b"later" in await read(rig)
        rig.clock.advance(DAY + 1)
        await churn(rig, 20)
        await reclaim(rig)
        assert first_segment(rig) > 1


@pytest.mark.parametrize("limit", [{"retention_hard_bytes": 4 << 20}, {"retention_hard_age": 3600.0}])
async def test_hard_limit_deletes_unread_rows_and_groups_continue_after_them(
    limit: dict[str, Any],
) -> None:
    async with opened(topic=limit) as rig:
        await rig.hl.create_group("jobs", "g")
        kept = await rig.hl.enqueue("jobs", b"alive", priority=100)
        await churn(rig, 100)
        rig.clock.advance(3601)
        await read(rig, limit=3)
        for _ in range(2):
            await reclaim(rig)
        assert journal_bytes(rig) <= 5 << 20
        assert first_segment(rig) > 1
        stream = await reported(rig.runner())
        for again in (False, True):
            if again:
                await rig.reopen()
            (place,) = await rig.hl.group_offsets("jobs", "g")
            assert place.committed >= (await rig.hl.offsets("jobs"))[0][0]
            assert place.lag == len(stream.offsets), "its lag counts the rows that are left"
        assert len(await read(rig)) == len(stream.offsets)
        assert await lag(rig) == 0
        assert (await rig.hl.get("jobs", kept.id)).payload == b"alive", "live messages are never dropped"


async def test_hard_limits_below_the_soft_ones_are_refused() -> None:
    async with opened() as rig:
        for bad in ({"retention_bytes": 2, "retention_hard_bytes": 1}, {"retention": 2.0, "retention_hard_age": 1.0}):
            with pytest.raises(BadRequest, match="must not be smaller"):
                await rig.hl.update_topic("jobs", **bad)
