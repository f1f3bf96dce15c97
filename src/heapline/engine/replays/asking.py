"""What a replay is asked for: checked once, and spelled so that two requests can be compared, stored and sent.

Which rows that means is found out in ranges.py, with the journal at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from heapline.config import NAME
from heapline.engine.columns import check_moment, check_priority, check_seconds, to_ms
from heapline.errors import BadName, BadRequest
from heapline.streams import Place, ReplayFilter

OFFSET_MAX = 1 << 62
RATE_MAX = 1e6
MODES = ("all", "fast")
ENDS = ("earliest", "latest")


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A place in the log, as it was asked for: exactly one of these."""

    end_of_log: Literal["earliest", "latest"] | None = None
    offset: int | None = None
    offsets: dict[int, int] | None = None  # by partition
    wall_ms: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which rows of which topic. `end` None: what is durable when it begins."""

    topic: str
    start: Mark = Mark(end_of_log="earliest")
    end: Mark | None = None
    partitions: list[int] | None = None
    mode: Literal["all", "fast"] = "all"
    where: ReplayFilter | None = None
    rate: float | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a message is given on its way into a topic; what is not given it keeps, but that it is due at once."""

    priority: int | None = None
    delay: float | None = None
    deliver_at_ms: int | None = None
    keep_due: bool = False


def request(
    topic: str, start: Place, end: Place | None, partitions: Sequence[int] | None, mode: str,
    where: ReplayFilter | None, rate: float | None,
) -> Request:  # fmt: skip
    if mode not in MODES:
        raise BadRequest(f'mode is "all" or "fast", not {mode!r}')
    check_filter(where)
    if rate is not None and not (type(rate) in (int, float) and 0 < rate <= RATE_MAX):
        raise BadRequest(f"rate is messages a second, over 0 and at most {RATE_MAX:g}, not {rate!r}")
    return Request(
        topic=topic, start=mark("start", start), end=None if end is None else mark("end", end),
        partitions=_partitions(partitions), mode=mode, where=None if where == ReplayFilter() else where, rate=rate,  # type: ignore[arg-type]
    )  # fmt: skip


def change(priority: int | None, delay: float | None, deliver_at: datetime | None, keep_due: bool) -> Change:
    if priority is not None:
        check_priority(priority)
    if delay is not None:
        check_seconds("delay", delay)
    if deliver_at is not None:
        check_moment("deliver_at", deliver_at)
    if type(keep_due) is not bool:
        raise BadRequest(f"keep_due is True or False, not {keep_due!r}")
    if (delay is not None) + (deliver_at is not None) + keep_due > 1:
        raise BadRequest("give one of delay, deliver_at and keep_due")
    moment = None if deliver_at is None else to_ms(deliver_at)
    return Change(priority=priority, delay=delay, deliver_at_ms=moment, keep_due=keep_due)


def mark(name: str, place: Any) -> Mark:
    if isinstance(place, str) and place in ENDS:
        return Mark(end_of_log=place)  # type: ignore[arg-type]
    if isinstance(place, datetime):
        check_moment(name, place)
        return Mark(wall_ms=to_ms(place))
    if isinstance(place, Mapping):
        if not place:
            raise BadRequest(f"{name} names no partition: give {{partition: offset}}, or leave it away")
        for partition, offset in place.items():
            _check_offset(f"a partition of {name}", partition)
            _check_offset(f"{name} of partition {partition}", offset)
        return Mark(offsets=dict(place))
    if type(place) is int:
        _check_offset(name, place)
        return Mark(offset=place)
    raise BadRequest(f'{name} is "earliest", "latest", an offset, {{partition: offset}} or a datetime, not {place!r}')


def check_filter(where: Any) -> None:
    if where is None:
        return
    if not isinstance(where, ReplayFilter):
        raise BadRequest(f"where is a heapline.ReplayFilter, not {where!r}")
    for bound in (where.priority_min, where.priority_max):
        if bound is not None:
            check_priority(bound)
    if where.key is not None and not isinstance(where.key, str):
        raise BadRequest(f"key of a ReplayFilter is text, not {where.key!r}")
    pairs = list(where.headers.items()) if isinstance(where.headers, Mapping) else [(None, None)]
    if any(not isinstance(text, str) for pair in pairs for text in pair):
        raise BadRequest(f"headers of a ReplayFilter are text by name, not {where.headers!r}")


def check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not NAME.match(name):
        raise BadName(what, str(name))


def _check_offset(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise BadRequest(f"{name} is an int from 0 to 2^62, not {value!r}")


def _partitions(partitions: Any) -> list[int] | None:
    if partitions is None:
        return None
    if isinstance(partitions, str | bytes) or not isinstance(partitions, Sequence):
        raise BadRequest(f"partitions is a list of numbers, not {partitions!r}")
    for partition in partitions:
        _check_offset("a partition", partition)
    if not partitions:
        raise BadRequest("partitions is empty: leave it away for all of them")
    return sorted(set(partitions))
