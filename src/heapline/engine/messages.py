"""Handlers of enqueues, and of calls on single messages by their id."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from heapline.contract import messages
from heapline.contract.call import Context, Page
from heapline.contract.columns import pack
from heapline.contract.errors import UnavailableError
from heapline.contract.message import Enqueued, MessageInfo
from heapline.contract.messages import pack_enqueued
from heapline.engine import lookup
from heapline.engine.columns import (
    Columns,
    EnqueueCall,
    Identity,
    batch_bytes_max,
    check_batch_bytes,
    check_for_topic,
    check_priority,
)
from heapline.engine.handlers import handles
from heapline.engine.runner import TopicRunner
from heapline.engine.topics import TopicKeeper

CHUNK_BYTES = 3 << 20  # a batch that is not atomic is written in pieces of this size


def identity_of(command: Any) -> Identity | None:
    if command.producer_id is None:
        return None
    return Identity(command.producer_id, command.epoch, command.answered_below or 0)


@handles(messages.Enqueue)
def enqueue(broker: TopicKeeper, command: messages.Enqueue, context: Context) -> Awaitable[Enqueued]:
    runner = broker.runner(command.topic)
    check_for_topic(command, runner.loaded.topic.config, runner.name)
    identity = None if command.producer_id is None else identity_of(command)
    return runner.enqueue(EnqueueCall(runner.future(), message=command, identity=identity))


@handles(messages.EnqueueBatch)
async def enqueue_batch(
    broker: TopicKeeper, command: messages.EnqueueBatch, context: Context
) -> messages.EnqueuedBatch:
    runner = broker.runner(command.topic)
    columns = Columns.of_batch(command.messages)
    identity = identity_of(command)
    errors = columns.check(runner.loaded.topic.config, runner.name, command.atomic)
    if not columns.count:
        return pack_enqueued([], runner.loaded.topic.id_suffix)
    if not errors:
        if command.atomic and identity is None and columns.tokens is None:
            call = EnqueueCall(runner.future(), columns=columns, wants_ids=True)
            check_batch_bytes(call, runner.loaded.topic.config)
            return messages.EnqueuedBatch(pack(await runner.enqueue(call)), id_suffix=runner.loaded.topic.id_suffix)
        results = await _enqueue_all(runner, columns, command.atomic, identity)
        return pack_enqueued(results, runner.loaded.topic.id_suffix)
    good = [i for i in range(columns.count) if i not in errors]
    rest = iter(await _enqueue_all(runner, columns.subset(good), False, identity) if good else ())
    everything = (Enqueued(0, error=errors[i]) if i in errors else next(rest) for i in range(columns.count))
    return pack_enqueued(list(everything), runner.loaded.topic.id_suffix)


async def _enqueue_all(
    runner: TopicRunner, columns: Columns, atomic: bool, identity: Identity | None
) -> list[Enqueued]:
    call = EnqueueCall(runner.future(), columns=columns, atomic=atomic, identity=identity)
    config, count = runner.loaded.topic.config, columns.count
    if atomic:
        check_batch_bytes(call, config)
    elif count > 1 and call.nbytes > min(CHUNK_BYTES, batch_bytes_max(config, count)):
        halves = columns.subset(range(count // 2)), columns.subset(range(count // 2, count))
        return [r for half in halves for r in await _enqueue_all(runner, half, atomic, identity)]
    try:
        results: list[Enqueued] = await runner.enqueue(call)
    except UnavailableError as error:
        if atomic:
            raise
        results = [
            Enqueued(0, error=error.with_traceback(None))
        ] * count  # other pieces of the batch may have been enqueued
    return results


@handles(messages.OpenProducer)
async def open_producer(broker: TopicKeeper, command: messages.OpenProducer, context: Context) -> messages.Opened:
    runner = broker.runner(command.topic)
    epoch = await runner.call(lambda now: runner.loaded.admission.open_producer(command.producer_id, None, now))
    return messages.Opened(epoch)


@handles(messages.GetMessage)
def get(broker: TopicKeeper, command: messages.GetMessage, context: Context) -> Awaitable[MessageInfo]:
    runner = broker.runner(command.topic)
    return lookup.get(runner, runner.loaded.topic.find_id(command.message_id))


@handles(messages.Peek)
def peek(broker: TopicKeeper, command: messages.Peek, context: Context) -> Awaitable[Page[MessageInfo]]:
    return lookup.peek(broker.runner(command.topic), command.limit, command.cursor, command.max_bytes)


@handles(messages.Cancel)
def cancel(broker: TopicKeeper, command: messages.Cancel, context: Context) -> Awaitable[None]:
    runner = broker.runner(command.topic)
    return lookup.cancel(runner, runner.loaded.topic.find_id(command.message_id))


@handles(messages.Reschedule)
def reschedule(broker: TopicKeeper, command: messages.Reschedule, context: Context) -> Awaitable[None]:
    runner = broker.runner(command.topic)
    if command.priority is not None:
        check_priority(command.priority, runner.loaded.topic.config)
    return lookup.reschedule(
        runner, runner.loaded.topic.find_id(command.message_id), command.delay, command.deliver_at, command.priority
    )
