"""Enqueue the firings of one schedule to its topic, each exactly once, whatever was tried before.

Theory of operation. A firing is a numbered message: its producer is the schedule, the epoch is the schedule's
incarnation and the number is the firing's planned time in ms. The topic writes the message and its number in **one unit
of its journal**. So that unit alone determines whether a firing was enqueued. The done mark in the schedules' own
journal (`store.py`) does not: it is written afterwards and may be behind.

Durability, and what a kill leaves:

1. before the topic's unit is durable: the firing is not enqueued; it is still owed and is sent again;
2. after that, before the done mark is durable: it is sent again after the restart, under the same number, and the
topic recognizes it;
3. after the mark is durable: it is not sent again.

Case 2 uses numbers, not idempotency keys: a key is forgotten after the topic's `dedup_window`, and a broker that was
down longer would fire twice. A forgotten number is refused as stale, forever; producers and their epochs are never
forgotten, and are in the topic's snapshots. Stale means here that the firing is done: a number is stale if it is below
`answered_below`, which is the schedule's done mark, or below one that was enqueued. Numbers are sent in ascending
order, and a higher one only when all lower ones are enqueued or were dropped by `misfire`.

A schedule that is changed, or deleted and created again, has a higher incarnation, so its numbers start again. Users
cannot use such a producer: the names of users' producers contain no slash. Under a relaxed fsync policy a power cut may
lose a firing, like everything else that the topic answered recently; a killed process loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from heapline.contract.errors import BadRequest, HeaplineError, IdempotencyConflict, StaleSequence
from heapline.contract.message import Outgoing
from heapline.contract.messages import EnqueuedBatch
from heapline.core.schedules.book import Taken
from heapline.core.schedules.records import ScheduleState
from heapline.engine.columns import Columns, EnqueueCall, Identity, check_one
from heapline.engine.runner import TopicRunner

#: The topic has seen this number. IdempotencyConflict means a different payload, which only a book restored from an
#: old copy can cause: a firing of this schedule for this time is enqueued nevertheless.
KNOWN = (StaleSequence, IdempotencyConflict)
CHUNK_BYTES = 256 << 10  # bytes of messages enqueued together


class Sent(NamedTuple):
    """The result of sending firings: the first `done` are in the topic; the rest is still owed."""

    done: int
    new: int  # how many of `done` were enqueued by this call
    error: HeaplineError | None = None  # why the rest was not enqueued


def producer_of(schedule: str) -> str:
    return f"_schedule/{schedule}"


async def send(runner: TopicRunner, state: ScheduleState, taken: Taken) -> Sent:
    """Enqueue what a schedule owes, oldest first. Durable on return."""
    identity = Identity(producer_of(taken.name), state.incarnation, state.done_ms + 1)
    done = new = 0
    try:
        check_one(taken.messages[0], runner.loaded.topic.config, runner.name)  # the others are like it
        for chunk in _chunks(taken.messages):
            try:
                new += await _enqueue(runner, chunk, identity)
                done += len(chunk)
            except (*KNOWN, BadRequest):  # one is already known, or together they are too large for this topic
                for message in chunk:
                    new += await _enqueue_one(runner, message, identity)
                    done += 1
    except HeaplineError as error:
        return Sent(done, new, error)
    return Sent(done, new)


async def _enqueue_one(runner: TopicRunner, message: Outgoing, identity: Identity) -> int:
    try:
        return await _enqueue(runner, [message], identity)
    except KNOWN:
        return 0


async def _enqueue(runner: TopicRunner, messages: list[Outgoing], identity: Identity) -> int:
    """Enqueue all messages or none. Return how many were new."""
    call = EnqueueCall(runner.future(), columns=Columns(messages), identity=identity)
    results: EnqueuedBatch = await runner.enqueue(call)
    return call.count - sum(results.duplicates or ())


def _chunks(messages: list[Outgoing]) -> Iterator[list[Outgoing]]:
    """Split the messages into chunks. All messages have about the same size."""
    count = max(1, CHUNK_BYTES // (len(messages[0].payload) + 1024))
    return (messages[start : start + count] for start in range(0, len(messages), count))
