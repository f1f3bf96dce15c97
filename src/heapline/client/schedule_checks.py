"""A schedule as the clients take it: what is wrong with it is told here, before anything is sent."""

from __future__ import annotations

from typing import Any

from heapline.client.checks import check_outgoing
from heapline.schedules import Schedule, schedule_of
from heapline.schedules.telling import short


def checked_schedule(name: str, fields: dict[str, Any]) -> Schedule:
    schedule = schedule_of(name, **fields)
    check_outgoing(schedule.message(0), short(schedule.topic))
    return schedule
