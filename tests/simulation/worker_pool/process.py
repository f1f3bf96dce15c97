"""A simulated process: it can be paused, as by SIGSTOP, and killed, and its clock drifts.

Its event loop can also be blocked: then no task takes a step, but its threads run and may call `holds`. Every task
started in a process is controlled: while the process is paused, none of its tasks takes a step, whatever it waits for;
afterwards each continues. Requests sent before remain in flight.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any

current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """A process whose clock starts at `offset` and runs at `rate`."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, rate: float = 1.0, offset: float = 0.0) -> None:
        self.name = name
        self._loop, self._rate, self._offset = loop, rate, offset
        self.is_paused = False
        self.is_blocked = False
        self.is_dead = False
        self._gates: list[asyncio.Future[None]] = []
        self.tasks: list[asyncio.Task[Any]] = []

    @property
    def is_running(self) -> bool:
        return not self.is_paused and not self.is_dead

    @property
    def is_stopped(self) -> bool:
        """Whether its tasks take no steps."""
        return self.is_paused or self.is_blocked

    def clock(self) -> float:
        return self._offset + self._rate * self._loop.time()

    def start(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(current.set, self)
        return context.run(lambda: self._loop.create_task(work(), name=self.name))

    def pause(self) -> None:
        self.is_paused = True

    def block(self) -> None:
        self.is_blocked = True

    def resume(self) -> None:
        self.is_paused = self.is_blocked = False
        gates, self._gates = self._gates, []
        for gate in gates:
            if not gate.done():
                gate.set_result(None)

    def kill(self) -> None:
        """End the process: it has no further effect."""
        self.is_dead = True
        self.resume()
        for task in self.tasks:
            task.cancel()

    def gate(self) -> asyncio.Future[None]:
        gate = self._loop.create_future()
        self._gates.append(gate)
        return gate


class _Controlled:
    def __init__(self, work: Coroutine[Any, Any, Any], process: Process) -> None:
        self._work, self._process = work, process

    def __await__(self) -> Generator[Any, None, Any]:
        raised: BaseException | None = None
        while True:
            while self._process.is_stopped:
                try:
                    yield from self._process.gate()
                except asyncio.CancelledError as error:
                    raised = error  # a timer fired meanwhile; the task receives it when it continues
            try:
                if raised is None:
                    waits_for = self._work.send(None)
                else:
                    thrown, raised = raised, None
                    waits_for = self._work.throw(thrown)
            except StopIteration as stop:
                return stop.value
            try:
                yield waits_for
            except BaseException as error:
                raised = error


async def _control(work: Coroutine[Any, Any, Any], process: Process) -> Any:
    return await _Controlled(work, process)


def task_factory(
    loop: asyncio.AbstractEventLoop, work: Any, context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    process = current.get() if context is None else context.get(current)
    controlled = work if process is None else _control(work, process)
    task = asyncio.Task(controlled, loop=loop, context=context)
    if process is not None:
        process.tasks = [each for each in process.tasks if not each.done()]
        process.tasks.append(task)
    return task
