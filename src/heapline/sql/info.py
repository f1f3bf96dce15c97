"""Stored rows as `MessageInfo`."""

from __future__ import annotations

from typing import Any

import msgspec

from heapline.contract.message import MessageInfo, from_ms
from heapline.core.ids import unix_ms_of
from heapline.sql.shard import Topic

_decode_headers = msgspec.msgpack.Decoder(dict[str, str]).decode


def info_of(topic: Topic, row: Any) -> MessageInfo:
    """Return the information about a message that exists."""
    place = row["place"]
    expires = None if place == "dead" else row["expires"]
    return MessageInfo(
        id=row["id"],
        id_suffix=topic.id_suffix,
        topic=topic.name,
        partition=0,
        state=place,
        priority=row["priority"],
        attempts=row["attempts"],
        due_at=from_ms(row["due"] if row["wake"] is None else row["wake"]),
        enqueued_at=from_ms(unix_ms_of(row["id"])),
        expires_at=None if expires is None else from_ms(expires),
        deadline=None if row["until"] is None else from_ms(row["until"]),
        holder=None if row["holder"] is None else row["holder"].decode(),
        reason=row["reason"],
        ended_at=None if row["at"] is None else from_ms(row["at"]),
        payload=row["payload"],
        key=None if row["name"] is None else row["name"].decode(),
        headers={} if row["headers"] is None else _decode_headers(row["headers"]),
    )


def departed(topic: Topic, id: int, row: Any) -> MessageInfo:
    """Return how a message ended."""
    return MessageInfo(
        id=id,
        id_suffix=topic.id_suffix,
        topic=topic.name,
        partition=0,
        state=row["how"],
        reason=row["reason"],
        ended_at=from_ms(row["at"]),
        enqueued_at=from_ms(unix_ms_of(id)),
    )
