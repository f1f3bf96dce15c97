"""Decide what to do with a message whose handler failed: retry it, and when, or make it a dead letter.

Depends only on the exception and the task's rules. The rule for the most specific class of the exception decides;
`bury_on` takes precedence over `retry_on` for the same class. Other exceptions are retried after the topic's backoff.
The broker counts the tries, up to the message's `max_retries`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from heapline.contract.config import Backoff

REASON_CHARACTERS = 500
Delay = Backoff | float | None  # None: the topic's backoff


class Retry(Exception):
    """Raise in a handler to retry the message later. Counts as an attempt.

    >>> raise Retry("the shop is closed", delay=3600)
    Traceback (most recent call last):
    heapline.client.tasks.outcomes.Retry: the shop is closed
    """

    def __init__(self, reason: str = "the handler asked for a retry", *, delay: Delay = None) -> None:
        check_delay("Retry(delay=…)", delay)
        self.delay = delay
        super().__init__(reason)


class Bury(Exception):
    """Raise in a handler to make the message a dead letter with this reason, without further tries."""

    def __init__(self, reason: str = "the handler buried it") -> None:
        super().__init__(reason)


class Outcome(NamedTuple):
    act: Literal["ack", "nack", "bury", "release", "leave"]  # leave: the lease expires
    reason: str | None = None
    backoff: float | None = None  # seconds; None: the topic's


ACK = Outcome("ack")
LEAVE = Outcome("leave")


class Rules:
    """A task's `retry_on` and `bury_on`."""

    def __init__(
        self,
        retry_on: Mapping[type[BaseException], Delay] | Iterable[type[BaseException]] = (),
        bury_on: Iterable[type[BaseException]] | type[BaseException] = (),
    ) -> None:
        given = retry_on if isinstance(retry_on, Mapping) else dict.fromkeys(_classes("retry_on", retry_on))
        self._retry: dict[type, Delay] = dict(given)
        self._bury = set(_classes("bury_on", bury_on))
        _classes("retry_on", self._retry)
        for kind, delay in self._retry.items():
            check_delay(f"retry_on[{kind.__name__}]", delay)

    def expects(self, error: BaseException) -> bool:
        """Whether the task decides about this error, by a rule or by raising Bury or Retry."""
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
        """Return the error of an exception group that decides: Bury, then Retry, then one that a rule names."""
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
    """Return the type and text of an error on one line, of limited length."""
    text = text_of(error)
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__


def text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a user's class
        return "(its text cannot be shown)"
    text = " ".join(text.split()).encode("utf-8", "replace").decode()
    return text if len(text) <= REASON_CHARACTERS else text[: REASON_CHARACTERS - 1] + "…"


def check_delay(where: str, delay: Any) -> None:
    if isinstance(delay, Backoff):
        delay.validate()
    elif delay is not None:
        is_number = isinstance(delay, int | float) and not isinstance(delay, bool)
        if not is_number or not (math.isfinite(delay) and delay >= 0):
            allowed = "seconds from 0, a heapline.Backoff, or None for the topic's"
            raise ValueError(f"{where} must be {allowed}, got {delay!r}")


def _seconds(delay: Delay, attempts: int, jitter_unit: float) -> float | None:
    if not isinstance(delay, Backoff):
        return delay
    from heapline.core.retry import backoff_ms  # loads numpy, which a worker without such a rule does not need

    return backoff_ms(delay, attempts, jitter_unit) / 1000


def _classes(where: str, given: Any) -> list[type[BaseException]]:
    if isinstance(given, type):
        given = (given,)
    found = list(given) if isinstance(given, Iterable) else [given]
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"{where} must name exception classes, got {kind!r}")
    return found
