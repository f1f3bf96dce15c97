"""Run blocking work. The engine itself never blocks and never creates a thread: it uses this interface.

`ThreadIo` is the real one. The simulator has its own, which runs everything in one thread, in fake time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
THREADS = 8


class Io(Protocol):
    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]: ...

    def close(self) -> None: ...


class ThreadIo:
    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="heapline-io")

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
