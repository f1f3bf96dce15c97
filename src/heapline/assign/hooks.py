"""What users hang in, and the one task that calls it: hooks run one at a time and in order, and nothing waits for them
but the partitions they are about.

A hook is a coroutine function, or a plain one, which is called in a thread. `on_assignment_changed` is repeated until
it succeeds, first as `RetryConfig` says and then at its longest delay: a partition that could not be dropped is not
given away. What a hook raises goes to `on_error`; what that raises goes to the log.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from heapline.assign.beating import is_cancelled
from heapline.assign.config import RetryConfig
from heapline.assign.member import Change
from heapline.assign.model import Partition, State
from heapline.logs import Log

log = Log("heapline.assign")

NOTICES_MAX = 1000  # a hook that hangs must not fill the memory with news it will never hear

AssignmentHook = Callable[[Sequence[Partition], Sequence[Partition]], Awaitable[object] | object]
StateHook = Callable[[State, State], Awaitable[object] | object]
ErrorHook = Callable[[Exception], Awaitable[object] | object]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    on_assignment_changed: AssignmentHook | None = None  # (added, removed); the removed ones first, please
    on_state_changed: StateHook | None = None  # (before, after)
    on_error: ErrorHook | None = None  # something failed that is tried again


class HookRunner:
    """Calls hooks. `next_change` and `begin`/`finish` are the member's."""

    def __init__(self, hooks: Hooks, retry: RetryConfig) -> None:
        self._hooks, self._retry = hooks, retry
        self._notices: deque[tuple[Any, tuple[Any, ...]]] = deque(maxlen=NOTICES_MAX)
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Something may have changed: look for what to do."""
        self._news.set()

    def tell_state(self, before: State, after: State) -> None:
        self._notice(self._hooks.on_state_changed, before, after)

    def tell_error(self, error: Exception) -> None:
        log.warning("assign.error", error=type(error).__name__, detail=str(error))
        self._notice(self._hooks.on_error, error)

    def _notice(self, hook: Any, *args: Any) -> None:
        if hook is not None:
            self._notices.append((hook, args))
            self._news.set()

    async def run(self, next_change: Callable[[], tuple[Change | None, float | None]],
                  finished: Callable[[Change], None]) -> None:  # fmt: skip
        """For ever: `next_change` gives what to tell (it counts as begun) and, if nothing, how long to wait at most."""
        failures = 0
        while True:
            self._news.clear()
            await self._say()
            change, wait = next_change()
            if change is None:
                failures = 0
                await self._sleep(wait)
                continue
            error = await self._change(change)
            if error is None:
                failures = 0
                finished(change)
                continue
            self.tell_error(error)
            await self._say()
            await self._pause(self._delay(failures))
            failures += 1

    def _delay(self, failures: int) -> float:
        return self._retry.delay(failures) if failures < self._retry.max_retries else float(self._retry.max_delay)

    async def _pause(self, seconds: float) -> None:
        """Between two tries; news (a lease that ends, a stop) are a reason to try sooner, but not at once."""
        await asyncio.sleep(min(seconds, 0.05))
        self._news.clear()
        await self._sleep(max(0.0, seconds - 0.05))

    async def _sleep(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _change(self, change: Change) -> Exception | None:
        if self._hooks.on_assignment_changed is None:
            return None
        try:
            await _call(self._hooks.on_assignment_changed, change.added, change.removed)
        except Exception as error:
            return error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return RuntimeError("the hook was cancelled from within")
        return None

    async def _say(self) -> None:
        while self._notices:
            hook, args = self._notices.popleft()
            try:
                await _call(hook, *args)
            except Exception as error:
                log.warning("assign.hook_failed", error=type(error).__name__, detail=str(error))
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                log.warning("assign.hook_failed", error="CancelledError", detail="")


async def _call(hook: Callable[..., Any], *args: Any) -> None:
    # A plain function may block, and heartbeats must not wait for it.
    answer = hook(*args) if _is_async(hook) else await asyncio.to_thread(hook, *args)
    if inspect.isawaitable(answer):
        await answer


def _is_async(hook: Any) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004
