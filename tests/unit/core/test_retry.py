from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.core.retry import DELAY_MS_MAX, backoff_ms, backoffs_ms


@dataclass(frozen=True)
class Settings:
    base: float = 1.0
    factor: float = 2.0
    max: float = 600.0
    jitter: float = 0.2


@pytest.mark.parametrize(("attempts", "expected"), [(0, 1_000), (1, 1_000), (2, 2_000), (5, 16_000), (11, 600_000)])
def test_delay_doubles_from_base_up_to_the_cap(attempts: int, expected: int) -> None:
    assert backoff_ms(Settings(), attempts, 0.5) == expected


def test_jitter_spreads_the_delay_evenly_to_both_sides() -> None:
    assert backoff_ms(Settings(), 3, 0.0) == 3_200
    assert backoff_ms(Settings(), 3, 0.75) == 4_400
    assert backoff_ms(Settings(jitter=0.0), 3, 0.9) == 4_000


@pytest.mark.parametrize("factor", [2.0, 1e6, 1e300])
def test_255_attempts_end_at_the_cap_without_overflow(factor: float) -> None:
    assert backoff_ms(Settings(factor=factor), 255, 0.5) == 600_000


def test_no_base_means_no_delay_however_many_attempts() -> None:
    assert backoff_ms(Settings(base=0.0, factor=1e300), 255, 0.9) == 0


def test_delay_at_a_huge_cap_can_still_be_added_to_a_time() -> None:
    assert backoff_ms(Settings(factor=1e300, max=1e300), 255, 0.5) == DELAY_MS_MAX


positive = st.floats(0, 1e9)


@given(
    st.builds(Settings, base=positive, factor=st.floats(0.1, 1e9), max=positive, jitter=st.floats(0, 1)),
    st.lists(st.tuples(st.integers(1, 255), st.floats(0, 1, exclude_max=True)), max_size=5),
)
def test_every_delay_is_within_jitter_of_the_capped_growth(settings: Settings, rows: list[tuple[int, float]]) -> None:
    delays = backoffs_ms(settings, np.array([a for a, _ in rows], np.int64), np.array([u for _, u in rows]))
    assert delays.tolist() == [backoff_ms(settings, a, u) for a, u in rows]
    for delay, (attempts, _) in zip(delays.tolist(), rows, strict=True):
        plain = settings.base
        for _ in range(attempts - 1):
            plain = min(plain * settings.factor, 1e300)
        plain = min(plain, settings.max) * 1000
        slack = 1 + plain * 1e-9
        assert plain * (1 - settings.jitter) - slack <= delay <= plain * (1 + settings.jitter) + slack
