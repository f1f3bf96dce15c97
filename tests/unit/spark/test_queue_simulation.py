"""The simulated queue, compared with closed forms of queueing theory and with a naive model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest
from heapline.spark.jobs.queue_simulation import fewest, grown, load_of, quantiles, resampled, simulate

COUNT = 120_000


def poisson(rate: float, mean_service: float, seed: int = 3, priorities: int = 1):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, COUNT))
    return load_of(arrivals, rng.integers(0, priorities, COUNT), rng.exponential(mean_service, COUNT))


def erlang_c(workers: int, offered: float) -> float:
    """The chance of having to wait at all."""
    last = offered**workers / math.factorial(workers) * workers / (workers - offered)
    return last / (sum(offered**k / math.factorial(k) for k in range(workers)) + last)


def test_simulation_matches_the_mm1_queue() -> None:
    load = poisson(rate=0.7, mean_service=1.0)
    assert simulate(load, 1)[COUNT // 20 :].mean() == pytest.approx(0.7 / 0.3, rel=0.06)


@pytest.mark.parametrize(("workers", "rate"), [(2, 1.4), (4, 3.2), (16, 12.0)])
def test_simulation_matches_the_mmc_queue(workers: int, rate: float) -> None:
    waits = simulate(poisson(rate, 1.0), workers)
    assert waits.mean() == pytest.approx(erlang_c(workers, rate) / (workers - rate), rel=0.08)
    assert (waits > 0).mean() == pytest.approx(erlang_c(workers, rate), rel=0.04)


def test_simulation_matches_cobhams_formula() -> None:
    """W_p = W0 / ((1 - s_{p-1}) (1 - s_p)), where W0 is the rest of the service in progress."""
    load = poisson(rate=0.8, mean_service=1.0, priorities=2)
    waits = simulate(load, 1)
    rest = 0.8  # rho times the mean rest of an exponential service
    assert waits[load.priorities == 0].mean() == pytest.approx(rest / (1 - 0.4), rel=0.06)
    assert waits[load.priorities == 1].mean() == pytest.approx(rest / ((1 - 0.4) * (1 - 0.8)), rel=0.1)


def naive(arrivals: list[int], priorities: list[int], services: list[int], workers: int) -> list[int]:
    """Second by second."""
    starts: dict[int, int] = {}
    busy = [0] * workers
    now = 0
    while len(starts) < len(arrivals):
        for worker in range(workers):
            waiting = [
                (priorities[i], arrivals[i], i) for i in range(len(arrivals)) if i not in starts and arrivals[i] <= now
            ]
            if busy[worker] <= now and waiting:
                taken = min(waiting)[2]
                starts[taken], busy[worker] = now, now + services[taken]
        now += 1
    return [starts[i] - arrivals[i] for i in range(len(arrivals))]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(-2, 2), st.integers(1, 4)), min_size=1, max_size=10),
    st.integers(1, 4),
)
def test_simulation_equals_a_naive_one(rows: list[tuple[int, int, int]], workers: int) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    arrivals, priorities, services = (np.array(column) for column in zip(*rows, strict=True))
    load = load_of(arrivals.astype(float), priorities, services.astype(float))
    expected = naive(arrivals.tolist(), priorities.tolist(), services.tolist(), workers)
    assert simulate(load, workers).tolist() == expected


def test_simulated_runs_start_with_an_empty_queue() -> None:
    load = load_of(np.array([0.0, 1.0, 5.0, 6.0]), np.zeros(4, np.int64), np.full(4, 100.0), np.array([0, 0, 1, 1]))
    assert simulate(load, 1).tolist() == [0.0, 99.0, 0.0, 99.0]
    assert load.seconds == 2.0


def test_zero_workers_are_rejected() -> None:
    with pytest.raises(BadRequest, match="must be 1 or more"):
        simulate(poisson(1.0, 1.0), 0)


@pytest.mark.parametrize("growth", [0.5, 1.0, 1.5, 3.0])
def test_growth_keeps_the_distribution_over_time_and_priorities(growth: float) -> None:
    load = poisson(1.0, 1.0, priorities=3)
    more = grown(load, growth, np.random.default_rng(3))
    assert len(more) == pytest.approx(growth * COUNT, rel=0.02)
    assert (np.diff(more.arrivals) >= 0).all()
    assert more.arrivals.mean() == pytest.approx(load.arrivals.mean(), rel=0.02)
    assert np.bincount(more.priorities) / len(more) == pytest.approx(np.full(3, 1 / 3), rel=0.05)
    if growth > 1:
        assert len(np.unique(more.arrivals)) > len(more) - growth  # only the last one has no successor


def test_service_times_are_drawn_from_the_same_priority() -> None:
    rng = np.random.default_rng(1)
    wanted = np.array([1, 1, 2, 9] * 50)
    drawn = resampled(np.array([10.0, 11.0, 20.0]), np.array([1, 1, 2]), wanted, rng)
    assert set(drawn[wanted == 1]) == {10.0, 11.0}
    assert set(drawn[wanted == 2]) == {20.0}
    assert set(drawn[wanted == 9]) == {10.0, 11.0, 20.0}
    with pytest.raises(BadRequest, match="no message has ended"):
        resampled(np.array([]), np.array([]), wanted, rng)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 400))
def test_fewest_was_tried_and_one_less_is_insufficient(needed: int, most: int, guess: int) -> None:
    tried: dict[int, bool] = {}
    found = fewest(lambda n: tried.setdefault(n, n >= needed), most, guess)
    assert found == (needed if needed <= most else None)
    assert max(tried) <= most
    if found is not None:
        assert tried[found]
        assert found == 1 or not tried[found - 1]


def test_quantile_is_an_observed_wait() -> None:
    assert quantiles(np.arange(1.0, 101.0), (0.5, 0.95, 1.0)) == (50.0, 95.0, 100.0)
    assert quantiles(np.array([]), (0.5,)) == (0.0,)
