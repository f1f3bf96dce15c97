"""Repeating one turn from many coroutines until time is up, and noting how long each took. Knows no queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from time import perf_counter
from typing import Any

Turn = Callable[[], Awaitable[int]]  # does something once; how many messages that was
BYTES_MAX = 1 << 30  # that one load sends at most: a quick disk must not be filled


class Drive:
    """`messages` can be looked at while it runs."""

    def __init__(self, seconds: float, messages_max: int | None = None) -> None:
        self._seconds, self._messages_max = seconds, messages_max
        self.messages = 0
        self.samples: list[float] = []
        self.seconds = 0.0

    async def run(self, turn: Turn, concurrency: int) -> None:
        """Ends when the last turn has; nothing begins after time is up. The first error ends all, and is raised."""
        begun = perf_counter()
        until = begun + self._seconds

        async def repeat() -> None:
            now = perf_counter()
            while now < until and (self._messages_max is None or self.messages < self._messages_max):
                number = await turn()
                after = perf_counter()
                self.samples.append(after - now)
                self.messages += number
                now = after

        tasks = [asyncio.ensure_future(repeat()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self.seconds = perf_counter() - begun


def run_loop(work: Any) -> Any:
    """On the quicker loop, if it is there, as servers and workers run."""
    if find_spec("uvloop") is not None:
        import uvloop

        return uvloop.run(work)
    return asyncio.run(work)
