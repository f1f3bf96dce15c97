"""A cancellation that other code swallows is raised nevertheless."""

from __future__ import annotations

import asyncio

import pytest

from heapline.assign.cancellation import honor_cancellation, within
from heapline.assign.errors import ConnectionLost


async def swallow(begun: asyncio.Event, fails: bool = False) -> int:
    try:
        begun.set()
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if fails:
            raise OSError("lost") from None
    return 5


@pytest.mark.parametrize("fails", [False, True])
async def test_swallowed_cancellation_is_raised(fails: bool) -> None:
    begun = asyncio.Event()
    task = asyncio.create_task(honor_cancellation(swallow(begun, fails)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_answer_arriving_with_a_cancellation_does_not_undo_it() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(honor_cancellation(asyncio.wait_for(answer, 10)))
    await asyncio.sleep(0)
    answer.set_result(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_results_and_errors_pass_through_without_a_cancellation() -> None:
    async def answer() -> int:
        return 5

    async def fail() -> int:
        raise OSError("lost")

    assert await honor_cancellation(answer()) == 5
    with pytest.raises(OSError, match="lost"):
        await honor_cancellation(fail())


async def test_operation_that_swallows_its_deadline_raises_connection_lost() -> None:
    with pytest.raises(ConnectionLost):
        await within(0.01, swallow(asyncio.Event()))


async def test_task_group_ends_although_a_task_swallows_its_cancellation() -> None:
    begun = asyncio.Event()

    async def go_on() -> None:
        while True:
            await within(60, swallow(begun))

    async def fail() -> None:
        await begun.wait()
        raise ValueError

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(go_on())
            group.create_task(fail())

    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup):
            await both()
