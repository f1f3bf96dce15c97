"""What a client refuses by itself: what no topic would take, told with the words of the embedded broker.

Most of it could not even be spelled on the wire (a payload that is no bytes, a moment without time zone). What one
topic takes and another does not (sizes, fairness keys) is the server's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from heapline.config import TopicConfig
from heapline.engine.columns import are_plain, check_one
from heapline.errors import BadRequest, HeaplineError
from heapline.model import Outgoing

#: Takes all that some topic takes, but for fairness keys, which are looked at apart.
_LOOSEST = TopicConfig(max_payload_bytes=1 << 40, segment_bytes=1 << 41)
_WITH_KEYS = TopicConfig(max_payload_bytes=1 << 40, segment_bytes=1 << 41, fairness="keys")


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
