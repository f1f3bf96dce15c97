"""A worker pool in one test: real managers on an in-memory store, in virtual time, without faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

from heapline.assign.assignment import ASSIGNMENT_KEY, Document, Lifecycle
from heapline.assign.config import Config
from heapline.assign.hooks import Hooks
from heapline.assign.kv import MemoryKV
from heapline.assign.manager import Manager
from heapline.assign.partitions import Partition, StaticSource
from heapline.assign.states import State
from tests.simulation.loop import run


class Pool:
    """A store, a source, and the managers' recorded hook calls."""

    def __init__(self, partitions: int = 12, config: Config | None = None) -> None:
        self.config = config or Config()
        self.kv = MemoryKV(self.now)
        self.source = StaticSource(Partition(("p", f"{n:02}")) for n in range(partitions))
        self.states: dict[Manager, list[tuple[float, State]]] = {}
        self.calls: dict[Manager, list[tuple[list[str], list[str]]]] = {}
        self.errors: list[Exception] = []
        self._sessions = 0

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def new_session(self) -> str:
        self._sessions += 1
        return f"s{self._sessions}"

    def manager(self, **more: Any) -> Manager:
        states: list[tuple[float, State]] = []
        calls: list[tuple[list[str], list[str]]] = []

        async def state_changed(before: State, after: State) -> None:
            states.append((self.now(), after))

        async def changed(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
            calls.append(([p.id for p in added], [p.id for p in removed]))

        async def failed(error: Exception) -> None:
            self.errors.append(error)

        hook: Callable[..., Any] = more.pop("hook", changed)
        kv = more.pop("kv", self.kv)
        config = more.pop("config", self.config)
        manager = Manager(
            config,
            kv,
            self.source,
            clock=self.now,
            new_session=self.new_session,
            hooks=Hooks(on_assignment_changed=hook, on_state_changed=state_changed, on_error=failed),
            **more,
        )
        self.states[manager], self.calls[manager] = states, calls
        return manager

    async def started(self, count: int) -> list[Manager]:
        managers = [self.manager() for _ in range(count)]
        await asyncio.gather(*(manager.start() for manager in managers))
        return managers

    async def document(self) -> Document:
        entry = await self.kv.get(ASSIGNMENT_KEY)
        assert entry is not None
        return Document.decode(entry.value)

    async def lifecycle(self) -> Lifecycle:
        return (await self.document()).lifecycle

    def leader(self, managers: Sequence[Manager]) -> Manager:
        [leader] = [manager for manager in managers if manager.is_leader]
        return leader

    def seconds_in(self, manager: Manager, state: State) -> list[float]:
        """Return how long each stay in a state lasted."""
        stays = self.states[manager]
        return [after - at for (at, entered), (after, _) in pairwise(stays) if entered is state]


async def until(condition: Callable[[], object]) -> None:
    """Let virtual time pass until the condition holds."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def crash(manager: Manager) -> None:
    """End its process: nothing is released."""
    for task in manager._tasks:
        task.cancel()


def in_virtual_time(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        run(scenario())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


def held(managers: Sequence[Manager]) -> dict[str, list[str]]:
    return {manager.worker_id: [p.id for p in manager.assignment.partitions] for manager in managers}


def holder_by_partition(managers: Sequence[Manager]) -> dict[str, str]:
    return {p: worker for worker, ps in held(managers).items() for p in ps}
