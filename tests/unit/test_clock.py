"""Steady time follows boot time, continues from the journal's last time and never falls; wall jumps are counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heapline.clock import JUMP_MS, SteadyClock, SystemClock
from heapline.testing import FakeClock


def test_system_clock_returns_wall_and_boot_time_in_milliseconds() -> None:
    clock = SystemClock()
    assert clock.wall_ms() > 1_700_000_000_000
    first = clock.boot_ms()
    assert 0 < first <= clock.boot_ms()


def test_new_steady_time_equals_wall_time_and_both_advance_alike() -> None:
    clock = FakeClock()
    steady = SteadyClock(clock)
    assert steady.now() == (clock.wall_ms(), clock.wall_ms())
    clock.advance(12.345)
    assert steady.now() == (clock.wall_ms(), clock.wall_ms())
    assert steady.jumps == 0


def test_steady_time_does_not_follow_a_wall_clock_jump() -> None:
    clock = FakeClock()
    steady = SteadyClock(clock)
    before = steady.now().steady
    for jump in (3600, -7200):
        clock.jump_wall(jump)
        clock.advance(1)
    now = steady.now()
    assert (now.steady - before, now.wall) == (2000, clock.wall_ms())


def test_jumps_are_counted_and_measured_and_drift_is_not() -> None:
    clock = FakeClock()
    steady = SteadyClock(clock)
    clock.jump_wall(JUMP_MS / 1000 / 2)
    steady.now()
    assert steady.jumps == 0
    clock.jump_wall(60)
    steady.now()
    steady.now()
    assert (steady.jumps, 59_000 < steady.last_jump_ms < 61_000) == (1, True)
    clock.jump_wall(-600)
    steady.now()
    assert (steady.jumps, steady.last_jump_ms) == (2, -600_000)


def test_time_never_starts_before_the_journals_last() -> None:
    clock = FakeClock()
    ahead = clock.wall_ms() + 1_000_000
    steady = SteadyClock(clock, ahead, clock.wall_ms())
    assert steady.now().steady == ahead
    clock.advance(5)
    assert steady.now().steady == ahead + 5000, "it stays ahead but does not stop"


def test_steady_time_passes_while_closed() -> None:
    clock = FakeClock()
    time, wall = clock.wall_ms() + 50_000, clock.wall_ms()
    clock.advance(3600)
    clock.reboot()
    assert SteadyClock(clock, time, wall).now().steady == time + 3_600_000


@given(
    st.lists(st.tuples(st.sampled_from(["advance", "jump", "look", "restart", "reboot"]), st.integers(-(10**7), 10**7)))
)
def test_steady_time_never_decreases(steps: list[tuple[str, int]]) -> None:
    clock = FakeClock()
    steady = SteadyClock(clock)
    last = steady.now()
    for what, amount in steps:
        if what == "advance":
            clock.advance(abs(amount) / 1000)
        elif what == "jump":
            clock.jump_wall(amount / 1000)
        elif what in ("restart", "reboot"):
            if what == "reboot":
                clock.reboot()
            steady = SteadyClock(clock, last.steady, last.wall)
        now = steady.now()
        assert now.steady >= last.steady
        last = now
