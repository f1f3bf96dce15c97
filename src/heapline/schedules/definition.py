"""What a schedule is: when it fires, what it then enqueues, and what becomes of firings that were missed.

This file checks what people write and says what to do about it. It knows neither what was fired before (`book.py`)
nor the topic's settings: whether the topic takes such a message is for whoever enqueues it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from heapline.config import DEFAULT_NAMESPACE, NAME, parse_topic
from heapline.errors import BadName, BadRequest
from heapline.model import EPOCH, Outgoing, from_ms

Misfire = Literal["skip", "once", "all"]
MISFIRES = ("skip", "once", "all")
EVERY_MS_MIN = 1000
EVERY_MS_MAX = 366 * 86400 * 1000
GRACE_MS_MAX = 3600 * 1000
MAKEUP_MAX = 1000
#: What people may say of one, besides its name.
FIELDS = frozenset((
    "topic", "payload", "cron", "every", "tz", "starts", "ends", "misfire", "grace", "makeup_max", "priority", "key",
    "headers", "ttl", "max_retries", "fairness_key",
))  # fmt: skip
MOMENT_MS_MAX = 32_503_680_000_000  # the year 3000
#: Headers that every firing carries: which schedule, and the moment that it was meant for.
SCHEDULE, SCHEDULED_AT = "heapline-schedule", "heapline-scheduled-at"


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One schedule as it was asked for; make it with `make_schedule`, which checks it.

    It is stored as it stands here, defaults too: another default is for new schedules only. A field may be added if
    its default means what was so before; none may change its meaning.
    """

    name: str  # namespace/name
    topic: str  # namespace/name
    cron: str | None = None  # this or every_ms
    every_ms: int | None = None
    tz: str = "UTC"  # of cron
    starts_ms: int | None = None  # no firing before this; with every_ms also the first one
    ends_ms: int | None = None  # no firing at or after this
    misfire: Misfire = "once"
    grace_ms: int = 60_000  # a firing no later than this is in time, whatever `misfire` says
    makeup_max: int = 100  # how many missed ones misfire="all" makes up after one absence: the latest
    payload: bytes = b""
    priority: int = 0
    key: str | None = None
    headers: dict[str, str] = {}
    ttl: float | None = None
    max_retries: int | None = None
    fairness_key: str | None = None

    @property
    def timing(self) -> tuple[object, ...]:
        """What its firings are computed from."""
        return self.cron, self.tz, self.every_ms, self.starts_ms

    def message(self, fire_ms: int) -> Outgoing:
        """What a firing enqueues: the same, however often it is asked for. Its number is the moment it is meant for;
        who counts, and in which incarnation, is for whoever enqueues it."""
        told = {SCHEDULE: self.name, SCHEDULED_AT: from_ms(fire_ms).isoformat(timespec="milliseconds")}
        return Outgoing(
            self.payload, priority=self.priority, key=self.key, headers={**self.headers, **told}, ttl=self.ttl,
            max_retries=self.max_retries, fairness_key=self.fairness_key, seq=fire_ms,
        )  # fmt: skip


def make_schedule(
    name: str, *, topic: str, payload: bytes = b"", cron: str | None = None, every: float | timedelta | None = None,
    tz: str | None = None, starts: datetime | None = None, ends: datetime | None = None, misfire: Misfire = "once",
    grace: float = 60.0, makeup_max: int = 100, priority: int = 0, key: str | None = None,
    headers: Mapping[str, str] | None = None, ttl: float | None = None, max_retries: int | None = None,
    fairness_key: str | None = None,
) -> Schedule:  # fmt: skip
    """A checked schedule from what people write: seconds as numbers, moments with a time zone.

    >>> make_schedule("nightly", cron="0 3 * * *", tz="Europe/Berlin", topic="jobs").name
    'default/nightly'
    """
    every_ms = None if every is None else _span("every", every, EVERY_MS_MIN, EVERY_MS_MAX)
    _check_timing(cron, every, tz)
    if misfire not in MISFIRES:
        raise BadRequest(f'misfire is "skip", "once" or "all", not {misfire!r}')
    plain = {
        "name": schedule_name(name), "topic": "/".join(parse_topic(topic)), "payload": _payload(payload), "cron": cron,
        "every_ms": every_ms, "tz": tz or "UTC", "starts_ms": _moment("starts", starts),
        "ends_ms": _moment("ends", ends), "misfire": misfire, "grace_ms": _span("grace", grace, 0, GRACE_MS_MAX),
        "makeup_max": makeup_max, "priority": priority, "key": key, "headers": _headers(headers), "ttl": ttl,
        "max_retries": max_retries, "fairness_key": fairness_key,
    }  # fmt: skip
    try:
        schedule = msgspec.convert(plain, Schedule)
    except msgspec.ValidationError as error:
        raise BadRequest(f"a schedule's settings do not fit: {error}") from None
    check_schedule(schedule)
    return schedule


def schedule_of(name: str, **fields: Any) -> Schedule:
    """`make_schedule` for keywords that came from elsewhere: one that it does not know is told like any other mistake.

    >>> schedule_of("nightly", cron="0 3 * * *", topic="jobs", misfires="all")
    Traceback (most recent call last):
    heapline.errors.BadRequest: a schedule has no misfires: it has cron, ends, every, fairness_key, grace, headers, ...
    """
    unknown = sorted(fields.keys() - FIELDS)
    if unknown:
        raise BadRequest(f"a schedule has no {', '.join(unknown)}: it has {', '.join(sorted(FIELDS))}")
    return make_schedule(name, **fields)


def check_schedule(schedule: Schedule) -> None:
    """What `make_schedule` promises, for one that came some other way."""
    if not 1 <= schedule.makeup_max <= MAKEUP_MAX:
        raise BadRequest(f"makeup_max={schedule.makeup_max} is out of range: it must be 1 to {MAKEUP_MAX}")
    starts, ends = schedule.starts_ms, schedule.ends_ms
    if starts is not None and ends is not None and ends <= starts:
        raise BadRequest("ends is not later than starts: the schedule would never fire; move one of them")
    taken = {SCHEDULE, SCHEDULED_AT} & schedule.headers.keys()
    if taken:
        raise BadRequest(f"header {min(taken)!r} is set by the schedule itself: leave it away")
    if schedule.cron is not None:
        from heapline.schedules.cron import cron_times  # brings time zones along, which few processes need

        cron_times(schedule.cron, schedule.tz)


def schedule_name(name: Any) -> str:
    """`namespace/name`; without a namespace it is the default one."""
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
        raise BadRequest("tz goes with cron: every counts elapsed time, which is the same in all zones; leave tz away")
    if not isinstance(cron, str | None) or not isinstance(tz, str | None):
        raise BadRequest(f'cron and tz are str, such as "0 3 * * *" and "Europe/Berlin", not {cron!r} and {tz!r}')


def _span(name: str, value: Any, low: int, high: int) -> int:
    """A length of time in ms, from seconds or a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds)
    if not number or not low <= seconds * 1000 <= high:
        raise BadRequest(f"{name}={value!r}: give {low // 1000} to {high // 1000} seconds, or a timedelta of that")
    return round(seconds * 1000)


def _moment(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise BadRequest(f"{name} is a datetime with a time zone, such as datetime.now(UTC), not {value!r}")
    ms = (value - EPOCH) // timedelta(milliseconds=1)
    if not 0 <= ms <= MOMENT_MS_MAX:
        raise BadRequest(f"{name}={value.isoformat()} is out of range: it must lie between the years 1970 and 3000")
    return ms


def _payload(payload: Any) -> bytes:
    if type(payload) is not bytes:
        raise BadRequest(f"a payload is bytes, not {type(payload).__name__}: encode it first, for example as JSON")
    return payload


def _headers(headers: Any) -> dict[str, str]:
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise BadRequest(f"headers is a mapping of str to str, not {type(headers).__name__}")
    return dict(headers)
