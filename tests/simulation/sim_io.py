"""Blocking work in virtual time: each job runs without interruption at a random time, and is answered at a later one.

So a crash can be before a job, after it, or (with `FakeDisk.cut_power_in`) in the middle of it, and concurrent jobs
run in any order. The engine itself must prevent jobs from overlapping.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, TypeVar

from heapline.engine.io import Io
from tests.simulation.fake_disk import PowerCut

T = TypeVar("T")


class SimIo(Io):
    """An `Io` for the simulator. After `cut` nothing is ever answered, as on a machine that has stopped."""

    def __init__(
        self, rng: random.Random, *, mean: float = 0.001, stall: float = 0.01, stall_seconds: float = 0.3,
        on_power_cut: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._rng = rng
        self._mean = mean
        self._stall = stall  # probability that a job hangs for up to `stall_seconds`
        self._stall_seconds = stall_seconds
        self._on_power_cut = on_power_cut
        self._is_cut = False
        self.jobs = 0

    def _delay(self) -> float:
        if self._rng.random() < self._stall:
            return self._rng.uniform(0, self._stall_seconds)
        return self._rng.expovariate(1 / self._mean)

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.jobs += 1
        loop.call_later(self._delay(), self._do, future, function, args)
        return future

    def _do(self, future: asyncio.Future[T], function: Callable[..., T], args: tuple[Any, ...]) -> None:
        # Cancelling the caller does not stop a thread that has started; one that has not started is not run.
        if self._is_cut or future.cancelled():
            return
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*args)
        except PowerCut:
            self.cut()
            self._on_power_cut()
            return
        except Exception as problem:
            error = problem
        asyncio.get_running_loop().call_later(self._delay(), self._answer, future, result, error)

    def _answer(self, future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
        if self._is_cut or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def cut(self) -> None:
        self._is_cut = True

    def close(self) -> None:
        self._is_cut = True
