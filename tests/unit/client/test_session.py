"""A session's end: whoever waits in it is told, at whichever moment it is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.client.session import Session
from heapline.errors import Closed


class Stream:
    """One that neither answers nor ends."""

    def add_done_callback(self, told: Any) -> None: ...

    async def write(self, request: Any) -> None: ...

    async def read(self) -> Any:
        await asyncio.Event().wait()

    def cancel(self) -> None: ...


@pytest.mark.parametrize("steps", range(6))
async def test_call_is_told_of_the_close_even_if_its_stream_has_not_begun(steps: int) -> None:
    session = Session(lambda: Stream(), lambda *_: None)
    calling = asyncio.ensure_future(session.call("Pop", b"", 3600))
    for _ in range(steps):
        await asyncio.sleep(0)
    await session.close()
    with pytest.raises(Closed):
        await asyncio.wait_for(calling, 20)
