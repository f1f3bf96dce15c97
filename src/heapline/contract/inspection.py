"""Inspection: why the queue does what it does. Nothing here changes a message, except to end a lease by force."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

from heapline.contract.call import Command, Right, call
from heapline.contract.fields import MessageId, Topic
from heapline.contract.message import MessageInfo

EXPLAINED_MAX = 100
HoldKind = Literal["paused", "in_flight", "rate", "throttled", "fairness", "freshness"]


class DeliveryHold(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reason why messages that are ready are not handed out now."""

    kind: HoldKind
    count: int  # messages that it may hold back
    text: str
    until: datetime | None = None  # when time alone ends it


class ExplainedMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message's place in line and what it follows from."""

    message: MessageInfo  # without payload and headers
    text: str  # one sentence
    line: int | None = None  # 1 = the next; None: it is not in line, or strategy and limits leave its place open
    age: float = 0.0  # seconds since it was enqueued
    effective_priority: float | None = None  # on a topic with aging: the priority after `age`
    turns_ahead: int | None = None  # on a topic with fairness keys: turns of its priority before its own


class Explanation(Struct, frozen=True, kw_only=True):
    topic: str
    ready: int
    items: list[ExplainedMessage]  # best first
    holds: list[DeliveryHold] = []


@call(id=0xB0, rpc="Explain", http="GET /v1/heaps/{topic}/explain", needs=Right.CONSUME, feature="explain")
class Explain(Command[Explanation]):
    """Explain what would be popped next, best first, or why one message waits. Nothing is leased or changed."""

    topic: Topic
    limit: Annotated[int, Meta(ge=1, le=EXPLAINED_MAX)] = 10
    message_id: MessageId | None = None
