"""One schedule's firings on their way into its topic: each goes in once, whatever was tried before.

Theory of operation. A firing is a numbered message: its producer is the schedule, the epoch is the schedule's
incarnation and the number is the moment that it was meant for, in ms. The topic writes the message and its number in
**one unit of its journal**. So whether a firing went in is settled there, by the unit being whole or not, and not by
the done mark in the schedules' own journal (`store.py`), which is written afterwards and may be behind.

Who fsyncs, and killed where:

1. before the topic's unit is durable: the firing is not there; it is still owed, and is taken again;
2. after that, before the done mark is durable: it is taken again after the restart, under the same number, and the
   topic recognises it;
3. after the mark is durable: it is not taken again.

Why numbers and not idempotency keys, in case 2: a key is forgotten after the topic's `dedup_window`, and whoever was
away longer would fire twice. A number that was forgotten is refused as stale, for ever; producers and their epochs are
never forgotten, and are in the topic's snapshots. Stale means here that the firing is done: a number is stale if it is
below `answered_below`, which is the schedule's done mark, or below one that went in. Numbers are sent in ascending
order, and a higher one only when all lower ones are in or were given up by `misfire`.

A schedule that is deleted and made again, or changed, has a higher incarnation, so its numbers begin anew. Nobody else
can use such a producer: the names of users' producers hold no slash. Under a relaxed fsync policy a power cut may take
a firing along, like everything else that the topic had answered of late; a killed process loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from heapline.engine.calls import EnqueueCall, Identity
from heapline.engine.columns import Columns, check_one
from heapline.engine.runner import TopicRunner
from heapline.errors import BadRequest, HeaplineError, IdempotencyConflict, StaleSequence
from heapline.model import Enqueued, Outgoing
from heapline.schedules import ScheduleState, Taken

#: The topic has seen this number. In the second case with another payload, which only a book restored from an old copy
#: can bring about: a firing of this schedule for this moment is in all the same.
KNOWN = (StaleSequence, IdempotencyConflict)
CHUNK_BYTES = 256 << 10  # of messages that go in together


class Sent(NamedTuple):
    """What became of firings: so many, from the first on, are in the topic; the rest is still owed."""

    done: int
    new: int  # of those, how many went in just now
    error: HeaplineError | None = None  # why the rest is not


def producer_of(schedule: str) -> str:
    return f"_schedule/{schedule}"


async def send(runner: TopicRunner, state: ScheduleState, taken: Taken) -> Sent:
    """Enqueue what a schedule owes, the oldest first; durable on return."""
    identity = Identity(producer_of(taken.name), state.incarnation, state.done_ms + 1)
    done = new = 0
    try:
        check_one(taken.messages[0], runner.topic.config, runner.name)  # the others are like it
        for chunk in _chunks(taken.messages):
            try:
                new += await _enqueue(runner, chunk, identity)
                done += len(chunk)
            except (*KNOWN, BadRequest):  # one was in long ago, or they are too large together for this topic
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
    """All of them or none; how many were new."""
    call = EnqueueCall(runner.future(), columns=Columns(messages), identity=identity)
    results: list[Enqueued] = await runner.enqueue(call)
    return sum(not result.duplicate for result in results)


def _chunks(messages: list[Outgoing]) -> Iterator[list[Outgoing]]:
    """They are all of about the same size."""
    count = max(1, CHUNK_BYTES // (len(messages[0].payload) + 1024))
    return (messages[start : start + count] for start in range(0, len(messages), count))
