"""Deliver the rows of a replay one by one or in batches, and save a checkpoint along the way.

A row is done when the next one is requested. So a saved checkpoint is never past a row that the reader has not
finished; after a crash, the rows since the last checkpoint are delivered again. The checkpoint is saved every so many
rows or seconds, when the reader stops, and at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from heapline.contract.errors import HeaplineError
from heapline.contract.replays import ReplayStep
from heapline.contract.results import step_batches
from heapline.contract.stream import StreamBatch, StreamMessage
from heapline.logs import Log

log = Log("heapline.replay")
SAVE_ROWS = 1000
SAVE_SECONDS = 1.0

Save = Callable[[dict[int, int]], Awaitable[None]]


async def deliver(
    steps: AsyncIterator[ReplayStep], save: Save | None, batches: bool
) -> AsyncIterator[StreamMessage | StreamBatch]:
    async with contextlib.aclosing(steps):  # type: ignore[type-var]
        progress = _Progress(save)
        try:
            async for step in steps:
                for batch in step_batches(step.topic, step.batches, step.id_suffix):
                    if batches:
                        yield batch
                    else:
                        for message in batch.messages():
                            yield message
                            progress.positions[batch.partition] = message.offset + 1
                    progress.done(batch)
                progress.positions.update(step.positions)
                await progress.save_sometimes()
        except BaseException:  # including a reader that stops early
            try:
                await progress.save_now()
            except HeaplineError as error:  # raise the first error; a reader that just stopped cannot receive this one
                log.warning("replay checkpoint not saved; rows will be delivered again", error=str(error))
            raise
        await progress.save_now()


class _Progress:
    def __init__(self, save: Save | None) -> None:
        self._save = save
        self.positions: dict[int, int] = {}
        self._saved: dict[int, int] = {}
        self._rows = 0
        self._since = asyncio.get_running_loop().time()

    def done(self, batch: StreamBatch) -> None:
        self.positions[batch.partition] = int(batch.offsets[-1]) + 1
        self._rows += len(batch)

    async def save_sometimes(self) -> None:
        late = asyncio.get_running_loop().time() - self._since >= SAVE_SECONDS
        if self._save is not None and (self._rows >= SAVE_ROWS or late):
            await self.save_now()

    async def save_now(self) -> None:
        if self._save is not None and self.positions != self._saved:
            self._saved = dict(self.positions)
            self._rows, self._since = 0, asyncio.get_running_loop().time()
            await self._save(self._saved)
