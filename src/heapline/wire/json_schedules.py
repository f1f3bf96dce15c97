"""Schedules as JSON: the bodies and answers of `/v1/schedules`, and from and to the contract's things."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, UnsetType

from heapline.errors import BadRequest
from heapline.model import from_ms
from heapline.schedules import Schedule, ScheduleInfo
from heapline.schedules.telling import short
from heapline.wire.json_requests import Ask, Seconds
from heapline.wire.json_shapes import Int64, Moment, Natural, PayloadAs, Shape, Text, Topic, shown

Name = Annotated[str, Meta(max_length=300, description="`name`, or `namespace/name`", examples=["nightly"])]
_SAME = ("cron", "every", "tz", "starts", "ends", "priority", "key", "ttl", "max_retries", "fairness_key")
_STANDS = ("next_at", "fired_at", "fired_count", "paused_at", "created_at", "changed_at", "problem")


class ScheduleAsk(Ask, kw_only=True):
    """When to enqueue what. `cron` or `every` is given; of the three payloads at most one; the rest has defaults."""

    name: Name
    topic: Topic
    cron: Annotated[Text | None, Meta(description="five fields, or @daily and the like", examples=["0 3 * * *"])] = None
    every: Annotated[Seconds | None, Meta(description="seconds between firings")] = None
    tz: Annotated[Text | None, Meta(description="time zone of cron; UTC otherwise", examples=["Europe/Berlin"])] = None
    starts: Annotated[Moment | None, Meta(description="no firing before it; of every, the first one")] = None
    ends: Annotated[Moment | None, Meta(description="no firing at or after it")] = None
    misfire: Annotated[
        Literal["skip", "once", "all"], Meta(description="what becomes of firings that nobody was there for")
    ] = "once"
    grace: Annotated[Seconds, Meta(description="seconds that a firing may be late and still count as in time")] = 60.0
    makeup_max: Annotated[Natural, Meta(description='how many misfire "all" makes up at most')] = 100
    payload: Annotated[bytes | None, Meta(description="any bytes, in base64")] = None
    payload_text: Annotated[str | None, Meta(description="text, stored as UTF-8")] = None
    payload_json: Annotated[Raw | UnsetType, Meta(description="any JSON, stored as it is written here")] = UNSET
    priority: Int64 = 0
    key: Text | None = None
    headers: dict[Text, Annotated[str, Meta(max_length=65536)]] | None = None
    ttl: Seconds | None = None
    max_retries: Natural | None = None
    fairness_key: Text | None = None

    def fields(self) -> dict[str, Any]:
        """As keywords of `create_schedule`."""
        same = {name: getattr(self, name) for name in (*_SAME, "misfire", "grace", "makeup_max", "headers")}
        return same | {"name": self.name, "topic": self.topic, "payload": self.content()}

    def content(self) -> bytes:
        given = (self.payload is not None) + (self.payload_text is not None) + (self.payload_json is not UNSET)
        if given > 1:
            raise BadRequest("give at most one of payload (base64), payload_text and payload_json")
        if self.payload_text is not None:
            return self.payload_text.encode()
        if self.payload_json is UNSET:
            return self.payload or b""
        content = bytes(self.payload_json)
        try:
            content.decode()
        except UnicodeDecodeError:
            raise BadRequest("payload_json is not UTF-8") from None
        return content


class ScheduleTold(Shape, kw_only=True):
    """A schedule as it was asked for, and how it stands."""

    name: Name
    topic: Topic
    state: Literal["active", "paused", "failing", "over"]
    misfire: Literal["skip", "once", "all"]
    grace: float
    makeup_max: Natural
    fired_count: Natural
    priority: Int64
    cron: str | None = None
    every: float | None = None
    tz: str | None = None
    starts: Moment | None = None
    ends: Moment | None = None
    payload: Annotated[bytes | None, Meta(description="in base64")] = None
    payload_text: Annotated[str | None, Meta(description="as text, if it was asked for and is UTF-8")] = None
    payload_json: Annotated[Raw | UnsetType, Meta(description="as JSON, if it was asked for and is JSON")] = UNSET
    key: str | None = None
    headers: dict[str, str] | None = None
    ttl: float | None = None
    max_retries: Natural | None = None
    fairness_key: str | None = None
    next_at: Annotated[Moment | None, Meta(description="left away if it is paused, over, or cannot fire")] = None
    fired_at: Annotated[Moment | None, Meta(description="the moment that its last firing was meant for")] = None
    paused_at: Moment | None = None
    created_at: Moment | None = None
    changed_at: Moment | None = None
    problem: Annotated[str | None, Meta(description="why what is due is not enqueued")] = None


class SchedulesTold(Shape, kw_only=True):
    schedules: Annotated[list[ScheduleTold], Meta(description="by name; those that the caller may see")]
    next: Annotated[str | None, Meta(description="there are more: ask again with `after` set to this")] = None


def ask_for(schedule: Schedule) -> ScheduleAsk:
    """To be asked for; it has been checked."""
    return ScheduleAsk(
        name=short(schedule.name), topic=short(schedule.topic), cron=schedule.cron,
        every=None if schedule.every_ms is None else schedule.every_ms / 1000,
        tz=None if schedule.cron is None else schedule.tz,
        starts=None if schedule.starts_ms is None else from_ms(schedule.starts_ms),
        ends=None if schedule.ends_ms is None else from_ms(schedule.ends_ms), misfire=schedule.misfire,
        grace=schedule.grace_ms / 1000, makeup_max=schedule.makeup_max, payload=schedule.payload,
        priority=schedule.priority, key=schedule.key, headers=schedule.headers or None, ttl=schedule.ttl,
        max_retries=schedule.max_retries, fairness_key=schedule.fairness_key,
    )  # fmt: skip


def tell_schedule(info: ScheduleInfo, wanted: PayloadAs) -> ScheduleTold:
    same = {name: getattr(info, name) for name in (*_SAME, *_STANDS, "misfire", "grace", "makeup_max", "state")}
    return ScheduleTold(
        name=info.name, topic=info.topic, headers=info.headers or None, **same, **shown(info.payload, wanted)
    )  # fmt: skip


def read_schedule(told: ScheduleTold) -> ScheduleInfo:
    same = {name: getattr(told, name) for name in (*_SAME, *_STANDS, "misfire", "grace", "makeup_max")}
    return ScheduleInfo(
        name=told.name, topic=told.topic, payload=told.payload or b"", headers=told.headers or {}, **same
    )  # fmt: skip
