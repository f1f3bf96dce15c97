"""Backoff: how long a message waits before its next attempt.

The delay grows by a factor with each attempt, is capped, and is then spread by jitter so that messages that failed
together are not retried together:

    min(max, base * factor^(attempts - 1)) * (1 + jitter * (2u - 1)),  u in [0, 1)

The randomness `u` is passed in: it is drawn once, when the retry is decided, and the outcome is recorded. The caller
decides whether there is a next attempt.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from heapline.core.events import F64, I64

#: No delay is longer than this: exact as a float, and safe to add to any time in milliseconds.
DELAY_MS_MAX = (1 << 53) - 1


class Backoff(Protocol):
    """The backoff settings of a topic that this module uses; times in seconds."""

    @property
    def base(self) -> float: ...
    @property
    def factor(self) -> float: ...
    @property
    def max(self) -> float: ...
    @property
    def jitter(self) -> float: ...


def backoff_ms(backoff: Backoff, attempts: int, jitter_unit: float) -> int:
    """Return the delay after the delivery numbered `attempts` (1 is the first) has failed."""
    return int(backoffs_ms(backoff, np.array([attempts]), np.array([jitter_unit]))[0])


def backoffs_ms(backoff: Backoff, attempts: I64, jitter_units: F64) -> I64:
    """Return the delay of each row; `attempts` below 1 count as 1."""
    if backoff.base <= 0:
        return np.zeros(len(attempts), dtype=np.int64)  # zero times an overflowed power would be NaN
    with np.errstate(over="ignore"):
        grown = backoff.base * np.power(float(backoff.factor), np.maximum(attempts, 1) - 1.0)
        delay = np.minimum(grown, backoff.max) * (1.0 + backoff.jitter * (2.0 * jitter_units - 1.0))
        milliseconds = np.rint(delay * 1000.0)
    return np.clip(milliseconds, 0, DELAY_MS_MAX).astype(np.int64)
