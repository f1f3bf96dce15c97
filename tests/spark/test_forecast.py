"""The forecast from lifecycles in Spark: the input of the simulation, and its result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from heapline.contract.errors import BadRequest
from heapline.spark.jobs.forecast import forecast
from tests.spark.conftest import MARKS
from tests.spark.lifecycle_rows import SCHEMA, at, lifecycle

pytestmark = MARKS


@pytest.fixture(scope="module")
def past(spark: Any) -> Any:
    """One message every 100 ms for a minute that takes 150 ms: one and a half workers. Every fifth is urgent."""
    rows = [
        lifecycle(i, 100 * i - 50, delay=50, priority=9 * (i % 5 > 0), wait=7, service=None if i % 50 == 1 else 150)
        for i in range(600)
    ]
    return spark.createDataFrame(rows, SCHEMA).coalesce(1).persist()


def test_forecast_finds_the_fewest_workers_that_meet_the_goal(spark: Any, past: Any) -> None:
    found = forecast(spark, None, "jobs", lifecycles=past, workers=[1, 4], goal=0.05)
    assert (found.messages, found.sampled, found.floor, found.workers_needed) == (600, 1.0, 2, 2)
    assert found.service_mean_ms == pytest.approx(150)
    assert found.arrivals_per_second == pytest.approx(10, rel=0.01)
    by_workers = {pool.workers: pool for pool in found.pools}
    assert sorted(by_workers) == [1, 2, 4]  # the requested count, the answer, and one less
    assert not by_workers[1].meets_goal
    assert by_workers[4].waits[0].max == 0.0
    everyone, urgent, patient = by_workers[1].waits
    assert (everyone.messages, urgent.priority, patient.priority) == (600, 0, 9)
    assert urgent.max <= 150  # the rest of the work in progress
    assert patient.p95 > 20_000
    assert [(wait.priority, wait.p95) for wait in found.observed] == [(None, 7.0), (0, 7.0), (9, 7.0)]
    assert forecast(spark, None, "jobs", lifecycles=past, workers=[1, 4], goal=0.05) == found


def test_forecast_uses_only_the_given_period(spark: Any, past: Any) -> None:
    found = forecast(spark, None, "jobs", lifecycles=past, workers=[2], since=at(10_000), until=at(20_000))
    assert found.messages == 100
    assert found.workers_needed is None
    with pytest.raises(BadRequest, match="nothing to forecast from"):
        forecast(spark, None, "jobs", lifecycles=past, since=at(600_000))


def test_long_past_is_sampled_and_growth_needs_more_workers(spark: Any, past: Any) -> None:
    found = forecast(spark, None, "jobs", lifecycles=past, goal=0.05, growth=3.0, messages_max=900)
    assert found.sampled == pytest.approx(0.5, abs=0.02)
    assert found.messages == pytest.approx(900, rel=0.05)
    assert found.floor >= 2
    assert found.workers_needed is not None
    assert found.workers_needed > 2


def test_invalid_forecast_arguments_are_rejected_before_spark_runs() -> None:
    for wish in ({"workers": []}, {"workers": [0]}, {"growth": 0.0}, {"growth": float("nan")}, {"goal": -1.0}):
        with pytest.raises(BadRequest):
            forecast(None, None, "jobs", lifecycles=replace, **wish)  # type: ignore[arg-type]
