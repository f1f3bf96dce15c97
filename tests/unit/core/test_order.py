from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest
from heapline.core.ids import EPOCH_2024_MS
from heapline.core.order import PRIORITY_LIMIT, RATE_MAX, Ordering

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
AGED = st.integers(-PRIORITY_LIMIT, PRIORITY_LIMIT)
TIMES = st.integers(EPOCH_2024_MS - (1 << 40), EPOCH_2024_MS + (1 << 41))
RATES = st.floats(0, RATE_MAX) | st.floats(0, 1) | st.sampled_from([0.1, 1.0, 0.001, 1000.0])
MODES = st.sampled_from(["min", "max"])


@given(MODES, INT64, INT64)
def test_strict_keys_follow_the_mode_over_all_of_int64(mode: str, a: int, b: int) -> None:
    keys = Ordering(mode).keys(np.array([a, b]), np.zeros(2, np.int64))
    assert (keys[0] < keys[1]) == (a < b if mode == "min" else a > b)
    assert keys.tolist() == [Ordering(mode).key(a, 0), Ordering(mode).key(b, 0)]


@given(MODES, INT64)
def test_strict_key_yields_its_priority(mode: str, priority: int) -> None:
    ordering = Ordering(mode)
    assert ordering.priority(ordering.key(priority, 0)) == priority


def urgency(mode: str, rate: float, priority: int, at_ms: int, now_ms: int) -> Fraction:
    """Return the exact effective priority; the smaller is served first."""
    gained = Fraction(rate) * (now_ms - at_ms) / 1000
    return priority - gained if mode == "min" else -(priority + gained)


@given(MODES, RATES, AGED, AGED, TIMES, TIMES, st.integers(0, 1 << 40))
def test_aged_keys_order_as_effective_priorities_at_any_later_time(
    mode: str, rate: float, a: int, b: int, at_a: int, at_b: int, wait: int
) -> None:
    now = max(at_a, at_b) + wait
    ordering = Ordering(mode, rate)
    keys = ordering.keys(np.array([a, b]), np.array([at_a, at_b]))
    difference = (urgency(mode, rate, a, at_a, now) - urgency(mode, rate, b, at_b, now)) * 1024
    # Each key is rounded by half a unit, and the float part of the product may be off by 2^-11 more.
    if abs(difference) > 1 + Fraction(1, 512):
        assert (keys[0] < keys[1]) == (difference < 0)
        assert keys[0] != keys[1]
    assert abs(int(keys[0]) - int(keys[1])) - abs(difference) <= 1 + Fraction(1, 512)


@given(MODES, st.none() | RATES, st.lists(st.tuples(INT64, INT64 | TIMES)))
def test_batch_keys_equal_single_keys(mode: str, rate: float | None, rows: list[tuple[int, int]]) -> None:
    rows = [(p, max(at, -(1 << 62))) for p, at in rows]
    ordering = Ordering(mode, rate)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2)
    keys = ordering.keys(columns[:, 0], columns[:, 1])
    assert keys.tolist() == [ordering.key(p, at) for p, at in rows]


def test_waiting_message_overtakes_a_later_more_urgent_one() -> None:
    ordering = Ordering("min", 2.0)
    at = EPOCH_2024_MS + 1_000_000_000
    assert ordering.key(10, at) < ordering.key(0, at + 5_001)
    assert ordering.key(10, at) > ordering.key(0, at + 4_999)
    ordering = Ordering("max", 2.0)
    assert ordering.key(0, at) < ordering.key(10, at + 5_001)
    assert ordering.key(0, at) > ordering.key(10, at + 4_999)


def test_priorities_past_the_limit_saturate_when_aging() -> None:
    ordering, at = Ordering("min", 1.0), EPOCH_2024_MS
    assert ordering.key((1 << 63) - 1, at) == ordering.key(PRIORITY_LIMIT, at)
    assert ordering.key(-(1 << 63), at) == ordering.key(-PRIORITY_LIMIT, at) < ordering.key(1 - PRIORITY_LIMIT, at)


def test_outermost_aged_key_fits_63_bits() -> None:
    late = EPOCH_2024_MS + (1 << 41)
    key = Ordering("min", RATE_MAX).key(PRIORITY_LIMIT, late)
    assert key == Ordering("min", RATE_MAX).keys(np.array([PRIORITY_LIMIT]), np.array([late]))[0] < 1 << 63


def test_priority_of_an_aged_key_is_rejected() -> None:
    with pytest.raises(BadRequest):
        Ordering("min", 1.0).priority(5)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), RATE_MAX * 1.01])
def test_impossible_aging_rate_is_refused(rate: float) -> None:
    with pytest.raises(BadRequest):
        Ordering("min", rate)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(BadRequest):
        Ordering("MIN")
