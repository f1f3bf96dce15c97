"""The types of the fields of calls: names, texts, delays, instants and their bounds.

Bounds are `msgspec.Meta`, so that decoding, OpenAPI and the constructor's check (check.py) read the same ones.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from heapline.contract.check import SECONDS_MAX
from heapline.contract.config import NAME, is_topic
from heapline.contract.ids import check_id

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
OFFSET_MAX = 1 << 62
KEY_BYTES_MAX = 4096
NAME_BYTES_MAX = 256
POP_MESSAGES_MAX = 100_000
PAGE_MAX = 10_000
ANSWER_BYTES = 2 << 20  # of payloads in one answer, unless the caller says otherwise
ANSWER_BYTES_MAX = 1 << 40  # what a caller may say; servers answer with less


Topic = Annotated[
    str,
    Meta(
        max_length=300,
        description="`name`, or `namespace/name`",
        examples=["jobs"],
        extra={"name": "topic", "is_text": lru_cache(8192)(is_topic)},
    ),
]
GroupName = Annotated[
    str,
    Meta(
        max_length=300,
        description="the group's name",
        examples=["billing"],
        extra={"name": "group", "is_str": NAME.match},
    ),
]
ProducerName = Annotated[str, Meta(max_length=300, extra={"name": "producer", "is_str": NAME.match})]
CheckpointName = Annotated[str, Meta(max_length=300, extra={"name": "checkpoint", "is_str": NAME.match})]
ReplayName = Annotated[
    str, Meta(max_length=300, description="the replay's name", extra={"name": "replay", "is_str": NAME.match})
]
Priority = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
Natural = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Offset = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
Partition = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_MAX)]
Visibility = Annotated[float, Meta(ge=0.001, le=SECONDS_MAX)]
Rate = Annotated[float, Meta(gt=0.0, le=1e6)]  # messages per second
Instant = Annotated[datetime, Meta(tz=True, examples=["2030-01-31T12:00:00Z"])]
Key = Annotated[str, Meta(min_length=1, max_length=KEY_BYTES_MAX, extra={"bytes_max": KEY_BYTES_MAX})]
Label = Annotated[str, Meta(min_length=1, max_length=1024)]  # holders and request ids
Reason = Annotated[str, Meta(max_length=4096)]  # may be empty: str(error) may well be
#: A batch, a part, a sink, a member: any text, but not much of it, because every share carries it.
ShortName = Annotated[str, Meta(min_length=1, max_length=NAME_BYTES_MAX, extra={"bytes_max": NAME_BYTES_MAX})]
#: A ULID, or the integer; the handler reads it, because only it knows the topic's part of a ULID.
MessageId = Annotated[Annotated[str, Meta(max_length=64)] | int, Meta(extra={"check": check_id})]
Limit = Annotated[int, Meta(ge=1, le=1 << 31)]
Cursor = Annotated[str, Meta(min_length=1, max_length=1024, description="of the page before")]
MaxBytes = Annotated[int, Meta(ge=1, le=ANSWER_BYTES_MAX)]
