"""Plain functions in threads, with real threads and a real loop; no test waits for time to pass."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from pathlib import Path
from typing import Any

import pytest

import heapline
from heapline.client.tasks.execution import Threads
from tests.unit.client.tasks.rig import SMALL

flavour: contextvars.ContextVar[str] = contextvars.ContextVar("flavour", default="plain")


def nothing() -> None: ...


async def until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.005)


async def test_function_runs_in_another_thread_in_the_callers_context() -> None:
    threads = Threads(2)
    flavour.set("sour")
    name, tasted = await threads.run(lambda: (threading.current_thread().name, flavour.get()), nothing)
    assert name.startswith("heapline-task-")
    assert tasted == "sour"
    threads.close()


async def test_thread_is_used_again() -> None:
    threads = Threads(2)
    first = await threads.run(threading.get_ident, nothing)
    second = await threads.run(threading.get_ident, nothing)
    assert first == second
    assert threads.count == 1
    threads.close()


@pytest.mark.parametrize("kind", [StopIteration, asyncio.CancelledError, SystemExit])
async def test_exceptions_that_futures_reject_become_failures(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind

    threads = Threads(1)
    with pytest.raises(RuntimeError, match=f"the handler raised {kind.__name__}"):
        await threads.run(fail, nothing)
    threads.close()


async def test_abandoned_thread_reports_its_end() -> None:
    threads, free, ended = Threads(1), threading.Event(), asyncio.Event()
    waiting = threads.run(free.wait, ended.set)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await threads.run(lambda: 1, nothing) == 1  # another replaces it
    assert not ended.is_set()
    free.set()
    async with asyncio.timeout(20):
        await ended.wait()
    assert threads.count == 1  # the second one ended: one idle thread is enough
    threads.close()


async def test_hung_plain_handler_is_abandoned_and_frees_lease_and_slot(tmp_path: Path) -> None:
    app, free, said = heapline.App(tmp_path / "data", topics={"jobs": SMALL}), threading.Event(), list[int]()

    @app.task(topic="jobs", timeout=0.2)
    def hang(n: int) -> None:
        said.append(n)
        if n == 1:
            free.wait()

    async with app:
        await hang.enqueue(1)
        worker = app.worker(concurrency=1, abandoned_max=5)
        running = asyncio.ensure_future(worker.run())
        await until(lambda: worker.totals.abandoned == 1)
        stats = await (await app.broker()).stats("jobs")
        assert stats.leased == 1  # the lease expires: the thread may still be running
        await hang.enqueue(2)
        await until(lambda: worker.totals.done == 1)
        assert said == [1, 2]
        free.set()
        await until(lambda: worker.totals.abandoned == 0)
        worker.stop()
        await running
    assert worker.totals.timed_out == 1


async def test_plain_handler_may_enqueue_in_turn(tmp_path: Path) -> None:
    app, said = heapline.App(tmp_path / "data", topics={"jobs": SMALL}), list[int]()

    @app.task(topic="jobs")
    def count_down(n: int) -> None:
        said.append(n)
        if n:
            count_down.enqueue_sync(n - 1)

    worker = app.worker()
    running = asyncio.ensure_future(worker.run())
    await count_down.enqueue(3)
    await until(lambda: worker.totals.done == 4)
    worker.stop()
    await running
    assert said == [3, 2, 1, 0]


async def test_async_function_behind_a_plain_decorator_is_awaited(tmp_path: Path) -> None:
    app, said = heapline.App(tmp_path / "data", topics={"jobs": SMALL}), list[int]()

    async def hidden(n: int) -> None:
        await asyncio.sleep(0)
        said.append(n)

    @app.task(topic="jobs")
    def shown(n: int) -> Any:
        return hidden(n)

    worker = app.worker()
    running = asyncio.ensure_future(worker.run())
    await shown.enqueue(3)
    await until(lambda: worker.totals.done == 1)
    worker.stop()
    await running
    assert said == [3]
