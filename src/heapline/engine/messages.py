"""Handlers of enqueues, and of calls on single messages by their id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

from heapline.contract import messages
from heapline.contract.call import Context, Page
from heapline.contract.config import TopicConfig
from heapline.contract.errors import HeaplineError, UnavailableError
from heapline.contract.message import Enqueued, MessageInfo
from heapline.contract.messages import EnqueuedBatch, enqueued, pack_enqueued
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
from heapline.engine.committer import give, refuse
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
def enqueue_batch(broker: TopicKeeper, command: messages.EnqueueBatch, context: Context) -> Awaitable[EnqueuedBatch]:
    runner = broker.runner(command.topic)
    config, columns = runner.loaded.topic.config, Columns.of_batch(command.messages, command.first_seq)
    errors = columns.check(config, runner.name, command.atomic)
    if not columns.count:
        answer = runner.future()
        answer.set_result(pack_enqueued([], runner.loaded.topic.id_suffix))
        return answer
    identity = identity_of(command)
    if errors:
        return _enqueue_good(runner, columns, errors, identity)
    call = EnqueueCall(
        runner.future(), columns=columns, atomic=command.atomic, identity=identity, first_seq=command.first_seq
    )
    if command.atomic:
        check_batch_bytes(call, config)
        return runner.enqueue(call)
    if _is_too_large(call, config):
        return _enqueue_pieces(runner, columns, identity)
    return _enqueue_rows(runner, call)


async def _enqueue_good(
    runner: TopicRunner, columns: Columns, errors: dict[int, HeaplineError], identity: Identity | None
) -> EnqueuedBatch:
    """Enqueue the rows without an error."""
    good = [i for i in range(columns.count) if i not in errors]
    rest: Iterator[Enqueued] = iter(())
    if good:
        rest = iter(enqueued(await _enqueue_pieces(runner, columns.subset(good), identity)))
    everything = [Enqueued(0, error=errors[i]) if i in errors else next(rest) for i in range(columns.count)]
    return pack_enqueued(everything, runner.loaded.topic.id_suffix)


async def _enqueue_pieces(runner: TopicRunner, columns: Columns, identity: Identity | None) -> EnqueuedBatch:
    """Enqueue a batch that is not atomic, in halves if it is too large for one unit."""
    call = EnqueueCall(runner.future(), columns=columns, atomic=False, identity=identity)
    count = columns.count
    if not _is_too_large(call, runner.loaded.topic.config):
        return await _enqueue_rows(runner, call)
    halves = columns.subset(range(count // 2)), columns.subset(range(count // 2, count))
    results = [row for half in halves for row in enqueued(await _enqueue_pieces(runner, half, identity))]
    return pack_enqueued(results, runner.loaded.topic.id_suffix)


def _is_too_large(call: EnqueueCall, config: TopicConfig) -> bool:
    return call.count > 1 and call.nbytes > min(CHUNK_BYTES, batch_bytes_max(config, call.count))


def _enqueue_rows(runner: TopicRunner, call: EnqueueCall) -> Awaitable[EnqueuedBatch]:
    """Enqueue a piece of a batch that is not atomic. If the topic fails, its rows have the error, because other pieces
    may have been enqueued."""
    result = runner.future()

    def end(answer: asyncio.Future[EnqueuedBatch]) -> None:
        if answer.cancelled():
            result.cancel()
        elif isinstance(error := answer.exception(), UnavailableError):
            give(result, _failed(call.count, error, runner))
        elif error is not None:
            refuse(result, error)
        else:
            give(result, answer.result())

    try:
        answer = runner.enqueue(call)
    except UnavailableError as error:
        result.set_result(_failed(call.count, error, runner))
        return result
    asyncio.ensure_future(answer).add_done_callback(end)  # it is a future already, unless the disk is behind
    return result


def _failed(count: int, error: UnavailableError, runner: TopicRunner) -> EnqueuedBatch:
    return pack_enqueued([Enqueued(0, error=error.with_traceback(None))] * count, runner.loaded.topic.id_suffix)


@handles(messages.OpenProducer)
async def open_producer(broker: TopicKeeper, command: messages.OpenProducer, context: Context) -> messages.Opened:
    runner = broker.runner(command.topic)
    epoch = await runner.call(lambda now: runner.loaded.admission.producers.open(command.producer_id, None, now))
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
