"""What may stand in a path or behind the question mark; unknown names are refused, so that a slip is not ignored."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import Path
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from heapline.model import DlqFilter
from heapline.wire.json_shapes import INT64_MAX, INT64_MIN, PayloadAs

TOPIC = "`name`, or `namespace/name`"
Topic = Annotated[str, Field(max_length=300, description=TOPIC, examples=["jobs"])]
HeapPath = Annotated[str, Path(max_length=300, description=TOPIC, examples=["jobs"])]
Text = Annotated[str, Field(max_length=4096)]
Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
Natural = Annotated[int, Field(ge=0, le=INT64_MAX)]
As = Annotated[PayloadAs, Field(description="how payloads are shown; one that is no such thing comes in base64")]
Id = Annotated[str, Field(max_length=64, description="a ULID, or the id's digits")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MaybeOnTopic(Strict):
    topic: Topic | None = None


class OnTopic(Strict):
    topic: Topic


class OnMessage(OnTopic):
    message_id: Id
    payload_as: As = "base64"


class PeekQuery(OnTopic):
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10
    payload_as: As = "base64"


class DlqQuery(OnTopic):
    limit: Annotated[int, Field(ge=1, le=1 << 31)] = 100
    payload_as: As = "base64"
    reason: Annotated[Text | None, Field(description="part of the reason, without regard to case")] = None
    priority_min: Int64 | None = None
    priority_max: Int64 | None = None
    died_after: AwareDatetime | None = None
    died_before: AwareDatetime | None = None
    key: Text | None = None

    def where(self) -> DlqFilter:
        after: datetime | None = self.died_after
        return DlqFilter(
            reason=self.reason, priority_min=self.priority_min, priority_max=self.priority_max, died_after=after,
            died_before=self.died_before, key=self.key,
        )  # fmt: skip


class LogQuery(OnTopic):
    partition: Natural = 0
    start: Annotated[Natural, Field(description="offset; 0 is wherever the log starts")] = 0
    end: Annotated[Natural | None, Field(description="offset; without it, to what is durable now")] = None


class Sure(Strict):
    """Of calls that cannot be undone."""

    force: Annotated[bool, Field(description="must be true")] = False
    confirmation: Annotated[
        str | None, Field(max_length=200, description="the token of a first call's 428; or in an x-confirmation header")
    ] = None
