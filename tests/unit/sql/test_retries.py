"""The outcome of leased messages that were not acked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from heapline.contract.config import Backoff, TopicConfig
from heapline.sql.retries import Held, Outcomes, bury, release, retry

NOW = 1_000_000
CONFIG = TopicConfig(max_retries_default=2, backoff=Backoff(base=1.0, factor=2.0, max=600.0, jitter=0.0))


def draw(count: int) -> npt.NDArray[np.float64]:
    return np.full(count, 0.5)


def held(id: int = 1, attempts: int = 1, max_retries: int | None = None, expires: int | None = None) -> Held:
    return Held(id, attempts, max_retries, expires)


def test_failed_message_waits_for_its_backoff() -> None:
    outcomes = retry([held(1, 1), held(2, 2)], CONFIG, NOW, None, draw)
    assert outcomes == Outcomes([], [1, 2], [NOW + 1000, NOW + 2000], [], [])


def test_given_backoff_replaces_that_of_the_topic() -> None:
    assert retry([held()], CONFIG, NOW, 0, draw) == Outcomes([1], [], [], [], [])
    assert retry([held()], CONFIG, NOW, 70, draw) == Outcomes([], [1], [NOW + 70], [], [])


@pytest.mark.parametrize(
    ("attempts", "limit", "dies"), [(2, None, False), (3, None, True), (1, 0, True), (3, 9, False)]
)
def test_message_without_retries_left_dies(attempts: int, limit: int | None, dies: bool) -> None:
    assert (retry([held(1, attempts, limit)], CONFIG, NOW, 0, draw).dead == [1]) is dies


def test_message_that_expired_under_its_lease_neither_returns_nor_dies() -> None:
    rows = [held(1, 9, expires=NOW), held(2, 1, expires=NOW + 1)]
    assert retry(rows, CONFIG, NOW, 0, draw) == Outcomes([2], [], [], [], [1])
    assert release(rows, NOW) == Outcomes([2], [], [], [], [1])


def test_buried_message_is_a_dead_letter_even_if_it_expired() -> None:
    assert bury([held(1, expires=NOW - 1)]) == Outcomes([], [], [], [1], [])
