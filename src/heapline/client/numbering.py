"""A `Producer` over the wire: its numbers are given here, so that a repeated call never doubles a message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from heapline.client.checks import check_outgoings
from heapline.config import DEFAULT_NAMESPACE, parse_topic
from heapline.engine.calls import Identity
from heapline.engine.requests import check_unnumbered, identity_of
from heapline.errors import DeadlineExceeded, TopicReloading, UnavailableError
from heapline.model import Enqueued, Outgoing
from heapline.producer import Producer

if TYPE_CHECKING:
    from heapline.broker import Broker


class Sender(Protocol):
    """What sends numbered messages, over whichever wire."""

    async def send_batch(
        self, topic: str, messages: list[Outgoing], atomic: bool, identity: Identity | None
    ) -> list[Enqueued]: ...


REPEAT_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # seconds


async def enqueue_checked(
    broker: Broker, sender: Sender, topic: str, messages: Sequence[Outgoing], atomic: bool, producer: Producer | None,
    producer_id: str | None, epoch: int | None, answered_below: int | None,
) -> list[Enqueued]:  # fmt: skip
    """A batch of which bad messages are refused here: all of it, or, where each stands alone, those."""
    messages = list(messages)
    errors = check_outgoings(messages, topic, atomic)
    good = [m for i, m in enumerate(messages) if i not in errors] if errors else messages
    if errors and not good:
        return [Enqueued(0, error=errors[i]) for i in range(len(messages))]
    if producer is not None:
        check_unnumbered(good, producer_id, epoch, answered_below)
        results = await enqueue_numbered(broker, sender, topic, good, atomic, producer)
    else:
        identity = identity_of(producer_id, epoch, answered_below, good)
        results = await sender.send_batch(topic, good, atomic, identity)
    if not errors:
        return results
    rest = iter(results)
    return [Enqueued(0, error=errors[i]) if i in errors else next(rest) for i in range(len(messages))]


async def enqueue_numbered(
    broker: Broker, sender: Sender, topic: str, messages: list[Outgoing], atomic: bool, producer: Producer
) -> list[Enqueued]:
    namespace, name = parse_topic(topic)  # however it is written, a topic has one line of numbers
    topic = name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{name}"
    line = await producer.line(broker, topic)
    identity = Identity(producer.producer_id, line.epoch, line.answered_below)
    first = producer.take(line, len(messages))
    numbered = [msgspec.structs.replace(m, seq=first + i) for i, m in enumerate(messages)]
    try:
        results = await _until_known(sender, topic, numbered, atomic, identity)
    except (asyncio.CancelledError, UnavailableError) as error:
        if not _in_doubt(error):
            producer.answered(line, first)
        raise  # nobody knows whether they went in: their numbers stay open
    except BaseException:
        producer.answered(line, first)
        raise
    if not any(_in_doubt(r.error) for r in results):
        producer.answered(line, first)
    return results


async def _until_known(
    sender: Sender, topic: str, messages: list[Outgoing], atomic: bool, identity: Identity
) -> list[Enqueued]:
    """Numbered messages can be sent again without doubling, so a topic that reloads is waited for."""
    for tries, pause in enumerate((*REPEAT_PAUSES, None)):
        try:
            results = await sender.send_batch(topic, messages, atomic, identity)
        except TopicReloading:
            if pause is None:
                raise
        else:
            if tries:  # what an earlier try of this very call brought in is no repeat to the one who calls
                results = [msgspec.structs.replace(r, duplicate=False) for r in results]
            if pause is None or not any(_in_doubt(r.error) for r in results):
                return results
        await asyncio.sleep(pause)
    raise AssertionError("unreachable: the last try returns or raises")


def _in_doubt(error: BaseException | None) -> bool:
    """Whether what ended so may have gone in all the same: the connection broke, time ran out, a write failed."""
    kind = type(error)
    return kind in (UnavailableError, DeadlineExceeded, TopicReloading) or isinstance(error, asyncio.CancelledError)
