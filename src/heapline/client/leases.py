"""A call on leases of any topics, as one call a topic; and what is raised when some of it went wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from heapline.broker import Held
from heapline.engine.requests import by_topic, listed
from heapline.errors import HeaplineError, LeaseLost
from heapline.model import LeaseRef, Message


class Outcome(NamedTuple):
    """Of one topic's leases."""

    lost: list[int]  # ids of those that were not held
    deadline_ms: list[int]  # of an extend: one a lease, −1 where it was not held


async def on_each_topic(messages: Held, act: Callable[[str, list[int], list[int]], Awaitable[Outcome]]) -> None:
    """Carry out all that can be; then raise for what could not."""
    held = listed(messages)
    problems: list[HeaplineError] = []
    for topic, ids, tokens in by_topic(held):
        try:
            outcome = await act(topic, ids, tokens)
        except HeaplineError as error:
            problems.append(error)
            continue
        if outcome.deadline_ms:
            _tell_deadlines([m for m in held if m.topic == topic], outcome.deadline_ms)
        if outcome.lost:
            problems.append(LeaseLost(outcome.lost, topic))
    if problems:
        raise _worst(problems)


def _tell_deadlines(held: list[Message | LeaseRef], deadlines: list[int]) -> None:
    for m, deadline in zip(held, deadlines, strict=True):
        if isinstance(m, Message) and deadline >= 0:
            m._deadline_ms = deadline


def _worst(problems: list[HeaplineError]) -> HeaplineError:
    """Of several topics' problems: leases lost, all of them together, unless something else went wrong."""
    if len(problems) == 1:
        return problems[0]
    lost = [p for p in problems if isinstance(p, LeaseLost)]
    if len(lost) < len(problems):
        return next(p for p in problems if not isinstance(p, LeaseLost))
    return LeaseLost([id for p in lost for id in p.lost], ", ".join(p.topic for p in lost))
