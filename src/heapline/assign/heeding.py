"""A cancellation that gets lost on the way, raised after all.

`asyncio.wait_for` before Python 3.12 forgets a cancellation that comes in the same moment as the answer, and so do
libraries that catch it. A task that was cancelled once then runs on for ever, and whoever waits for its end does too:
a worker whose session was lost would never begin another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def heeding(asking: Awaitable[T]) -> T:
    """Await something of others; if we were cancelled meanwhile, that is what happens, whatever came back."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        return await asking
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
