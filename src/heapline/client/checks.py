"""What a client refuses by itself: what no topic would take, told with the words of the embedded broker.

Most of it could not even be spelled on the wire (a payload that is no bytes, a moment without time zone). What one
topic takes and another does not (sizes, fairness keys) is the server's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from heapline.config import TopicConfig, parse_topic
from heapline.engine.columns import are_plain, check_moment, check_one, check_priority, check_seconds
from heapline.engine.requests import check_int, check_name, check_reason, check_text
from heapline.errors import BadRequest, HeaplineError
from heapline.model import Outgoing

#: Takes all that some topic takes, but for fairness keys, which are looked at apart.
_LOOSEST = TopicConfig(max_payload_bytes=1 << 40, segment_bytes=1 << 41)
_WITH_KEYS = TopicConfig(max_payload_bytes=1 << 40, segment_bytes=1 << 41, fairness="keys")


def checked_topic(topic: str) -> str:
    parse_topic(topic)  # a bad name is refused here: not all of them can be spelled on a wire
    return topic


def check_outgoing(message: Any, topic: str) -> None:
    if not isinstance(message, Outgoing):
        raise BadRequest(f"a batch holds heapline.Outgoing(…), not {type(message).__name__}")
    if message.fairness_key is None:
        check_one(message, _LOOSEST, topic)
    else:
        check_one(msgspec.structs.replace(message, fairness_key=None), _LOOSEST, topic)
        check_one(Outgoing(b"", fairness_key=message.fairness_key), _WITH_KEYS, topic)


def check_outgoings(messages: Sequence[Any], topic: str, atomic: bool) -> dict[int, HeaplineError]:
    """Errors by row; the first one is raised if the batch is atomic."""
    errors: dict[int, HeaplineError] = {}
    if not messages or is_plain(messages):
        return errors
    for row, message in enumerate(messages):
        try:
            check_outgoing(message, topic)
        except HeaplineError as error:
            if atomic:
                raise
            errors[row] = error
    return errors


def is_plain(messages: Sequence[Any]) -> bool:
    return are_plain(list(messages), _LOOSEST)


def check_pop(
    visibility: float | None, wait: float, holder: str | None, request_id: str | None, max_messages: int, max_bytes: int
) -> None:
    if visibility is not None:
        check_seconds("visibility", visibility, 0.001)
    check_seconds("wait", wait)
    check_text("holder", holder)
    check_text("request_id", request_id)
    check_int("max_messages", max_messages, 1, 100_000)
    check_int("max_bytes", max_bytes, 1, 1 << 40)


def check_reschedule(delay: float | None, deliver_at: datetime | None, priority: int | None) -> None:
    if delay is not None:
        check_seconds("delay", delay)
    if deliver_at is not None:
        check_moment("deliver_at", deliver_at)
    if priority is not None:
        check_priority(priority)


def checked_parts(batch_id: str, parts: Sequence[str]) -> list[str]:
    check_name("batch_id", batch_id)
    if isinstance(parts, str | bytes) or not isinstance(parts, Iterable):
        raise BadRequest(f"parts is a list of part names, not {parts!r}")
    for part in (parts := list(parts)):
        check_name("part", part)
    return parts


def check_throttle(partition: int, throttled: bool, reason: str | None) -> None:
    if type(throttled) is not bool:
        raise BadRequest(f"throttled is True or False, not {throttled!r}")
    check_reason(reason)
    check_int("partition", partition, -(1 << 63), (1 << 63) - 1)


def check_rate(rate: float | None) -> None:
    if rate is not None and not (type(rate) in (int, float) and 0 < rate <= 1e6):
        raise BadRequest(f"rate is messages a second, over 0 and at most 1e6, not {rate!r}")


def check_range(partition: int, start: int, end: int | None) -> None:
    check_int("partition", partition, 0, 1 << 31)
    check_int("start", start, 0, 1 << 62)
    if end is not None:
        check_int("end", end, 0, 1 << 62)
