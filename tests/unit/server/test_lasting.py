"""What lasts ends with its credential, and with nothing else."""

from __future__ import annotations

import asyncio

import pytest

from heapline.errors import Unauthenticated
from heapline.server.auth.principal import LOCAL, Everybody, Principal
from heapline.server.lasting import Lasting


class Some(Everybody):
    def __init__(self) -> None:
        self.out: set[str] = set()
        self.asked = 0

    def is_valid(self, principal: Principal) -> bool:
        self.asked += 1
        return principal.subject not in self.out


async def forever(lasting: Lasting, principal: Principal = LOCAL) -> None:
    with lasting.hold(principal):
        await asyncio.Event().wait()


async def test_only_the_calls_of_the_one_who_is_out_are_ended() -> None:
    guard = Some()
    lasting, other = Lasting(guard), Principal("key:other", ())
    mine = [asyncio.create_task(forever(lasting)) for _ in range(100)]
    stays = asyncio.create_task(forever(lasting, other))
    await asyncio.sleep(0)
    guard.out.add("local")
    lasting.look()
    assert guard.asked == 2  # once a principal, not once a call
    told = await asyncio.gather(*mine, return_exceptions=True)
    assert {type(t) for t in told} == {Unauthenticated}
    assert len(lasting) == 1
    assert not stays.done()
    stays.cancel()


async def test_cancellation_by_somebody_else_stays_a_cancellation() -> None:
    lasting = Lasting(Some())
    task = asyncio.create_task(forever(lasting))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(lasting) == 0


async def test_result_that_came_at_the_same_moment_is_given_to_nobody() -> None:
    guard = Some()
    lasting = Lasting(guard)

    async def stubborn() -> str:
        with lasting.hold(LOCAL):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "a message"
        raise AssertionError

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    guard.out.add("local")
    lasting.look()
    with pytest.raises(Unauthenticated):
        await task


async def test_task_can_go_on_after_its_block_was_ended() -> None:
    guard = Some()
    lasting = Lasting(guard)

    async def work() -> str:
        with pytest.raises(Unauthenticated):
            await forever(lasting)
        await asyncio.sleep(0)
        return "told"

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    guard.out.add("local")
    lasting.look()
    assert await task == "told"
