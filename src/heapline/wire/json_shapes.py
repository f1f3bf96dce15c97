"""What the JSON of the HTTP face is made of: payloads, times and ids, and what is told of heaps and messages.

Requests (json_requests.py), frames of the log (json_log.py) and the answers here are structs that the server and its
client share, and that the OpenAPI is made from. What a value may be is mostly the broker's to say; here it has a form
and a size. Ids are told twice, as a ULID and as digits in a string: JavaScript's numbers end at 2^53, ours do not.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from heapline.config import GroupConfig, TopicConfig
from heapline.errors import BadRequest
from heapline.model import BatchInfo, Enqueued, MessageInfo, Popped, SinkInfo, State, TopicInfo, TopicStats, from_ms
from heapline.ulid import to_ulid, to_ulids
from heapline.wire import codes

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
PayloadAs = Literal["base64", "text", "json"]
Int64 = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
Natural = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Moment = Annotated[datetime, Meta(tz=True, examples=["2030-01-31T12:00:00Z"])]
Text = Annotated[str, Meta(max_length=4096)]
Topic = Annotated[str, Meta(max_length=300, description="`name`, or `namespace/name`", examples=["jobs"])]
Ulid = Annotated[str, Meta(max_length=64, description="its id, a ULID", examples=["01JGXV0Z000000000000000000"])]
Digits = Annotated[str, Meta(max_length=64, description="the same id as an integer of 63 bits, in digits")]
Token = Annotated[str, Meta(max_length=64, description="the lease's token, as the pop gave it", examples=["42"])]


class Shape(Struct, kw_only=True, omit_defaults=True):
    """An answer: what is None is left away."""


class ErrorTold(Shape, kw_only=True):
    """Every refusal looks like this."""

    error: Annotated[str, Meta(description="the error's class, as in heapline.errors", examples=["TopicNotFound"])]
    text: Annotated[str, Meta(description="what happened and what to do, for people")]
    facts: Annotated[dict[str, Any], Meta(description="its data", examples=[{"topic": "jobs"}])]


class Done(Shape, kw_only=True):
    done: Literal[True]


class Count(Shape, kw_only=True):
    count: Natural


class HeapTold(Shape, kw_only=True):
    topic: Topic
    incarnation: Annotated[Natural, Meta(description="which of the heaps that had this name")]
    config: TopicConfig


class HeapsTold(Shape, kw_only=True):
    heaps: list[HeapTold]


class StatsTold(Shape, kw_only=True):
    heaps: list[TopicStats]


class EnqueuedTold(Shape, kw_only=True):
    message_id: Ulid
    id: Digits
    duplicate: Annotated[bool, Meta(description="it was enqueued before, under the same identity: this is its id")]


class RowTold(Shape, kw_only=True):
    """One message of a batch: its id, or, where each stands alone, its error."""

    message_id: Ulid | None = None
    id: Digits | None = None
    duplicate: bool | None = None
    error: ErrorTold | None = None


class BatchEnqueuedTold(Shape, kw_only=True):
    results: Annotated[list[RowTold], Meta(description="one a message, in the order of the request")]


class PreparedTold(Shape, kw_only=True):
    results: Annotated[dict[str, list[RowTold]], Meta(description="by topic")]


class EpochTold(Shape, kw_only=True):
    epoch: Natural


class BatchesTold(Shape, kw_only=True):
    batches: list[BatchInfo]


class SinksTold(Shape, kw_only=True):
    sinks: list[SinkInfo]


class KnownTold(Shape, kw_only=True):
    known: bool


class OneTold(Shape, kw_only=True):
    """A message. Exactly one of the three payloads is there, if its payload is."""

    message_id: Ulid
    id: Digits
    payload: Annotated[bytes | None, Meta(description="in base64")] = None
    payload_text: Annotated[str | None, Meta(description="as text, if it was asked for and is UTF-8")] = None
    payload_json: Annotated[Raw | UnsetType, Meta(description="as JSON, if it was asked for and is JSON")] = UNSET


class PoppedTold(OneTold, kw_only=True):
    lease_token: Token
    priority: Int64
    attempts: Annotated[Natural, Meta(description="deliveries so far, this one among them")]
    enqueued_at: Moment
    deadline: Annotated[Moment, Meta(description="when the lease ends unless it is extended")]
    partition: Natural
    key: str | None = None
    fairness_key: str | None = None
    headers: dict[str, str] | None = None


class PopTold(Shape, kw_only=True):
    topic: Topic
    messages: Annotated[list[PoppedTold], Meta(description="best first; empty if nothing was due")]


class DeadlineTold(Shape, kw_only=True):
    message_id: Ulid
    deadline: Moment


class LeasesTold(Shape, kw_only=True):
    count: Annotated[Natural, Meta(description="how many leases this was carried out on")]
    lost: Annotated[list[Digits] | None, Meta(description="ids of those not held any more, with tell_lost")] = None
    deadlines: Annotated[list[DeadlineTold] | None, Meta(description="the new ones, of an extend")] = None


class MessageTold(OneTold, kw_only=True):
    """What is known of one message."""

    topic: Topic
    partition: Natural
    state: State
    attempts: Annotated[Natural, Meta(description="deliveries so far")]
    priority: Int64 | None = None
    due_at: Moment | None = None
    enqueued_at: Moment | None = None
    expires_at: Moment | None = None
    deadline: Annotated[Moment | None, Meta(description="of its lease")] = None
    holder: str | None = None
    reason: Annotated[str | None, Meta(description="of its last failure, or of its end")] = None
    ended_at: Moment | None = None
    key: str | None = None
    headers: dict[str, str] | None = None
    fairness_key: str | None = None


class MessagesTold(Shape, kw_only=True):
    messages: list[MessageTold]


class PartitionOffsets(Shape, kw_only=True):
    partition: Natural
    start: Natural
    end: Annotated[Natural, Meta(description="what is durable ends before it")]


class OffsetsTold(Shape, kw_only=True):
    topic: Topic
    partitions: list[PartitionOffsets]


class LoginTold(Shape, kw_only=True):
    token: Annotated[str, Meta(description="send it as `authorization: Bearer <token>`; it is short-lived")]


# -- from the model's things -------------------------------------------------------------------------------------------


def tell_heap(info: TopicInfo) -> HeapTold:
    return HeapTold(topic=info.name, incarnation=info.incarnation, config=info.config)


def tell_error(error: Any) -> ErrorTold:
    told = codes.describe(error)
    facts = told["facts"]
    if "lost" in facts:
        facts = facts | {"lost": list(map(str, facts["lost"]))}
    return ErrorTold(error=told["error"], facts=facts, text=told["text"])


def tell_enqueued(result: Enqueued) -> EnqueuedTold:
    return EnqueuedTold(message_id=to_ulid(result.id), id=str(result.id), duplicate=result.duplicate)


def tell_rows(results: list[Enqueued]) -> list[RowTold]:
    ulids = to_ulids([r.id for r in results])
    return [
        RowTold(message_id=ulid, id=str(r.id), duplicate=r.duplicate)
        if r.error is None else RowTold(error=tell_error(r.error))
        for r, ulid in zip(results, ulids, strict=True)
    ]  # fmt: skip


def shown(payload: bytes | None, wanted: PayloadAs) -> dict[str, Any]:
    """A payload as the caller wants to see it; in base64 if it is no such thing."""
    if wanted == "base64" or payload is None:
        return {"payload": payload}
    try:
        text = payload.decode()
        if wanted == "text":
            return {"payload_text": text}
        msgspec.json.decode(payload)
    except (ValueError, RecursionError):
        return {"payload": payload}
    return {"payload_json": Raw(payload)}


def tell_popped(popped: Popped, wanted: PayloadAs) -> list[PoppedTold]:
    count = len(popped.ids)
    deadlines = [from_ms(ms) for ms in popped.deadline_ms] * (count if len(popped.deadline_ms) == 1 else 1)
    ulids = to_ulids(popped.ids)
    return [
        PoppedTold(
            message_id=ulids[i], id=str(popped.ids[i]), lease_token=str(popped.tokens[i]),
            priority=int(popped.priorities[i]), attempts=popped.attempts[i],
            enqueued_at=from_ms(int(popped.enqueued_ms[i])), deadline=deadlines[i],
            partition=0 if popped.partitions is None else int(popped.partitions[i]),
            key=popped.keys[i] if popped.keys else None,
            fairness_key=popped.fairness_keys[i] if popped.fairness_keys else None,
            headers=popped.headers[i] if popped.headers else None, **shown(popped.payloads[i], wanted),
        )
        for i in range(count)
    ]  # fmt: skip


def tell_message(info: MessageInfo, wanted: PayloadAs) -> MessageTold:
    return MessageTold(
        message_id=info.message_id, id=str(info.id), topic=info.topic, partition=info.partition, state=info.state,
        attempts=info.attempts, priority=info.priority, due_at=info.due_at, enqueued_at=info.enqueued_at,
        expires_at=info.expires_at, deadline=info.deadline, holder=info.holder, reason=info.reason,
        ended_at=info.ended_at, key=info.key, headers=info.headers or None, fairness_key=info.fairness_key,
        **shown(info.payload, wanted),
    )  # fmt: skip


def config_json(fields: dict[str, Any], whose: str = "topic") -> str:
    try:
        return msgspec.json.encode(fields).decode()
    except (TypeError, ValueError) as error:
        raise BadRequest(f"a {whose}'s settings do not fit: {error}") from None


def read_group_settings(fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in GroupConfig.__struct_fields__:
            raise BadRequest(f"a group has no setting {name!r}; it has {', '.join(GroupConfig.__struct_fields__)}")
    return fields


def read_settings(fields: dict[str, Any]) -> dict[str, Any]:
    """A topic's settings as JSON has them, in which every key is text."""
    for name in fields:
        if name not in TopicConfig.__struct_fields__:
            raise BadRequest(f"a topic has no setting {name!r}; it has {', '.join(TopicConfig.__struct_fields__)}")
    if isinstance(weights := fields.get("partition_weights"), dict):
        weights = {int(p) if p.isascii() and p.isdigit() else p: w for p, w in weights.items()}
        return fields | {"partition_weights": weights}
    return fields
