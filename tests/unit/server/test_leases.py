"""Leases per consumer, limited by the server's context: never over the limit, and never shared between callers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.contract.call import Context
from heapline.contract.columns import unpack
from heapline.contract.errors import ResourceExhausted
from heapline.contract.leases import Ack, LeasedMessages, LeaseKeys, Pop
from heapline.contract.message import Outgoing
from tests.unit.engine.rig import Rig, opened, settle


async def fill(rig: Rig, count: int) -> None:
    await rig.hl.enqueue_batch("jobs", [Outgoing(b"x")] * count)


def begin(rig: Rig, count: int = 5, who: str = "key:a", **options: Any) -> asyncio.Task[LeasedMessages | None]:
    async def pop() -> LeasedMessages | None:
        leased = await rig.hl.do(Pop("jobs", count, **options), Context(principal=who, leases_max=5))
        return leased.messages

    return asyncio.create_task(pop())


async def got(pop: asyncio.Task[LeasedMessages | None]) -> LeasedMessages:
    popped = await pop
    assert popped is not None
    return popped


async def test_concurrent_waiting_pops_together_get_as_many_as_the_limit_allows() -> None:
    async with opened() as rig:
        pops = [begin(rig, 5, wait=60.0) for _ in range(4)]
        await settle()
        await fill(rig, 20)
        reported = await asyncio.gather(*pops, return_exceptions=True)
        assert sum(isinstance(t, ResourceExhausted) for t in reported) == 3
        assert (await rig.hl.stats("jobs")).leased == 5


async def test_pops_wait_concurrently_while_nothing_is_ready() -> None:
    async with opened() as rig:
        pops = [begin(rig, 5, wait=60.0) for _ in range(4)]
        await settle()
        assert not any(pop.done() for pop in pops)
        for pop in pops:
            pop.cancel()


async def test_repeat_of_a_named_pop_returns_the_same_leases() -> None:
    async with opened() as rig:
        first = begin(rig, 5, wait=60.0, request_id="r")
        await settle()
        await fill(rig, 5)
        mine = await got(first)
        await fill(rig, 5)
        assert unpack((await got(begin(rig, 5, request_id="r"))).tokens) == unpack(mine.tokens)
        with pytest.raises(ResourceExhausted):
            await begin(rig, 5)
        settled = await rig.hl.do(Ack("jobs", LeaseKeys(mine.ids, mine.tokens)))
        assert settled.lost == []


async def test_named_pop_leases_at_most_what_the_limit_allows() -> None:
    async with opened() as rig:
        await fill(rig, 20)
        assert len(await got(begin(rig, 3, request_id="r"))) == 3
        assert len(await got(begin(rig, 20, request_id="s"))) == 2
        assert len(await got(begin(rig, 20, request_id="r"))) == 3
        with pytest.raises(ResourceExhausted):
            await begin(rig, 1, request_id="t")


async def test_two_callers_who_choose_the_same_request_id_get_different_messages() -> None:
    async with opened() as rig:
        await fill(rig, 4)
        one = await got(begin(rig, 2, "key:a", request_id="1"))
        other = await got(begin(rig, 2, "key:b", request_id="1"))
        assert not set(unpack(one.ids)) & set(unpack(other.ids))
        assert unpack((await got(begin(rig, 2, "key:a", request_id="1"))).tokens) == unpack(one.tokens)
