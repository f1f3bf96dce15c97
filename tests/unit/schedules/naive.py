"""Firings found the slow way: minute by minute, by the local time of the zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

MINUTE = 60_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR

ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]
#: Days near which clocks change in one of these zones, and an ordinary one.
NEAR_CHANGES = ["2026-03-07", "2026-03-28", "2026-04-04", "2026-07-14", "2026-10-03", "2026-10-24", "2026-10-31"]


def ms(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def clock(at_ms: int, zone: str = "UTC") -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC).astimezone(ZoneInfo(zone))


class Field(NamedTuple):
    text: str
    values: frozenset[int]


class Cron(NamedTuple):
    minute: Field
    hour: Field
    day: Field
    month: Field
    weekday: Field

    @property
    def text(self) -> str:
        return " ".join(field.text for field in self)

    def matches(self, local: datetime) -> bool:
        day = local.day in self.day.values
        weekday = local.isoweekday() % 7 in self.weekday.values
        both = self.day.text.startswith("*") or self.weekday.text.startswith("*")
        return (
            local.minute in self.minute.values
            and local.hour in self.hour.values
            and local.month in self.month.values
            and (day and weekday if both else day or weekday)
        )

    def walk(self, zone: str, after: int, until: int) -> list[int]:
        """Return all firings in (after, until], in ms."""
        time_of_day = not self.minute.text.startswith("*") and not self.hour.text.startswith("*")
        found = []
        at = after // MINUTE * MINUTE
        before = clock(at, zone)
        while (at := at + MINUTE) <= until:
            local = clock(at, zone)
            skipped = int((local.replace(tzinfo=None) - before.replace(tzinfo=None)) / timedelta(minutes=1)) - 1
            missing = [local - timedelta(minutes=i + 1) for i in range(skipped)]
            if time_of_day:
                fires = (self.matches(local) and not local.fold) or any(map(self.matches, missing))
            else:
                fires = self.matches(local)
            if fires:
                found.append(at)
            before = local
        return found


def fields(low: int, high: int, *, star: int = 1) -> st.SearchStrategy[Field]:
    """A field's text with its values; `star` makes a plain * more likely."""
    whole = frozenset(range(low, high + 1))
    steps = st.integers(1, high).map(lambda n: Field(f"*/{n}", frozenset(range(low, high + 1, n))))
    some = st.lists(st.integers(low, high), min_size=1, max_size=4, unique=True)
    lists = some.map(lambda v: Field(",".join(map(str, v)), frozenset(v)))
    pairs = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    ranges = pairs.map(lambda p: Field(f"{p[0]}-{p[1]}", frozenset(range(p[0], p[1] + 1))))
    return st.one_of(*[st.just(Field("*", whole))] * star, steps, lists, ranges)


#: Hours in which clocks change, so that tests meet them.
night = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True).map(
    lambda hours: Field(",".join(map(str, hours)), frozenset(hours))
)
crons = st.builds(
    Cron,
    fields(0, 59),
    fields(0, 23, star=2) | night,
    fields(1, 31, star=8),
    fields(1, 12, star=8),
    fields(0, 6, star=8),
)
