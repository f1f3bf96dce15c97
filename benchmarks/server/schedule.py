"""An open loop: calls start when they are due, even if earlier ones are still in progress.

Latency is counted from the time that a call was due, not from when it was sent, so a server that stalls is charged
with everything that it delays. A thread keeps the time, because event loops wake to the millisecond only.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np


def poisson(per_second: float, seconds: float, seed: int = 7) -> list[float]:
    """Return seconds from the start at which calls are due: independent callers, this many per second on average."""
    chance = np.random.default_rng(seed)
    gaps = chance.exponential(1 / per_second, size=int(per_second * seconds * 1.5) + 100)
    due = np.cumsum(gaps)
    kept: list[float] = due[due < seconds].tolist()
    return kept


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that this percentage does not exceed: a real sample."""
    if not samples:
        raise ValueError("no samples: nothing was measured")
    return float(np.percentile(samples, percent, method="inverted_cdf"))


async def open_loop(due: Sequence[float], call: Callable[[int, float], Coroutine[Any, Any, None]]) -> list[float]:
    """Start `call(number, due_at)` at each time; `due_at` is on `time.perf_counter`. At the end return how late
    each was started, in seconds: the delay caused by this process."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []
    late: list[float] = []
    began = time.perf_counter() + 0.05
    all_started = asyncio.Event()

    def start(number: int) -> None:
        due_at = began + due[number]
        late.append(time.perf_counter() - due_at)
        tasks.append(loop.create_task(call(number, due_at)))
        if number == len(due) - 1:
            all_started.set()

    def keep_time() -> None:
        for number, offset in enumerate(due):
            time.sleep(max(0.0, began + offset - time.perf_counter()))
            loop.call_soon_threadsafe(start, number)

    if due:
        threading.Thread(target=keep_time, daemon=True).start()
        await all_started.wait()
        await asyncio.gather(*tasks)
    return late
