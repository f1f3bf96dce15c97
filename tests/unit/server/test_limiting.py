"""Leases of one consumer: what is over the limit goes back, and never what somebody has."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from heapline.errors import ResourceExhausted
from heapline.model import Outgoing, Popped
from heapline.server.auth.limits import Limits
from heapline.server.limiting import pop_within
from tests.unit.engine.rig import Rig, opened, settle


def caller(subject: str = "key:a", leases: int = 5) -> Any:
    front = SimpleNamespace(limits=Limits(leases_per_consumer=leases))
    return SimpleNamespace(principal=SimpleNamespace(subject=subject), visit=SimpleNamespace(front=front))


async def fill(rig: Rig, count: int) -> None:
    await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * count)


def begin(rig: Rig, count: int = 5, who: Any = None, **options: Any) -> asyncio.Task[tuple[str, Popped | None]]:
    return asyncio.create_task(pop_within(rig.hl, who or caller(), "jobs", count, **options))


async def got(pop: asyncio.Task[tuple[str, Popped | None]]) -> Popped:
    _, popped = await pop
    assert popped is not None
    return popped


async def test_of_pops_that_wait_side_by_side_some_get_all_that_the_limit_allows() -> None:
    async with opened() as rig:
        pops = [begin(rig, 5, wait=60) for _ in range(4)]
        await settle()
        await fill(rig, 20)
        told = await asyncio.gather(*pops, return_exceptions=True)
        assert sum(isinstance(t, ResourceExhausted) for t in told) == 3
        assert (await rig.hl.stats("jobs")).leased == rig.hl.leases_held("jobs", "key:a") == 5


async def test_repeat_of_a_named_pop_never_gives_back_what_the_first_who_asked_has() -> None:
    async with opened() as rig:
        first = begin(rig, 5, wait=60, request_id="r")
        other = begin(rig, 5, wait=60)
        await settle()
        await fill(rig, 5)
        mine = await got(first)
        rig.io.hold = {"commit"}
        filling = asyncio.create_task(fill(rig, 5))
        repeat = begin(rig, 5, request_id="r")
        rig.runner()._pops.rotate()  # whoever comes first
        await settle()
        rig.io.release()
        assert (await got(repeat)).tokens == mine.tokens
        with pytest.raises(ResourceExhausted):
            await other
        await filling
        assert await rig.hl.ack_columns("jobs", mine.ids, mine.tokens) == []


async def test_named_pop_leases_no_more_than_the_limit_leaves() -> None:
    async with opened() as rig:
        await fill(rig, 20)
        assert len((await got(begin(rig, 3, request_id="r"))).ids) == 3
        assert len((await got(begin(rig, 20, request_id="s"))).ids) == 2
        assert len((await got(begin(rig, 20, request_id="r"))).ids) == 3
        with pytest.raises(ResourceExhausted):
            await begin(rig, 1, request_id="t")


async def test_two_callers_who_choose_the_same_name_for_a_pop_get_different_messages() -> None:
    async with opened() as rig:
        await fill(rig, 4)
        one = await got(begin(rig, 2, caller("key:a"), request_id="1"))
        other = await got(begin(rig, 2, caller("key:b"), request_id="1"))
        assert not set(one.ids) & set(other.ids)
        assert (await got(begin(rig, 2, caller("key:a"), request_id="1"))).tokens == one.tokens
