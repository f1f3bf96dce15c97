"""Number every enqueue under a producer of the client's own, so that a repeat is recognized and counts once.

The producer's name is random, so its first epoch is used by no one else and begins with its first message; no call
opens it. The server forgets it some time after its last message. Each number is used for one call, and is closed when
that call ends, whatever its outcome. Messages that the caller numbers (`producer=…`) pass through.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from heapline.client import message_rows
from heapline.client.backoff import pauses
from heapline.client.transports.transport import BATCH_BYTES
from heapline.contract.call import HERE, Command, Context, Feed
from heapline.contract.columns import part, pick
from heapline.contract.config import PASSING, canonical_topic
from heapline.contract.errors import (
    ConflictError,
    HeaplineError,
    IdempotencyConflict,
    RequestError,
    ResourceExhausted,
    StaleEpoch,
    StaleSequence,
)
from heapline.contract.message import Enqueued
from heapline.contract.messages import Enqueue, EnqueueBatch, EnqueuedBatch, NewMessages
from heapline.contract.producer import Line, in_doubt

R = TypeVar("R")
EPOCH = 1


class Idempotent:
    """`deadline` is in seconds, for calls that have none."""

    def __init__(self, inner: Any, deadline: float) -> None:
        self._inner, self._deadline = inner, deadline
        self._producers: dict[str, ClientProducer] = {}  # by topic, as callers spell it

    def do(self, command: Command[R], context: Context = HERE, /) -> Awaitable[R]:
        call: Any = command
        kind: Any = type(call)
        is_batch = kind is EnqueueBatch and bool(call.messages.payloads)
        if not (is_batch or kind is Enqueue) or call.producer_id is not None:
            return self._inner.do(command, context)  # type: ignore[no-any-return]
        if context.deadline is None:
            context = replace(context, deadline=asyncio.get_running_loop().time() + self._deadline)
        producer = self._producers.get(call.topic) or self.open_producer(call.topic)
        if is_batch:
            return producer.enqueue(call.messages, call.atomic, context)  # type: ignore[return-value]
        return producer.enqueue_one(call, context)  # type: ignore[return-value]

    def stream(self, feed: Feed[R], context: Context = HERE, /) -> AsyncIterator[R]:
        return self._inner.stream(feed, context)  # type: ignore[no-any-return]

    def open_producer(self, topic: str) -> ClientProducer:
        """Return the producer of a topic, however the topic is spelled."""
        name = canonical_topic(topic)
        producer = self._producers.get(name) or ClientProducer(name, self._inner)
        self._producers[name] = self._producers[topic] = producer
        return producer


class ClientProducer:
    """The client's numbers on one topic. The contexts of its calls have a deadline."""

    def __init__(self, topic: str, inner: Any) -> None:
        self._topic, self._inner = topic, inner
        self._rename()

    def _rename(self) -> None:
        self._name = f"{PASSING}{secrets.token_hex(8)}"
        self._line = Line(EPOCH)

    async def enqueue(
        self, messages: NewMessages, atomic: bool, context: Context, *, is_renamed: bool = False
    ) -> EnqueuedBatch:
        """Enqueue messages, and repeat until their outcome is known or the deadline has passed."""
        count = len(messages.payloads)
        if not atomic and count > 1 and message_rows.size(messages) > BATCH_BYTES:
            half = count // 2
            first = await self._enqueue_part(part(messages, 0, half), context)
            return message_rows.join_results([first, await self._enqueue_part(part(messages, half, count), context)])
        name, line = self._name, self._line
        first_seq, answered_below = line.take(count)
        try:
            command = EnqueueBatch(self._topic, messages, atomic, name, EPOCH, answered_below, first_seq)
            result = await self._until_known(command, context)
        except HeaplineError as error:
            if is_renamed or error.repeated or not _is_taken(error, has_key=False):
                raise
            result = message_rows.failed(count, error)
        finally:
            line.answered(first_seq)
        if is_renamed or result.errors is None:
            return result
        return await self._enqueue_taken(messages, result, atomic, context, name)

    async def enqueue_one(self, command: Enqueue, context: Context, *, is_renamed: bool = False) -> Enqueued:
        """Enqueue one message, which costs client and server less than a batch of one."""
        name, line, has_key = self._name, self._line, command.idempotency_key is not None
        seq, answered_below = line.take(1)
        try:
            numbered = replace(command, producer_id=name, epoch=EPOCH, seq=seq, answered_below=answered_below)
            result: Enqueued = await self._inner.do(numbered, context)
            return replace(result, duplicate=False) if result.duplicate and not has_key else result
        except HeaplineError as error:
            if is_renamed or error.repeated or not _is_taken(error, has_key):
                raise
        finally:
            line.answered(seq)
        if self._name == name:
            self._rename()
        return await self.enqueue_one(command, context, is_renamed=True)

    async def _enqueue_part(self, messages: NewMessages, context: Context) -> EnqueuedBatch:
        """Enqueue a part of a batch. Its error belongs to its own rows, because other parts may have succeeded."""
        try:
            return await self.enqueue(messages, False, context)
        except HeaplineError as error:
            return message_rows.failed(len(messages), copy.copy(error))

    async def enqueue_each(self, batches: Sequence[NewMessages], context: Context) -> list[EnqueuedBatch | Exception]:
        """Enqueue batches in one call, each of them all or none. If the call is refused, send each by itself.

        If the refused call was repeated, an earlier try may still be executed. Then each batch is sent under the
        numbers that it has, so that none is duplicated and none gets the error of another.
        """
        name, line, sizes = self._name, self._line, list(map(len, batches))
        first_seq, answered_below = line.take(sum(sizes))
        try:
            messages = message_rows.join(batches)
            command = EnqueueBatch(self._topic, messages, True, name, EPOCH, answered_below, first_seq)
            return list(message_rows.cut_result(await self._until_known(command, context), sizes))
        except (RequestError, ConflictError, ResourceExhausted) as error:
            if not error.repeated:
                return await _gather(self.enqueue(batch, True, context) for batch in batches)
            starts = accumulate(sizes, initial=first_seq)
            commands = [
                replace(command, messages=batch, first_seq=start) for batch, start in zip(batches, starts, strict=False)
            ]
            return await _gather(self._until_known(c, context) for c in commands)
        finally:
            line.answered(first_seq)

    async def _until_known(self, command: EnqueueBatch, context: Context) -> EnqueuedBatch:
        """Send a numbered batch until no row's outcome is in doubt. Errors say whether they may be of a repeat."""
        assert context.deadline is not None
        tries: Iterator[float] | None = None
        while True:
            try:
                result: EnqueuedBatch = await self._inner.do(command, context)
            except HeaplineError as error:
                error.repeated = error.repeated or tries is not None
                raise
            if result.duplicates is not None:
                result = _without_own_duplicates(command.messages, result)
            if result.errors is None:
                return result
            is_repeated, tries = tries is not None, tries or pauses()
            pause = next(tries)
            ends_at = asyncio.get_running_loop().time() + pause
            if not any(in_doubt(e.error) for e in result.errors) or ends_at >= context.deadline:
                for row in result.errors:
                    row.error.repeated = row.error.repeated or is_repeated
                return result
            await asyncio.sleep(pause)

    async def _enqueue_taken(
        self, messages: NewMessages, result: EnqueuedBatch, atomic: bool, context: Context, name: str
    ) -> EnqueuedBatch:
        """Enqueue again, under a new name, rows whose numbers another process has used.

        That process is a copy of this one, restored from an image. The rows were not enqueued if they were sent once.
        """
        errors = result.errors or []
        if any(e.error.repeated for e in errors):
            return result
        keys = messages.idempotency_keys
        rows = [e.row for e in errors if _is_taken(e.error, keys is not None and keys[e.row] is not None)]
        if not rows:
            return result
        if self._name == name:
            self._rename()
        again = await self.enqueue(pick(messages, rows), atomic, context, is_renamed=True)
        return message_rows.replace_results(result, rows, again)


def _without_own_duplicates(messages: NewMessages, result: EnqueuedBatch) -> EnqueuedBatch:
    """Clear the mark of duplicates by number: an earlier try of this very call enqueued them.

    A message with an idempotency key may be a duplicate of another call's, so it keeps the mark.
    """
    keys = messages.idempotency_keys
    if keys is None or result.duplicates is None:
        return replace(result, duplicates=None)
    kept = bytes(d and k is not None for d, k in zip(bytes(result.duplicates), keys, strict=True))
    return replace(result, duplicates=memoryview(kept) if any(kept) else None)


async def _gather(calls: Iterable[Awaitable[EnqueuedBatch]]) -> list[EnqueuedBatch | Exception]:
    found = await asyncio.gather(*calls, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, Exception):
            raise one
    return cast("list[EnqueuedBatch | Exception]", found)


def _is_taken(error: Exception, has_key: bool) -> bool:
    """Whether the error says that another process has used the number."""
    if isinstance(error, IdempotencyConflict):
        return error.identity.startswith("sequence ") and not has_key
    return isinstance(error, StaleEpoch | StaleSequence)
