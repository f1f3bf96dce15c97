"""Batches on their way to a wire: checked, and numbered if a `Producer` sends them, so that none is ever doubled."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol

from heapline.client.checks import check_outgoings
from heapline.config import DEFAULT_NAMESPACE, parse_topic
from heapline.engine.calls import Identity
from heapline.engine.requests import check_unnumbered, identity_of
from heapline.model import Enqueued, Outgoing
from heapline.producer import Producer

if TYPE_CHECKING:
    from heapline.broker import Broker


class Sender(Protocol):
    """What sends numbered messages, over whichever wire."""

    async def send_batch(
        self, topic: str, messages: list[Outgoing], atomic: bool, identity: Identity | None
    ) -> list[Enqueued]: ...


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
    topic = one_name(topic)

    def send(messages: list[Outgoing], epoch: int, answered_below: int) -> Awaitable[list[Enqueued]]:
        return sender.send_batch(topic, messages, atomic, Identity(producer.producer_id, epoch, answered_below))

    return await producer.enqueue(broker, topic, messages, send)


def one_name(topic: str) -> str:
    """However it is written, a topic has one line of numbers.

    >>> one_name("default/jobs"), one_name("eu/jobs")
    ('jobs', 'eu/jobs')
    """
    namespace, name = parse_topic(topic)
    return name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{name}"
