"""The rates at which holders lease messages."""

from __future__ import annotations

import pytest

from heapline.core.workers import IDLE_MS, MINUTE, WORKERS_MAX, Workers

START = 29_000_000 * MINUTE  # the start of a minute


def test_rate_is_that_of_the_last_minute() -> None:
    workers = Workers()
    for second in range(180):
        workers.took("a", 6, START + second * 1000)
    assert workers.active(START + 179_000)["a"].rate == pytest.approx(6.0, rel=0.05)
    assert workers.active(START + 210_000)["a"].rate == pytest.approx(3.0, rel=0.05)
    assert workers.active(START + 300_000)["a"].rate == 0


def test_pause_of_minutes_does_not_count_as_the_minute_before() -> None:
    workers = Workers()
    workers.took("a", 600, START)
    workers.took("a", 6, START + 5 * MINUTE)
    assert workers.active(START + 5 * MINUTE)["a"].rate == pytest.approx(0.1)


def test_idle_holder_is_forgotten_after_an_hour_and_their_number_is_bounded() -> None:
    workers = Workers()
    for n in range(WORKERS_MAX + 10):
        workers.took(f"w{n}", 1, START + n)
    assert len(workers.active(START)) == WORKERS_MAX
    assert workers.active(START + IDLE_MS + WORKERS_MAX + 10) == {}
