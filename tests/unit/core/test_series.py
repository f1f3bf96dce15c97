"""Depths and rates over time: nothing is lost between the tiers, and the memory is bounded."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from heapline.core.series import DAY, FIELDS, MAX, STEP, TIERS, Sample, Series

START = 1_900_000_200
ENQUEUED = FIELDS.index("enqueued")
READY = FIELDS.index("ready")
WAIT = FIELDS.index("oldest_wait")


def filled(
    samples: int, seed: int = 1, step: int = STEP, activity: float = 1.0
) -> tuple[Series, list[tuple[int, int]]]:
    """A series and its (time, total enqueued) by sample."""
    draw, series, total, history = random.Random(seed), Series(), 0, []
    for n in range(samples):
        total += draw.randrange(100) if draw.random() < activity else 0
        time = START + n * step
        series.add(time, Sample((total % 1000, 0, 0, 0), (total, total // 2, 0), n % 500))
        history.append((time, total))
    return series, history


@pytest.mark.parametrize("samples", [1, 2, 100, 180, 181, 187, 400, 2000, 9000, 20_000])
@pytest.mark.parametrize("activity", [1.0, 0.3])
def test_every_message_is_in_exactly_one_point(samples: int, activity: float) -> None:
    series, history = filled(samples, samples, activity=activity)
    points, steps = series.points(0)
    assert len(points) == len(steps)
    assert (np.diff(points[:, 0].astype(np.int64)) > 0).all()
    if len(points):
        first, size = int(points[0, 0]), steps[0]
        before = [total for time, total in history if time // size < first // size]
        assert points[:, ENQUEUED].sum() == history[-1][1] - (before[-1] if before else 0)
        assert int(points[-1, READY]) == history[-1][1] % 1000


def test_points_are_finer_the_newer_and_reach_back_a_day() -> None:
    series, history = filled(DAY // STEP + 1000)
    points, steps = series.points(0)
    assert steps == sorted(steps, reverse=True)
    assert set(steps) == {step for step, _ in TIERS}
    assert history[-1][0] - int(points[0, 0]) >= DAY - 600
    since = history[-1][0] - 3600
    recent, _ = series.points(since)
    assert recent[:, 0].min() > since


def test_coarser_points_keep_the_longest_wait() -> None:
    series, _ = filled(2000)
    points, steps = series.points(0)
    assert points[np.array(steps) == 600, WAIT].max() >= 400


def test_memory_of_a_series_is_bounded_and_an_idle_one_has_none() -> None:
    series, _ = filled(20_000)
    assert series.nbytes < 20_000
    assert sum(len(points) for points, _ in series.to_state()[0]) < 20_000
    idle = Series()
    for n in range(100):
        idle.add(START + n * STEP, Sample((0, 0, 0, 7), (0, 0, 0), 0))
    assert idle.nbytes == 0
    assert not idle.is_changed


def test_largest_values_and_gaps_stay_within_20_kb() -> None:
    for step in (STEP, 3 * STEP, 130, 1300):
        series = Series()
        for n in range(10_000):
            series.add(START + n * step, Sample((MAX - n % 2,) * 4, (n * MAX,) * 3, MAX))
        assert series.nbytes < 20_000
        assert len(msgspec.msgpack.encode(series.to_state())) < 20_000 - 100  # the file's head and what varies


def test_pause_adds_no_points() -> None:
    series = Series()
    for n in range(1000):
        done = min(n, 10)
        series.add(START + n * STEP, Sample((0, 0, 0, 0), (done, done, 0), 0))
    points, _ = series.points(0)
    assert len(points) == 10


def test_state_survives_and_totals_begin_again_at_zero() -> None:
    series, history = filled(3000)
    assert series.is_changed
    again = Series.from_state(series.to_state())
    assert not series.is_changed
    np.testing.assert_array_equal(again.points(0)[0], series.points(0)[0])
    again.add(history[-1][0] + STEP, Sample((5, 0, 0, 0), (5, 0, 0), 0))
    assert int(again.points(0)[0][-1, ENQUEUED]) == 5


@pytest.mark.parametrize("state", [[], [[], []], [[b"x"], [None, None]], [[b"", b"", b"xyz"], [None, None]], [1, 2]])
def test_state_of_another_form_is_refused(state: list[object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Series.from_state(state)


def test_clock_set_back_drops_the_points_after_it() -> None:
    series, history = filled(500)
    back = history[100][0]
    series.add(back, Sample((1, 0, 0, 0), (history[-1][1] + 1, 0, 0), 0))
    points, _ = series.points(0)
    assert int(points[-1, 0]) == back
    assert (np.diff(points[:, 0].astype(np.int64)) > 0).all()


def test_numbers_too_large_for_a_point_are_capped() -> None:
    series = Series()
    series.add(START, Sample((0, 0, 0, 0), (0, 0, 0), 0))
    series.add(START + STEP, Sample((1 << 40, 0, 0, 0), (1 << 40, 0, 0), 0))
    series.add(START + 2 * STEP, Sample((1, 0, 0, 0), ((1 << 40) + 5, 0, 0), 0))
    points, _ = series.points(0)
    assert points[:, READY].tolist() == [MAX, 1]
    assert points[:, ENQUEUED].tolist() == [MAX, 5]
