"""Sentences about a message's place in line."""

from __future__ import annotations

import pytest

from heapline.core.explanation import Waiting, effective_priority, ordinal, sentence, span
from heapline.core.order import Ordering

PLAIN = Waiting(key=5, priority=5, waited_ms=720_000, attempts=0)


@pytest.mark.parametrize(
    ("waiting", "line", "above", "text"),
    [
        (PLAIN, 1, None, "Next in line: priority 5, waited 12 min."),
        (PLAIN, None, None, "Ready: priority 5, waited 12 min."),
        (
            PLAIN._replace(fairness_key="acme", turns_ahead=2), 3, None,
            "Third in line: priority 5, waited 12 min, turn of 'acme' after 2 more.",
        ),
        (
            PLAIN._replace(turns_ahead=0, attempts=2), 1, None,
            "Next in line: priority 5, waited 12 min, delivery 3, turn of messages without a fairness key now.",
        ),
        (
            PLAIN, 2, PLAIN._replace(key=4, priority=4),
            "Second in line: priority 5, waited 12 min; after the message above because its priority is worse.",
        ),
        (
            PLAIN._replace(effective=3.8), 2, PLAIN._replace(key=4, priority=9, effective=2.0),
            "Second in line: priority 5, now 3.8 by age, waited 12 min; "
            "after the message above because it has waited less.",
        ),
        (
            PLAIN._replace(key=7, turns_ahead=1), 2, PLAIN._replace(turns_ahead=0),
            "Second in line: priority 5, waited 12 min, turn of messages without a fairness key after 1 more; "
            "after the message above because its turn is later.",
        ),
    ],
)  # fmt: skip
def test_sentence(waiting: Waiting, line: int | None, above: Waiting | None, text: str) -> None:
    assert sentence(waiting, line, above) == text


def test_long_key_of_others_is_quoted_and_cut() -> None:
    text = sentence(PLAIN._replace(fairness_key="x" * 4000 + "\x1b", turns_ahead=0), 1)
    assert len(text) < 120
    assert "\x1b" not in sentence(PLAIN._replace(fairness_key="\x1b[31m", turns_ahead=0), 1)


@pytest.mark.parametrize(("mode", "expected"), [("min", 40.0), ("max", 160.0)])
def test_age_moves_the_priority_towards_the_better_end(mode: str, expected: float) -> None:
    assert effective_priority(Ordering(mode, 1.0), 100, 60_000) == expected
    assert effective_priority(Ordering(mode), 100, 60_000) is None


@pytest.mark.parametrize(("number", "text"), [(1, "Next"), (2, "Second"), (12, "12th"), (21, "21st"), (113, "113th")])
def test_ordinal(number: int, text: str) -> None:
    assert ordinal(number) == text


@pytest.mark.parametrize(("ms", "text"), [(-5, "0 ms"), (999, "999 ms"), (59_999, "59 s"), (86_400_000, "1 d")])
def test_span(ms: int, text: str) -> None:
    assert span(ms) == text
