"""Handlers of replays, and the checkpoints of replays to subscribers.

A checkpoint is one file, in the folder of its topic, under its name. It is deleted with its topic: a new topic under
the same name starts without checkpoints. A checkpoint names its topic's incarnation nevertheless, because folders can
be copied.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping

import msgspec

from heapline.contract import replays
from heapline.contract.call import Context, Page, page_of
from heapline.contract.check import instant_to_ms
from heapline.contract.errors import BadRequest, UnavailableError
from heapline.contract.groups import pack_batch
from heapline.contract.stream import ReplayInfo
from heapline.engine.handlers import feeds, handles
from heapline.engine.replays.job_runner import rows_within
from heapline.engine.replays.jobs import load, save
from heapline.engine.replays.reader import ANY_NUMBER, Pace, Reading
from heapline.engine.replays.requests import Change, find_ranges, request_of
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper
from heapline.logs import Log
from heapline.owned_tasks import KeyedLocks, until_done

log = Log("heapline.replay")
#: Two concurrent writes would write the same file, and one would lose the other's partitions.
_locks: KeyedLocks[TopicRunner] = KeyedLocks()
STEP_BYTES = 2 << 20  # a step over the wire is one message, and most clients accept no more than 4 MiB


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: int
    positions: dict[int, int]  # partition -> next offset
    at_ms: int


async def find_checkpoint(runner: TopicRunner, name: str) -> dict[int, int]:
    found: Checkpoint | None = await runner.io.run(load, runner.loaded.journal.checkpoints, name, Checkpoint)
    if found is None:
        return {}
    if found.incarnation != runner.loader.incarnation:
        log.warning("checkpoint of a topic that was deleted, not used", topic=runner.name, checkpoint=name)
        return {}
    return found.positions


async def keep_checkpoint(runner: TopicRunner, name: str, positions: Mapping[int, int]) -> None:
    """Save positions. Durable on return. Partitions that are not named keep their saved position."""
    for partition, offset in positions.items():
        if not 0 <= partition < len(runner.loaded.topic.partitions) or not 0 <= offset <= 1 << 62:
            raise BadRequest(f"topic {runner.name!r} has no offset {offset} in partition {partition}")
    async with _locks.alone(runner):
        known = await find_checkpoint(runner, name)
        checkpoint = Checkpoint(
            incarnation=runner.loader.incarnation, positions={**known, **positions}, at_ms=runner.wall_ms()
        )
        try:
            await until_done(runner.io.run(save, runner.loaded.journal.checkpoints, name, checkpoint))
        except OSError as error:
            raise UnavailableError(f"checkpoint {name!r} cannot be written: {error.strerror}") from None


@feeds(replays.Replay)
async def replay(broker: TopicKeeper, feed: replays.Replay, context: Context) -> AsyncIterator[replays.ReplayStep]:
    runner = broker.runner(feed.topic)
    request = request_of(feed)
    kept = None if feed.checkpoint is None else await find_checkpoint(runner, feed.checkpoint)
    ranges, gaps = await find_ranges(runner, request, kept)
    ends = {p: last for p, (_, last) in ranges.items()}
    yield replays.ReplayStep(runner.name, {p: first for p, (first, _) in ranges.items()}, ends, gaps=gaps)
    reading, pace = Reading(runner, request, ranges, broker.clock), Pace(request.rate, broker.clock)
    left = ANY_NUMBER if request.count is None else request.count
    try:
        while not reading.is_done:
            portion = await reading.next()
            while len(portion):
                count = min(await pace.room(reading.stay), rows_within(portion, STEP_BYTES), left)
                head, portion = portion.split(count)
                pace.went(count)
                batches = [pack_batch(rows.batch) for rows in head.rows]
                yield replays.ReplayStep(runner.name, head.positions, ends, batches, runner.loaded.topic.id_suffix)
                if request.count is not None and not (left := left - count):
                    return
            yield replays.ReplayStep(runner.name, portion.positions, ends)
    finally:
        await reading.close()


@handles(replays.SaveCheckpoint)
def save_checkpoint(broker: TopicKeeper, command: replays.SaveCheckpoint, context: Context) -> Awaitable[None]:
    return keep_checkpoint(broker.runner(command.topic), command.checkpoint, command.positions)


@handles(replays.StartReplay)
async def start_replay(broker: TopicKeeper, command: replays.StartReplay, context: Context) -> ReplayInfo:
    broker.check_open()
    change = Change(
        priority=command.priority,
        delay=command.delay,
        deliver_at_ms=None if command.deliver_at is None else instant_to_ms(command.deliver_at),
        keep_due=command.keep_due,
    )
    return await broker.replays.start(command.name, request_of(command), command.into, change)


@handles(replays.GetReplay)
async def get_replay(broker: TopicKeeper, command: replays.GetReplay, context: Context) -> ReplayInfo:
    broker.check_open()
    return await broker.replays.get(command.name)


@handles(replays.ListReplays)
async def list_replays(broker: TopicKeeper, command: replays.ListReplays, context: Context) -> Page[ReplayInfo]:
    broker.check_open()
    return page_of(await broker.replays.listed(), command.cursor, command.limit)


@handles(replays.CancelReplay)
async def cancel_replay(broker: TopicKeeper, command: replays.CancelReplay, context: Context) -> ReplayInfo:
    broker.check_open()
    return await broker.replays.cancel(command.name)
