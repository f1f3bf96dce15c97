"""A `Producer` over the wire: its numbers are given here, so that a repeated call never doubles a message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from heapline.config import DEFAULT_NAMESPACE, parse_topic
from heapline.errors import DeadlineExceeded, TopicReloading, UnavailableError
from heapline.model import Enqueued, Outgoing
from heapline.producer import Producer
from heapline.wire.schema import pb

if TYPE_CHECKING:
    from heapline.client.wire import WireBroker

REPEAT_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # seconds


async def enqueue_numbered(
    broker: WireBroker, topic: str, messages: list[Outgoing], atomic: bool, producer: Producer
) -> list[Enqueued]:
    namespace, name = parse_topic(topic)  # however it is written, a topic has one line of numbers
    topic = name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{name}"
    line = await producer.line(broker, topic)
    identity = pb.Identity(producer_id=producer.producer_id, epoch=line.epoch, answered_below=line.answered_below)
    first = producer.take(line, len(messages))
    numbered = [msgspec.structs.replace(m, seq=first + i) for i, m in enumerate(messages)]
    try:
        results = await _until_known(broker, topic, numbered, atomic, identity)
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
    broker: WireBroker, topic: str, messages: list[Outgoing], atomic: bool, identity: object
) -> list[Enqueued]:
    """Numbered messages can be sent again without doubling, so a topic that reloads is waited for."""
    for tries, pause in enumerate((*REPEAT_PAUSES, None)):
        try:
            results = await broker.send_batch(topic, messages, atomic, identity)
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
