"""A `Producer` over the wire: how its numbered messages are sent. The numbers themselves are its own affair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heapline.config import DEFAULT_NAMESPACE, parse_topic
from heapline.model import Enqueued, Outgoing
from heapline.producer import Producer
from heapline.wire.schema import pb

if TYPE_CHECKING:
    from heapline.client.wire import WireBroker


async def enqueue_numbered(
    broker: WireBroker, topic: str, messages: list[Outgoing], atomic: bool, producer: Producer
) -> list[Enqueued]:
    topic = one_name(topic)

    async def send(messages: list[Outgoing], epoch: int, answered_below: int) -> list[Enqueued]:
        identity = pb.Identity(producer_id=producer.producer_id, epoch=epoch, answered_below=answered_below)
        return await broker.send_batch(topic, messages, atomic, identity)

    return await producer.enqueue(broker, topic, messages, send)


def one_name(topic: str) -> str:
    """However it is written, a topic has one line of numbers.

    >>> one_name("default/jobs"), one_name("eu/jobs")
    ('jobs', 'eu/jobs')
    """
    namespace, name = parse_topic(topic)
    return name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{name}"
