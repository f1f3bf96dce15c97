from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest
from heapline.contract.schedules import Misfire, make_schedule
from heapline.core.schedules.timetable import Timetable
from tests.unit.schedules.naive import DAY, HOUR, MINUTE, NEAR_CHANGES, ZONES, Cron, crons, ms

NOW = ms("2026-11-16T12:00")
SECOND = 1000


def table(anchor: int = NOW, **fields: Any) -> Timetable:
    return Timetable(make_schedule("s", topic="t", **fields), anchor)


# --- every ------------------------------------------------------------------------------------------------------------


def test_every_fires_first_one_interval_after_its_anchor() -> None:
    assert table(every=90).next_fire(NOW) == NOW + 90 * SECOND


def test_every_keeps_its_phase_when_evaluated_late() -> None:
    hourly = table(every=3600)
    for late in (0, 1, 17 * MINUTE, HOUR - 1):
        assert hourly.next_fire(NOW + 5 * HOUR + late) == NOW + 6 * HOUR


def test_every_with_a_start_fires_at_the_start_and_keeps_step_with_it() -> None:
    starts = datetime(2026, 1, 1, 3, tzinfo=UTC)
    daily = table(every=86400, starts=starts)
    assert daily.next_fire(0) == ms("2026-01-01T03:00")
    assert daily.next_fire(NOW) == ms("2026-11-17T03:00")


def test_every_counts_elapsed_time_where_clocks_change() -> None:
    daily = table(anchor=ms("2026-03-28T12:00", "Europe/Berlin"), every=86400)
    assert daily.next_fire(ms("2026-03-28T12:00", "Europe/Berlin")) == ms("2026-03-29T13:00", "Europe/Berlin")


# --- starts and ends --------------------------------------------------------------------------------------------------


def test_nothing_fires_before_the_start_nor_at_the_end() -> None:
    starts, ends = datetime(2026, 11, 18, 3, tzinfo=UTC), datetime(2026, 11, 20, 3, tzinfo=UTC)
    nightly = table(cron="0 3 * * *", starts=starts, ends=ends)
    assert nightly.next_fire(NOW) == ms("2026-11-18T03:00")
    assert nightly.next_fire(ms("2026-11-18T03:00")) == ms("2026-11-19T03:00")
    assert nightly.next_fire(ms("2026-11-19T03:00")) is None
    assert nightly.due(NOW, NOW + 30 * DAY) == [ms("2026-11-19T03:00")]


# --- owed firings -----------------------------------------------------------------------------------------------------

#: After downtime: its minutes, seconds after the hour on return, policy, expected firings (hours ago).
AWAY = [
    (2, 30, "skip", [0]),
    (2, 30, "once", [0]),
    (2, 30, "all", [0]),
    (200, 30, "skip", [0]),
    (200, 60, "skip", [0]),
    (200, 61, "skip", []),
    (200, 61, "once", [0]),
    (200, 61, "all", [3, 2, 1, 0]),
    (60 * 24 * 9, 61, "all", [4, 3, 2, 1, 0]),
]


@pytest.mark.parametrize(("away", "late", "misfire", "expected"), AWAY)
def test_policy_decides_which_missed_firings_run(away: int, late: int, misfire: Misfire, expected: list[int]) -> None:
    hourly = table(cron="0 * * * *", misfire=misfire, makeup_max=5)
    now = NOW + late * SECOND
    owed = hourly.owed(now - away * MINUTE, now)
    assert owed.times == [NOW - hours * HOUR for hours in expected]
    assert owed.until == NOW
    assert owed.missed == (away > 2 or late > 60)


def test_firings_within_the_grace_all_fire_under_any_policy() -> None:
    for misfire in ("skip", "once", "all"):
        quick = table(every=10, misfire=misfire, grace=30)
        assert quick.due(NOW, NOW + 40 * SECOND) == [NOW + s * SECOND for s in (10, 20, 30, 40)]
        assert quick.owed(NOW, NOW + 40 * SECOND + 1).missed


def test_without_grace_every_late_firing_is_a_misfire() -> None:
    assert table(every=10, misfire="skip", grace=0).due(NOW, NOW + 10_001) == []
    assert table(every=10, misfire="skip", grace=0).due(NOW, NOW + 10_000) == [NOW + 10_000]


def test_nothing_is_owed_before_its_time_or_with_a_clock_set_back() -> None:
    hourly = table(cron="0 * * * *")
    assert hourly.owed(NOW, NOW + HOUR - 1) == ([], NOW, False)
    assert hourly.owed(NOW, NOW - 5 * HOUR) == ([], NOW, False)


def test_firing_a_century_away_is_found_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    minutely = table(cron="* * * * *", misfire="all", makeup_max=50)
    asked = 0
    real = Timetable.next_fire

    def counting(self: Timetable, after: int) -> int | None:
        nonlocal asked
        asked += 1
        return real(self, after)

    monkeypatch.setattr(Timetable, "next_fire", counting)
    assert minutely.due(NOW, NOW + 100 * 365 * DAY) == [NOW + 100 * 365 * DAY - i * MINUTE for i in range(50)][::-1]
    assert asked < 300


def naive_owed(fires: list[int], now: int, misfire: str, grace: int, makeup_max: int) -> list[int]:
    if not fires or fires[0] >= now - grace:
        return fires
    if misfire == "all":
        return fires[-makeup_max:]
    return [] if misfire == "skip" and fires[-1] < now - grace else fires[-1:]


@given(
    cron=crons, zone=st.sampled_from(ZONES), day=st.sampled_from(NEAR_CHANGES),
    misfire=st.sampled_from(["skip", "once", "all"]), grace=st.sampled_from([0, 60, 600, 3600]),
    makeup_max=st.integers(1, 7), seconds=st.integers(0, 59),
    away=st.lists(st.integers(1, 20 * 60) | st.integers(1, 3), min_size=1, max_size=5),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_missed_firings_equal_a_minute_by_minute_walk(
    cron: Cron, zone: str, day: str, misfire: Misfire, grace: int, makeup_max: int, away: list[int], seconds: int
) -> None:
    try:
        timetable = table(cron=cron.text, tz=zone, misfire=misfire, grace=grace, makeup_max=makeup_max)
    except BadRequest:  # a day that none of its months has
        return
    done = now = ms(day) + seconds * SECOND
    for minutes in away:
        now += minutes * MINUTE
        fires = cron.walk(zone, done, now)
        owed = timetable.owed(done, now)
        assert owed.times == naive_owed(fires, now, misfire, grace * SECOND, makeup_max)
        assert owed.until == (fires[-1] if fires else done)
        done = owed.until
