"""A manager with failing user code.

No exception from a hook, source, store or collector may silently end one of the manager's tasks, and `start()` and
`stop()` end in time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import pytest

from heapline.assign.errors import AssignError, ShutdownTimeout
from heapline.assign.kv import Entry, MemoryKV
from heapline.assign.manager import Manager
from heapline.assign.metrics import NoMetrics
from heapline.assign.partitions import Partition
from tests.simulation.loop import run
from tests.unit.assign.pool_rig import Pool, crash, held, in_virtual_time


@in_virtual_time
async def test_hook_that_raises_a_foreign_cancellation_is_repeated() -> None:
    pool = Pool()
    calls: list[int] = []

    async def changed(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        calls.append(len(added))
        if len(calls) == 1:
            raise asyncio.CancelledError  # as awaiting a cancelled task does

    manager = pool.manager(hook=changed)
    await manager.start()
    assert calls == [12, 12]
    await manager.stop()


@in_virtual_time
async def test_source_that_raises_a_foreign_cancellation_is_retried() -> None:
    pool = Pool()

    class Source:
        calls = 0

        async def list_partitions(self) -> Iterable[Partition]:
            self.calls += 1
            if self.calls == 1:
                raise asyncio.CancelledError
            return await pool.source.list_partitions()

    manager = Manager(pool.config, pool.kv, Source(), clock=pool.now)
    await manager.start()
    assert len(manager.assignment.partitions) == 12
    await manager.stop()


class Odd(MemoryKV):
    """A store whose client raises an unexpected error at every third call."""

    def __init__(self, clock: Callable[[], float], error: BaseException) -> None:
        super().__init__(clock)
        self._error, self._calls = error, 0

    def _fail(self) -> None:
        self._calls += 1
        if self._calls % 3 == 1:
            raise self._error

    async def get(self, key: str) -> Entry | None:
        self._fail()
        return await super().get(key)

    async def entries(self, prefix: str) -> list[Entry]:
        self._fail()
        return await super().entries(prefix)

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        self._fail()
        return await super().update(key, value, revision, ttl=ttl)

    async def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        self._fail()
        async for entry in super().watch(prefix):
            yield entry


@pytest.mark.parametrize("error", [OSError("odd"), asyncio.CancelledError()], ids=["odd error", "cancellation"])
def test_store_whose_client_raises_any_error_is_retried(error: BaseException) -> None:
    async def story() -> None:
        pool = Pool()
        pool.kv = Odd(pool.now, error)
        managers = await pool.started(2)
        await asyncio.sleep(60)
        assert [len(ps) for ps in held(managers).values()] == [6, 6]
        for manager in managers:
            await manager.stop()

    run(story())


@in_virtual_time
async def test_collector_that_raises_affects_nothing() -> None:
    class Failing(NoMetrics):
        def record_heartbeat(self, worker_id: str, success: bool) -> None:
            raise RuntimeError("no disk")

        def record_assignment_change(self, added: int, removed: int, version: int) -> None:
            raise RuntimeError("no disk")

    pool = Pool()
    manager = pool.manager(metrics=Failing())
    await manager.start()
    await asyncio.sleep(60)
    assert len(manager.assignment.partitions) == 12
    await manager.stop()


@in_virtual_time
async def test_stop_ends_start() -> None:
    pool = Pool()
    manager = pool.manager()
    starting = asyncio.create_task(manager.start())
    await asyncio.sleep(3)
    await manager.stop()
    with pytest.raises(AssignError, match="stop"):
        await starting
    assert pool.now() < 4


@in_virtual_time
async def test_stop_does_not_wait_for_a_hook_that_ignores_cancellation() -> None:
    pool = Pool()
    over = asyncio.Event()

    async def changed(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        while removed and not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    manager = pool.manager(hook=changed)
    await manager.start()
    began = pool.now()
    with pytest.raises(ShutdownTimeout):
        await manager.stop()
    assert pool.now() - began < 10 + 2.1
    assert manager.assignment.partitions  # it still works on them, and no other worker gets them
    await asyncio.sleep(6)
    assert not manager.assignment.partitions
    over.set()


@in_virtual_time
async def test_workers_recover_when_the_store_is_recreated() -> None:
    pool = Pool()
    managers = await pool.started(2)
    await asyncio.sleep(50)
    pool.kv._stored.clear()
    pool.kv._revision = 0
    await asyncio.sleep(60)
    assert [len(ps) for ps in held(managers).values()] == [6, 6]
    assert (await pool.document()).version < 10
    crash(pool.leader(managers))
    await asyncio.sleep(20)
    assert sum(manager.is_leader for manager in managers) == 1
