"""Decide what becomes of leased messages that were not acked. Pure: time and randomness are passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heapline.contract.config import TopicConfig
from heapline.core.retry import backoffs_ms

Draw = Callable[[int], npt.NDArray[np.float64]]


class Held(NamedTuple):
    """A lease that ends now."""

    id: int
    attempts: int
    max_retries: int | None  # None: the topic's default
    expires: int | None


class Outcomes(NamedTuple):
    """Ids by what becomes of them."""

    ready: list[int]
    delayed: list[int]
    wakes: list[int]  # of those that are delayed
    dead: list[int]
    expired: list[int]


def retry(held: Sequence[Held], config: TopicConfig, now: int, backoff_ms: int | None, draw: Draw) -> Outcomes:
    """Each message expires, becomes a dead letter, or waits for another attempt."""
    expired = [h.id for h in held if has_expired(h, now)]
    left = [h for h in held if not has_expired(h, now)]
    dead = [h.id for h in left if is_worn(h, config)]
    left = [h for h in left if not is_worn(h, config)]
    if backoff_ms is None:
        attempts = np.array([h.attempts for h in left], dtype=np.int64)
        waits = backoffs_ms(config.backoff, attempts, draw(len(left))).tolist()
    else:
        waits = [backoff_ms] * len(left)
    pairs = list(zip(left, waits, strict=True))
    return Outcomes(
        [h.id for h, wait in pairs if wait <= 0],
        [h.id for h, wait in pairs if wait > 0],
        [now + wait for _, wait in pairs if wait > 0],
        dead,
        expired,
    )


def release(held: Sequence[Held], now: int) -> Outcomes:
    """Each message is ready again, unless it expired while it was leased."""
    expired = [h.id for h in held if has_expired(h, now)]
    return Outcomes([h.id for h in held if not has_expired(h, now)], [], [], [], expired)


def bury(held: Sequence[Held]) -> Outcomes:
    """Each message becomes a dead letter."""
    return Outcomes([], [], [], [h.id for h in held], [])


def has_expired(held: Held, now: int) -> bool:
    return held.expires is not None and held.expires <= now


def is_worn(held: Held, config: TopicConfig) -> bool:
    """Whether the message has no retries left."""
    limit = config.max_retries_default if held.max_retries is None else held.max_retries
    return held.attempts > limit
