"""What a call may ask: checks of arguments that need no topic state, and the shapes calls take inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heapline.broker import Held
from heapline.config import NAME, TopicConfig
from heapline.engine.admission import Identity
from heapline.engine.columns import are_plain, check_one
from heapline.errors import BadName, BadRequest, HeaplineError
from heapline.model import LeaseRef, Message, Outgoing


def identity_of(
    producer_id: str | None, epoch: int | None, answered_below: int | None, messages: Sequence[Outgoing]
) -> Identity | None:
    """Who numbered these messages, if anybody."""
    if producer_id is None:
        if epoch is not None or answered_below is not None or any(m.seq is not None for m in messages):
            raise BadRequest("epoch, seq and answered_below go with producer_id; or pass producer=heapline.Producer(…)")
        return None
    check_producer(producer_id)
    if any(m.seq is None for m in messages):
        raise BadRequest("with producer_id every message needs its seq")
    check_int("epoch", epoch, 1, 1 << 62)
    check_int("answered_below", answered_below or 0, 0, 1 << 62)
    return Identity(producer_id, epoch or 0, answered_below or 0)


def check_producer(producer_id: Any) -> None:
    if not isinstance(producer_id, str) or not NAME.match(producer_id):
        raise BadName("producer", str(producer_id))


def check_all(messages: list[Outgoing], config: TopicConfig, topic: str, atomic: bool) -> dict[int, HeaplineError]:
    """Errors by row; the first one is raised if the batch is atomic."""
    errors: dict[int, HeaplineError] = {}
    if not messages or are_plain(messages, config):
        return errors
    for i, message in enumerate(messages):
        try:
            if not isinstance(message, Outgoing):
                raise BadRequest(f"a batch holds heapline.Outgoing(…), not {type(message).__name__}")
            check_one(message, config, topic)
        except HeaplineError as error:
            if atomic:
                raise
            errors[i] = error
    return errors


def check_int(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{name} is an int from {low} to {high}, not {value!r}")


def check_reason(reason: Any) -> None:
    if reason is not None and not (isinstance(reason, str) and len(reason) <= 4096):
        raise BadRequest("reason is a str of at most 4096 characters")


def check_text(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, str) and len(value) <= 1024):
        raise BadRequest(f"{name} is a str of at most 1024 characters, not {value!r}")


def listed(messages: Held) -> list[Message | LeaseRef]:
    if isinstance(messages, Message | LeaseRef):
        return [messages]
    found = list(messages)
    for kind in set(map(type, found)):
        if not issubclass(kind, Message | LeaseRef):
            raise BadRequest(f"give messages that pop returned, not {kind.__name__}")
    return found


def by_topic(messages: list[Message | LeaseRef]) -> list[tuple[str, list[int], list[int]]]:
    """(topic, ids, tokens) of each topic."""
    topics = dict.fromkeys([m.topic for m in messages])
    if len(topics) == 1:
        return [(messages[0].topic, [m.id for m in messages], [m.token for m in messages])]
    return [
        (topic, [m.id for m in messages if m.topic == topic], [m.token for m in messages if m.topic == topic])
        for topic in topics
    ]
