"""What becomes of a message whose handler ended badly: another try, and when, or the dead letters.

Pure: it looks at the exception and at the task's rules. The most specific class of an exception that any rule names
decides; `bury_on` goes before `retry_on` for the same class. What no rule names is tried again after the topic's own
back-off. How many tries there are at all is the message's `max_retries`, which the broker counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from heapline.config import Backoff
from heapline.core.retry import backoff_ms

REASON_CHARACTERS = 500
Delay = Backoff | float | None  # None: the topic's own back-off


class Retry(Exception):
    """Raise it in a handler: this did not work, try again. It counts as an attempt.

    >>> raise Retry("the shop is closed", delay=3600)
    Traceback (most recent call last):
    heapline.client.tasks.outcomes.Retry: the shop is closed
    """

    def __init__(self, reason: str = "the handler asked for another try", *, delay: Delay = None) -> None:
        check_delay("Retry(delay=…)", delay)
        self.delay = delay
        super().__init__(reason)


class Bury(Exception):
    """Raise it in a handler: no further try can help. The message goes to the dead letters with this reason."""

    def __init__(self, reason: str = "the handler buried it") -> None:
        super().__init__(reason)


class Outcome(NamedTuple):
    act: Literal["ack", "nack", "bury", "release", "leave"]  # leave: the lease is let go and runs out by itself
    reason: str | None = None
    backoff: float | None = None  # seconds; None: the topic's own


ACK = Outcome("ack")
LEAVE = Outcome("leave")


class Rules:
    """A task's `retry_on` and `bury_on`."""

    def __init__(
        self, retry_on: Mapping[type[BaseException], Delay] | Iterable[type[BaseException]] = (),
        bury_on: Iterable[type[BaseException]] | type[BaseException] = (),
    ) -> None:  # fmt: skip
        given = retry_on if isinstance(retry_on, Mapping) else dict.fromkeys(_classes("retry_on", retry_on))
        self._retry: dict[type, Delay] = dict(given)
        self._bury = set(_classes("bury_on", bury_on))
        _classes("retry_on", self._retry)
        for kind, delay in self._retry.items():
            check_delay(f"retry_on[{kind.__name__}]", delay)

    def expects(self, error: BaseException) -> bool:
        """Whether the task says what to do about it, in its rules or by what it raises."""
        error = self._telling(error)
        return self._names(error)

    def _names(self, error: BaseException) -> bool:
        return isinstance(error, Bury | Retry) or any(
            kind in self._bury or kind in self._retry for kind in type(error).__mro__
        )

    def decide(self, error: BaseException, attempts: int, jitter_unit: float) -> Outcome:
        """`attempts` is the number of the delivery that failed; `jitter_unit` is drawn from [0, 1)."""
        error = self._telling(error)
        if isinstance(error, Bury):
            return Outcome("bury", text_of(error))
        if isinstance(error, Retry):
            return Outcome("nack", text_of(error), _seconds(error.delay, attempts, jitter_unit))
        for kind in type(error).__mro__:
            if kind in self._bury:
                return Outcome("bury", reason_of(error))
            if kind in self._retry:
                return Outcome("nack", reason_of(error), _seconds(self._retry[kind], attempts, jitter_unit))
        return Outcome("nack", reason_of(error))

    def _telling(self, error: BaseException) -> BaseException:
        """Of a group, as a TaskGroup raises it, the one that decides: Bury, then Retry, then what a rule names."""
        if not isinstance(error, BaseExceptionGroup):
            return error
        leaves = list(_leaves(error))
        for kind in (Bury, Retry):
            for leaf in leaves:
                if isinstance(leaf, kind):
                    return leaf
        return next((leaf for leaf in leaves if self._names(leaf)), leaves[0] if len(leaves) == 1 else error)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def reason_of(error: BaseException) -> str:
    """Type and text, on one line, of bounded length."""
    text = text_of(error)
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__


def text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a user's class
        return "(its text cannot be told)"
    text = " ".join(text.split()).encode("utf-8", "replace").decode()
    return text if len(text) <= REASON_CHARACTERS else text[: REASON_CHARACTERS - 1] + "…"


def check_delay(where: str, delay: Any) -> None:
    if isinstance(delay, Backoff):
        delay.validate()
    elif delay is not None:
        is_number = isinstance(delay, int | float) and not isinstance(delay, bool)
        if not is_number or not (math.isfinite(delay) and delay >= 0):
            raise ValueError(f"{where} is seconds from 0, a heapline.Backoff, or None for the topic's, not {delay!r}")


def _seconds(delay: Delay, attempts: int, jitter_unit: float) -> float | None:
    return backoff_ms(delay, attempts, jitter_unit) / 1000 if isinstance(delay, Backoff) else delay


def _classes(where: str, given: Any) -> list[type[BaseException]]:
    if isinstance(given, type):
        given = (given,)
    found = list(given) if isinstance(given, Iterable) else [given]
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"{where} names exception classes, not {kind!r}")
    return found
