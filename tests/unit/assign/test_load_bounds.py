"""Load bounds, with giants set apart and with zero weights."""

from __future__ import annotations

import numpy as np
import pytest

from heapline.assign.bounded_hash import bounds_of, without_zeros


def bounds(weights: list[float], workers: int) -> tuple[float, float, float, int]:
    found = bounds_of(np.array(weights, dtype=np.float64), workers, 1.15)
    return found.share, found.low, found.high, len(found.giants)


def test_bounds_surround_the_share() -> None:
    assert bounds([30, 20, 20, 20, 10] * 20, 10) == (200, pytest.approx(170), pytest.approx(230), 0)


def test_giants_are_set_apart_until_none_is_left() -> None:
    """100 exceeds the bound of all partitions; 20 exceeds only the bound of the rest."""
    share, _, high, giants = bounds([100, 20, 3, 3, 3, 3], 4)
    assert (share, giants) == (6, 2)
    assert high == pytest.approx(6.9)


def test_weight_just_within_the_bound_is_not_a_giant() -> None:
    assert bounds([115, 95, 90], 3)[3] == 0
    assert bounds([116, 94, 90], 3)[3] == 1


def test_giant_of_any_size_leaves_the_share_of_the_others_exact() -> None:
    assert bounds([2.0**63, *[1] * 900], 10)[0] == 100


def test_last_worker_takes_the_rest_whatever_its_weight() -> None:
    assert bounds([100, 1], 1) == (101, pytest.approx(85.85), pytest.approx(116.15), 0)


def test_equal_weights_may_fill_up_to_the_next_whole_number() -> None:
    assert bounds([5] * 15, 10)[:3] == (7.5, 5, 10)
    assert bounds([1] * 20, 10)[:3] == (2, pytest.approx(1.7), pytest.approx(2.3))


def test_no_partitions_have_zero_bounds() -> None:
    assert bounds([], 3) == (0, 0, 0, 0)


def test_zero_weights_count_at_most_a_thousandth_of_the_others() -> None:
    counted = without_zeros(np.array([0, 0, 4, 8], dtype=np.float64))
    assert counted[2:].tolist() == [4, 8]
    assert 0 < counted[:2].sum() <= 12 / 1000
    assert without_zeros(np.zeros(3)).tolist() == [1, 1, 1]
    assert without_zeros(np.array([2.0, 3.0])).tolist() == [2, 3]
