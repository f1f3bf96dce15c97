"""Memory and event sizes of groups: members, sessions and units are forgotten, and large events are split."""

from __future__ import annotations

from typing import Any

import pytest

from heapline.contract.errors import BadRequest, HeaplineError, ResourceExhausted
from tests.unit.engine.groups.group_calls import MANY, fetch, fill, offsets
from tests.unit.engine.rig import opened, settle


async def test_units_are_forgotten_once_durable_without_fetches() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", observer=True)
        for _ in range(50):
            await rig.hl.enqueue("jobs", b"x")
        tail = rig.runner().loaded.topic.tails[0]
        assert tail is not None
        assert len(tail._ends) < 5


async def test_sessions_of_non_members_are_not_remembered() -> None:
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


async def test_removed_member_leaves_no_state() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        for i in range(5):
            await fetch(rig.hl, f"m{i}")
            await rig.hl.group_leave("jobs", "g", f"m{i}", session="s")
        assert not rig.runner().loaded.topic.groups.by_name["g"]._turns
        assert not rig.runner().streams._answering._sent_generations


async def test_member_count_is_limited_to_what_one_event_can_name() -> None:
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


@pytest.mark.parametrize("retries", [0, 3])
async def test_many_rows_can_be_nacked_in_one_call_with_small_segments(retries: int) -> None:
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


async def test_many_single_rows_can_be_released_in_one_call_with_small_segments() -> None:
    async with opened() as rig:
        await rig.hl.create_group("jobs", "g", max_retries=0)
        await fill(rig, MANY, b"")
        got: dict[int, list[int]] = {0: []}
        while len(got[0]) < MANY:
            got[0] += offsets(await fetch(rig.hl, max_messages=MANY, max_bytes=1 << 30))[0]
        await rig.hl.group_nack("jobs", "g", "a", {0: got[0][1::2]}, session="s")
        assert rig.runner().counters.reloads == 0


@pytest.mark.parametrize("retries", [0, 3])
async def test_many_rows_can_time_out_together_with_small_segments(retries: int) -> None:
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
