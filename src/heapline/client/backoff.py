"""Client retry policy: which errors are transient, the backoff between tries, and the error raised at the deadline.

Knows neither connections nor commands.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from heapline.contract.errors import (
    BadRequest,
    Closed,
    DeadlineExceeded,
    HeaplineError,
    TopicReloading,
    UnavailableError,
)
from heapline.logs import Log

DEADLINE = 30.0  # seconds
DEADLINE_MAX = 12 * 3600.0  # servers remember the sequence numbers of a client for a day
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
log = Log("heapline.client")


def pauses() -> Iterator[float]:
    """Seconds between tries: doubling, with jitter."""
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(LONGEST_PAUSE, pause * 2)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed soon. A limit that is reached is left to the caller."""
    return type(error) in (UnavailableError, TopicReloading) or isinstance(error, Closed)


def check_deadline(name: str, seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.001 <= seconds <= DEADLINE_MAX:
        raise BadRequest(f"{name} must be from 0.001 to {DEADLINE_MAX:g} seconds (12 hours), got {seconds!r}")


UNSENT = "it waited behind other calls and was not sent, so nothing changed"
IN_DOUBT = "it was sent and no response arrived, so it may have been executed"


def unreached(endpoints: Sequence[str], error: HeaplineError) -> str:
    where = ", ".join(endpoints)
    return (
        f"could not connect to {where}, so nothing changed; check that `heapline serve` is running there "
        f"(last error: {error})"
    )


def deadline_exceeded(name: str, seconds: float, known: str) -> DeadlineExceeded:
    """Return the error of an abandoned call, with what is known about its outcome."""
    error = DeadlineExceeded(name)
    shown = round(seconds, 1 if seconds >= 1 else 3)  # some of the time has passed since the deadline was set
    error.args = (f"{name} failed after {shown:g} s: {known}",)
    error.reached = known.startswith(IN_DOUBT)
    return error


def not_repeated(name: str, error: HeaplineError) -> UnavailableError:
    """Return the error of a call that must not be sent twice, and may have been executed."""
    return UnavailableError(
        f"{name} was sent and no response arrived ({error}), so it may have been executed. It is not repeated "
        "automatically, because a repeat would also affect what was added since; check, and call again if needed"
    )
