"""What people are told about a schedule: seconds and moments instead of milliseconds, short names, how it stands."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Literal

import msgspec

from heapline.config import DEFAULT_NAMESPACE
from heapline.model import from_ms
from heapline.schedules.definition import Misfire

if TYPE_CHECKING:
    from heapline.schedules.book import Standing

#: A schedule that is done so far ahead of the clock was fired by a clock that has been set back since.
AHEAD_MS = 60_000


class ScheduleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it was asked for, and how it stands."""

    name: str
    topic: str
    cron: str | None = None  # this or every
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
    fired_at: datetime | None = None  # the moment that the last firing was meant for
    fired_count: int = 0
    paused_at: datetime | None = None
    created_at: datetime | None = None
    changed_at: datetime | None = None
    problem: str | None = None  # why what is due is not enqueued; it is tried again every few seconds

    @property
    def state(self) -> Literal["active", "paused", "failing", "over"]:
        if self.paused_at is not None:
            return "paused"
        if self.problem is not None:
            return "failing"
        return "over" if self.next_at is None else "active"


def tell(standing: Standing, trouble: str | None, now: int) -> ScheduleInfo:
    """`trouble`: why the last firing could not be enqueued."""
    state, schedule = standing.state, standing.state.schedule
    problem = standing.problem or trouble
    if problem is None and state.done_ms > now + AHEAD_MS:
        done = from_ms(state.done_ms).isoformat(timespec="seconds")
        problem = f"the clock was set back: it goes on after {done}; to go on now, delete it and create it again"
    return ScheduleInfo(
        name=short(schedule.name), topic=short(schedule.topic), cron=schedule.cron,
        every=None if schedule.every_ms is None else schedule.every_ms / 1000,
        tz=None if schedule.cron is None else schedule.tz, starts=_moment(schedule.starts_ms),
        ends=_moment(schedule.ends_ms), misfire=schedule.misfire, grace=schedule.grace_ms / 1000,
        makeup_max=schedule.makeup_max, payload=schedule.payload, priority=schedule.priority, key=schedule.key,
        headers=schedule.headers, ttl=schedule.ttl, max_retries=schedule.max_retries,
        fairness_key=schedule.fairness_key, next_at=_moment(standing.next_ms), fired_at=_moment(state.fired_ms),
        fired_count=state.fired_count, paused_at=_moment(state.paused_ms), created_at=_moment(state.created_ms),
        changed_at=_moment(state.changed_ms), problem=problem,
    )  # fmt: skip


def short(name: str) -> str:
    """Without the default namespace, as topics are told.

    >>> short("default/nightly"), short("shop/nightly")
    ('nightly', 'shop/nightly')
    """
    return name.removeprefix(f"{DEFAULT_NAMESPACE}/")


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else from_ms(ms)
