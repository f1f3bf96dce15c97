"""Dead letters of a topic: list, replay and delete them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct

from heapline.contract.call import Command, Count, Page, Repeat, Right, call
from heapline.contract.errors import BadRequest
from heapline.contract.fields import (
    ANSWER_BYTES,
    Cursor,
    Limit,
    MaxBytes,
    MessageId,
    Rate,
    Topic,
)
from heapline.contract.message import DlqFilter, MessageInfo

LETTER_BYTES = 256  # of a dead letter's other fields in an answer


@call(id=0x30, rpc="DlqList", http="GET /v1/dlq", needs=Right.CONSUME)
class ListDeadLetters(Command[Page[MessageInfo]]):
    """List dead letters, oldest first, at most `limit` per page and about `max_bytes` of payloads."""

    topic: Topic
    limit: Limit = 100
    cursor: Cursor | None = None
    where: DlqFilter | None = None
    max_bytes: MaxBytes = ANSWER_BYTES


@call(id=0x31, rpc="DlqPeek", http="GET /v1/dlq:peek", needs=Right.CONSUME)
class GetDeadLetter(Command[MessageInfo]):
    """Return one dead letter. A message that is not dead raises MessageNotFound."""

    topic: Topic
    message_id: MessageId


@call(id=0x32, rpc="DlqReplay", http="POST /v1/dlq:replay", needs=Right.ADMIN, repeat=Repeat.ONCE, audit=())
class ReplayDeadLetters(Command[Count]):
    """Make dead letters ready again with no attempts, at most `rate` per second, and return how many."""

    topic: Topic
    ids: list[MessageId] | None = None
    where: DlqFilter | None = None
    rate: Rate | None = None


@call(
    id=0x33, rpc="DlqDelete", http="POST /v1/dlq:delete", needs=Right.ADMIN, repeat=Repeat.ONCE, destroys=True, audit=()
)
class DeleteDeadLetters(Command[Count]):
    """Delete dead letters and return how many."""

    topic: Topic
    ids: list[MessageId] | None = None
    where: DlqFilter | None = None

    def validate(self) -> None:
        if self.ids is None and self.where is None:
            raise BadRequest("say which: give ids, or where (an empty filter matches all)")


class DeadLetterGroup(Struct, frozen=True, kw_only=True):
    """Dead letters whose reasons differ only in numbers and ids."""

    reason: str  # the last line, with # for numbers and ids
    count: int
    match: str | None  # longest part of it without #: as DlqFilter.reason it selects these letters, perhaps more
    example: str  # the whole reason of the newest letter
    first_at: datetime
    last_at: datetime
    message_ids: list[str]  # of some of them
    tasks: list[str]  # named by these


class DeadLetterGroups(Struct, frozen=True, kw_only=True):
    items: list[DeadLetterGroup]  # largest first
    count: int  # letters in all groups
    others: int = 0  # letters of groups beyond the limit
    as_of: datetime  # letters that died before; give it as DlqFilter.died_before to act on no later ones


@call(id=0x34, rpc="DlqGroups", http="GET /v1/dlq:groups", needs=Right.CONSUME, feature="dlq_groups")
class GroupDeadLetters(Command[DeadLetterGroups]):
    """Count dead letters by reason, with the tasks of some of them."""

    topic: Topic
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


class DeadLetterCount(Struct, frozen=True):
    count: int
    as_of: datetime  # as in DeadLetterGroups


@call(id=0x35, rpc="DlqCount", http="GET /v1/dlq:count", needs=Right.CONSUME, feature="dlq_groups")
class CountDeadLetters(Command[DeadLetterCount]):
    """Count the dead letters that a filter selects, before a replay or deletion of exactly these.

    Give `as_of` as the filter's `died_before` to that call. Letters that die meanwhile are then left alone.
    """

    topic: Topic
    where: DlqFilter | None = None


def size_of(info: MessageInfo) -> int:
    """Return about how many bytes of an answer a dead letter takes."""
    texts = (info.key, info.fairness_key, info.reason, *info.headers, *info.headers.values())
    return LETTER_BYTES + len(info.payload or b"") + sum(len(text) for text in texts if text)


def matches(info: MessageInfo, where: DlqFilter) -> bool:
    """Return whether a dead letter matches the filter."""
    if where.reason is not None and where.reason.lower() not in (info.reason or "").lower():
        return False
    priority = info.priority if info.priority is not None else 0
    if where.priority_min is not None and priority < where.priority_min:
        return False
    if where.priority_max is not None and priority > where.priority_max:
        return False
    if where.died_after is not None and (info.ended_at is None or info.ended_at < where.died_after):
        return False
    if where.died_before is not None and (info.ended_at is None or info.ended_at >= where.died_before):
        return False
    return where.key is None or info.key == where.key
