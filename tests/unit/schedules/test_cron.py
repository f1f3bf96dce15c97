from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
from cronsim import CronSim, CronSimError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heapline.contract.cron import MACROS, CronTimes, cron_times
from heapline.contract.errors import BadRequest
from tests.unit.schedules.naive import DAY, NEAR_CHANGES, ZONES, Cron, clock, crons, ms


def firings(cron: str, zone: str, after: str, count: int) -> list[str]:
    """Return the next firings by that zone's clock with its offset: `day hour:minute±offset`."""
    times, at, found = CronTimes(cron, zone), ms(after, zone) // 1000, []
    for _ in range(count):
        at = times.next(at)
        found.append(clock(at * 1000, zone).isoformat(" ", "minutes")[5:])
    return found


# Berlin 2026: forward 29 March at 02:00, back 25 October at 03:00. New York: 8 March, 1 November at 02:00.
# Lord Howe: forward half an hour on 4 October at 02:00, back half an hour on 5 April at 02:00.
DST = {
    "Berlin, a time that is skipped fires when the clock is changed": (
        "30 2 * * *", "Europe/Berlin", "2026-03-28T00:00",
        ["03-28 02:30+01:00", "03-29 03:00+02:00", "03-30 02:30+02:00"],
    ),
    "Berlin, several skipped times fire once together": (
        "10,50 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29 03:00+02:00", "03-30 02:10+02:00"],
    ),
    "Berlin, a skipped time and one at the change fire once together": (
        "0 2,3 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29 03:00+02:00", "03-30 02:00+02:00"],
    ),
    "Berlin, a time that occurs twice fires the first time": (
        "30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", ["10-25 02:30+02:00", "10-26 02:30+01:00"],
    ),
    "Berlin, an interval fires in both of the doubled hours": (
        "*/30 * * * *", "Europe/Berlin", "2026-10-25T01:45",
        ["10-25 02:00+02:00", "10-25 02:30+02:00", "10-25 02:00+01:00", "10-25 02:30+01:00", "10-25 03:00+01:00"],
    ),
    "Berlin, an interval ignores the skipped hour": (
        "*/30 * * * *", "Europe/Berlin", "2026-03-29T01:15",
        ["03-29 01:30+01:00", "03-29 03:00+02:00", "03-29 03:30+02:00"],
    ),
    "Berlin, an interval within the skipped hour does not fire that day": (
        "*/20 2 * * *", "Europe/Berlin", "2026-03-28T02:30", ["03-28 02:40+01:00", "03-30 02:00+02:00"],
    ),
    "Berlin, times around the changes keep to the clock": (
        "0 12 * * *", "Europe/Berlin", "2026-03-28T00:00", ["03-28 12:00+01:00", "03-29 12:00+02:00"],
    ),
    "New York, skipped": (
        "30 2 * * *", "America/New_York", "2026-03-07T12:00", ["03-08 03:00-04:00", "03-09 02:30-04:00"],
    ),
    "New York, twice": (
        "15 1 * * *", "America/New_York", "2026-10-31T12:00", ["11-01 01:15-04:00", "11-02 01:15-05:00"],
    ),
    "New York, hourly through the doubled hour": (
        "0 * * * *", "America/New_York", "2026-11-01T00:30",
        ["11-01 01:00-04:00", "11-01 01:00-05:00", "11-01 02:00-05:00"],
    ),
    "Lord Howe, half an hour is skipped": (
        "10 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["10-04 02:30+11:00", "10-05 02:10+11:00"],
    ),
    "Lord Howe, the other half of that hour is as usual": (
        "45 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["10-04 02:45+11:00", "10-05 02:45+11:00"],
    ),
    "Lord Howe, an interval later that day misses nothing": (
        "*/20 5 * * *", "Australia/Lord_Howe", "2026-10-04T00:00",
        ["10-04 05:00+11:00", "10-04 05:20+11:00", "10-04 05:40+11:00"],
    ),
    "Lord Howe, half an hour occurs twice": (
        "45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", ["04-05 01:45+11:00", "04-06 01:45+10:30"],
    ),
    "Lord Howe, an interval through the doubled half hour": (
        "*/15 * * * *", "Australia/Lord_Howe", "2026-04-05T01:20",
        ["04-05 01:30+11:00", "04-05 01:45+11:00", "04-05 01:30+10:30", "04-05 01:45+10:30", "04-05 02:00+10:30"],
    ),
    "Kolkata never changes, and is half an hour off": (
        "0 3 * * *", "Asia/Kolkata", "2026-03-28T12:00", ["03-29 03:00+05:30", "03-30 03:00+05:30"],
    ),
    "UTC": ("30 2 * * *", "UTC", "2026-03-28T12:00", ["03-29 02:30+00:00", "03-30 02:30+00:00"]),
}  # fmt: skip


@pytest.mark.parametrize(("cron", "zone", "after", "expected"), DST.values(), ids=DST)
def test_firings_where_clocks_change(cron: str, zone: str, after: str, expected: list[str]) -> None:
    assert firings(cron, zone, after, len(expected)) == expected


CALENDAR = {
    "31st only in months that have one": ("0 0 31 * *", "2026-03-01T00:00", ["03-31", "05-31", "07-31", "08-31"]),
    "last day of the month": ("0 0 L * *", "2028-01-30T00:00", ["01-31", "02-29", "03-31", "04-30"]),
    "leap day": ("0 0 29 2 *", "2026-01-01T00:00", ["02-29", "02-29"]),
    "day of month or of week": ("0 0 13 * 5", "2026-02-01T00:00", ["02-06", "02-13", "02-20", "02-27", "03-06"]),
    "third Friday": ("0 0 * * FRI#3", "2026-01-01T00:00", ["01-16", "02-20", "03-20"]),
    "Sunday is 0 and 7": ("0 0 * * 7", "2026-11-14T00:00", ["11-15", "11-22"]),
    "weekly by its short name": ("@weekly", "2026-11-14T00:00", ["11-15", "11-22"]),
    "the year's end": ("0 0 1 * *", "2026-12-31T23:59", ["01-01", "02-01"]),
}


@pytest.mark.parametrize(("cron", "after", "expected"), CALENDAR.values(), ids=CALENDAR)
def test_firings_follow_the_calendar(cron: str, after: str, expected: list[str]) -> None:
    assert firings(cron, "UTC", after, len(expected)) == [f"{day} 00:00+00:00" for day in expected]


def test_leap_day_on_a_weekday_is_found_decades_ahead() -> None:
    at = CronTimes("0 0 * 2 MON#5", "Europe/Berlin").next(ms("2072-03-01T00:00") // 1000)
    assert clock(at * 1000, "Europe/Berlin").isoformat() == "2112-02-29T00:00:00+01:00"


def test_next_firing_is_later_than_a_firing_itself() -> None:
    times, at = CronTimes("0 3 * * *", "UTC"), ms("2026-11-16T03:00") // 1000
    assert times.next(at - 1) == at
    assert times.next(at) == at + 86400


@given(cron=crons, zone=st.sampled_from(ZONES), day=st.sampled_from(NEAR_CHANGES), minutes=st.integers(0, 1439))
@settings(max_examples=80, deadline=None)
def test_firings_equal_a_walk_by_the_minute(cron: Cron, zone: str, day: str, minutes: int) -> None:
    after = ms(day) + minutes * 60_000
    until = after + DAY
    times, at, found = CronTimes(cron.text, zone), after // 1000, []
    while (at := times.next(at)) is not None and at * 1000 <= until:
        found.append(at * 1000)
    assert found == cron.walk(zone, after, until)


READ_BY_THE_LIBRARY = ["0 0 L * *", "0 12 LW * *", "5 4 * * 5L", "0 0 * * MON#2", "0 9 1,15 * 1", "*/7 */5 */9 1-6 *"]


@given(cron=crons.map(lambda cron: cron.text) | st.sampled_from(READ_BY_THE_LIBRARY), days=st.integers(0, 3000))
@example("0 0 * 2 MON#5", 0)
@settings(max_examples=60, deadline=None)
def test_firings_in_utc_equal_those_of_the_library(cron: str, days: int) -> None:
    start = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=days)
    try:
        expected = [int(at.timestamp()) for at in islice(CronSim(cron, start), 4)]
    except CronSimError:  # a day that none of the months has: both refuse it
        with pytest.raises(BadRequest, match="never fires"):
            CronTimes(cron, "UTC")
        return
    times, at, found = CronTimes(cron, "UTC"), int(start.timestamp()), []
    while len(found) < len(expected):
        at = times.next(at)
        found.append(at)
    assert found == expected


REFUSED = {
    "61 * * * *": "minute field '61'",
    "* 24 * * *": "hour field '24'",
    "* * 0 * *": "day-of-month field '0'",
    "* * * 13 *": "month field '13'",
    "* * * * 8": "day-of-week field '8'",
    "* * * * MONDAY": "day-of-week field 'MONDAY'",
    "*/0 * * * *": "minute field",
    "5-1 * * * *": "minute field",
    "": "0 fields",
    "0 3 * *": "4 fields",
    "0 0 3 * * *": "6 fields.*every=",
    "@reboot": "@daily",
    "0 0 30 2 *": "never fires",
    "0 0 31 4,6,9,11 *": "never fires",
    "²L * * * *": "minute field",
    "9" * 300: "at most 256",
}


@pytest.mark.parametrize(("cron", "match"), REFUSED.items())
def test_bad_expression_is_refused_and_its_field_named(cron: str, match: str) -> None:
    with pytest.raises(BadRequest, match=match):
        CronTimes(cron, "UTC")


@given(st.text("0123456789*/,-LW#@ MONJAN¹", max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_text_is_accepted_or_rejected(cron: str) -> None:
    with suppress(BadRequest):
        CronTimes(cron, "UTC").next(0)


@pytest.mark.parametrize(
    "zone", ["", "Mars/Olympus", "../etc/passwd", "/etc/localtime", "Europe", "localtime", "right/UTC"]
)
def test_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(BadRequest, match="is not a time zone"):
        CronTimes("* * * * *", zone)


def test_misspelled_zone_gets_a_suggestion() -> None:
    with pytest.raises(BadRequest, match="did you mean 'Europe/Berlin'"):
        CronTimes("* * * * *", "berlin")


def test_missing_time_zones_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.contract.cron.available_timezones", set)
    with pytest.raises(BadRequest, match="install the package tzdata"):
        CronTimes("* * * * *", "Mars/Olympus")


def test_cron_aliases_equal_their_expressions() -> None:
    at = ms("2026-11-16T07:30") // 1000
    for name, cron in MACROS.items():
        assert CronTimes(name, "UTC").next(at) == CronTimes(cron, "UTC").next(at)


def test_expression_is_read_once() -> None:
    assert cron_times("0 3 * * *", "UTC") is cron_times("0 3 * * *", "UTC")
