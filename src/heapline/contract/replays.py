"""Replays: read a topic's past messages again, or enqueue them into a topic.

A row is done when the reader requests the next one. So a saved checkpoint is never past a row that the reader has not
finished; after a crash, the rows since the last checkpoint are delivered again. The checkpoint is saved every so many
rows or seconds, when the reader stops, and at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from heapline.contract.call import Access, Command, Feed, Page, Right, call_family
from heapline.contract.check import fail
from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.fields import (
    CheckpointName,
    Cursor,
    Instant,
    Limit,
    Partition,
    Priority,
    Rate,
    ReplayName,
    Seconds,
    Topic,
)
from heapline.contract.groups import EARLIEST, PartitionBatch, Position, step_batches
from heapline.contract.messages import check_headers
from heapline.contract.stream import ReplayFilter, ReplayInfo, StreamBatch, StreamMessage
from heapline.logs import Log

replay_call = call_family(feature="replay")
Mode = Literal["all", "fast"]
RowCount = Annotated[int, Meta(ge=1, le=1 << 53)]


class ReplayStep(Struct, frozen=True, omit_defaults=True):
    """Some rows in order, and the offset after them in each partition. The first step has no rows."""

    topic: str
    positions: dict[int, int]
    ends: dict[int, int]
    batches: list[PartitionBatch] = []
    id_suffix: int = 0  # of the topic: the low bits of its messages' ULIDs
    gaps: dict[int, int] = {}  # first step: where the log starts, by partition whose requested rows were reclaimed


def check_partitions(partitions: list[int] | None) -> None:
    if partitions is not None and not partitions:
        raise BadRequest("partitions is empty; omit it for all of them")


def check_where(where: ReplayFilter | None) -> None:
    if where is not None and where.headers:
        check_headers(where.headers)


@replay_call(id=0x60, rpc="Replay", http="POST /v1/replays:read", needs=Right.CONSUME)
class Replay(Feed[ReplayStep]):
    """Read the stream from `start` to `end`, which is what is durable when it begins.

    mode="fast" reads only the last state of each message, and only messages that still exist. With `checkpoint` it
    continues where SaveCheckpoint left off. If rows after the start were reclaimed, the call is refused; with
    `allow_gaps` it begins where the log does, and the first step says so. With `count` it ends after that many rows,
    and the next one with the same checkpoint continues after them.
    """

    topic: Topic
    start: Position = EARLIEST
    end: Position | None = None
    partitions: list[Partition] | None = None
    mode: Mode = "all"
    where: ReplayFilter | None = None
    rate: Rate | None = None
    checkpoint: CheckpointName | None = None
    allow_gaps: bool = False
    count: RowCount | None = None  # of the rows that `where` and `mode` let through

    def validate(self) -> None:
        check_partitions(self.partitions)
        check_where(self.where)


@replay_call(id=0x61, rpc="KeepReplay", http="POST /v1/replays:keep", needs=Right.CONSUME)
class SaveCheckpoint(Command[None]):
    """Save how far a reader is: all rows below these offsets are done."""

    topic: Topic
    checkpoint: CheckpointName
    positions: dict[int, int]

    def validate(self) -> None:
        for partition, offset in self.positions.items():
            if type(partition) is not int or type(offset) is not int or partition < 0 or not 0 <= offset <= 1 << 62:
                fail("positions", "{partition: offset}", self.positions)


@replay_call(
    id=0x62,
    rpc="StartReplay",
    http="POST /v1/replays",
    needs=(Access(Right.ADMIN), Access(Right.PRODUCE, "target")),
    route="replay",
    audit=("name", "target"),
)
class StartReplay(Command[ReplayInfo]):
    """Enqueue a stream's messages into a topic, each exactly once, across restarts.

    Starting it again with the same arguments returns the replay that runs. `allow_gaps` is that of Replay.
    """

    name: ReplayName
    topic: Topic
    into: Topic | None = None
    start: Position = EARLIEST
    end: Position | None = None
    partitions: list[Partition] | None = None
    mode: Mode = "all"
    where: ReplayFilter | None = None
    rate: Rate | None = None
    priority: Priority | None = None
    delay: Seconds | None = None
    deliver_at: Instant | None = None
    keep_due: bool = False
    allow_gaps: bool = False
    count: RowCount | None = None  # messages after which it is done

    def validate(self) -> None:
        check_partitions(self.partitions)
        check_where(self.where)
        if (self.delay is not None) + (self.deliver_at is not None) + self.keep_due > 1:
            raise BadRequest("give one of delay, deliver_at and keep_due")

    @property
    def target(self) -> str:
        return self.topic if self.into is None else self.into


@replay_call(
    id=0x63, rpc="GetReplay", http="GET /v1/replays/{name}", rows=Access(Right.CONSUME, "source"), route="replay"
)
class GetReplay(Command[ReplayInfo]):
    """Return how far a replay is."""

    name: ReplayName


@replay_call(
    id=0x64, rpc="ListReplays", http="GET /v1/replays", rows=Access(Right.CONSUME, "source"), route="all", merge="pages"
)
class ListReplays(Command[Page[ReplayInfo]]):
    """List the replays that run, and those that ended recently."""

    cursor: Cursor | None = None
    limit: Limit = 1000


@replay_call(
    id=0x65,
    rpc="CancelReplay",
    http="POST /v1/replays/{name}:cancel",
    needs=(Access(Right.ADMIN, "source"),),
    lookup="GetReplay",
    route="replay",
    audit=("name",),
)
class CancelReplay(Command[ReplayInfo]):
    """Stop a replay. What it has enqueued stays."""

    name: ReplayName


# -- reading -----------------------------------------------------------------------------------------------------------

log = Log("heapline.replay")
SAVE_ROWS = 1000
SAVE_SECONDS = 1.0
Save = Callable[[dict[int, int]], Awaitable[None]]


async def deliver(
    steps: AsyncIterator[ReplayStep], save: Save | None, batches: bool
) -> AsyncIterator[StreamMessage | StreamBatch]:
    """Yield the rows of a replay one by one or in batches, and save a checkpoint along the way."""
    async with contextlib.aclosing(steps):  # type: ignore[type-var]
        progress = _Progress(save)
        try:
            async for step in steps:
                if step.gaps:
                    log.warning("replay omits reclaimed rows", topic=step.topic, log_starts=step.gaps)
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
