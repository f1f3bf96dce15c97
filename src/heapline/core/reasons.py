"""Group the reasons of dead letters: those that differ only in numbers and ids are one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import msgspec

SAMPLES = 5  # newest ids of a group
GROUPS_MAX = 10_000
REASON_MAX = 200  # characters that a group is named by
OTHERS = "(other reasons)"
_VARIABLE = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"  # UUID
    r"|\b[0-9A-HJKMNP-TV-Z]{26}\b"  # ULID
    r"|\d+"
)


class ReasonGroup(msgspec.Struct):
    reason: str
    count: int
    example: str
    first_at: int  # ms
    last_at: int
    ids: list[int]

    @property
    def match(self) -> str | None:
        """The longest part that all reasons of the group contain; None if there is none."""
        parts = [] if self.reason == OTHERS else self.reason.split("#")
        longest = max((part.strip() for part in parts), key=len, default="")
        return longest or None


@lru_cache(4096)
def name_of(reason: str) -> str:
    """Return the last line of a reason, which names the error of a traceback, with # for numbers and ids.

    >>> name_of("ValueError: order 4711 was paid at 12:30")
    'ValueError: order # was paid at #:#'
    """
    lines = reason.strip().splitlines() or [""]
    return _VARIABLE.sub("#", lines[-1].strip()[:REASON_MAX])


class ReasonTally:
    def __init__(self) -> None:
        self._groups: dict[str, ReasonGroup] = {}
        self.count = 0

    def add(self, reasons: Sequence[str], ats: Sequence[int], ids: Sequence[int]) -> None:
        """Count letters, in the order of their deaths."""
        self.count += len(ids)
        for reason, at, id in zip(reasons, ats, ids, strict=True):
            name = name_of(reason)
            group = self._groups.get(name)
            if group is None:
                if len(self._groups) >= GROUPS_MAX:
                    name = OTHERS
                group = self._groups.setdefault(name, ReasonGroup(name, 0, reason, at, at, []))
            group.count += 1
            group.first_at = min(group.first_at, at)
            if at >= group.last_at:
                group.last_at, group.example = at, reason
            group.ids.append(id)
            if len(group.ids) > SAMPLES:
                del group.ids[0]

    def largest(self, limit: int) -> list[ReasonGroup]:
        return sorted(self._groups.values(), key=lambda group: (-group.count, group.reason))[:limit]


class ReasonCount:
    """Counts the letters whose reason contains a text, ignoring case; all without a text."""

    def __init__(self, text: str | None) -> None:
        self._text = None if text is None else text.lower()
        self.count = 0

    def add(self, reasons: Sequence[str], ats: Sequence[int], ids: Sequence[int]) -> None:
        if self._text is None:
            self.count += len(ids)
            return
        for reason, number in Counter(reasons).items():
            self.count += number * (self._text in reason.lower())
