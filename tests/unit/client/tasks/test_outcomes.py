"""The outcome of a message whose handler failed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import heapline
from heapline.client.tasks.outcomes import Outcome, Rules, reason_of


class Oddity(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_exception_without_a_rule_waits_for_the_topic_backoff() -> None:
    assert Rules().decide(KeyError("x"), 1, 0.5) == Outcome("nack", "KeyError: 'x'", None)


def test_most_specific_class_decides() -> None:
    rules = Rules(retry_on={OSError: 1.0, ConnectionError: 7.0}, bury_on=(FileNotFoundError, Exception))
    assert rules.decide(ConnectionResetError("x"), 1, 0.5) == Outcome("nack", "ConnectionResetError: x", 7.0)
    assert rules.decide(PermissionError("x"), 1, 0.5) == Outcome("nack", "PermissionError: x", 1.0)
    assert rules.decide(FileNotFoundError("x"), 1, 0.5).act == "bury"
    assert rules.decide(KeyError("x"), 1, 0.5).act == "bury"


def test_bury_takes_precedence_over_retry_for_the_same_class() -> None:
    assert Rules(retry_on={ValueError: 1.0}, bury_on=ValueError).decide(ValueError(), 1, 0.5).act == "bury"


def test_classes_without_a_delay_are_retried_with_the_topic_backoff() -> None:
    rules = Rules(retry_on=(ValueError,), bury_on=(Exception,))
    assert rules.decide(ValueError("x"), 1, 0.5) == Outcome("nack", "ValueError: x", None)


@pytest.mark.parametrize(("attempts", "seconds"), [(1, 5.0), (2, 10.0), (3, 20.0), (9, 600.0)])
def test_backoff_grows_with_the_attempts(attempts: int, seconds: float) -> None:
    rules = Rules(retry_on={ValueError: heapline.Backoff(base=5, jitter=0)})
    assert rules.decide(ValueError("x"), attempts, 0.5).backoff == seconds


def test_retry_and_bury_override_the_rules() -> None:
    rules = Rules(retry_on={Exception: 99.0}, bury_on=())
    assert rules.decide(heapline.Retry(delay=3), 1, 0.5) == Outcome("nack", "the handler asked for a retry", 3)
    assert rules.decide(heapline.Retry("closed"), 1, 0.5) == Outcome("nack", "closed", None)
    slow = heapline.Retry("closed", delay=heapline.Backoff(base=8, jitter=0))
    assert rules.decide(slow, 2, 0.5).backoff == 16
    assert rules.decide(heapline.Bury(), 1, 0.5) == Outcome("bury", "the handler buried it")


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [
        ([OSError("a"), heapline.Retry("later", delay=3), heapline.Bury("never")], Outcome("bury", "never")),
        ([OSError("a"), heapline.Retry("later", delay=3)], Outcome("nack", "later", 3)),
        ([KeyError("k"), OSError("a")], Outcome("nack", "OSError: a", 9.0)),
        ([ExceptionGroup("inner", [ValueError("b")]), KeyError("k")], Outcome("bury", "ValueError: b")),
        ([KeyError("k")], Outcome("nack", "KeyError: 'k'")),
        ([KeyError("k"), KeyError("l")], Outcome("nack", "ExceptionGroup: outer (2 sub-exceptions)")),
    ],
)
def test_most_decisive_exception_of_a_group_decides(errors: list[Exception], outcome: Outcome) -> None:
    rules = Rules(retry_on={OSError: 9.0}, bury_on=(ValueError,))
    group = ExceptionGroup("outer", errors)
    assert rules.decide(group, 1, 0.5) == outcome
    assert rules.expects(group) == (not all(isinstance(error, KeyError) for error in errors))


@given(st.text(st.characters(), max_size=2000))
def test_reason_is_one_bounded_line_that_any_broker_accepts(text: str) -> None:
    reason = reason_of(ValueError(text))
    assert len(reason) < 600
    assert len(reason.splitlines()) == 1
    reason.encode()


def test_exception_without_a_text_still_has_a_reason() -> None:
    assert reason_of(Oddity()) == "Oddity: (its text cannot be shown)"
    assert reason_of(ValueError()) == "ValueError"


@pytest.mark.parametrize("delay", [-1, float("inf"), float("nan"), "5", True])
def test_bad_delay_is_refused(delay: Any) -> None:
    with pytest.raises(ValueError, match=r"retry_on\[OSError\] must be seconds from 0, a heapline.Backoff, or None"):
        Rules(retry_on={OSError: delay})
    with pytest.raises(ValueError, match=r"Retry\(delay=…\) must be seconds from 0"):
        heapline.Retry(delay=delay)


@pytest.mark.parametrize("classes", [("ValueError",), (1,), (int,), 5])
def test_rules_accept_only_exception_classes(classes: Any) -> None:
    with pytest.raises(TypeError, match="bury_on must name exception classes, got "):
        Rules(bury_on=classes)
    with pytest.raises(TypeError, match="retry_on must name exception classes, got "):
        Rules(retry_on=classes)
