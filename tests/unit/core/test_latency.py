"""Latency histograms: the right bucket, the right sum, and sums of several."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heapline.core.latency import BOUNDS_MS, Latency, Tally

SECONDS = st.lists(st.floats(0, 100, allow_nan=False), max_size=50)


def tally(values: list[float]) -> Tally:
    latency = Latency()
    for value in values:
        latency.add(value)
    return latency.tally()


@given(SECONDS)
def test_cumulated_counts_are_those_at_or_below_each_bound(values: list[float]) -> None:
    reported = tally(values)
    for i, bound in enumerate(BOUNDS_MS):
        assert sum(reported.counts[: i + 1]) == sum(value * 1000 <= bound for value in values)
    assert sum(reported.counts) == len(values)
    assert abs(reported.sum_ms - sum(value * 1000 for value in values)) < 1e-3


@given(SECONDS)
def test_observations_of_a_turn_count_like_single_ones(values: list[float]) -> None:
    latency = Latency()
    latency.add(*values)
    assert latency.tally().counts == tally(values).counts
    assert abs(latency.tally().sum_ms - tally(values).sum_ms) < 1e-3


@given(SECONDS, SECONDS)
def test_tallies_add_up(some: list[float], others: list[float]) -> None:
    whole, parts = tally(some + others), tally(some).plus(tally(others))
    assert parts.counts == whole.counts
    assert abs(parts.sum_ms - whole.sum_ms) < 1e-3


def test_tally_does_not_change_with_later_observations() -> None:
    latency = Latency()
    before = latency.tally()
    latency.add(0.001)
    assert sum(before.counts) == 0
