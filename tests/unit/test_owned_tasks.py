"""Background tasks end with their owner, and none is left behind."""

from __future__ import annotations

import asyncio
import gc

import pytest

from heapline import owned_tasks
from heapline.owned_tasks import OwnedTasks, until_done


async def test_spawned_task_survives_garbage_collection() -> None:
    tasks, go, done = OwnedTasks(), asyncio.Event(), []

    async def work() -> None:
        await go.wait()
        done.append(1)

    tasks.spawn(work())
    await asyncio.sleep(0)
    gc.collect()
    go.set()
    await tasks.join()
    assert done == [1]
    assert len(tasks) == 0


async def test_cancelled_caller_does_not_stop_run_to_completion() -> None:
    tasks, go, done = OwnedTasks(), asyncio.Event(), []

    async def work() -> int:
        await go.wait()
        done.append(1)
        return 7

    caller = asyncio.ensure_future(tasks.run_to_completion(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(tasks) == 1
    go.set()
    await tasks.join()
    assert done == [1]
    assert await tasks.run_to_completion(work()) == 7


async def test_run_to_completion_raises_the_error_of_its_work() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await OwnedTasks().run_to_completion(work())


async def test_until_done_outlasts_the_cancellation_of_its_caller() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    caller = asyncio.ensure_future(until_done(future))
    await asyncio.sleep(0)
    caller.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not caller.done()
    future.set_result(7)
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert await until_done(future) == 7


async def test_cancel_waits_until_every_other_task_has_ended() -> None:
    tasks, ended = OwnedTasks(), []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def closer() -> None:
        await tasks.cancel()
        ended.append("closer")

    tasks.spawn(work("a"))
    tasks.spawn(work("b"))
    await asyncio.sleep(0)
    await tasks.spawn(closer())
    assert sorted(ended[:2]) == ["a", "b"]
    assert ended[2] == "closer"
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_join_with_a_timeout_leaves_slow_tasks_running() -> None:
    tasks = OwnedTasks()
    slow = tasks.spawn(asyncio.Event().wait())
    await tasks.join(seconds=0.01)
    assert not slow.done()
    await tasks.cancel()


async def test_task_that_swallows_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_tasks, "CANCEL_SECONDS", 0.01)
    swallowed = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            swallowed.set()
        await asyncio.sleep(3600)

    tasks = OwnedTasks()
    task = tasks.spawn(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.cancel(), 20)
    assert swallowed.is_set()
    assert task.cancelled()
