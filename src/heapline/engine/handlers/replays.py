"""Handlers of replays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING

from heapline.contract import replays
from heapline.contract.call import Page
from heapline.contract.check import instant_to_ms
from heapline.contract.context import Context
from heapline.contract.groups import pack_batch
from heapline.contract.stream import ReplayInfo
from heapline.engine.handlers.table import feeds, handles, page_by_name
from heapline.engine.replays import checkpoints, replay_request
from heapline.engine.replays.messages import rows_within
from heapline.engine.replays.ranges import find_ranges
from heapline.engine.replays.reader import Pace, Reading

if TYPE_CHECKING:
    from heapline.engine.broker import EmbeddedBroker

STEP_BYTES = 2 << 20  # a step over the wire is one message, and most clients accept no more than 4 MiB


@feeds(replays.Replay)
async def replay(broker: EmbeddedBroker, feed: replays.Replay, context: Context) -> AsyncIterator[replays.ReplayStep]:
    runner = broker.runner(feed.topic)
    request = replay_request.request_of(feed)
    kept = None if feed.checkpoint is None else await checkpoints.find(runner, feed.checkpoint)
    ranges = await find_ranges(runner, request, kept)
    ends = {p: last for p, (_, last) in ranges.items()}
    yield replays.ReplayStep(runner.name, {p: first for p, (first, _) in ranges.items()}, ends)
    reading, pace = Reading(runner, request, ranges, broker.clock), Pace(request.rate, broker.clock)
    try:
        while not reading.is_done:
            portion = await reading.next()
            while len(portion):
                count = min(await pace.room(reading.stay), rows_within(portion, STEP_BYTES))
                head, portion = portion.split(count)
                pace.went(count)
                batches = [pack_batch(rows.batch) for rows in head.rows]
                yield replays.ReplayStep(runner.name, head.positions, ends, batches, runner.loaded.topic.id_suffix)
            yield replays.ReplayStep(runner.name, portion.positions, ends)
    finally:
        await reading.close()


@handles(replays.SaveCheckpoint)
def save_checkpoint(broker: EmbeddedBroker, command: replays.SaveCheckpoint, context: Context) -> Awaitable[None]:
    return checkpoints.keep(broker.runner(command.topic), command.checkpoint, command.positions)


@handles(replays.StartReplay)
async def start_replay(broker: EmbeddedBroker, command: replays.StartReplay, context: Context) -> ReplayInfo:
    broker.check_open()
    change = replay_request.Change(
        priority=command.priority,
        delay=command.delay,
        deliver_at_ms=None if command.deliver_at is None else instant_to_ms(command.deliver_at),
        keep_due=command.keep_due,
    )
    return await broker.replays.start(command.name, replay_request.request_of(command), command.into, change)


@handles(replays.GetReplay)
async def get_replay(broker: EmbeddedBroker, command: replays.GetReplay, context: Context) -> ReplayInfo:
    broker.check_open()
    return await broker.replays.get(command.name)


@handles(replays.ListReplays)
async def list_replays(broker: EmbeddedBroker, command: replays.ListReplays, context: Context) -> Page[ReplayInfo]:
    broker.check_open()
    infos = sorted(await broker.replays.listed(), key=lambda info: info.name)
    return page_by_name(infos, command.cursor, command.limit)


@handles(replays.CancelReplay)
async def cancel_replay(broker: EmbeddedBroker, command: replays.CancelReplay, context: Context) -> ReplayInfo:
    broker.check_open()
    return await broker.replays.cancel(command.name)
