"""User hooks, and the one task that calls them: one at a time and in order. Only the affected partitions wait for them.

A hook is a coroutine function, or a plain function, which runs in a thread. `on_assignment_changed` is repeated until
it succeeds, first as `RetryConfig` says and then at its longest delay: a partition that could not be dropped is not
given to another worker. What a hook raises goes to `on_error`; what `on_error` raises goes to the log.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from heapline.assign.cancellation import is_cancelled, wait_for_event
from heapline.assign.config import RetryConfig
from heapline.assign.member import Change
from heapline.assign.partitions import Partition
from heapline.assign.states import State
from heapline.logs import Log

NOTICES_MAX = 1000  # limits memory while a hook hangs

AssignmentHook = Callable[[Sequence[Partition], Sequence[Partition]], Awaitable[object] | object]
StateHook = Callable[[State, State], Awaitable[object] | object]
ErrorHook = Callable[[Exception], Awaitable[object] | object]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The functions that users provide."""

    on_assignment_changed: AssignmentHook | None = None  # (added, removed); stop the removed ones first
    on_state_changed: StateHook | None = None  # (before, after)
    on_error: ErrorHook | None = None  # an operation failed and will be retried


class HookRunner:
    """Calls hooks. The caller supplies assignment changes."""

    def __init__(self, hooks: Hooks, retry: RetryConfig, log: Log) -> None:
        self._hooks, self._retry, self._log = hooks, retry, log
        self._notices: deque[tuple[Any, tuple[Any, ...]]] = deque(maxlen=NOTICES_MAX)
        self._wakeup = asyncio.Event()

    def wake(self) -> None:
        """Check again for something to do."""
        self._wakeup.set()

    def notify_state_change(self, before: State, after: State) -> None:
        self._queue(self._hooks.on_state_changed, before, after)

    def notify_error(self, error: Exception) -> None:
        self._log.warning("assign.error", error=type(error).__name__, detail=str(error))
        self._queue(self._hooks.on_error, error)

    def _queue(self, hook: Any, *args: Any) -> None:
        if hook is not None:
            self._notices.append((hook, args))
            self._wakeup.set()

    async def run(
        self, next_change: Callable[[], tuple[Change | None, float | None]], finished: Callable[[Change], None]
    ) -> None:
        """Run forever. `next_change` returns a change that counts as begun, or None and the longest time to wait."""
        failures = 0
        while True:
            self._wakeup.clear()
            await self._deliver_notices()
            change, wait = next_change()
            if change is None:
                failures = 0
                await wait_for_event(self._wakeup, wait)
                continue
            error = await _call(self._hooks.on_assignment_changed, change.added, change.removed)
            if error is None:
                failures = 0
                finished(change)
                continue
            self.notify_error(error)
            await self._deliver_notices()
            await self._pause(self._retry.endless_delay(failures))
            failures += 1

    async def _pause(self, seconds: float) -> None:
        """Wait between two tries. News (a lease that ends, a stop) shortens the wait, but not below 50 ms."""
        await asyncio.sleep(min(seconds, 0.05))
        self._wakeup.clear()
        await wait_for_event(self._wakeup, seconds - 0.05)

    async def _deliver_notices(self) -> None:
        while self._notices:
            hook, args = self._notices.popleft()
            if (error := await _call(hook, *args)) is not None:
                self._log.warning("assign.hook_failed", error=type(error).__name__, detail=str(error))


async def _call(hook: Callable[..., Any] | None, *args: Any) -> Exception | None:
    """Call a hook, if there is one. Return its error instead of raising it."""
    if hook is None:
        return None
    try:
        # A plain function may block, and heartbeats must not wait for it.
        answer = hook(*args) if is_async(hook) else await asyncio.to_thread(hook, *args)
        if inspect.isawaitable(answer):
            await answer
    except Exception as error:
        return error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        return RuntimeError("the hook was cancelled internally")
    return None


def is_async(hook: Any) -> bool:
    """Return whether a function, or an object with `__call__`, is a coroutine function."""
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004
