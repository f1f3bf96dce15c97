"""Arguments of methods as people write them, read into the fields of commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from heapline.contract import groups, topics
from heapline.contract.check import build, describe_types
from heapline.contract.config import GroupConfig, TopicConfig, check_names, plain_settings
from heapline.contract.errors import BadRequest
from heapline.contract.groups import position
from heapline.contract.message import Outgoing
from heapline.contract.stream import Place

MessageId = str | int
describe_types(topics.TopicSettings, groups.GroupSettings)


def settings(what: str, given: Mapping[str, Any], config: type[msgspec.Struct], kind: Any) -> Any:
    """Settings from keywords. A name that does not exist, or an invalid value, raises BadRequest."""
    check_names(what, given, config)
    return build(kind, plain_settings(given))


def topic_settings(given: Mapping[str, Any]) -> Any:
    return settings("topic", given, TopicConfig, topics.TopicSettings)


def group_settings(given: Mapping[str, Any]) -> Any:
    return settings("group", given, GroupConfig, groups.GroupSettings)


def check_unnumbered(messages: Sequence[Outgoing], *own: object) -> None:
    if any(value is not None for value in own) or any(m.seq is not None for m in messages):
        raise BadRequest("Producer sets producer_id, epoch, seq and answered_below; omit them")


def listed_messages(given: Any) -> list[Outgoing]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise BadRequest(f"messages must be a list of heapline.Outgoing(…), got {given!r}")
    return list(given)


def listed_ids(ids: Any) -> list[MessageId] | None:
    if ids is None:
        return None
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise BadRequest(f"ids must be a list of message ids, got {ids!r}")
    return list(ids)


def messages_by_topic(given: Any, topic: str | None) -> dict[str, list[Outgoing]]:
    if isinstance(given, Mapping):
        if topic is not None:
            raise BadRequest("give messages by topic, or a list with topic=…, not both")
        return {name: listed_messages(share) for name, share in given.items()}
    if topic is None:
        raise BadRequest("a list of messages needs topic=…; or give them as {topic: [heapline.Outgoing(…)]}")
    return {topic: listed_messages(given)}


def log_range(start: Place, end: Place | None, partitions: Any) -> tuple[Any, Any, list[int] | None]:
    if partitions is not None:
        if isinstance(partitions, str | bytes) or not isinstance(partitions, Sequence):
            raise BadRequest(f"partitions must be a list of numbers, got {partitions!r}")
        partitions = list(partitions)
    return position("start", start), None if end is None else position("end", end), partitions


def check_member(member: Any, session: Any) -> None:
    if member is None or session is None:
        raise BadRequest("a member of a group needs a name and a session; give both")
