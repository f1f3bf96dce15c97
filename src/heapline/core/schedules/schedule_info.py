"""Convert a schedule to its public form: seconds and datetimes instead of milliseconds, short names, current state."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from heapline.contract.message import from_ms
from heapline.contract.schedules import ScheduleInfo, short

if TYPE_CHECKING:
    from heapline.core.schedules.book import Standing

#: A schedule that is done this far ahead of the clock was fired by a clock that has since been set back.
AHEAD_MS = 60_000


def tell(standing: Standing, trouble: str | None, now: int) -> ScheduleInfo:
    """Return the public description. `trouble` is why the last firing could not be enqueued."""
    state, schedule = standing.state, standing.state.schedule
    problem = standing.problem or trouble
    if problem is None and state.done_ms > now + AHEAD_MS:
        done = from_ms(state.done_ms).isoformat(timespec="seconds")
        problem = f"the clock was set back; it continues after {done}; to continue now, delete it and create it again"
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


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else from_ms(ms)
