"""What a call may ask: checks of arguments that need no topic state, and the shapes calls take inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from heapline.broker import Held
from heapline.config import NAME, TopicConfig
from heapline.engine.calls import Identity
from heapline.engine.columns import are_plain, are_scheduled, check_moment, check_one, check_priority
from heapline.errors import BadName, BadRequest, HeaplineError
from heapline.model import DlqFilter, LeaseRef, Message, Outgoing
from heapline.ulid import parse_id

NAME_BYTES_MAX = 256


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


def check_unnumbered(messages: Sequence[Outgoing], *own: object) -> None:
    """A Producer brings its own name, epoch and numbers."""
    if any(value is not None for value in own) or any(m.seq is not None for m in messages):
        raise BadRequest("a Producer gives the numbers itself: leave producer_id, epoch, seq and answered_below away")


def check_producer(producer_id: Any) -> None:
    if not isinstance(producer_id, str) or not NAME.match(producer_id):
        raise BadName("producer", str(producer_id))


def check_all(messages: list[Outgoing], config: TopicConfig, topic: str, atomic: bool) -> dict[int, HeaplineError]:
    """Errors by row; the first one is raised if the batch is atomic."""
    errors: dict[int, HeaplineError] = {}
    if not messages or are_plain(messages, config) or are_scheduled(messages, config):
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
    check_text("reason", reason, 4096, low=0)  # str(error) may well be empty


def check_filter(where: Any) -> None:
    """A DlqFilter is a plain struct that anybody can fill with anything."""
    if where is None:
        return
    if not isinstance(where, DlqFilter):
        raise BadRequest(f"where is a heapline.DlqFilter(…), not {where!r}")
    for name in ("died_after", "died_before"):
        if getattr(where, name) is not None:
            check_moment(name, getattr(where, name))
    for name in ("priority_min", "priority_max"):
        if getattr(where, name) is not None:
            check_priority(getattr(where, name))
    for name in ("reason", "key"):
        check_text(f"{name} of a DlqFilter", getattr(where, name), 4096, low=0)


def parse_ids(ids: Any) -> list[int] | None:
    if ids is None:
        return None
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise BadRequest(f"ids is a list of message ids, not {ids!r}")
    return [parse_id(id) for id in ids]


def check_text(name: str, value: Any, limit: int = 1024, low: int = 1) -> None:
    """What goes into the journal as text must be writable there: a str that UTF-8 can spell."""
    if value is None:
        return
    if not (isinstance(value, str) and low <= len(value) <= limit):
        raise BadRequest(f"{name} is a str of {low} to {limit} characters, not {str(value)[:40]!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{name} cannot be encoded as UTF-8: {value[:40]!r}") from None


def check_name(name: str, value: Any) -> None:
    """Of a batch or a part: any text, but not much of it, for every share carries it."""
    if value is None:
        raise BadRequest(f"{name} is a non-empty str of at most {NAME_BYTES_MAX} bytes, not None")
    check_text(name, value, NAME_BYTES_MAX)
    if len(value.encode()) > NAME_BYTES_MAX:
        raise BadRequest(f"{name} is {len(value.encode())} bytes long; at most {NAME_BYTES_MAX} are allowed")


def check_sink(sink: Any, version: Any) -> None:
    """Of a commit: both or neither."""
    if sink is None and version is None:
        return
    if sink is None or version is None:
        raise BadRequest("a sink goes with a version: give both, or neither")
    check_name("sink", sink)
    check_int("version", version, 0, (1 << 63) - 1)


def messages_by_topic(messages: Any, topic: str | None) -> dict[str, list[Outgoing]]:
    """Both ways of giving a part's messages, as one."""
    if isinstance(messages, Mapping):
        if topic is not None:
            raise BadRequest("give messages by topic, or a list with topic=…, not both")
        if not messages:
            raise BadRequest("a part needs a topic: give {topic: []} for one without messages, or leave it out")
        return {name: list(outgoing) for name, outgoing in messages.items()}
    if topic is None:
        raise BadRequest("a list of messages goes with topic=…; or give them as {topic: [heapline.Outgoing(…)]}")
    if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
        raise BadRequest(f"messages is a list of heapline.Outgoing(…), not {messages!r}")
    return {topic: list(messages)}


def listed(messages: Held) -> list[Message | LeaseRef]:
    if isinstance(messages, Message | LeaseRef):
        messages = [messages]
    elif not isinstance(messages, Iterable):
        raise BadRequest(f"give messages that pop returned, not {messages!r}")
    found = list(messages)
    for kind in set(map(type, found)):
        if not issubclass(kind, Message | LeaseRef):
            raise BadRequest(f"give messages that pop returned, not {kind.__name__}")
        if issubclass(kind, LeaseRef):
            _check_refs(found)
    return found


def _check_refs(messages: list[Message | LeaseRef]) -> None:
    """A LeaseRef may be made by hand or come over a wire: its numbers must be numbers."""
    for m in messages:
        if isinstance(m, LeaseRef):
            check_int("the id of a LeaseRef", m.id, 0, (1 << 63) - 1)
            check_int("the token of a LeaseRef", m.token, 0, (1 << 63) - 1)


def by_topic(messages: list[Message | LeaseRef]) -> list[tuple[str, list[int], list[int]]]:
    """(topic, ids, tokens) of each topic."""
    topics = dict.fromkeys([m.topic for m in messages])
    if len(topics) == 1:
        return [(messages[0].topic, [m.id for m in messages], [m.token for m in messages])]
    return [
        (topic, [m.id for m in messages if m.topic == topic], [m.token for m in messages if m.topic == topic])
        for topic in topics
    ]
