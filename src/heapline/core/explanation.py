"""Explain a message's place in line in one sentence, from the numbers that the order follows from.

The numbers come from the heap key and the record; nothing is remembered for explanations. This module does not choose:
the caller passes the messages in the order in which the queue would hand them out.
"""

from __future__ import annotations

from typing import NamedTuple

from heapline.core.order import Ordering

_ORDINALS = ("Next", "Second", "Third", "Fourth", "Fifth", "Sixth", "Seventh", "Eighth", "Ninth", "Tenth")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_NAME_MAX = 40  # characters of a key in a sentence


class Waiting(NamedTuple):
    """A ready message, as the order sees it."""

    key: int  # in the heap
    priority: int
    waited_ms: int
    attempts: int
    fairness_key: str | None = None
    turns_ahead: int | None = None
    effective: float | None = None  # priority after aging


def effective_priority(ordering: Ordering, priority: int, waited_ms: int) -> float | None:
    """Return the priority that aging has led to, or None on a topic without aging."""
    if ordering.aging is None:
        return None
    gained = ordering.aging * waited_ms / 1000
    return priority + gained if ordering.mode == "max" else priority - gained


def sentence(waiting: Waiting, line: int | None, above: Waiting | None = None) -> str:
    """Say where a ready message is and why there. `above` is the message before it in line, if it is known."""
    place = "Ready" if line is None else "Next in line" if line == 1 else f"{ordinal(line)} in line"
    priority = f"priority {waiting.priority}"
    if waiting.effective is not None and round(waiting.effective, 1) != waiting.priority:
        priority += f", now {waiting.effective:.1f} by age"
    facts = [priority, f"waited {span(waiting.waited_ms)}"]
    if waiting.attempts:
        facts.append(f"delivery {waiting.attempts + 1}")
    if waiting.turns_ahead is not None:
        owner = "messages without a fairness key" if waiting.fairness_key is None else repr_name(waiting.fairness_key)
        facts.append(f"turn of {owner}" + (f" after {waiting.turns_ahead} more" if waiting.turns_ahead else " now"))
    behind = "" if above is None else f"; after the message above because {_why_after(waiting, above)}"
    return f"{place}: {', '.join(facts)}{behind}."


def _why_after(waiting: Waiting, above: Waiting) -> str:
    if waiting.turns_ahead is not None and waiting.priority == above.priority and waiting.key != above.key:
        return "its turn is later"
    if waiting.key == above.key:
        return "it is newer"
    if waiting.effective is not None and above.effective is not None:
        is_by_priority = (waiting.priority - above.priority) * (waiting.effective - above.effective) > 0
        return "its priority is worse" if is_by_priority else "it has waited less"
    return "its priority is worse"


def ordinal(number: int) -> str:
    """
    >>> ordinal(3), ordinal(11), ordinal(22)
    ('Third', '11th', '22nd')
    """
    if number <= len(_ORDINALS):
        return _ORDINALS[number - 1]
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def span(ms: int) -> str:
    """Return a duration in one unit.

    >>> span(42_000), span(690_000), span(9_000_000)
    ('42 s', '11 min', '2.5 h')
    """
    seconds = max(0, ms) / 1000
    for size, unit in _UNITS:
        if seconds >= size:
            value = seconds / size
            return f"{value:.1f} {unit}" if value < 10 and value % 1 >= 0.1 and size > 60 else f"{int(value)} {unit}"
    return f"{int(seconds * 1000)} ms"


def repr_name(name: str) -> str:
    """Return a name that others wrote, quoted and not too long for a sentence."""
    return repr(name if len(name) <= _NAME_MAX else name[: _NAME_MAX - 1] + "…")
