"""Compute the instants at which a cron expression fires in a time zone. Knows neither schedules nor past firings.

cronsim parses the expression and decides which days match (`L`, `#`, day of month *or* of week, as in Debian's cron).
The step from local time to instants is done here, because cronsim's own iteration misses firings where clocks change by
half an hour (Australia/Lord_Howe). The rules are those of Debian's cron:

* A *time of day* (neither the minute nor the hour field begins with `*`) fires once for each local occurrence. One
  that the clock skips fires at the instant of the change (several of them together: once); one that occurs twice fires
  the first time.
* Anything else is an *interval* and follows elapsed time: it fires at each instant whose local time matches, so not
  at all in an hour that is skipped, and both times in an hour that occurs twice.

Instants are whole seconds since the Unix epoch here; the rest of the package counts milliseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from heapline.contract.errors import BadRequest
from heapline.contract.message import EPOCH

MACROS = {
    "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@hourly": "0 * * * *",
}  # fmt: skip
FIELDS = ("minute", "hour", "day-of-month", "month", "day-of-week")
CRON_CHARS_MAX = 256
#: The longest pause of any cron expression that fires is shorter: 29 February on a given weekday may take 40 years.
YEARS_MAX = 50
DAY = 86400
_EPOCH_DAY = EPOCH.toordinal()
_EXAMPLE = 'use five fields such as "30 3 * * 1-5": minute, hour, day of month, month, day of week'
#: Zones that differ between machines, or count leap seconds.
_UNFIT_ZONES = ("right/", "posix/", "localtime", "posixrules", "Factory")


class CronTimes:
    """The firings of one expression in one zone."""

    def __init__(self, cron: str, tz: str) -> None:
        expression = MACROS.get(cron.strip().lower(), cron)
        self._zone = _zone(tz)
        self._sim = _parse(expression, cron)
        fields = expression.split()
        self.is_time_of_day = not fields[0].startswith("*") and not fields[1].startswith("*")
        self._minutes = sorted(hour * 60 + minute for hour in self._sim.hours for minute in self._sim.minutes)

    def next(self, after: int) -> int | None:
        """Return the first firing later than `after`, or None if there is none within fifty years."""
        return self._next_time_of_day(after) if self.is_time_of_day else self._next_of_interval(after)

    def _next_time_of_day(self, after: int) -> int | None:
        # A later local time is never an earlier instant, so the first match is the result. Some before it may have
        # fired already: in an hour's second occurrence, or together at the end of a skipped one.
        return next((at for at in map(self._instant, self._local(after + self._offset(after))) if at > after), None)

    def _next_of_interval(self, after: int) -> int | None:
        start, begin = after, after + self._offset(after)
        while True:
            # While the offset does not change, local time advances like elapsed time.
            offset = self._offset(start)
            local = next(self._local(begin), None)
            if local is None:
                return None
            change = self._first_change(start, local - offset)
            if change is None:
                return local - offset
            start, begin = change, change + self._offset(change) - 1  # the instant of the change itself may match

    def _local(self, after: int) -> Iterator[int]:
        """Yield the matching local times later than a local time, as seconds since a local 1970."""
        day, second = divmod(after, DAY)
        today = date.fromordinal(_EPOCH_DAY + day)
        from_minute = bisect_right(self._minutes, second // 60)
        year_end = min(today.year + YEARS_MAX, date.max.year - 1)
        while today.year <= year_end:
            if today.month not in self._sim.months:
                today = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
            else:
                if self._sim.match_day(today):
                    midnight = (today.toordinal() - _EPOCH_DAY) * DAY
                    yield from (midnight + minute * 60 for minute in self._minutes[from_minute:])
                today += timedelta(days=1)
            from_minute = 0

    # -- the zone --------------------------------------------------------------------------------------------------

    def _offset(self, at: int) -> int:
        """Return the seconds by which local time is ahead of UTC at an instant."""
        return _seconds_ahead((EPOCH + timedelta(seconds=at)).astimezone(self._zone))

    def _instant(self, local: int) -> int:
        """Return the first instant of a local time, or the instant of the clock change that skips it."""
        moment = (EPOCH + timedelta(seconds=local)).replace(tzinfo=self._zone)
        before = _seconds_ahead(moment)
        if self._offset(local - before) == before:
            return local - before
        return self._change(local - _seconds_ahead(moment.replace(fold=1)), local - before)

    def _first_change(self, start: int, end: int) -> int | None:
        """Return the first instant in (start, end] at which the offset differs from just before."""
        offset = self._offset(start)
        while start < end:
            look = min(start + DAY, end)
            if self._offset(look) != offset:
                return self._change(start, look)
            start = look
        return None

    def _change(self, low: int, high: int) -> int:
        offset = self._offset(low)
        while high - low > 1:
            middle = (low + high) // 2
            if self._offset(middle) == offset:
                low = middle
            else:
                high = middle
        return high


@lru_cache(maxsize=4096)
def cron_times(cron: str, tz: str) -> CronTimes:
    """Return the firings of an expression. Cached, because many schedules have few expressions."""
    return CronTimes(cron, tz)


def _seconds_ahead(moment: datetime) -> int:
    offset = moment.utcoffset()
    assert offset is not None
    return round(offset.total_seconds())


def _zone(tz: str) -> ZoneInfo:
    try:
        if tz.startswith(_UNFIT_ZONES):
            raise ValueError
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError):  # not found; not a name; a directory of names
        pass
    known = available_timezones()
    if not known:
        raise BadRequest(f"tz={tz!r}: this machine has no time zones: install the package tzdata, or use tz='UTC'")
    wanted = tz.lower().replace(" ", "_")
    near = sorted(name for name in known if name.lower() == wanted or name.lower().endswith("/" + wanted))
    hint = f"did you mean {near[0]!r}?" if near else "use a name such as 'Europe/Berlin' or 'UTC'"
    raise BadRequest(f"tz={tz[:64]!r} is not a time zone that is known here: {hint}")


def _parse(expression: str, cron: str) -> CronSim:
    if len(cron) > CRON_CHARS_MAX:
        raise BadRequest(f"a cron expression is at most {CRON_CHARS_MAX} characters long: make several schedules")
    if expression.startswith("@"):
        raise BadRequest(f"cron={cron!r} is not known: {_EXAMPLE}, or one of {', '.join(MACROS)}")
    fields = expression.split()
    if len(fields) != 5:
        seconds = "; for less than a minute give every=…" if len(fields) == 6 else ""
        raise BadRequest(f"cron={cron!r} has {len(fields)} fields: {_EXAMPLE}{seconds}")
    sim = _read(fields)
    if isinstance(sim, CronSim):
        return sim
    alone = [*fields[:3], "*", fields[4]], ["0", "0", "1", *fields[3:]]
    if all(isinstance(_read(part), CronSim) for part in alone):
        raise never(cron)  # each field is valid, but none of the months has that day
    wrong = next((i for i, name in enumerate(FIELDS) if name in sim), 0)
    raise BadRequest(f"cron={cron!r}: its {FIELDS[wrong]} field {fields[wrong]!r} cannot be read: {_EXAMPLE}")


def never(cron: str) -> BadRequest:
    return BadRequest(f"cron={cron!r} never fires: no date matches its day and month; check them")


def _read(fields: list[str]) -> CronSim | str:
    try:
        return CronSim(" ".join(fields), datetime(2000, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        return str(error)
    except (ValueError, AssertionError, TypeError):  # forms that the parser does not handle
        return ""
