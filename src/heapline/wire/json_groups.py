"""Consumer groups in the JSON of the HTTP face: what a body may ask, and what is told of groups and rows.

Rows are told one by one, as whoever reads JSON wants them; offsets are numbers (a log has less than 2^53 rows), ids are
digits in a string as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from msgspec import Meta

from heapline.config import GroupConfig
from heapline.errors import BadRequest, DeliveryLost
from heapline.model import from_ms
from heapline.streams import Fetched, GroupDeadLetter, GroupInfo, GroupOffset, Place
from heapline.ulid import to_ulids
from heapline.wire.json_requests import AS, Ask, Seconds
from heapline.wire.json_shapes import Int64, Moment, Natural, OneTold, PayloadAs, Shape, Text, Topic, shown

Group = Annotated[str, Meta(max_length=300, description="the group's name", examples=["billing"])]
OffsetOf = Annotated[dict[str, Natural], Meta(description="an offset for each partition, by its number")]
Where = Annotated[
    str | Natural | OffsetOf,
    Meta(
        description='"earliest", "latest", a moment (RFC 3339), an offset of each partition, or {partition: offset}',
        examples=["earliest", "2030-01-31T12:00:00Z", {"0": 1200}],
    ),
]
Rows = Annotated[
    dict[str, Annotated[list[Natural], Meta(max_length=1_000_000)]],
    Meta(description="offsets of rows, by the number of their partition", examples=[{"0": [17, 18]}]),
]

# -- asked -------------------------------------------------------------------------------------------------------------


class NewGroup(Ask, kw_only=True):
    """`config` holds fields of GroupConfig; those not given have their defaults."""

    group: Group
    start: Where = "earliest"
    config: dict[str, Any] | None = None


class ResetAsk(Ask, kw_only=True):
    to: Where
    partitions: Annotated[list[Natural], Meta(max_length=100_000, description="all, if not given")] | None = None


class OfMember(Ask, kw_only=True):
    member: Annotated[str, Meta(max_length=300, description="the member's name", examples=["b1"])]
    session: Annotated[str, Meta(max_length=300, description="random text, the same in all calls of one subscriber")]


class FetchAsk(OfMember, kw_only=True):
    max_messages: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000
    max_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] = 2 << 20
    wait: Annotated[Seconds, Meta(description="seconds to wait for the first row, or other partitions")] = 0.0
    start: Annotated[Where, Meta(description="of a group that is not there yet")] = "earliest"
    config: Annotated[dict[str, Any] | None, Meta(description="of a group that is not there yet")] = None
    payload_as: Annotated[PayloadAs, AS] = "base64"


class RowsAsk(OfMember, kw_only=True):
    rows: Rows
    tell_lost: Annotated[bool, Meta(description="tell those not held any more in the answer, instead of 409")] = False


class NackRowsAsk(RowsAsk, kw_only=True):
    reason: Text | None = None


class DeadRowsAsk(Ask, kw_only=True):
    rows: Annotated[Rows | None, Meta(description="all, if not given")] = None


def place_in(where: Any) -> Place:
    """What a body calls a place."""
    if isinstance(where, dict):
        return {partition_in(p): offset for p, offset in where.items()}
    if isinstance(where, str) and where not in ("earliest", "latest"):
        try:
            return datetime.fromisoformat(where)
        except ValueError:
            raise BadRequest(f"{where[:60]!r} is no place: earliest, latest, a moment or an offset is") from None
    found: Place = where
    return found


def partition_in(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise BadRequest(f"{text[:20]!r} is no partition: they are numbered from 0")


def rows_in(rows: dict[str, list[int]]) -> dict[int, list[int]]:
    return {partition_in(p): offsets for p, offsets in rows.items()}


def told_place(place: Place) -> Any:
    """The way back: what a client writes."""
    if isinstance(place, datetime):
        return place.isoformat()
    return {str(p): offset for p, offset in place.items()} if isinstance(place, Mapping) else place


def told_rows(rows: Mapping[int, Any]) -> dict[str, list[int]]:
    return {str(p): [int(o) for o in offsets] for p, offsets in rows.items()}


# -- told --------------------------------------------------------------------------------------------------------------


class GroupTold(Shape, kw_only=True):
    group: Group
    topic: Topic
    config: GroupConfig
    generation: Annotated[Natural, Meta(description="rises whenever partitions change hands")]
    members: Annotated[dict[str, list[Natural]], Meta(description="and the partitions that each reads")]
    offsets: list[GroupOffset]
    lag: Annotated[Natural, Meta(description="rows that are not done, over all partitions")]
    holding: Annotated[bool, Meta(description="whether it keeps the journal from its offsets on")]
    used_at: Moment | None = None


class GroupsTold(Shape, kw_only=True):
    groups: list[GroupTold]


class GroupOffsetsTold(Shape, kw_only=True):
    offsets: list[GroupOffset]


class StreamRow(OneTold, kw_only=True):
    partition: Natural
    offset: Natural
    priority: Int64
    attempts: Annotated[Natural, Meta(description="deliveries to the group, this one among them")]
    enqueued_at: Moment
    key: str | None = None
    fairness_key: str | None = None
    headers: dict[str, str] | None = None


class FetchTold(Shape, kw_only=True):
    rows: Annotated[list[StreamRow], Meta(description="those of a partition in their order")]
    partitions: Annotated[list[Natural], Meta(description="that the member reads")]
    generation: Natural


class RowsTold(Shape, kw_only=True):
    lost: Annotated[Rows | None, Meta(description="those not held any more, with tell_lost")] = None


class DeadRow(OneTold, kw_only=True):
    partition: Natural
    offset: Natural
    attempts: Natural
    reason: str
    died_at: Moment | None = None
    priority: Int64 | None = None
    key: str | None = None
    headers: dict[str, str] | None = None


class DeadRowsTold(Shape, kw_only=True):
    letters: list[DeadRow]


def tell_group(info: GroupInfo) -> GroupTold:
    return GroupTold(
        group=info.name, topic=info.topic, config=info.config, generation=info.generation, members=info.members,
        offsets=info.offsets, lag=info.lag, holding=info.holding, used_at=info.used_at,
    )  # fmt: skip


def tell_fetched(fetched: Fetched, wanted: PayloadAs) -> FetchTold:
    rows: list[StreamRow] = []
    for batch in fetched.batches:
        ids = batch.ids.tolist()
        rows += [
            StreamRow(
                partition=m.partition, offset=m.offset, message_id=ulid, id=str(m.id), priority=m.priority,
                attempts=m.attempts, enqueued_at=from_ms(m._enqueued_ms), key=m.key, fairness_key=m.fairness_key,
                headers=m._headers, **shown(m.payload, wanted),
            )
            for ulid, m in zip(to_ulids(ids), batch.messages(), strict=True)
        ]  # fmt: skip
    return FetchTold(rows=rows, partitions=fetched.partitions, generation=fetched.generation)


def tell_lost(lost: DeliveryLost) -> RowsTold:
    found: dict[str, list[int]] = {}
    for partition, offset in zip(lost.partitions, lost.offsets, strict=True):
        found.setdefault(str(partition), []).append(offset)
    return RowsTold(lost=found)


def tell_dead(letter: GroupDeadLetter, wanted: PayloadAs) -> DeadRow:
    return DeadRow(
        partition=letter.partition, offset=letter.offset, message_id=letter.message_id, id=str(letter.id),
        attempts=letter.attempts, reason=letter.reason, died_at=letter.died_at, priority=letter.priority,
        key=letter.key, headers=letter.headers or None, **shown(letter.payload, wanted),
    )  # fmt: skip
