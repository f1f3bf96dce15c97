"""Schedules as protobuf: what is asked for, and what is told."""

from __future__ import annotations

from typing import Any

from heapline.model import from_ms
from heapline.schedules import Schedule, ScheduleInfo
from heapline.schedules.telling import short
from heapline.wire.columns import to_us
from heapline.wire.schema import pb
from heapline.wire.shapes import given, moment

_OPTIONAL = ("cron", "every", "tz", "misfire", "grace", "makeup_max", "key", "ttl", "max_retries", "fairness_key")
_MOMENTS = ("next_at", "fired_at", "paused_at", "created_at", "changed_at")


def pack_schedule(schedule: Schedule) -> Any:
    """To be asked for; it has been checked."""
    return pb.ScheduleSpec(
        name=short(schedule.name), topic=short(schedule.topic), cron=schedule.cron,
        every=None if schedule.every_ms is None else schedule.every_ms / 1000,
        tz=None if schedule.cron is None else schedule.tz, starts_us=_us(schedule.starts_ms),
        ends_us=_us(schedule.ends_ms), misfire=schedule.misfire, grace=schedule.grace_ms / 1000,
        makeup_max=schedule.makeup_max, payload=schedule.payload, priority=schedule.priority, key=schedule.key,
        headers=schedule.headers, ttl=schedule.ttl, max_retries=schedule.max_retries,
        fairness_key=schedule.fairness_key,
    )  # fmt: skip


def _us(ms: int | None) -> int | None:
    return None if ms is None else to_us(from_ms(ms))


def unpack_spec(spec: Any) -> dict[str, Any]:
    """What a request says, as keywords of `create_schedule`; nothing is checked."""
    found: dict[str, Any] = {"name": spec.name, "topic": spec.topic, "payload": spec.payload, "priority": spec.priority}
    found |= {name: value for name in _OPTIONAL if (value := given(spec, name)) is not None}
    return found | {
        "starts": moment(spec, "starts_us"), "ends": moment(spec, "ends_us"), "headers": dict(spec.headers)
    }  # fmt: skip


def pack_schedule_info(info: ScheduleInfo) -> Any:
    spec = pb.ScheduleSpec(
        name=info.name, topic=info.topic, payload=info.payload, priority=info.priority, headers=info.headers,
        starts_us=None if info.starts is None else to_us(info.starts),
        ends_us=None if info.ends is None else to_us(info.ends),
        **{name: getattr(info, name) for name in _OPTIONAL},
    )  # fmt: skip
    moments = {f"{name}_us": to_us(at) for name in _MOMENTS if (at := getattr(info, name)) is not None}
    return pb.ScheduleInfo(spec=spec, fired_count=info.fired_count, problem=info.problem, **moments)


def unpack_schedule_info(info: Any) -> ScheduleInfo:
    moments: dict[str, Any] = {name: moment(info, f"{name}_us") for name in _MOMENTS}
    return ScheduleInfo(
        **unpack_spec(info.spec), fired_count=info.fired_count, problem=given(info, "problem"), **moments
    )  # fmt: skip
