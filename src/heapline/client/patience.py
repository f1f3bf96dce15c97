"""How long a client goes on: which failures pass by themselves, how long it pauses, when it gives up and what it says.

Knows no connection and no call by heart, and needs no gRPC.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from heapline.errors import BadRequest, Closed, DeadlineExceeded, HeaplineError, TopicReloading, UnavailableError
from heapline.logs import Log

DEADLINE = 30.0  # seconds
DEADLINE_MAX = 12 * 3600.0  # a server remembers what a client has sent for a day
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
#: Seconds that the calls made in this context may take, if somebody said so.
SECONDS: ContextVar[float | None] = ContextVar("heapline_seconds", default=None)
log = Log("heapline.client")


def pauses() -> Iterator[float]:
    """Twice as long each time, and never the same for two clients."""
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(LONGEST_PAUSE, pause * 2)


def passes_by_itself(error: BaseException) -> bool:
    """A limit that is reached is an answer, though it may pass too: whoever calls decides what to do about it."""
    return type(error) in (UnavailableError, TopicReloading) or isinstance(error, Closed)


def check_deadline(name: str, seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.001 <= seconds <= DEADLINE_MAX:
        raise BadRequest(f"{name} is a number of seconds from 0.001 to {DEADLINE_MAX:g} (12 hours), not {seconds!r}")


UNSENT = "it waited behind other calls and was never sent, so nothing was changed"
IN_DOUBT = "it was sent and its answer did not come, so it may have been carried out"


def unreached(endpoints: Sequence[str]) -> str:
    where = ", ".join(endpoints)
    return f"none of {where} could be reached, so nothing was changed; is `heapline serve` running there?"


def out_of_time(name: str, seconds: float, known: str) -> DeadlineExceeded:
    """A call is given up: what is known of it."""
    error = DeadlineExceeded(name)
    error.args = (f"{name} was given up after {seconds:g} s: {known}",)
    error.reached = known.startswith(IN_DOUBT)
    return error


def not_again(name: str, error: HeaplineError) -> UnavailableError:
    return UnavailableError(
        f"{name} was sent and its answer did not come, so it may have been carried out ({error}). It is not repeated "
        "by itself, because that would also hit what came in between: look, and call again if it is still wanted"
    )
