"""Schedules: when they fire, the message that they enqueue, and the policy for missed firings.

This module validates users' input, and its errors say how to fix it. It knows neither past firings (`book.py`) nor the
topic's settings: the caller that enqueues the message checks whether the topic accepts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec

from heapline.contract.call import Access, Command, Page, Repeat, Right, call_family
from heapline.contract.check import describe_types, fail
from heapline.contract.config import DEFAULT_NAMESPACE, NAME, parse_topic
from heapline.contract.errors import BadName, BadRequest
from heapline.contract.fields import Cursor, Key, Priority, Topic
from heapline.contract.message import EPOCH, Outgoing, from_ms

Misfire = Literal["skip", "once", "all"]
MISFIRES = ("skip", "once", "all")
EVERY_MS_MIN = 1000
EVERY_MS_MAX = 366 * 86400 * 1000
GRACE_MS_MAX = 3600 * 1000
MAKEUP_MAX = 1000
INSTANT_MS_MAX = 32_503_680_000_000  # the year 3000
#: Fields of a schedule that its messages have too.
MESSAGE_FIELDS = ("payload", "priority", "key", "ttl", "max_retries", "fairness_key")
#: Headers of every firing: its schedule and its planned time.
SCHEDULE, SCHEDULED_AT = "heapline-schedule", "heapline-scheduled-at"


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One schedule as requested; create it with `make_schedule`, which validates it.

    It is stored with all fields, including defaults: a changed default applies to new schedules only. A field may be
    added if its default keeps the previous behavior; no field may change its meaning.
    """

    name: str  # namespace/name
    topic: str  # namespace/name
    cron: str | None = None  # either this or every_ms
    every_ms: int | None = None
    tz: str = "UTC"  # of cron
    starts_ms: int | None = None  # no firing before this; with every_ms also the first one
    ends_ms: int | None = None  # no firing at or after this
    misfire: Misfire = "once"
    grace_ms: int = 60_000  # a firing at most this late is on time, whatever `misfire` says
    makeup_max: int = 100  # most missed firings, the latest ones, that misfire="all" makes up after one outage
    payload: bytes = b""
    priority: int = 0
    key: str | None = None
    headers: dict[str, str] = {}
    ttl: float | None = None
    max_retries: int | None = None
    fairness_key: str | None = None

    @property
    def timing(self) -> tuple[object, ...]:
        """Return the fields that determine its firings."""
        return self.cron, self.tz, self.every_ms, self.starts_ms

    def message(self, fire_ms: int) -> Outgoing:
        """Return the message of a firing: the same on every call. Its number is its planned time; the caller that
        enqueues it adds the producer and the incarnation."""
        fields = {name: getattr(self, name) for name in MESSAGE_FIELDS}
        own = {SCHEDULE: self.name, SCHEDULED_AT: from_ms(fire_ms).isoformat(timespec="milliseconds")}
        return Outgoing(**fields, headers={**self.headers, **own}, seq=fire_ms)


describe_types(Schedule)


def make_schedule(name: str, **fields: Any) -> Schedule:
    """Return a validated schedule from the fields of CreateSchedule: seconds as numbers, times with a time zone.

    >>> make_schedule("nightly", cron="0 3 * * *", tz="Europe/Berlin", topic="jobs").name
    'default/nightly'
    >>> make_schedule("nightly", cron="0 3 * * *", topic="jobs", misfires="all")
    Traceback (most recent call last):
    heapline.contract.errors.BadRequest: a schedule has no misfires: it has cron, ends, every, fairness_key, ...
    """
    unknown = sorted(fields.keys() - DEFAULTS.keys())
    if unknown:
        raise BadRequest(f"a schedule has no {', '.join(unknown)}: it has {', '.join(sorted(DEFAULTS))}")
    given = DEFAULTS | fields
    cron, every, tz = given["cron"], given.pop("every"), given["tz"]
    every_ms = None if every is None else _span("every", every, EVERY_MS_MIN, EVERY_MS_MAX)
    _check_timing(cron, every, tz)
    if given["misfire"] not in MISFIRES:
        raise BadRequest(f'misfire is "skip", "once" or "all", not {given["misfire"]!r}')
    given |= {
        "name": schedule_name(name),
        "topic": "/".join(parse_topic(given["topic"])),
        "payload": _payload(given["payload"]),
        "every_ms": every_ms,
        "tz": tz or "UTC",
        "starts_ms": _instant_ms("starts", given.pop("starts")),
        "ends_ms": _instant_ms("ends", given.pop("ends")),
        "grace_ms": _span("grace", given.pop("grace"), 0, GRACE_MS_MAX),
        "headers": _headers(given["headers"]),
    }
    try:
        schedule = msgspec.convert(given, Schedule)
    except msgspec.ValidationError as error:
        raise BadRequest(f"invalid settings of a schedule: {error}") from None
    check_schedule(schedule)
    return schedule


def check_schedule(schedule: Schedule) -> None:
    """Validate a schedule that was not created by `make_schedule`."""
    if not 1 <= schedule.makeup_max <= MAKEUP_MAX:
        fail("makeup_max", f"an integer from 1 to {MAKEUP_MAX}", schedule.makeup_max)
    starts, ends = schedule.starts_ms, schedule.ends_ms
    if starts is not None and ends is not None and ends <= starts:
        raise BadRequest("ends is not later than starts: the schedule would never fire; move one of them")
    taken = {SCHEDULE, SCHEDULED_AT} & schedule.headers.keys()
    if taken:
        raise BadRequest(f"header {min(taken)!r} is set by the schedule itself; omit it")
    if schedule.cron is not None:
        from heapline.contract.cron import cron_times  # loads time zones, which few processes need

        cron_times(schedule.cron, schedule.tz)


def schedule_name(name: Any) -> str:
    """Return `namespace/name`, with the default namespace if none is given."""
    namespace, slash, rest = name.partition("/") if isinstance(name, str) else ("", "", "")
    if not slash:
        namespace, rest = DEFAULT_NAMESPACE, namespace
    if not NAME.match(namespace) or not NAME.match(rest):
        raise BadName("schedule", name if isinstance(name, str) else repr(name))
    return f"{namespace}/{rest}"


def _check_timing(cron: Any, every: Any, tz: Any) -> None:
    if cron is None and every is None:
        raise BadRequest('a schedule needs cron="0 3 * * *" or every=60.0 (seconds): neither is given')
    if cron is not None and every is not None:
        raise BadRequest("give cron or every, not both: for both make two schedules")
    if cron is None and tz is not None:
        raise BadRequest("tz needs cron; `every` counts elapsed time, which is the same in all zones, so omit tz")
    if not isinstance(cron, str | None) or not isinstance(tz, str | None):
        raise BadRequest(f'cron and tz are str, such as "0 3 * * *" and "Europe/Berlin", not {cron!r} and {tz!r}')


def _span(name: str, value: Any, low: int, high: int) -> int:
    """Return a duration in ms, from seconds or a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds)
    if not number or not low <= seconds * 1000 <= high:
        raise BadRequest(f"{name}={value!r}: give {low // 1000} to {high // 1000} seconds")
    return round(seconds * 1000)


def _instant_ms(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise BadRequest(f"{name} is a datetime with a time zone, such as datetime.now(UTC), not {value!r}")
    ms = (value - EPOCH) // timedelta(milliseconds=1)
    if not 0 <= ms <= INSTANT_MS_MAX:
        raise BadRequest(f"{name}={value.isoformat()} is out of range: it must be between the years 1970 and 3000")
    return ms


def _payload(payload: Any) -> bytes:
    if type(payload) is not bytes:
        raise BadRequest(f"a payload is bytes, not {type(payload).__name__}: encode it first, for example as JSON")
    return payload


def _headers(headers: Any) -> dict[str, str]:
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise BadRequest(f"headers must be a mapping of strings to strings, got {type(headers).__name__}")
    return dict(headers)


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as requested, and its state."""

    name: str
    topic: str
    cron: str | None = None  # either this or every
    every: float | None = None  # seconds
    tz: str | None = None  # of cron
    starts: datetime | None = None
    ends: datetime | None = None
    misfire: Misfire = "once"
    grace: float = 60.0
    makeup_max: int = 100
    payload: bytes = b""
    priority: int = 0
    key: str | None = None
    headers: dict[str, str] = {}
    ttl: float | None = None
    max_retries: int | None = None
    fairness_key: str | None = None
    next_at: datetime | None = None  # its next firing; None: it is paused, over, or cannot fire
    fired_at: datetime | None = None  # planned time of the last firing
    fired_count: int = 0
    paused_at: datetime | None = None
    created_at: datetime | None = None
    changed_at: datetime | None = None
    problem: str | None = None  # why due firings are not enqueued; retried every few seconds

    @property
    def state(self) -> Literal["active", "paused", "failing", "over"]:
        if self.paused_at is not None:
            return "paused"
        if self.problem is not None:
            return "failing"
        return "over" if self.next_at is None else "active"


# -- calls -------------------------------------------------------------------------------------------------------------


def _schedule(value: Any) -> bool:
    try:
        schedule_name(value)
    except BadName:
        return False
    return True


ScheduleName = Annotated[
    str,
    msgspec.Meta(
        max_length=300,
        description="the schedule's name, or `namespace/name`",
        examples=["nightly"],
        extra={"name": "schedule", "is_name": _schedule},
    ),
]
schedule_call = call_family(feature="schedules", route="schedule")
ADMINISTER = (Access(Right.ADMIN, "name"),)  # a schedule's name appears in scopes as a topic's does


@schedule_call(
    id=0x80,
    rpc="CreateSchedule",
    http="POST /v1/schedules",
    needs=(*ADMINISTER, Access(Right.PRODUCE)),
    audit=("name",),
    status=201,
)
class CreateSchedule(Command[ScheduleInfo]):
    """Enqueue a message at each of these times, once each. Creating it again under the same name changes it."""

    name: ScheduleName
    topic: Topic
    payload: bytes = b""
    cron: str | None = None
    every: float | None = None  # seconds
    tz: str | None = None
    starts: datetime | None = None
    ends: datetime | None = None
    misfire: str = "once"
    grace: float = 60.0
    makeup_max: int = 100
    priority: Priority = 0
    key: Key | None = None
    headers: dict[str, str] | None = None
    ttl: float | None = None
    max_retries: int | None = None
    fairness_key: Key | None = None

    def validate(self) -> None:
        self.schedule()

    def schedule(self) -> Schedule:
        return make_schedule(**{name: getattr(self, name) for name in self.__struct_fields__})


#: Fields that users can set, besides the name, and their defaults.
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(CreateSchedule) if field.name != "name"
}


@schedule_call(id=0x81, rpc="GetSchedule", http="GET /v1/schedules/{name}", needs=ADMINISTER)
class GetSchedule(Command[ScheduleInfo]):
    """Return a schedule and its state."""

    name: ScheduleName


@schedule_call(
    id=0x82, rpc="ListSchedules", http="GET /v1/schedules", rows=Access(Right.ADMIN, "name"), route="all", merge="pages"
)
class ListSchedules(Command[Page[ScheduleInfo]]):
    """List the schedules that the caller may administer, by name."""

    cursor: Cursor | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000


@schedule_call(id=0x83, rpc="PauseSchedule", http="POST /v1/schedules/{name}:pause", needs=ADMINISTER, audit=("name",))
class PauseSchedule(Command[ScheduleInfo]):
    """Stop a schedule from firing."""

    name: ScheduleName


@schedule_call(
    id=0x84, rpc="ResumeSchedule", http="POST /v1/schedules/{name}:resume", needs=ADMINISTER, audit=("name",)
)
class ResumeSchedule(Command[ScheduleInfo]):
    """Let a paused schedule fire again."""

    name: ScheduleName


@schedule_call(
    id=0x85,
    rpc="DeleteSchedule",
    http="DELETE /v1/schedules/{name}",
    needs=ADMINISTER,
    repeat=Repeat.ONCE,
    destroys=True,
    audit=("name",),
)
class DeleteSchedule(Command[None]):
    """Delete a schedule. Messages that it has enqueued stay."""

    name: ScheduleName
