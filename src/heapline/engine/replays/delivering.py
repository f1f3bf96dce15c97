"""A replay as somebody iterates over it, on whichever broker: rows one by one or in batches, and where it stands kept.

A row counts as done when the next one is asked for. So the place that is kept is never past a row that nobody has seen
to its end; after a crash the rows since the last keeping come once more. It is kept every so many rows or seconds,
when the reader stops, and at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from heapline.engine.replays.asking import Request, check_name, request
from heapline.errors import HeaplineError
from heapline.logs import Log
from heapline.streams import Place, ReplayFilter, StreamBatch, StreamMessage

log = Log("heapline.replay")
KEEP_ROWS = 1000
KEEP_SECONDS = 1.0

Keep = Callable[[dict[int, int]], Awaitable[None]]


class Step(NamedTuple):
    """Some rows in order, and where the replay stands after them."""

    batches: list[StreamBatch]
    positions: dict[int, int]
    ends: dict[int, int]


class Replaying:
    """`replay` of any broker that can give its steps and keep its place."""

    def replay_steps(self, asked: Request, checkpoint: str | None = None) -> AsyncIterator[Step]:
        """`replay` without keeping: that is for whoever knows what became of the rows. The first step has none, and
        tells where it begins and ends."""
        raise NotImplementedError

    async def keep_replay(self, topic: str, checkpoint: str, positions: Mapping[int, int]) -> None:
        """All rows below these offsets are done, for the replay that goes on under this name."""
        raise NotImplementedError

    def replay(
        self, topic: str, *, start: Place = "earliest", end: Place | None = None,
        partitions: Sequence[int] | None = None, mode: str = "all", where: ReplayFilter | None = None,
        rate: float | None = None, checkpoint: str | None = None, batches: bool = False,
    ) -> AsyncIterator[StreamMessage | StreamBatch]:  # fmt: skip
        """The stream from `start` to `end` (what is durable when it begins), to whoever iterates. mode="fast": only the
        last state of each message, and only what is not gone. With `checkpoint`, a name, it goes on after a crash where
        it was: a few rows before that may come twice, none is missing."""
        asked = request(topic, start, end, partitions, mode, where, rate)
        if checkpoint is None:
            return deliver(self.replay_steps(asked), None, batches)
        check_name("checkpoint", checkpoint)

        async def keep(positions: dict[int, int]) -> None:
            await self.keep_replay(topic, checkpoint, positions)

        return deliver(self.replay_steps(asked, checkpoint), keep, batches)


async def deliver(
    steps: AsyncIterator[Step], keep: Keep | None, batches: bool
) -> AsyncIterator[StreamMessage | StreamBatch]:
    async with contextlib.aclosing(steps):  # type: ignore[type-var]
        place = _Place(keep)
        try:
            async for step in steps:
                for batch in step.batches:
                    if batches:
                        yield batch
                    else:
                        for message in batch.messages():
                            yield message
                            place.positions[batch.partition] = message.offset + 1
                    place.done(batch)
                place.positions.update(step.positions)
                await place.keep_sometimes()
        except BaseException:  # also of whoever stops reading
            try:
                await place.keep_now()
            except HeaplineError as error:  # what went wrong first is told; whoever just stopped cannot be
                log.warning("the place of a replay was not kept: rows come once more", error=str(error))
            raise
        await place.keep_now()


class _Place:
    def __init__(self, keep: Keep | None) -> None:
        self._keep = keep
        self.positions: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        self._rows = 0
        self._since = asyncio.get_running_loop().time()

    def done(self, batch: StreamBatch) -> None:
        self.positions[batch.partition] = int(batch.offsets[-1]) + 1
        self._rows += len(batch)

    async def keep_sometimes(self) -> None:
        late = asyncio.get_running_loop().time() - self._since >= KEEP_SECONDS
        if self._keep is not None and (self._rows >= KEEP_ROWS or late):
            await self.keep_now()

    async def keep_now(self) -> None:
        if self._keep is not None and self.positions != self._kept:
            self._kept = dict(self.positions)
            self._rows, self._since = 0, asyncio.get_running_loop().time()
            await self._keep(self._kept)
